"""Requests to a model: messages or prompts in, events out. Knows no HTTP.

`ChatService.run` is the way of a request. `Checks` checks its options and
tools, `History` (the keeper) finds the turns that it follows, `Prompts` makes
token ids of its messages or texts, `Grammars` compiles what its replies are
held to. Then it waits in `Admission` for its turn, and `Continuations` has the
engine write.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Template
from gemmakv.generation._embeddings import Embedder
from gemmakv.generation._prompts import TokenArray
from gemmakv.generation._requests import requests_of
from gemmakv.server.service.admission import Admission, stopping
from gemmakv.server.service.checks import Checks
from gemmakv.server.service.continuations import Continuations, Run
from gemmakv.server.service.counts import Counts
from gemmakv.server.service.diagnostics import Diagnostics
from gemmakv.server.service.errors import (
    library_errors,
    out_of_memory,
    too_late,
)
from gemmakv.server.service.events import Emit, Started
from gemmakv.server.service.grammars import Grammars
from gemmakv.server.service.prompts import Prompts
from gemmakv.server.service.requests import (
    ChatRequest,
    EmbedRequest,
    Pin,
    Tenant,
    seconds_left,
)
from gemmakv.server.service.sink import Sink
from gemmakv.server.service.threads import Threads
from gemmakv.server.settings import Settings


class Keeper(Protocol):
    """A store of conversations, which knows the turns before a request."""

    def turn(
        self, request: ChatRequest, emit: Emit
    ) -> AbstractAsyncContextManager[tuple[ChatRequest, Emit]]:
        """Makes the `ids` of a request that has a `past`, and keeps its
        turn.
        """

    async def ids(self, request: ChatRequest) -> TokenArray:
        """Makes these `ids` alone."""

    def close(self) -> None: ...


class ChatService:
    """A model that serves many tenants. It belongs to one event loop.

    The same request gives the same tokens alone and among others.

    Attributes:
      gemma, settings: the model, and what the operator decides.
      tokenizer, context, defaults: the model's tokenizer, the most tokens of a
        conversation, and the options of requests that say nothing.
      threads, prompts, checks, grammars, continuations: the parts that a
        request goes through.
      admission: the queue.
      keeper: the conversations, if any are kept.
      counts: the metrics.
      pins: the pinned prefixes, by the tenant's label and the pin's id.
      diagnostics: what is remembered of prompts for Anthropic's diagnostics.
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
        self.gemma = gemma
        self.settings = settings
        self.threads = Threads()
        self.prompts = Prompts(gemma, settings, self.threads, template)
        self.tokenizer = self.prompts.tokenizer
        self.context = self.prompts.context
        self.keeper: Keeper | None = None
        self.checks = Checks(gemma, settings, self.prompts)
        self.defaults = self.checks.defaults
        self.continuations = Continuations(gemma, settings, self.prompts)
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
        self._live: set[asyncio.Task[Any]] = set()
        self.pins: dict[str, dict[str, Pin]] = {}
        self.diagnostics = Diagnostics()
        self._aborted = False
        self.grammars = Grammars(
            gemma, self.threads, self.labels, settings.limits.compile_s
        )

    @property
    def live(self) -> int:
        """The number of requests that wait or run."""
        return len(self._live)

    @property
    def labels(self) -> list[str]:
        """The labels of all tenants."""
        found = [tenant.label for tenant in self._tenants.values()]
        return found or [self._anybody.label]

    def tenant(self, key: str | None) -> Tenant | None:
        """Gives the tenant of a key; None if nobody has it. Takes as long for
        any key.
        """
        if not self._tenants:
            return self._anybody
        mac = self._mac(key or "")
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, mac):
                found = tenant
        return found

    def drain(self) -> None:
        """Refuses new requests; those that are here go on."""
        self.admission.draining = True

    async def ended(self) -> None:
        """Waits until no request is here any more."""
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
        """Ends the threads, pins and conversations of the service."""
        for pins in self.pins.values():
            for pin in pins.values():
                pin.held.unpin()
        self.pins.clear()
        self.threads.close()
        if self.keeper is not None:
            self.keeper.close()

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
        """Gives vectors [texts, dim] of length 1, and the texts' tokens.

        Raises RequestError. If the task is cancelled, it ends with the step
        of the model that runs.
        """
        with self._serving():
            return await self._embed(request)

    async def count(self, request: ChatRequest) -> int:
        """Counts the tokens of the prompt that `run` would have of a
        conversation. Raises RequestError.
        """
        with library_errors():
            request, options = await self.checks.check(request)
            if request.past is not None and self.keeper is not None:
                return len(await self.keeper.ids(request))
            assert request.messages is not None
            if request.truncate:
                ids, _ = await self.prompts.message_ids(request, options)
            else:
                ids = await self.prompts.chat_ids(
                    request.messages, request.tools, request.think
                )
            return len(ids)

    async def _run(self, request: ChatRequest, emit: Emit) -> None:
        if self.admission.draining:
            raise stopping()
        prompts = 1 if request.messages is not None else len(request.prompts)
        self.checks.check_rows(prompts, request.n)
        request, options = await self.checks.check(request)
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
        """Runs a checked request once it is its turn."""
        tenant, writer = request.tenant, self.continuations
        prompts, dropped = await self.prompts.prompt_ids(request, options)
        if options.get("response_format") or options.get("grammar"):
            request.not_enforced.extend(
                await self.grammars.compile(tenant.label, options)
            )
        own = [writer.make_options(request, ids, options) for ids in prompts]
        run = Run(request, prompts, own, self._until(request, options))
        rows, tokens = len(prompts) * request.n, 0
        left = seconds_left(run.until)
        if self.admission.max_tokens is not None and self.admission.waits(rows):
            tokens = await writer.count_missing(tenant.gemma, prompts)
        async with self.admission.slot(tenant.label, rows, left, tokens):
            begin = time.monotonic()
            self.counts.queue_s.observe(begin - request.arrived)
            scored = await writer.score(run)
            started = Started(
                sum(map(len, prompts)), dropped, [one.found for one in scored]
            )
            sink = Sink(started, emit, self.counts, request.arrived)
            ended = await writer.write(run, scored, sink)
        event = ended.event(begin - request.arrived, sink.reasoning_tokens)
        self.counts.add(tenant.label, event)
        await emit(event)

    async def _embed(
        self, request: EmbedRequest
    ) -> tuple[npt.NDArray[np.float32], int]:
        if self.admission.draining:
            raise stopping()
        embedder = Embedder(requests_of(self.gemma))
        label = request.tenant.label
        job = await self.threads.run_texts(
            lambda texts: embedder.prepare(
                texts,
                request.dim,
                request.prompt,
                longest=self.prompts.context,
                truncate=request.truncate,
            ),
            request.texts,
        )
        timeout = self.settings.request_timeout
        until = None if timeout is None else request.arrived + timeout
        try:
            async with self.admission.slot(label, 1, seconds_left(until)):
                self.counts.queue_s.observe(time.monotonic() - request.arrived)
                async with asyncio.timeout(seconds_left(until)):
                    vectors = await embedder.acompute(job)
        except TimeoutError:
            raise too_late("before the texts were computed") from None
        tokens = sum(map(len, job.ids))
        self.counts.prompt_tokens.labels(key=label).inc(tokens)
        self.counts.embeddings.labels(key=label).inc(len(vectors))
        return vectors, tokens

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Counts a request as live while the body serves it. Makes requests'
        errors of all others.
        """
        task = asyncio.current_task()
        assert task is not None
        self._live.add(task)
        try:
            with library_errors():
                yield
        except asyncio.CancelledError:
            if self._aborted:
                task.uncancel()
                raise stopping() from None
            self.counts.cancelled.inc()
            raise
        except MemoryError:
            raise out_of_memory("out of memory") from None
        finally:
            self._live.discard(task)

    def _until(
        self, request: ChatRequest, options: Mapping[str, Any]
    ) -> float | None:
        """Gives time.monotonic() when the answer has to end; None if never."""
        limits = (options.get("deadline"), self.settings.request_timeout)
        found = [seconds for seconds in limits if seconds is not None]
        return request.arrived + min(found) if found else None

    def _mac(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), hashlib.sha256)
