"""The way of a request's events to its API: one at a time, measured, summed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gemmakv.generation._result import Generation
from gemmakv.server.service.counts import Counts
from gemmakv.server.service.events import (
    Called,
    Emit,
    Ended,
    Event,
    Token,
)


class Sink:
    """The sink of a request's events: gives them out one at a time, and
    measures them. The first of them is `opening`.
    """

    def __init__(
        self,
        opening: Event,
        emit: Emit,
        counts: Counts,
        arrived: float,
    ) -> None:
        self._opening: Event | None = opening
        self._emit = emit
        self._counts = counts
        self._arrived = arrived
        self.reasoning_tokens = 0
        self.written: dict[int, int] = {}  # by continuation
        self._last: dict[int, float] = {}
        self._lock = asyncio.Lock()

    def has_said(self, index: int) -> bool:
        """Says whether anything of a continuation was given out."""
        return index in self._last

    def note(self, event: Token | Called) -> None:
        """Measures a token that came."""
        if not isinstance(event, Token):
            return
        now, index = time.monotonic(), event.index
        last = self._last.get(index)
        if last is not None:
            self._counts.inter_token_s.observe(now - last)
        elif not self._last:
            self._counts.first_token_s.observe(now - self._arrived)
        self._last[index] = now

    def measure(self, generation: Generation) -> None:
        """Measures tokens that did not come one by one."""
        decode_s, count = generation.timings.decode_s, len(generation.token_ids)
        if count and not self._last:
            first = time.monotonic() - decode_s
            self._counts.first_token_s.observe(first - self._arrived)
            self._last[0] = first
        if count > 1:
            between = decode_s / (count - 1)
            for _ in range(count - 1):
                self._counts.inter_token_s.observe(between)

    async def open(self) -> None:
        """Emits `opening`, unless that is done."""
        async with self._lock:
            await self._open()

    async def emit(self, event: Event) -> None:
        """Gives out an event, after `opening`."""
        async with self._lock:
            await self._open()
            await self._emit(event)

    async def _open(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            await self._emit(opening)


class Sum:
    """The sum over the prompts of a request."""

    def __init__(self) -> None:
        self._prompts: list[Generation] = []
        self._rows: list[Generation] = []
        self._written = 0

    def add(
        self, prompt: Generation, rows: Sequence[Generation], written: int
    ) -> None:
        """Adds a prompt, its continuations, and the tokens of it that the
        prefix cache has now, and had not before.
        """
        self._prompts.append(prompt)
        self._rows += rows
        self._written += written

    def event(self, queued_s: float, reasoning_tokens: int) -> Ended:
        """Makes the last event of the request."""
        usages = [prompt.usage for prompt in self._prompts]
        cached: dict[str, int] = {}
        for usage in usages:
            for tier, count in usage.cached.items():
                cached[tier] = cached.get(tier, 0) + count
        return Ended(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            completion_tokens=sum(
                row.usage.completion_tokens for row in self._rows
            ),
            cached=cached,
            miss_reason=usages[0].miss_reason,
            prefill_s=max(p.timings.prefill_s for p in self._prompts),
            decode_s=max(row.timings.decode_s for row in self._rows),
            queued_s=queued_s,
            reasoning_tokens=reasoning_tokens,
            drafted=sum(row.usage.drafted for row in self._rows),
            accepted=sum(row.usage.accepted for row in self._rows),
            cache_write_tokens=self._written,
        )
