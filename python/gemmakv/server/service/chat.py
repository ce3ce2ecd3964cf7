"""Requests to a model: messages or prompts in, events out. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import os
import secrets
import sys
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gemmakv.cache._kv_cache import KVCache, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.chat._answers import answer_of
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Segment, Template, messages_of
from gemmakv.chat._native_calls import grammar_of
from gemmakv.chat._reply import Part, ReplyReader, read_reply, said
from gemmakv.chat._templates import (
    PlainTemplate,
    call_form,
    knows_thinking,
    render,
    stop_ids,
    stop_texts,
    template_for,
    thinking,
    turn_rules,
)
from gemmakv.chat._tools import CallPart, tool_use
from gemmakv.chat._transcript import Encoder, at_least
from gemmakv.chat._turns import SYSTEM_ROLES
from gemmakv.errors import CacheFullError, GemmaKVError, one_line, within
from gemmakv.generation._embeddings import Embedder
from gemmakv.generation._prompts import TokenArray
from gemmakv.generation._requests import requests_of
from gemmakv.generation._result import Generation, TopLogprobs
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.generation._work import off_the_loop
from gemmakv.options import GenerationOptions
from gemmakv.server.service.admission import Admission, stopping
from gemmakv.server.service.counts import Counts
from gemmakv.server.service.diagnostics import Diagnostics
from gemmakv.server.service.errors import (
    RequestError,
    error_of_value,
    invalid,
    unexpected,
    unsupported,
)
from gemmakv.server.service.events import (
    Called,
    Emit,
    Finished,
    Progress,
    Started,
    Token,
)
from gemmakv.server.service.requests import (
    ChatRequest,
    EmbedRequest,
    Messages,
    Pin,
    Tenant,
    parted,
    taken_options,
)
from gemmakv.server.service.sink import Sink, Sum
from gemmakv.server.settings import Settings
from gemmakv.tokenizers._tokenizer import with_bos

# By which sliding layers are ahead of their window in a step, at most: blocks
# that begin before it, and those of the step's own tokens.
_STEP_TOKENS = 256
_POOL_THREADS = 2  # for templates and tokenizing
_SHORT = 1_000  # characters and token ids that take no thread
_LONG = 100_000  # and that take one which others do not need
# Waits for the memory of what has ended.
_ROOM_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_GRAMMAR_THREADS = 2  # for grammars: some take long
_SCORING = 2  # requests whose prompts' log-probabilities are computed
_SEEDS = 1 << 64
_ASKING = (*SYSTEM_ROLES, "user")  # roles whose messages are one turn
TOO_LONG = "context_length_exceeded"

_T = TypeVar("_T")


class Keeper(Protocol):
    """Keeps conversations."""

    def turn(
        self, request: ChatRequest, emit: Emit
    ) -> AbstractAsyncContextManager[tuple[ChatRequest, Emit]]:
        """What has a request's `past` become `ids`, and keeps its turn."""

    async def ids(self, request: ChatRequest) -> TokenArray:
        """These `ids` alone."""

    def close(self) -> None: ...


