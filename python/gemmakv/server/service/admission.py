"""The queue: which requests run, wait, or are refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator

from gemmakv.server.service.errors import RequestError, too_late

_MEMORY = 64  # requests that the drain rate is measured by
_LONGEST_S = 120  # clients do not wait longer


class Admission:
    """The admission of requests: at most `max_running` rows run at once, and
    at most `max_queue` requests wait.

    Tenants take turns; one tenant's requests go in their order. Where the
    queue is full, the newest request of the tenant that has the most in it
    makes room for one of a tenant that has fewer. The requests that wait have
    at most `max_tokens` tokens to be computed, unless only one waits. It
    belongs to one event loop.
    """

    def __init__(
        self, max_running: int, max_queue: int, max_tokens: int | None = None
    ) -> None:
        self.max_running = max_running
        self.max_queue = max_queue
        self.max_tokens = max_tokens
        self.running = 0  # rows
        self.draining = False
        self._waiting: dict[str, deque[_Waiter]] = {}  # in order of turns
        # Rows times seconds of the requests that ended last. Time in which
        # nothing runs does not count.
        self._held: deque[float] = deque(maxlen=_MEMORY)

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_tokens(self) -> int:
        """The tokens of these requests that are to be computed."""
        return sum(
            waiter.tokens
            for waiters in self._waiting.values()
            for waiter in waiters
        )

    def waits(self, rows: int) -> bool:
        """Says whether a request of so many rows would wait now."""
        return bool(self._waiting) or self.running + rows > self.max_running

    @contextlib.asynccontextmanager
    async def slot(
        self, tenant: str, rows: int, seconds: float | None, tokens: int = 0
    ) -> AsyncIterator[None]:
        """Holds `rows` rows while the body runs, after waiting for them for
        so many seconds at most. `tokens` are to be computed for it.

        Raises RequestError: 429 if the queue is full, 503 if the time is over
        or the server stops. Requires: rows <= max_running.
        """
        if self.draining:
            raise stopping()
        if self.waits(rows):
            await self._wait(tenant, rows, seconds, tokens)
        else:
            self.running += rows
        begin = time.monotonic()
        try:
            yield
        finally:
            self.running -= rows
            self._held.append(rows * (time.monotonic() - begin))
            self._admit()

    def retry_after(self) -> int:
        """Gives the seconds until the queue is empty, if its requests take as
        long as the last ones did.
        """
        if not self._held:
            return 1
        each = sum(self._held) / len(self._held) / self.max_running
        return max(1, min(_LONGEST_S, math.ceil((self.waiting + 1) * each)))

    def refuse_waiting(self) -> None:
        """Refuses all requests that wait, since the server stops."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.refuse(stopping())
        self._waiting.clear()

    async def _wait(
        self, tenant: str, rows: int, seconds: float | None, tokens: int
    ) -> None:
        if self.waiting >= self.max_queue:
            self._make_room(tenant)
        while (
            self.max_tokens is not None
            and self.waiting
            and self.waiting_tokens + tokens > self.max_tokens
        ):
            self._make_room(tenant)
        waiter = _Waiter(rows, tokens)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.turn
        except BaseException as error:
            if waiter.admitted:  # and cancelled in the same moment
                self.running -= rows
            else:
                self._forget(tenant, waiter)
            self._admit()
            if isinstance(error, TimeoutError):
                raise too_late("while the request waited for others") from None
            raise

    def _make_room(self, tenant: str) -> None:
        """Refuses a request of the tenant that has the most, to make room for
        one of `tenant`. Raises RequestError if that would have as many then.
        """
        own = len(self._waiting.get(tenant, ()))
        name = max(
            self._waiting, key=lambda n: len(self._waiting[n]), default=tenant
        )
        if len(self._waiting.get(name, ())) <= own + 1:
            raise self._full()
        waiter = self._waiting[name].pop()
        waiter.refuse(self._full())
        if not self._waiting[name]:
            del self._waiting[name]

    def _full(self) -> RequestError:
        return RequestError(
            429,
            f"the queue is full: {self.running} continuations run and "
            f"{self.waiting} requests wait, expected at most "
            f"{self.max_running} and {self.max_queue}"
            + (
                ""
                if self.max_tokens is None
                else f", with {self.waiting_tokens} tokens to be computed, "
                f"expected at most {self.max_tokens}"
            ),
            code="rate_limit_exceeded",
            retry_after=self.retry_after(),
        )

    def _forget(self, tenant: str, waiter: _Waiter) -> None:
        waiters = self._waiting.get(tenant)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[tenant]

    def _admit(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            waiters = self._waiting[tenant]
            while waiters and waiters[0].turn.done():  # cancelled
                waiters.popleft()
            if waiters:
                if self.running + waiters[0].rows > self.max_running:
                    return
                waiter = waiters.popleft()
                self.running += waiter.rows
                waiter.admit()
            del self._waiting[tenant]
            if waiters:  # after the others now
                self._waiting[tenant] = waiters


class _Waiter:
    def __init__(self, rows: int, tokens: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.admitted = False
        self.turn: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )

    def admit(self) -> None:
        self.admitted = True
        self.turn.set_result(None)

    def refuse(self, error: RequestError) -> None:
        if not self.turn.done():
            self.turn.set_exception(error)


def stopping() -> RequestError:
    """Makes the error of a request that a server refuses as it stops."""
    return RequestError(
        503, "the server stops", code="server_stopping", retry_after=5
    )
