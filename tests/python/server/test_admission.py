"""The queue: bounded, fair, and true about how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from gemmakv.server.service.admission import Admission
from gemmakv.server.service.errors import RequestError
from support.waits import LIMIT_S


class Line:
    """Requests that hold their slots until they are told to end."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def come(
        self,
        name: str,
        rows: int = 1,
        seconds: float | None = None,
        tokens: int = 0,
    ) -> asyncio.Task[None]:
        """A request of the tenant that is the name's first letter."""
        self.ends[name] = asyncio.Event()
        return asyncio.ensure_future(self._hold(name, rows, seconds, tokens))

    async def _hold(
        self, name: str, rows: int, seconds: float | None, tokens: int
    ) -> None:
        async with self.admission.slot(name[0], rows, seconds, tokens):
            self.order.append(name)
            await self.ends[name].wait()

    async def finish(self, name: str) -> None:
        self.ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)  # tasks need fewer turns until they wait


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(main())


def test_tenants_take_turns() -> None:
    async def main() -> None:
        line = Line(Admission(1, 100))
        tasks = [line.come("a0")]
        await settle()
        tasks += [line.come(f"a{i}") for i in range(1, 5)]
        tasks += [line.come("b1"), line.come("c1"), line.come("b2")]
        await settle()
        assert line.admission.waiting == 7
        for i in range(8):
            await line.finish(line.order[i])
        await asyncio.gather(*tasks)
        assert line.order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]
        assert line.admission.running == line.admission.waiting == 0

    run(main())


def test_rows_count_and_big_requests_are_not_passed() -> None:
    async def main() -> None:
        line = Line(Admission(4, 10))
        tasks = [line.come("a0", 3)]
        await settle()
        tasks += [line.come("a1", 4), line.come("b1", 1)]
        await settle()
        assert line.order == ["a0"]  # the row that is free waits for a1
        await line.finish("a0")
        assert line.order == ["a0", "a1"]
        await line.finish("a1")
        assert line.order == ["a0", "a1", "b1"]
        await line.finish("b1")
        await asyncio.gather(*tasks)

    run(main())


def test_full() -> None:
    async def main() -> None:
        line = Line(Admission(1, 2))
        tasks = [line.come(f"a{i}") for i in range(3)]
        await settle()
        with pytest.raises(RequestError) as caught:
            await line.come("a3")
        assert caught.value.status == 429
        assert caught.value.retry_after == 1
        # Another tenant has the place of the newest of the greediest.
        other = line.come("b0")
        await settle()
        with pytest.raises(RequestError) as caught:
            await tasks[2]
        assert caught.value.status == 429
        # With one each, nobody gives way.
        with pytest.raises(RequestError):
            await line.come("c0")
        for name in ("a0", "a1", "b0"):
            await line.finish(name)
        await asyncio.gather(tasks[0], tasks[1], other)
        assert line.order == ["a0", "a1", "b0"]

    run(main())


def test_no_queue() -> None:
    async def main() -> None:
        line = Line(Admission(1, 0))
        task = line.come("a0")
        await settle()
        with pytest.raises(RequestError):
            await line.come("b0")
        await line.finish("a0")
        await task

    run(main())


def test_retry_after_knows_no_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A burst after an hour of one request a minute was sent away for long."""

    async def main() -> None:
        now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        admission = Admission(4, 100)
        for _ in range(60):
            async with admission.slot("a", 2, None):
                now += 6
            now += 54
        assert admission.retry_after() == 3  # 12 row seconds, of 4 rows
        now += 3600
        assert admission.retry_after() == 3

    run(main())


def test_retry_after_is_the_measured_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        admission = Admission(1, 100)
        for _ in range(10):  # one every two seconds
            async with admission.slot("a", 1, None):
                now += 2
        assert admission.retry_after() == 2
        line = Line(admission)
        tasks = [line.come(f"a{i}") for i in range(10)]
        await settle()
        assert admission.waiting == 9
        assert admission.retry_after() == 20
        for i in range(10):
            await line.finish(f"a{i}")
        await asyncio.gather(*tasks)

    # The loop has a clock of its own.
    asyncio.run(main())


def test_deadline_in_the_queue() -> None:
    async def main() -> None:
        line = Line(Admission(1, 5))
        task = line.come("a0")
        await settle()
        with pytest.raises(RequestError) as caught:
            await line.come("a1", seconds=0.01)
        assert caught.value.status == 503
        assert caught.value.code == "deadline_exceeded"
        assert line.admission.waiting == 0
        await line.finish("a0")
        await task

    run(main())


def test_who_leaves_is_passed_over() -> None:
    async def main() -> None:
        line = Line(Admission(1, 5))
        tasks = [line.come(f"a{i}") for i in range(3)]
        await settle()
        tasks[1].cancel()
        await settle()
        assert line.admission.waiting == 1
        # Admitted and cancelled in the same moment: the place goes on.
        line.ends["a0"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[2].cancel()
        await settle()
        assert line.admission.running == 0
        again = line.come("a4")
        await settle()
        assert line.order[-1] == "a4"
        await line.finish("a4")
        await again
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main())


def test_draining() -> None:
    async def main() -> None:
        line = Line(Admission(1, 5))
        tasks = [line.come("a0"), line.come("a1")]
        await settle()
        line.admission.draining = True
        with pytest.raises(RequestError) as caught:
            await line.come("a2")
        assert caught.value.status == 503
        line.admission.refuse_waiting()
        with pytest.raises(RequestError):
            await tasks[1]
        await line.finish("a0")
        await tasks[0]
        assert line.admission.running == 0

    run(main())


def test_tokens_that_wait_are_bounded() -> None:
    async def main() -> None:
        line = Line(Admission(1, 100, 1000))
        first = line.come("a0", tokens=5000)  # it need not wait
        await settle()
        huge = line.come("a1", tokens=3000)  # alone, it may
        await settle()
        assert line.admission.waiting_tokens == 3000
        full = line.come("a2", tokens=1)
        await settle()
        with pytest.raises(RequestError) as caught:
            await full
        assert caught.value.status == 429 and caught.value.retry_after
        assert "3000" in caught.value.message
        await line.finish("a0")
        two = [line.come(f"a{i}", tokens=500) for i in (3, 4)]
        await settle()
        assert line.admission.waiting_tokens == 1000
        other = line.come("b1", tokens=400)  # of somebody who has fewer
        await settle()
        with pytest.raises(RequestError):
            await two[1]
        assert line.admission.waiting_tokens == 900
        for name in ("a1", "a3", "b1"):
            await line.finish(name)
        await asyncio.gather(first, huge, two[0], other)
        assert line.admission.waiting_tokens == 0

    run(main())
