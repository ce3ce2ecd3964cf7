"""The continuations of a request's prompts, from their token ids on.

`Continuations.write` has the engine continue the prompts of one request, all at
once. A prompt that is continued several times is computed once, and its cache
forked. What the engine finds goes to the request's `Sink` as events.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from gemmakv.cache._kv_cache import KVCache, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._reply import Part, ReplyReader, read_reply, said
from gemmakv.chat._templates import call_form, stop_ids, stop_texts
from gemmakv.chat._tools import CallPart
from gemmakv.errors import CacheFullError
from gemmakv.generation._prompts import TokenArray
from gemmakv.generation._requests import requests_of
from gemmakv.generation._result import Generation, TopLogprobs
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.generation._work import off_the_loop
from gemmakv.server.service.errors import too_late
from gemmakv.server.service.events import (
    Called,
    Finished,
    Progress,
    Token,
)
from gemmakv.server.service.prompts import Prompts
from gemmakv.server.service.requests import ChatRequest, seconds_left
from gemmakv.server.service.sink import Sink, Sum
from gemmakv.server.service.threads import SHORT, step_back
from gemmakv.server.settings import Settings

# By which sliding layers are ahead of their window in a step, at most: blocks
# that begin before it, and those of the step's own tokens.
_STEP_TOKENS = 256
# Waits for the memory of what has ended.
_ROOM_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SCORING = 2  # requests whose prompts' log-probabilities are computed
_SEEDS = 1 << 64

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Run:
    """A request whose prompts have tokens.

    Attributes:
      request: the checked request.
      prompts: the token ids of its prompts.
      options: for each prompt, the options of its continuations.
      until: time.monotonic() when the answer has to end; None: whenever.
    """

    request: ChatRequest
    prompts: Sequence[TokenArray]
    options: Sequence[dict[str, Any]]
    until: float | None


@dataclasses.dataclass(frozen=True)
class _Row:
    """A continuation.

    Attributes:
      request: the request that it belongs to.
      index: its number among the request's continuations.
      cache: the cache that it goes on from.
      prompt: what it begins with; "" after a prompt that is in the cache.
      options: its generation options.
      sink: where its events go.
    """

    request: ChatRequest
    index: int
    cache: KVCache
    prompt: TokenArray | str
    options: dict[str, Any]
    sink: Sink


class Continuations:
    """The continuations of requests to one model."""

    def __init__(
        self, gemma: Gemma, settings: Settings, prompts: Prompts
    ) -> None:
        """Raises ValueError for a `kv_cache_memory` that one conversation does
        not fit in.
        """
        self._gemma = gemma
        self._settings = settings
        self._prompts = prompts
        self._threads = prompts.threads
        self._blocks = self._block_pool(settings.kv_cache_memory)
        self._ends = frozenset(
            [
                *gemma.config.eos_ids,
                *stop_ids(prompts.template, prompts.tokenizer),
            ]
        )
        self._scoring = asyncio.Semaphore(_SCORING)

    def _block_pool(self, memory: int | None) -> BlockPool | None:
        """Makes the pool of what runs; one conversation always fits."""
        if memory is None:
            return None
        config, context = self._gemma.config, self._prompts.context
        _, sliding = config.kv_bytes_per_token()
        least = config.kv_bytes_at(context) + _STEP_TOKENS * sliding
        if memory < least:
            raise ValueError(
                f"kv_cache_memory: expected at least {least}, which one "
                f"conversation of {context} tokens takes "
                f"(max_model_len), found {memory}"
            )
        return BlockPool(memory)

    def make_options(
        self, request: ChatRequest, ids: TokenArray, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Makes the options of a prompt's continuations of a request's: with
        the texts and tokens that end a reply, and no more tokens than fit.
        """
        template = self._prompts.template
        found = {k: v for k, v in options.items() if k != "deadline"}
        room = self._prompts.context - len(ids)
        wanted = found.get("max_tokens")
        if wanted is None:
            wanted = self._settings.default_max_tokens
        if wanted is None:
            wanted = request.default_max_tokens
        found["max_tokens"] = room if wanted is None else min(wanted, room)
        if request.messages is not None:
            begun = bool(request.begun)
            found["stop"] = stop_texts(template, found, begun=begun)
            if not found.get("ignore_eos"):
                found["stop_token_ids"] = [
                    *(found.get("stop_token_ids") or ()),
                    *stop_ids(template, self._prompts.tokenizer),
                ]
        return found

    async def count_missing(
        self, gemma: Gemma, prompts: Sequence[TokenArray]
    ) -> int:
        """Counts the tokens of prompts that the prefix cache does not have."""
        count, prefix = sum(map(len, prompts)), gemma.prefix_cache
        if prefix is None:
            return count
        known = await self._threads.run_waiting(
            lambda: sum(self._count_known(gemma, ids) for ids in prompts)
        )
        return count - known

    def _count_known(self, gemma: Gemma, ids: TokenArray) -> int:
        """Counts the tokens of a prompt that the prefix cache has."""
        assert gemma.prefix_cache is not None
        try:
            with gemma.prefix_cache._match(ids, self._blocks) as found:
                return len(found)
        except CacheFullError:  # nothing to tell is worth a request's memory
            return 0

    async def write(
        self, run: Run, scored: Sequence[Scored], sink: Sink
    ) -> Sum:
        """Makes the engine write all continuations of a request, whose events
        go to `sink`, and gives their sum. `scored`: as `score` gave it. If one
        fails, the others are cancelled. Raises the library's errors.
        """
        ended = Sum()
        await _wait_for_all(
            [
                self._continue(
                    run, number, scored[number] if scored else None, sink, ended
                )
                for number in range(len(run.prompts))
            ]
        )
        return ended

    async def _continue(
        self,
        run: Run,
        number: int,
        scored: Scored | None,
        sink: Sink,
        ended: Sum,
    ) -> None:
        """Writes the continuations of one prompt."""
        request, ids, options = run.request, run.prompts[number], run.options
        gemma = request.tenant.gemma
        cache = self._new_cache()
        if scored is not None:
            cache, ids = scored.cache, ids[-1:]
        first = number * request.n

        async def one(
            i: int, cache: KVCache, prompt: TokenArray | str
        ) -> Generation:
            def attempt() -> Awaitable[Generation]:
                own = {**options[number], "deadline": seconds_left(run.until)}
                if own.get("seed") is not None:
                    own["seed"] = (own["seed"] + i) % _SEEDS
                cache._core.for_one_request = True
                return self._write_row(
                    _Row(request, first + i, cache, prompt, own, sink)
                )

            with cache:
                return await self._with_room(attempt, sink, first + i)

        if request.n == 1:
            generation = await one(0, cache, ids)
            said = generation if scored is None else scored.counted(generation)
            ended.add(said, [generation], sink.written.pop(first, 0))
            return
        await sink.open()
        # The prompt is computed once, with its tokens found and kept as the
        # options say.
        said = await self._with_room(
            lambda: gemma.agenerate(
                cache,
                ids,
                max_tokens=0,
                deadline=seconds_left(run.until),
                prefix_cache=options[number].get("prefix_cache", "on"),
            ),
            sink,
            first,
        )
        if scored is not None:
            said = scored.counted(said)
        written = await self._count_written(gemma, ids, said, options[number])
        if said.finish_reason == "deadline":  # nothing is continued any more
            for i in range(request.n):
                end = Finished(first + i, said.finish_reason, None, said)
                await sink.emit(end)
            ended.add(said, [said], written)
            return
        with cache:
            forks = [cache.fork() for _ in range(request.n)]
        generations = await _wait_for_all(
            [one(i, fork, "") for i, fork in enumerate(forks)]
        )
        ended.add(said, generations, written)

    def _new_cache(self) -> KVCache:
        return create_kv_cache(
            self._gemma.config, self._prompts.context, pool=self._blocks
        )

    async def score(self, run: Run) -> list[Scored]:
        """Computes the log-probabilities of prompts, if they are asked for,
        one prompt after the other: each takes memory for logits. To the engine
        these are requests among others. Raises RequestError.
        """
        request = run.request
        top = request.prompt_logprobs
        if top is None:
            return []
        model = requests_of(request.tenant.gemma)

        async def attempt(ids: TokenArray) -> Scored:
            begin, cache = time.monotonic(), self._new_cache()
            work = model.prompt_logprobs(cache, ids, top)

            def compute(check: Callable[[], None]) -> PromptLogprobs:
                step_back()
                return work(check)

            found = await off_the_loop(compute)
            return Scored(cache, found, time.monotonic() - begin)

        try:
            async with asyncio.timeout(seconds_left(run.until)), self._scoring:
                return [
                    await self._with_room(functools.partial(attempt, ids))
                    for ids in run.prompts
                ]
        except TimeoutError:
            raise too_late("before the prompt was computed") from None

    async def _with_room(
        self,
        attempt: Callable[[], Awaitable[_T]],
        sink: Sink | None = None,
        index: int = 0,
    ) -> _T:
        """Makes an attempt, again where memory is full: conversations that
        have ended may keep theirs until this loop gets to them, and the engine
        asks only those that run. An attempt that fails leaves its cache as it
        was, if nothing was given out.
        """
        for wait in _ROOM_S:
            try:
                return await attempt()
            except CacheFullError:
                if self._blocks is None or (
                    sink is not None and sink.has_said(index)
                ):
                    raise
            if sink is not None:
                await sink.open()
            await asyncio.sleep(wait)
        return await attempt()

    async def _write_row(self, row: _Row) -> Generation:
        request, sink, index = row.request, row.sink, row.index
        if request.streamed:
            generation, reader = await self._stream_row(row)
        else:
            generation, reader = await self._generate_row(row)
        calls = reader.calls if reader else 0
        thoughts = reader.reasoning_tokens if reader else 0
        sink.reasoning_tokens += thoughts
        given = request.options.get("stop") or ()
        stops = [given] if isinstance(given, str) else given
        stop = self._find_stop(generation, stops)
        written = 0
        if not isinstance(row.prompt, str):
            written = await self._count_written(
                request.tenant.gemma, row.prompt, generation, row.options
            )
            sink.written[index] = written
        await sink.emit(
            Finished(
                index,
                generation.finish_reason,
                stop,
                generation,
                calls,
                thoughts,
                written,
            )
        )
        return generation

    async def _generate_row(
        self, row: _Row
    ) -> tuple[Generation, ReplyReader | None]:
        """Gives out a continuation when it has ended. Returns it, and what
        read it.
        """
        generation = await row.request.tenant.gemma.agenerate(
            row.cache, row.prompt, **row.options
        )
        row.cache.close()  # its memory is for others
        reader = self._make_reader(row)
        parts: Sequence[Part] = [generation.text]
        if reader is not None:
            parts = read_reply(reader, generation)
        for token in self._make_tokens(row.index, generation, parts):
            await row.sink.emit(token)
        for part in parts:
            if isinstance(part, CallPart):
                await row.sink.emit(Called(row.index, part))
        row.sink.measure(generation)
        return generation, reader

    async def _count_written(
        self,
        gemma: Gemma,
        ids: TokenArray,
        said: Generation,
        options: Mapping[str, Any],
    ) -> int:
        """Counts the tokens of a prompt that the prefix cache has now, and had
        not before.
        """
        prefix = gemma.prefix_cache
        if prefix is None or options.get("prefix_cache", "on") == "off":
            return 0
        if said.usage.cached_tokens + 1 >= len(ids):
            return 0
        if len(ids) <= SHORT and prefix.cache.tiers == ("ram",):
            found = self._count_known(gemma, ids)
        else:
            found = await self._threads.run_waiting(
                self._count_known, gemma, ids
            )
        return max(0, found - said.usage.cached_tokens)

    def _make_reader(self, row: _Row) -> ReplyReader | None:
        """Makes the reader that tells the parts of a reply apart; prompts get
        none.
        """
        request = row.request
        if request.messages is None:
            return None
        form = call_form(self._prompts.template) if request.tools else None
        begun, grammar = bool(request.begun), row.options.get("grammar")
        return ReplyReader(self._prompts.tokenizer, form, begun, grammar)

    def _make_tokens(
        self, index: int, generation: Generation, parts: Sequence[Part]
    ) -> Iterator[Token]:
        """Makes the tokens of a continuation that has ended; the first has all
        its text.
        """
        text, reasoning = said(parts)
        logprobs, top = generation.logprobs, generation.top_logprobs
        if logprobs is None:
            yield Token(index, text, -1, None, None, reasoning)
            return
        for i, token in enumerate(generation.token_ids):
            last = i + 1 == len(generation.token_ids)
            ended = last and generation.finish_reason == "stop"
            yield Token(
                index,
                "" if i else text,
                -1 if ended and token in self._ends else token,
                float(logprobs[i]),
                top and TopLogprobs(top.token_ids[i], top.logprobs[i]),
                "" if i else reasoning,
            )

    async def _stream_row(
        self, row: _Row
    ) -> tuple[Generation, ReplyReader | None]:
        """Gives out a continuation's tokens as they come. Returns it, and what
        read it.
        """
        index, sink, options = row.index, row.sink, row.options
        reader = self._make_reader(row)

        def events(
            text: str,
            token: int,
            logprob: float | None,
            reason: str | None,
            top: TopLogprobs | None,
        ) -> Sequence[Token | Called]:
            parts: Sequence[Part] = (text,)
            if reader is not None:
                parts = reader.push(token, text)
                if token < 0 and not parts:
                    return ()
            if reason == "stop" and token in self._ends:
                token = -1
            return _make_events(index, token, logprob, top, parts)

        begin = time.monotonic()
        reports: list[asyncio.Task[None]] = []

        def report(done: int, total: int) -> None:
            seconds = time.monotonic() - begin
            event = Progress(index, done, total, stream.cached_tokens, seconds)
            reports.append(asyncio.create_task(sink.emit(event)))

        if row.request.progress and row.request.n == 1:
            options = {**options, "prompt_progress": report}
        stream = await row.request.tenant.gemma.astream(
            row.cache, row.prompt, **options
        )
        async with stream:
            # While the engine computes: the first token does not wait for it.
            await sink.open()
            async for piece in stream:
                while reports:
                    await reports.pop(0)
                for event in events(
                    piece.text,
                    piece.token_id,
                    piece.logprob,
                    piece.finish_reason,
                    piece.top_logprobs,
                ):
                    sink.note(event)
                    await sink.emit(event)
            row.cache.close()  # its memory is for others
            rest = reader.end() if reader is not None else []
            if rest:
                for event in _make_events(index, -1, None, None, rest):
                    await sink.emit(event)
            return stream.result(), reader

    def _find_stop(
        self, generation: Generation, stops: Sequence[str]
    ) -> str | None:
        ids = generation.token_ids
        if generation.finish_reason != "stop" or not ids or not stops:
            return None
        if ids[-1] in self._ends:
            return None
        # A stop string was cut where it began, the first of them.
        said = self._prompts.tokenizer.decode(ids)
        rest = said[len(generation.text) :]
        return next((stop for stop in stops if rest.startswith(stop)), None)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A prompt whose log-probabilities are known.

    Attributes:
      cache: all of the prompt but its last token.
      found: what is known.
      seconds: how long that took.
    """

    cache: KVCache
    found: PromptLogprobs
    seconds: float

    def counted(self, said: Generation) -> Generation:
        """Gives what followed the last token with the counts and times of the
        whole prompt.
        """
        tokens = len(self.found.token_ids)
        seconds = said.timings.prefill_s + self.seconds
        return dataclasses.replace(
            said,
            usage=dataclasses.replace(
                said.usage, prompt_tokens=tokens, cached_tokens=0, cached={}
            ),
            timings=dataclasses.replace(said.timings, prefill_s=seconds),
        )


async def _wait_for_all(work: Sequence[Awaitable[_T]]) -> list[_T]:
    """Gives the results of all; if one fails, the others are cancelled and
    waited for, and its error raised.
    """
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _make_events(
    index: int,
    token: int,
    logprob: float | None,
    top: TopLogprobs | None,
    parts: Sequence[Part],
) -> Sequence[Token | Called]:
    """Makes the events of a token and the parts of the reply that it
    completes.
    """
    if len(parts) == 1 and isinstance(parts[0], str):
        return (Token(index, parts[0], token, logprob, top),)
    text, reasoning = said(parts)
    return [
        Token(index, text, token, logprob, top, reasoning),
        *(Called(index, part) for part in parts if isinstance(part, CallPart)),
    ]