class ChatService:
    """One model for many tenants. Of one event loop.

    The same request gives the same tokens alone and among others.
    """

    def __init__(
        self,
        gemma: Gemma,
        settings: Settings,
        template: Template | str | None = None,
    ) -> None:
        """Raises ValueError or GemmaKVError for settings that the model
        cannot have.
        """
        if gemma.tokenizer is None:
            raise ValueError(
                "model: it has no tokenizer (a folder needs a tokenizer.model "
                "or tokenizer.json), and a server needs one"
            )
        self.gemma = gemma
        self.settings = settings
        self.tokenizer = gemma.tokenizer
        self.template = template_for(gemma, template)
        self.context = gemma.config.context_length
        if settings.max_model_len is not None:
            if settings.max_model_len > self.context:
                raise ValueError(
                    f"max_model_len: expected at most {self.context}, the "
                    f"model's context, found {settings.max_model_len}"
                )
            self.context = settings.max_model_len
        self.keeper: Keeper | None = None
        self.defaults = self._default_options()
        self._blocks = self._block_pool(settings.kv_cache_memory)
        self.admission = Admission(
            settings.max_running,
            settings.max_queue,
            settings.max_queue_tokens,
        )
        self._secret = settings.cache_secret or secrets.token_bytes(32)
        self._tenants: dict[bytes, Tenant] = {}
        for number, key in enumerate(settings.api_keys, 1):
            mac = self._mac(key)
            self._tenants[mac] = Tenant(
                str(number), gemma.with_salt(mac), mac
            )
        self._anybody = Tenant("none", gemma)
        self.counts = Counts(self.labels, self.admission, gemma)
        self._ends = frozenset(
            [
                *gemma.config.eos_ids,
                *stop_ids(self.template, self.tokenizer),
            ]
        )
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "gemmakv-text")
        self._long = ThreadPoolExecutor(1, "gemmakv-long-text", _step_back)
        self._grammars = ThreadPoolExecutor(
            _GRAMMAR_THREADS, "gemmakv-grammar", _step_back
        )
        one_each = 1 if len(self.labels) > 1 else _GRAMMAR_THREADS
        self._compiling = {
            label: asyncio.Semaphore(one_each) for label in self.labels
        }
        self._scoring = asyncio.Semaphore(_SCORING)
        self._live: set[asyncio.Task[Any]] = set()
        self.pins: dict[str, dict[str, Pin]] = {}  # by label, and id
        self.diagnostics = Diagnostics()
        self._aborted = False
        # Made here, not in a request; without llguidance requests say so.
        len(self.tokenizer.token_bytes)
        self.tokenizer._at_least("", 0)
        with contextlib.suppress(ValueError, GemmaKVError):
            requests_of(gemma).compiler.prepare()

    def _block_pool(self, memory: int | None) -> BlockPool | None:
        """Of what runs; one conversation always fits."""
        if memory is None:
            return None
        config = self.gemma.config
        _, sliding = config.kv_bytes_per_token()
        least = config.kv_bytes_at(self.context) + _STEP_TOKENS * sliding
        if memory < least:
            raise ValueError(
                f"kv_cache_memory: expected at least {least}, which one "
                f"conversation of {self.context} tokens takes "
                f"(max_model_len), found {memory}"
            )
        return BlockPool(memory)

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def labels(self) -> list[str]:
        """Of all tenants."""
        found = [tenant.label for tenant in self._tenants.values()]
        return found or [self._anybody.label]

    def tenant(self, key: str | None) -> Tenant | None:
        """Whose key it is; None if nobody's. Takes as long for any key."""
        if not self._tenants:
            return self._anybody
        mac = self._mac(key or "")
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, mac):
                found = tenant
        return found

    def drain(self) -> None:
        """Takes nothing more on; what is here goes on."""
        self.admission.draining = True

    async def ended(self) -> None:
        """Waits until nothing is here any more."""
        while self._live:
            await asyncio.wait(self._live)

    def abort(self) -> None:
        """Ends everything that still waits or runs: RequestError 503."""
        self.drain()
        self._aborted = True
        self.admission.refuse_waiting()
        for task in self._live:
            task.cancel()

    def close(self) -> None:
        for pins in self.pins.values():
            for pin in pins.values():
                pin.held.unpin()
        self.pins.clear()
        for pool in (self._pool, self._long, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.keeper is not None:
            self.keeper.close()

    async def in_pool(self, function: Callable[..., _T], *args: Any) -> _T:
        """A call on a thread for texts, off the event loop.

        Raises RequestError for the library's errors.
        """
        return await _on(self._pool, function, *args)

    async def on_texts(self, function: Callable[..., _T], *args: Any) -> _T:
        """`in_pool` of what takes as long as its arguments are: texts, token
        ids, messages. Short ones stay on the event loop, since going to a
        thread and back takes longer than they do; long ones, of which some
        take seconds, have a thread of their own.
        """
        length = _length(args, _LONG)
        if length > _LONG:
            return await _on(self._long, function, *args)
        if length > _SHORT:
            return await self.in_pool(function, *args)
        try:
            return function(*args)
        except (ValueError, GemmaKVError) as error:
            raise _of_library(error) from error

    async def aside(self, function: Callable[..., _T], *args: Any) -> _T:
        """As `in_pool`, for what may wait for other machines or disks."""
        return await _on(None, function, *args)

    async def chat_ids(
        self,
        messages: Messages,
        tools: Messages | None = None,
        think: bool | None = None,
        fits: bool = False,
    ) -> TokenArray:
        """Token ids of a conversation, with the opening of the reply; `fits`:
        as in `render`.
        """
        self.check_writes()
        self._check_count(messages)
        return await self.on_texts(self.render, messages, tools, think, fits)

    def check_writes(self) -> None:
        """Raises RequestError for a model that writes no text by itself."""
        if self.gemma.config.target_hidden:
            raise RequestError(
                400,
                "model: expected one that writes text, found a drafter, which "
                "only guesses for another model (--draft)",
                param="model",
                code="model_not_supported",
            )
        if self.gemma.config.bidirectional:
            raise RequestError(
                400,
                "model: expected one that writes text, found one that makes "
                "embeddings of texts; these are at /v1/embeddings",
                param="model",
                code="model_not_supported",
            )

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        think: bool | None = None,
        fits: bool = False,
    ) -> TokenArray:
        """`chat_ids` on the caller's thread. `fits`: raises RequestError at
        once for much more than the context has room for.
        """
        segments = self._segments(messages, tools, think)
        if fits:
            self.check_fits(segments)
        return self._encoded(segments)

    def _segments(
        self, messages: Messages, tools: Messages | None, think: bool | None
    ) -> list[Segment]:
        """What `render` has the tokens of."""
        said, begun = parted(messages, self.template)
        segments = render(
            self.template,
            messages_of(said),
            tools=tools,
            add_generation_prompt=True,
            **thinking(self.template, think),
        )
        return [*segments, Segment(self.begun_text(begun))]

    def _encoded(self, segments: Sequence[Segment]) -> TokenArray:
        bos = self.gemma.config.bos_id
        return Encoder(self.tokenizer, bos).encode(segments)

    def begun_text(self, begun: str) -> str:
        """The beginning of a reply as it stands behind what opens it."""
        plain = isinstance(self.template, PlainTemplate)
        return f" {begun}" if begun and plain else begun

    def begun_ids(self, begun: str) -> TokenArray:
        """Token ids of that."""
        text = self.begun_text(begun)
        return np.array(self.tokenizer.encode(text) if text else [], np.int32)

    def fitted(
        self,
        messages: Messages,
        tools: Messages | None,
        think: bool | None,
        wanted: int | None,
    ) -> tuple[TokenArray, int]:
        """`render` of what is left of a conversation when as many of its
        oldest turns are left out as needed, and how many messages these are.

        Room is left for a reply of `wanted` tokens, or of a quarter of the
        context, and for one of half of it at most. What the system says first,
        and the last turn, stay. What the template makes one turn stays whole.
        """
        room = self.context // 4 if wanted is None else wanted
        most = self.context - min(max(room, 1), self.context // 2)
        first = 0
        while first < len(messages) and (
            messages[first]["role"] in SYSTEM_ROLES
        ):
            first += 1
        alone = ("user",) if turn_rules(self.template).users else ()
        turns = [
            i
            for i in range(first + 1, len(messages))
            if messages[i]["role"] in alone
            or messages[i]["role"] in _ASKING
            and messages[i - 1]["role"] not in _ASKING
        ]

        def without(count: int) -> Messages:
            return [*messages[:first], *messages[turns[count - 1] :]]

        def too_long(count: int) -> bool:
            segments = self._segments(without(count), tools, think)
            least = at_least(segments, self.tokenizer, most + 1)
            return least > most or len(self._encoded(segments)) > most

        least, enough = 1, len(turns)
        while least < enough:
            middle = (least + enough) // 2
            if too_long(middle):
                least = middle + 1
            else:
                enough = middle
        if not turns:
            return self.render(messages, tools, think, True), 0
        ids = self.render(without(least), tools, think, True)
        return ids, turns[least - 1] - first

    @property
    def can_think(self) -> bool:
        """Whether requests may say that the model is to think."""
        return knows_thinking(self.template)

    async def run(self, request: ChatRequest, emit: Emit) -> None:
        """Serves a request; `emit` is called with one event at a time.

        Raises RequestError. If the task is cancelled, or `emit` raises, all
        of it ends with the step of the model that runs.
        """
        with self._serving():
            await self._run(request, emit)

    async def embed(
        self, request: EmbedRequest
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Vectors [texts, dim] of length 1, and the texts' tokens.

        Raises RequestError. If the task is cancelled, it ends with the step
        of the model that runs.
        """
        with self._serving():
            return await self._embed(request)

    async def _embed(
        self, request: EmbedRequest
    ) -> tuple[npt.NDArray[np.float32], int]:
        if self.admission.draining:
            raise stopping()
        embedder = Embedder(requests_of(self.gemma))
        label = request.tenant.label
        job = await self.on_texts(
            lambda texts: embedder.prepare(
                texts,
                request.dim,
                request.prompt,
                longest=self.context,
                truncate=request.truncate,
            ),
            request.texts,
        )
        timeout = self.settings.request_timeout
        until = None if timeout is None else request.arrived + timeout
        try:
            async with self.admission.slot(label, 1, _left(until)):
                self.counts.queue_s.observe(time.monotonic() - request.arrived)
                async with asyncio.timeout(_left(until)):
                    vectors = await embedder.acompute(job)
        except TimeoutError:
            raise _too_late("the texts were computed") from None
        tokens = sum(map(len, job.ids))
        self.counts.prompt_tokens.labels(key=label).inc(tokens)
        self.counts.embeddings.labels(key=label).inc(len(vectors))
        return vectors, tokens

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Around a request: it counts as live, and errors are of requests."""
        task = asyncio.current_task()
        assert task is not None
        self._live.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._aborted:
                task.uncancel()
                raise stopping() from None
            self.counts.cancelled.inc()
            raise
        except (ValueError, GemmaKVError) as error:
            raise _of_library(error) from error
        except MemoryError:
            raise _no_memory("out of memory") from None
        finally:
            self._live.discard(task)

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt that `run` would have of a conversation.

        Raises RequestError.
        """
        try:
            request, options = await self._checked(request)
            if request.past is not None and self.keeper is not None:
                return len(await self.keeper.ids(request))
            assert request.messages is not None
            if request.truncate:
                ids, _ = await self._message_ids(request, options)
            else:
                ids = await self.chat_ids(
                    request.messages, request.tools, request.think
                )
            return len(ids)
        except (ValueError, GemmaKVError) as error:
            raise _of_library(error) from error

    async def _run(self, request: ChatRequest, emit: Emit) -> None:
        if self.admission.draining:
            raise stopping()
        if request.messages is None:
            self.check_rows(len(request.prompts), request.n)
        else:
            self.check_rows(1, request.n)
        request, options = await self._checked(request)
        if request.past is None or self.keeper is None:
            await self._admit(request, options, emit)
            return
        async with self.keeper.turn(request, emit) as (request, emit):
            await self._admit(request, options, emit)

    async def _admit(
        self,
        request: ChatRequest,
        options: dict[str, Any],
        emit: Emit,
    ) -> None:
        prompts, dropped = await self._prompt_ids(request, options)
        if options.get("response_format") or options.get("grammar"):
            request.not_enforced.extend(
                await self._compile(request.tenant.label, options)
            )
        rows = len(prompts) * request.n
        jobs = [
            (p, ids, self._row_options(options, ids, request))
            for p, ids in enumerate(prompts)
        ]
        ended = Sum()
        until = self._until(request, options)
        left = _left(until)
        tokens = 0
        if self.admission.max_tokens is not None and self.admission.waits(rows):
            tokens = await self._to_compute(request.tenant.gemma, prompts)
        async with self.admission.slot(
            request.tenant.label, rows, left, tokens
        ):
            begin = time.monotonic()
            self.counts.queue_s.observe(begin - request.arrived)
            scored = await self._scores(request, prompts, until)
            started = Started(
                sum(map(len, prompts)), dropped, [one.found for one in scored]
            )
            sink = Sink(started, emit, self.counts, request.arrived)
            await _all(
                [
                    self._prompt(
                        request, *job, until, sink, ended,
                        scored[job[0]] if scored else None,
                    )
                    for job in jobs
                ]
            )  # fmt: skip
        event = ended.event(begin - request.arrived, sink.reasoning_tokens)
        key, counts = {"key": request.tenant.label}, self.counts
        counts.prompt_tokens.labels(**key).inc(event.prompt_tokens)
        counts.cached_tokens.labels(**key).inc(event.cached_tokens)
        counts.completion_tokens.labels(**key).inc(event.completion_tokens)
        counts.drafted_tokens.inc(event.drafted)
        counts.accepted_tokens.inc(event.accepted)
        if event.miss_reason:
            counts.misses.labels(reason=event.miss_reason).inc()
        await emit(event)

    def check_rows(self, prompts: int, n: int) -> None:
        """Raises RequestError for more continuations than one may have."""
        most = min(self.settings.limits.rows, self.settings.max_running)
        if prompts * n > most:
            raise invalid(
                "n",
                f"expected at most {most} continuations, found {prompts * n}",
            )

    async def _compile(
        self, label: str, options: dict[str, Any]
    ) -> Sequence[str]:
        """Has a grammar ready, and returns the paths of what it does not
        enforce. Tenants have one compiled at a time, so that none keeps the
        others waiting.
        """
        async with self._compiling[label]:
            seconds = self.settings.limits.compile_s
            return await _on(
                self._grammars,
                requests_of(self.gemma).compile,
                options,
                seconds,
            )

    async def _to_compute(
        self, gemma: Gemma, prompts: Sequence[TokenArray]
    ) -> int:
        """Tokens of prompts that the prefix cache does not have."""
        count, prefix = sum(map(len, prompts)), gemma.prefix_cache
        if prefix is None:
            return count
        known = await self.aside(
            lambda: sum(self._known(gemma, ids) for ids in prompts)
        )
        return count - known

    def _known(self, gemma: Gemma, ids: TokenArray) -> int:
        """Tokens of a prompt that the prefix cache has."""
        assert gemma.prefix_cache is not None
        try:
            with gemma.prefix_cache._match(ids, self._blocks) as found:
                return len(found)
        except CacheFullError:  # nothing to tell is worth a request's memory
            return 0

    async def _prompt(
        self,
        request: ChatRequest,
        number: int,
        ids: TokenArray,
        options: dict[str, Any],
        until: float | None,
        sink: Sink,
        ended: Sum,
        scored: _Scored | None,
    ) -> None:
        gemma = request.tenant.gemma
        cache = self._new_cache()
        if scored is not None:
            cache, ids = scored.cache, ids[-1:]
        first = number * request.n

        async def one(
            i: int, cache: KVCache, prompt: TokenArray | str
        ) -> Generation:
            def row() -> Awaitable[Generation]:
                own = {**options, "deadline": _left(until)}
                if own.get("seed") is not None:
                    own["seed"] = (own["seed"] + i) % _SEEDS
                cache._core.for_one_request = True
                return self._row(
                    gemma, first + i, cache, prompt, own, request, sink
                )

            with cache:
                return await self._with_room(row, sink, first + i)

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
                deadline=_left(until),
                prefix_cache=options.get("prefix_cache", "on"),
            ),
            sink,
            first,
        )
        if scored is not None:
            said = scored.counted(said)
        written = await self._written(gemma, ids, said, options)
        if said.finish_reason == "deadline":  # nothing is continued any more
            for i in range(request.n):
                end = Finished(first + i, said.finish_reason, None, said)
                await sink.emit(end)
            ended.add(said, [said], written)
            return
        with cache:
            forks = [cache.fork() for _ in range(request.n)]
        generations = await _all(
            [one(i, fork, "") for i, fork in enumerate(forks)]
        )
        ended.add(said, generations, written)

    def _new_cache(self) -> KVCache:
        return create_kv_cache(
            self.gemma.config, self.context, pool=self._blocks
        )

    async def _scores(
        self,
        request: ChatRequest,
        prompts: Sequence[TokenArray],
        until: float | None,
    ) -> list[_Scored]:
        """Computes the log-probabilities of prompts, if they are asked for,
        one prompt after the other: each takes memory for logits. To the engine
        these are requests among others.
        """
        top = request.prompt_logprobs
        if top is None:
            return []
        model = requests_of(request.tenant.gemma)

        async def attempt(ids: TokenArray) -> _Scored:
            begin, cache = time.monotonic(), self._new_cache()
            work = model.prompt_logprobs(cache, ids, top)

            def compute(check: Callable[[], None]) -> PromptLogprobs:
                _step_back()
                return work(check)

            found = await off_the_loop(compute)
            return _Scored(cache, found, time.monotonic() - begin)

        try:
            async with asyncio.timeout(_left(until)), self._scoring:
                return [
                    await self._with_room(functools.partial(attempt, ids))
                    for ids in prompts
                ]
        except TimeoutError:
            raise _too_late("the prompt was computed") from None

    async def _with_room(
        self,
        attempt: Callable[[], Awaitable[_T]],
        sink: Sink | None = None,
        index: int = 0,
    ) -> _T:
        """An attempt, again where memory is full: conversations that have
        ended may keep theirs until this loop gets to them, and the engine asks
        only those that run. One that fails leaves its cache as it was, if
        nothing was given out.
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

    async def _row(
        self,
        gemma: Gemma,
        index: int,
        cache: KVCache,
        prompt: TokenArray | str,
        options: dict[str, Any],
        request: ChatRequest,
        sink: Sink,
    ) -> Generation:
        """One continuation."""
        if request.streamed:
            generation, reader = await self._pieces(
                gemma, index, cache, prompt, options, request, sink
            )
        else:
            generation = await gemma.agenerate(cache, prompt, **options)
            cache.close()  # its memory is for others
            reader = self._reader(request, options)
            parts: Sequence[Part] = [generation.text]
            if reader is not None:
                parts = read_reply(reader, generation)
            for token in self._tokens(index, generation, parts):
                await sink.emit(token)
            for part in parts:
                if isinstance(part, CallPart):
                    await sink.emit(Called(index, part))
            sink.measure(generation)
        calls = reader.calls if reader else 0
        thoughts = reader.reasoning_tokens if reader else 0
        sink.reasoning_tokens += thoughts
        stops = stop_texts(_NO_TEMPLATE, request.options, begun=True)
        stop = self._stopped_by(generation, stops)
        written = 0
        if not isinstance(prompt, str):
            written = await self._written(gemma, prompt, generation, options)
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

    async def _written(
        self,
        gemma: Gemma,
        ids: TokenArray,
        said: Generation,
        options: Mapping[str, Any],
    ) -> int:
        """Tokens of a prompt that the prefix cache has now, and had not."""
        prefix = gemma.prefix_cache
        if prefix is None or options.get("prefix_cache", "on") == "off":
            return 0
        if said.usage.cached_tokens + 1 >= len(ids):
            return 0
        if len(ids) <= _SHORT and prefix.cache.tiers == ("ram",):
            found = self._known(gemma, ids)
        else:
            found = await self.aside(self._known, gemma, ids)
        return max(0, found - said.usage.cached_tokens)

    def _reader(
        self, request: ChatRequest, options: Mapping[str, Any]
    ) -> ReplyReader | None:
        """What tells the parts of a reply apart; prompts get none."""
        if request.messages is None:
            return None
        form = call_form(self.template) if request.tools else None
        begun = bool(parted(request.messages, self.template)[1])
        grammar = options.get("grammar")
        return ReplyReader(self.tokenizer, form, begun, grammar)

    def _tokens(
        self, index: int, generation: Generation, parts: Sequence[Part]
    ) -> Iterator[Token]:
        """Of a continuation that has ended; the first has all its text."""
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

    async def _pieces(
        self,
        gemma: Gemma,
        index: int,
        cache: KVCache,
        prompt: TokenArray | str,
        options: dict[str, Any],
        request: ChatRequest,
        sink: Sink,
    ) -> tuple[Generation, ReplyReader | None]:
        """A continuation whose tokens are given out as they come, and what
        read them.
        """
        reader = self._reader(request, options)

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
            return _told(index, token, logprob, top, parts)

        begin = time.monotonic()
        reports: list[asyncio.Task[None]] = []

        def report(done: int, total: int) -> None:
            seconds = time.monotonic() - begin
            event = Progress(index, done, total, stream.cached_tokens, seconds)
            reports.append(asyncio.create_task(sink.emit(event)))

        if request.progress and request.n == 1:
            options = {**options, "prompt_progress": report}
        stream = await gemma.astream(cache, prompt, **options)
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
            cache.close()  # its memory is for others
            rest = reader.end() if reader is not None else []
            if rest:
                for event in _told(index, -1, None, None, rest):
                    await sink.emit(event)
            return stream.result(), reader

    def _stopped_by(
        self, generation: Generation, stops: Sequence[str]
    ) -> str | None:
        ids = generation.token_ids
        if generation.finish_reason != "stop" or not ids or not stops:
            return None
        if ids[-1] in self._ends:
            return None
        # A stop string was cut where it began, the first of them.
        said = self.tokenizer.decode(ids)
        rest = said[len(generation.text) :]
        return next((stop for stop in stops if rest.startswith(stop)), None)

    async def _checked(
        self, request: ChatRequest
    ) -> tuple[ChatRequest, dict[str, Any]]:
        """A request with the tools that are said to the model, and all of its
        options. Raises RequestError.
        """
        given = taken_options(request.options, self.context)
        request = dataclasses.replace(request, options=given)
        options = {**self.defaults, **given}

        def check(*_: object) -> ChatRequest:
            found = self._with_tools(request, options)
            self._check_options(options, request.prompt_logprobs)
            return found

        # Schemas may be long.
        return await self.on_texts(check, options, request.tools), options

    def _with_tools(
        self, request: ChatRequest, options: dict[str, Any]
    ) -> ChatRequest:
        """The request with the tools that are said to the model, and what the
        reply is to follow among the options.
        """
        try:
            use = tool_use(
                request.tools, request.tool_choice, request.parallel_tool_calls
            )
        except ValueError as error:
            raise _of_library(error) from error
        if request.messages and parted(request.messages, self.template)[1]:
            _check_begun(request, options)
        if use is None:
            return dataclasses.replace(request, tools=None)
        form = call_form(self.template)
        if form is None:
            raise unsupported(
                "tools", "calls in the form of this model's template"
            )
        try:
            rest, answer = answer_of(options)
            grammar = grammar_of(form, self.tokenizer, use, answer)
        except ValueError as error:
            raise _of_library(error) from error
        options.clear()
        options.update(rest, grammar=grammar)
        return dataclasses.replace(request, tools=use.tools)

    def _check_options(
        self, options: Mapping[str, Any], prompt_logprobs: int | None
    ) -> None:
        stop = options.get("stop")
        most = self.settings.limits.stop
        if isinstance(stop, list | tuple) and len(stop) > most:
            raise invalid(
                "stop", f"expected at most {most} texts, found {len(stop)}"
            )
        most = self.settings.limits.top_logprobs
        for name, top in (
            ("top_logprobs", options.get("top_logprobs")),
            ("prompt_logprobs", prompt_logprobs),
        ):
            if isinstance(top, int) and top > most:
                raise invalid(name, f"expected at most {most}, found {top}")
        if prompt_logprobs is not None and prompt_logprobs < 0:
            raise unexpected(
                "prompt_logprobs", f"0 to {most}", prompt_logprobs
            )
        try:
            GenerationOptions.check(options, self.gemma.config.vocab_size)
        except (ValueError, GemmaKVError) as error:
            raise _of_library(error) from error

    async def _prompt_ids(
        self, request: ChatRequest, options: dict[str, Any]
    ) -> tuple[list[TokenArray], int]:
        """Of all prompts, and how many messages are left out of them."""
        self.check_writes()
        dropped = request.dropped
        special = bool(options.pop("parse_special", False))
        if request.messages is not None:
            if special:
                raise invalid("parse_special", "messages are text")
            self._check_count(request.messages)
            if request.ids is not None:
                found = [request.ids]
            else:
                ids, dropped = await self._message_ids(request, options)
                found = [ids]
        else:
            found = await self.on_texts(
                self._text_ids, request.prompts, special, request.add_bos
            )
        for ids in found:
            self.check_length(len(ids), request.messages is not None)
        return found, dropped

    async def _message_ids(
        self, request: ChatRequest, options: Mapping[str, Any]
    ) -> tuple[TokenArray, int]:
        """Of a conversation that is cut to fit if the request says so, and
        how many messages are left out then.
        """
        assert request.messages is not None
        said = request.messages, request.tools, request.think
        try:
            ids = await self.chat_ids(*said, fits=True)
            if not request.truncate or len(ids) < self.context:
                return ids, 0
        except RequestError as error:
            if not request.truncate or error.code != TOO_LONG:
                raise
        return await self.in_pool(
            self.fitted, *said, options.get("max_tokens")
        )

    def _text_ids(
        self,
        prompts: Sequence[str | Sequence[int]],
        special: bool,
        add_bos: bool,
    ) -> list[TokenArray]:
        return [self.text_ids(one, special, True, add_bos) for one in prompts]

    def check_fits(
        self, segments: Sequence[Segment], messages: bool = True
    ) -> None:
        """`check_length` of a text before it has tokens: raises RequestError
        where it is too long whatever they are, which takes no time.
        """
        least = at_least(segments, self.tokenizer, self.context)
        self.check_length(least, messages, "at least ")

    def check_length(
        self, length: int, messages: bool, exactly: str = ""
    ) -> None:
        """Raises RequestError if a prompt of that many tokens, or `messages`
        that come to them, leave no room in the context.
        """
        if length >= self.context:
            raise RequestError(
                400,
                f"the prompt has {exactly}{length} tokens, expected at most "
                f"{self.context - 1}: the context is {self.context} "
                "tokens, and one is to be sampled",
                param="messages" if messages else "prompt",
                code=TOO_LONG,
                more={"n_prompt_tokens": length, "n_ctx": self.context},
            )

    def _check_count(self, messages: Messages) -> None:
        most = self.settings.limits.messages
        if len(messages) > most:
            raise invalid(
                "messages", f"expected at most {most}, found {len(messages)}"
            )

    def text_ids(
        self,
        prompt: str | Sequence[int],
        special: bool = False,
        fits: bool = False,
        add_bos: bool = True,
    ) -> TokenArray:
        """Token ids of a prompt; a text has a BOS in front, if `add_bos`.

        With `special`, names of control tokens mean them; `fits`: as in
        `render`. Raises ValueError for ids that are none.
        """
        config = self.gemma.config
        bad = f"prompt: expected token ids in [0, {config.vocab_size}), found "
        if isinstance(prompt, str):
            if fits:
                self.check_fits([Segment(prompt)], False)
            ids = self.tokenizer.encode(prompt, special)
            if add_bos:
                ids = with_bos(ids, config.bos_id)
            found = np.array(ids, np.int32)
        else:
            try:
                found = np.asarray(prompt, np.int64)
            except OverflowError:
                raise ValueError(f"{bad}{max(prompt, key=abs)}") from None
        if not len(found):
            raise ValueError("prompt: expected at least one token, found none")
        others = (found < 0) | (found >= config.vocab_size)
        if others.any():
            raise ValueError(f"{bad}{int(found[others][0])}")
        return found.astype(np.int32)

    def _default_options(self) -> dict[str, Any]:
        """Of requests that say nothing: the operator's, else the model's."""
        found: dict[str, Any] = {"temperature": 1.0}
        found |= self.gemma.sampling_defaults
        if self.settings.default_temperature is not None:
            found["temperature"] = self.settings.default_temperature
        if self.settings.default_seed is not None:
            found["seed"] = self.settings.default_seed
        self._check_settings(found)
        return found

    def _check_settings(self, options: dict[str, Any]) -> None:
        try:
            GenerationOptions.check(options, self.gemma.config.vocab_size)
        except ValueError as error:
            raise within("default_", error) from None

    def _row_options(
        self, options: dict[str, Any], ids: TokenArray, request: ChatRequest
    ) -> dict[str, Any]:
        """Of a continuation: with what ends a reply, as long as fits."""
        found = {k: v for k, v in options.items() if k != "deadline"}
        room = self.context - len(ids)
        wanted = found.get("max_tokens")
        if wanted is None:
            wanted = self.settings.default_max_tokens
        if wanted is None:
            wanted = request.default_max_tokens
        found["max_tokens"] = room if wanted is None else min(wanted, room)
        if request.messages is not None:
            begun = bool(parted(request.messages, self.template)[1])
            found["stop"] = stop_texts(self.template, found, begun=begun)
            if not found.get("ignore_eos"):
                found["stop_token_ids"] = [
                    *(found.get("stop_token_ids") or ()),
                    *stop_ids(self.template, self.tokenizer),
                ]
        return found

    def _until(
        self, request: ChatRequest, options: Mapping[str, Any]
    ) -> float | None:
        """Of time.monotonic(), when the answer has to end."""
        limits = (options.get("deadline"), self.settings.request_timeout)
        found = [seconds for seconds in limits if seconds is not None]
        return request.arrived + min(found) if found else None

    def _mac(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), hashlib.sha256)


@dataclasses.dataclass(frozen=True)
class _Scored:
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


class _NoTemplate:
    """A template that ends nothing."""

    name = "none"
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()

    def render(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_NO_TEMPLATE = _NoTemplate()


def _check_begun(request: ChatRequest, options: Mapping[str, Any]) -> None:
    """Raises RequestError for what a reply cannot be held to, or come after,
    that the client has begun.
    """
    if options.get("response_format") not in (None, {"type": "text"}):
        raise invalid(
            "response_format",
            "expected none where the last message begins the reply",
        )
    if request.think:
        raise invalid(
            "think",
            "expected no thoughts where the last message begins the reply: "
            "they come before it",
        )


async def _all(work: Sequence[Awaitable[_T]]) -> list[_T]:
    """Results of all; if one fails, the others are cancelled and waited for,
    and its error raised.
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


def _told(
    index: int,
    token: int,
    logprob: float | None,
    top: TopLogprobs | None,
    parts: Sequence[Part],
) -> Sequence[Token | Called]:
    """A token with the parts of the reply that it completes."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return (Token(index, parts[0], token, logprob, top),)
    text, reasoning = said(parts)
    return [
        Token(index, text, token, logprob, top, reasoning),
        *(Called(index, part) for part in parts if isinstance(part, CallPart)),
    ]


def _length(value: object, most: int) -> int:
    """Characters and numbers in it; more than `most` says no more than that."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple | np.ndarray):
        return 1
    count = len(value)
    if count <= most and set(map(type, value)) <= {int}:
        return 2 * count  # as below, but soon
    for one in value:
        if count > most:
            break
        count += _length(one, most - count)
    return count


def _step_back() -> None:
    """Has this thread, and those that it starts, leave the processors to the
    engine's, where there are too few.
    """
    if sys.platform == "linux":  # elsewhere it is the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


async def _on(
    pool: ThreadPoolExecutor | None, function: Callable[..., _T], *args: Any
) -> _T:
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(pool, function, *args)
    except (ValueError, GemmaKVError) as error:
        raise _of_library(error) from error


def _left(until: float | None) -> float | None:
    """Seconds until then."""
    return None if until is None else max(0.0, until - time.monotonic())


def _of_library(error: Exception) -> RequestError:
    if isinstance(error, CacheFullError):
        return _no_memory(one_line(error))
    if isinstance(error, ValueError):
        return error_of_value(error)
    # A template that cannot express the messages.
    return RequestError(400, one_line(error))


def _too_late(what: str) -> RequestError:
    return RequestError(
        503,
        f"deadline: it passed before {what}",
        param="deadline",
        code="deadline_exceeded",
    )


def _no_memory(message: str) -> RequestError:
    return RequestError(503, message, code="out_of_memory", retry_after=5)
