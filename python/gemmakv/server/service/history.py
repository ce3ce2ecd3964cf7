"""The conversations that the server keeps: makes the prompts of their next
turns, and keeps these turns. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gemmakv.chat._continuation import continuation, kept_reply, moved
from gemmakv.chat._messages import Message, Segment, messages_of
from gemmakv.chat._reply import rendered_anew
from gemmakv.conversations import (
    BUSY_S,
    LEASE_S,
    Pending,
    SessionInfo,
    StoreError,
    Turn,
)
from gemmakv.generation._prompts import TokenArray
from gemmakv.generation._result import ToolCall
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError, error_of_store, invalid
from gemmakv.server.service.events import (
    Called,
    Emit,
    Event,
    Finished,
    Token,
)
from gemmakv.server.service.prompts import TOO_LONG
from gemmakv.server.service.requests import ChatRequest, Past, Tenant

if TYPE_CHECKING:
    from gemmakv.conversations._store import Conversations

SPENT = "spent"  # among a turn's `params`: what the cache gave, and seconds
FIRST = "first_token_s"  # after how many seconds the reply began
BEGUN = "begun"  # how many characters of the reply the client wrote
DROPPED = "dropped_messages"  # how many had no room
PENDING = "pending"  # items that were added before, and how many messages
LOG = logging.getLogger("gemmakv.server")
_T = TypeVar("_T")


class History:
    """The conversations of a service.

    Its store has a thread of its own: a slow disk holds up neither the event
    loop nor what makes prompts.
    """

    def __init__(
        self, service: ChatService, store: Conversations, mark: str = ""
    ) -> None:
        """The leases of this process begin with `mark`. Those of one that
        ended with the same mark are free at once.
        """
        self.store = store
        self._mark = mark
        self.service = service
        self._pool = ThreadPoolExecutor(1, "gemmakv-store")
        self._closed = False
        self._failure = ""  # of the last write
        self._tenants = {
            str(number): store.tenant_of(key)
            for number, key in enumerate(service.settings.api_keys, 1)
        }
        template = service.prompts.template
        parts = (
            service.gemma.fingerprint,
            template.name,
            getattr(template, "source", ""),
        )
        # Tokens are for one model and one template.
        self.basis = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        self.marks = rendered_anew(service.tokenizer)
        service.keeper = self
        if mark:
            store.leases.release_all(mark)

    async def on(self, function: Callable[..., _T], *args: Any) -> _T:
        """Calls the store, off the event loop. Raises RequestError."""
        return await asyncio.wrap_future(self._submit(function, *args))

    async def create(
        self,
        owner: str,
        name: str | None,
        system: str | None,
        turns: Sequence[Turn] = (),
        metadata: dict[str, str] | None = None,
        pending: Pending | None = None,
    ) -> SessionInfo:
        """Makes a session, of this model. Raises RequestError."""
        create = functools.partial(
            self.store.sessions.create,
            model=self.service.gemma.weights_fingerprint,
            metadata=metadata,
            pending=pending,
        )
        return await self.on(create, owner, name, system, turns)

    def _submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Calls the store on its thread. Calls wait together, not one after
        the other, for another process that writes at the same time. Raises
        RequestError once the store is closed.
        """
        if self._closed:
            raise RequestError(
                503, "the sessions are closed", code="server_stopping"
            )
        asked = time.monotonic()

        def called() -> _T:
            waited = round(time.monotonic() - asked)
            self.store.database.be_patient(max(BUSY_S - waited, 0.0))
            try:
                return function(*args)
            except StoreError as error:
                raise error_of_store(error) from error
            finally:
                self._note_failure()

        return self._pool.submit(called)

    def _note_failure(self) -> None:
        """Logs that writing began to fail, or to succeed."""
        before = self._failure
        self._failure = self.store.database.failure
        if self._failure and not before:
            LOG.warning(
                "sessions: %s: nothing can be written: %s",
                self.store.folder,
                self._failure,
            )
        elif before and not self._failure:
            LOG.info(
                "sessions: %s: it can be written again", self.store.folder
            )

    def health(self) -> list[str]:
        """Gives the warnings about the store for its operator; waits for none
        of its calls. Raises RequestError where it needs another start.
        """
        try:
            self.store.database.check_place()
        except StoreError as error:
            raise error_of_store(error) from error
        return self.store.database.warnings()

    def owner(self, tenant: Tenant) -> str:
        """Gives the name of a tenant in records."""
        return self._tenants.get(tenant.label, "")

    def close(self) -> None:
        """Closes the store, after what is being written. There may be requests
        still.
        """
        self._closed = True
        self._pool.shutdown()
        self.store.close()

    @contextlib.asynccontextmanager
    async def turn(
        self, request: ChatRequest, emit: Emit
    ) -> AsyncIterator[tuple[ChatRequest, Emit]]:
        """Holds the turn of a request while the body runs it. Yields the
        request with its tokens, and an `emit` that keeps the turn before it
        tells of its end.

        Nothing is kept of a turn whose body raises, or is cancelled.
        """
        if request.n != 1:
            raise invalid(
                "n", f"expected 1 in a conversation, found {request.n}"
            )
        past, owner = self._check(request)
        async with self._leased(owner, past) as (lease, session):
            work, line = await self._begin(request, owner, past, session)
            await work.fit()

            async def keeping(event: Event) -> None:
                work.take(event)
                if isinstance(event, Finished) and past.keep is not None:
                    turn = work.turn(owner, past, event)
                    name = None if session is None else session.id
                    # Of a session, nobody deletes any meanwhile.
                    before = line if session is None else []
                    add = self.store.turns.add
                    await self.on(add, turn, name, lease, before)
                await emit(event)

            fitting = dataclasses.replace(
                request, ids=work.ids, dropped=work.dropped
            )
            yield fitting, keeping

    async def ids(self, request: ChatRequest) -> TokenArray:
        """Gives the token ids of the prompt that a turn would have. Waits for
        no other turn.
        """
        past, owner = self._check(request)
        session = None
        if past.session is not None:
            session = await self.on(
                self.store.sessions.get, owner, past.session
            )
        work, _ = await self._begin(request, owner, past, session)
        if request.truncate:
            await work.fit()
        else:
            await work.make_prompt()
        return work.ids

    def _check(self, request: ChatRequest) -> tuple[Past, str]:
        """Checks a request's messages; gives its past, and its owner."""
        assert request.past is not None and request.messages is not None
        messages_of(request.messages)
        return request.past, self.owner(request.tenant)

    async def _begin(
        self,
        request: ChatRequest,
        owner: str,
        past: Past,
        session: SessionInfo | None,
    ) -> tuple[_Work, list[Turn]]:
        """Begins the turn of a request; gives the turns before it, too."""
        line, replaced = await self._line(owner, past, session)
        system = past.system
        if session is not None and system is None:
            system = session.system
        pending = _pending_of(past, session)
        work = _Work(self, request, line, system, pending)
        if replaced is not None:
            work.go_on_with(replaced)
        return work, line

    async def _line(
        self, owner: str, past: Past, session: SessionInfo | None
    ) -> tuple[list[Turn], Turn | None]:
        """Gives the turn that the request comes after, and before it, for a
        response, all earlier ones: they may be deleted meanwhile. Gives the
        turn that it replaces, too, if any.
        """
        turns = self.store.turns
        if session is not None:
            head = await self.on(turns.head, owner, session)
            if past.replaces is None:
                return [] if head is None else [head], None
            if head is None or head.id != past.replaces:
                raise RequestError(
                    409,
                    "replaces: expected the last turn of the session, "
                    f"{session.head}, found {past.replaces[:60]!r}",
                    param="replaces",
                    code="session_changed",
                )
            return await self.on(turns.path, head.parent, True), head
        if past.parent is not None:
            return await self.on(turns.line, owner, past.parent), None
        return [], None

    @contextlib.asynccontextmanager
    async def _leased(
        self, owner: str, past: Past
    ) -> AsyncIterator[tuple[str | None, SessionInfo | None]]:
        """Holds the lease of the session, if there is one, while the body
        runs. Yields both.
        """
        if past.session is None:
            yield None, None
            return
        name, lease = past.session, self._mark + secrets.token_hex(16)
        renewing = None
        try:
            session = await self.on(
                self.store.leases.take, owner, name, lease
            )
            renewing = asyncio.create_task(self._renew(name, lease))
            yield lease, session
        finally:
            if renewing is not None:
                renewing.cancel()
            # Also where the task is cancelled: nobody waits for it. A lease
            # of who outlives the store ends by itself.
            with contextlib.suppress(RequestError):
                self._submit(self._release, name, lease)

    def _release(self, name: str, lease: str) -> None:
        try:
            self.store.leases.release(name, lease)
        except StoreError as error:
            LOG.warning("%s (its lease ends by itself)", error)

    async def _renew(self, name: str, lease: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self.on(self.store.leases.renew, name, lease)
            except RequestError as error:
                LOG.warning("%s", error.message)


class _Work:
    """A turn that is being made."""

    def __init__(
        self,
        history: History,
        request: ChatRequest,
        line: Sequence[Turn],
        system: str | None,
        pending: Pending,
    ) -> None:
        """`line` has the turn before this one, and maybe those before that."""
        self._history = history
        self._prompts = history.service.prompts
        self._request = request
        self._begun = request.begun
        self._pending = pending
        self._new = [*self._pending["messages"], *map(dict, request.said)]
        self._tools = [dict(tool) for tool in request.tools or ()]
        self._think = request.think
        self._line = line
        self._parent = line[-1] if line else None
        self._system = system or None
        self._before = 0  # tokens of the parent, which are not stored again
        self._ids = np.empty(0, np.int32)
        self.dropped = 0  # messages that had no room
        self._text = self._reasoning = ""
        self._calls: list[ToolCall] = []

    @property
    def ids(self) -> TokenArray:
        return self._ids

    def go_on_with(self, replaced: Turn) -> None:
        """Keeps the thoughts before a reply that gets longer."""
        if self._begun:
            self._reasoning = replaced.reply.get("reasoning") or ""

    async def fit(self) -> None:
        """Makes the prompt, without the oldest turns where there is no room for
        all and the request says so. Raises RequestError at once where the new
        messages are much too long.
        """
        request, prompts = self._request, self._prompts
        try:
            await self.make_prompt(fits=True)
            if not request.truncate or len(self._ids) < prompts.context:
                return
        except RequestError as error:
            if not request.truncate or error.code != TOO_LONG:
                raise
        before = await self._messages_before()
        self._before = 0
        self._ids, self.dropped = await prompts.threads.run(
            prompts.fit_messages,
            [*before, *(request.messages or ())],
            self._tools or None,
            self._think,
            request.options.get("max_tokens"),
        )

    async def make_prompt(self, fits: bool = False) -> None:
        """Makes the token ids of the conversation, with the opening of the
        reply. `fits`: as in `Prompts.render`.
        """
        parent, run = self._parent, self._prompts.threads.run
        # Also what the turns before it said when they were computed.
        goes_on = (
            parent is not None
            and parent.basis == self._history.basis
            and parent.system == self._system
            and parent.tools == self._tools
            and parent.params.get("think") == self._think
        )
        if parent is not None and goes_on:
            before = await self._tokens_before(parent)
            more = None
            # Templates say thoughts and calls otherwise later on.
            if not np.isin(before, self._history.marks).any():
                more = await run(self._more, parent, fits)
            if more is not None:
                self._before = len(before)
                self._ids = np.concatenate([before, more])
                return
        said = await self._messages_before()
        self._ids = await run(self._all, said, fits)

    async def _tokens_before(self, parent: Turn) -> TokenArray:
        if len(self._line) < parent.depth:
            store = self._history.store
            return await self._history.on(store.turns.tokens, parent.id)
        first = max(i for i, turn in enumerate(self._line) if turn.whole)
        return np.concatenate([turn.tokens for turn in self._line[first:]])

    def _more(self, parent: Turn, fits: bool) -> TokenArray | None:
        prompts = self._prompts
        begun = prompts.begun_text(self._begun)
        if fits:
            prompts.check_fits([Segment(begun)])
        more = continuation(
            prompts.template,
            prompts.tokenizer,
            _message(parent.reply),
            messages_of(self._new),
            self._tools or None,
            prompts.check_fits if fits else None,
        )
        if more is None:
            return None
        return np.concatenate([more, prompts.begun_ids(self._begun)])

    async def _messages_before(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._system is not None:
            found.append({"role": "system", "content": self._system})
        path: Sequence[Turn] = self._line
        if self._parent is not None and len(path) < self._parent.depth:
            path = await self._history.on(
                self._history.store.turns.path, self._parent.id
            )
        for turn in path:
            found += [*turn.messages, turn.reply]
        return found + self._pending["messages"]

    def _all(self, before: list[dict[str, Any]], fits: bool) -> TokenArray:
        try:
            return self._prompts.render(
                [*before, *(self._request.messages or ())],
                self._tools or None,
                self._think,
                fits,
            )
        except ValueError as error:
            raise moved(error, -len(before)) from None

    def take(self, event: Event) -> None:
        """Adds an event to the reply."""
        if isinstance(event, Token):
            self._text += event.text
            self._reasoning += event.reasoning
        elif isinstance(event, Called) and event.part.end is not None:
            self._calls.append(event.part.end)

    def turn(self, owner: str, past: Past, finished: Finished) -> Turn:
        """Gives the turn as it is kept."""
        assert past.keep is not None
        generation = finished.generation
        parent = self._parent
        text = self._begun + self._text
        reply: dict[str, Any] = {"role": "assistant", "content": text}
        if self._calls:
            reply["content"] = text or None
            reply["tool_calls"] = [call.to_dict() for call in self._calls]
        if self._reasoning:
            reply["reasoning"] = self._reasoning
        params = dict(past.params)
        if self._think is not None:
            params["think"] = self._think
        params[SPENT] = _spent(finished)
        took = time.monotonic() - self._request.arrived
        params[FIRST] = max(took - generation.timings.decode_s, 0.0)
        if self._begun:
            params[BEGUN] = len(self._begun)
        if self.dropped:
            params[DROPPED] = self.dropped
        if self._pending["items"]:
            count = len(self._pending["messages"])
            params[PENDING] = {**self._pending, "messages": count}
        return Turn(
            id=past.id,
            tenant=owner,
            parent=None if parent is None else parent.id,
            depth=1 if parent is None else parent.depth + 1,
            state=past.keep,
            created=past.created,
            system=self._system,
            tools=self._tools,
            messages=self._new,
            reply=reply,
            reason=finished.reason,
            usage=_usage(finished),
            params=params,
            basis=self._history.basis,
            whole=not self._before,
            tokens=np.concatenate(
                [
                    self._ids[self._before :],
                    kept_reply(
                        generation.token_ids,
                        generation.text,
                        self._prompts.tokenizer,
                    ),
                ]
            ),
        )


def _pending_of(past: Past, session: SessionInfo | None) -> Pending:
    """Gives the messages that a turn begins with: none if it replaces the last
    one.
    """
    if session is None or session.pending is None or past.replaces is not None:
        return {"items": [], "messages": []}
    return session.pending


def _message(fields: dict[str, Any]) -> Message:
    return messages_of([fields])[0]


def _spent(finished: Finished) -> dict[str, Any]:
    generation = finished.generation
    return {
        "cached": dict(generation.usage.cached),
        "miss_reason": generation.usage.miss_reason,
        "prefill_s": generation.timings.prefill_s,
        "decode_s": generation.timings.decode_s,
    }


def _usage(finished: Finished) -> dict[str, int]:
    usage = finished.generation.usage
    return {
        "reasoning_tokens": finished.reasoning_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": finished.cache_write_tokens,
    }
