"""A loaded model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Self,
    cast,
    overload,
)

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._support.arguments import (
    QuantizeType,
    boolean,
    items,
    quantize_target,
)
from gemmakv._support.progress import Progress, as_callback
from gemmakv.cache._kv_cache import KVCache, KvDtype, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.cache._prefix import (
    PrefixCache,
    core_prefix_cache,
    salt_bytes,
)
from gemmakv.chat._messages import Messages, Template, Tools, messages_of
from gemmakv.chat._reply import ReplyReader, read_reply, with_parts
from gemmakv.chat._stream import ChatStream
from gemmakv.chat._templates import (
    check_reply_options,
    render,
    stop_ids,
    stop_texts,
    template_for,
    thinking,
)
from gemmakv.chat._toolset import Toolset
from gemmakv.chat._transcript import Encoder, common_exact
from gemmakv.errors import GemmaKVError, unexpected
from gemmakv.generation._embeddings import Embedder
from gemmakv.generation._options import (
    BatchOptions,
    GenerationOptions,
    Options,
    Speculate,
    speculation,
)
from gemmakv.generation._prefix import ModelPrefixCache
from gemmakv.generation._profile import StepProfile, profile_of
from gemmakv.generation._prompts import Prompt, TokenArray, check_cache
from gemmakv.generation._requests import Asked, Requests, draft_engine
from gemmakv.generation._result import Generation, Prefill, ToolCall
from gemmakv.generation._stream import Stream
from gemmakv.generation._threads import (
    ThreadPlacement,
    count_threads,
    placement_of,
)
from gemmakv.generation._work import off_the_loop
from gemmakv.models import _catalog as models
from gemmakv.models import _loading as loading
from gemmakv.models._config import ModelConfig, ModelType, type_of
from gemmakv.models._forms import parts_beside
from gemmakv.models._info import ModelInfo
from gemmakv.models._packed import PackedWeights
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ChatOptions(Options, total=False):
    """Keywords of `Gemma.chat`."""

    cache: KVCache | None
    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    think: bool | None
    template: Template | str | None
    template_kwargs: Mapping[str, Any] | None


@dataclasses.dataclass
class _Reply:
    """A reply of `chat` in the making.

    Attributes:
      request: cache, prompt, options and ends of what is to be generated.
      given: the caller's cache, which is to hold the same.
      tokenizer: of the model.
      form: of calls, see `ReplyReader`.
    """

    request: tuple[KVCache, TokenArray, dict[str, Any], list[int]]
    given: KVCache | None
    tokenizer: Tokenizer
    form: str | None

    def stream(self, inner: Stream) -> ChatStream:
        return ChatStream(inner, self, lambda: None)

    def reader(self) -> ReplyReader:
        grammar = self.request[2].get("grammar")
        return ReplyReader(self.tokenizer, self.form, grammar=grammar)

    def finish(self, generation: Generation) -> Generation:
        if generation.token_ids or generation.finish_reason != "cancelled":
            self._fill_given()
        return with_parts(generation, read_reply(self.reader(), generation))

    def keep(
        self, text: str, reasoning: str, calls: Sequence[ToolCall]
    ) -> str:
        del reasoning, calls
        self._fill_given()
        return text

    def take_back(self) -> None:
        """Does nothing: the caller's cache was not touched."""

    def _fill_given(self) -> None:
        if self.given is not None:
            self.given._become(self.request[0])


class Gemma(Asked):
    """Weights of a model, their tokenizer and the engine that runs them.

    Made by `load` or `from_tensors`. Weights never change: any number of
    conversations and threads may use one Gemma at the same time, each with
    exactly the result that it would have alone; calls with the same cache
    wait for each other.
    """

    def __init__(
        self,
        requests: Requests,
        packed_weights: PackedWeights = PackedWeights("off"),
    ) -> None:
        if not isinstance(requests, Requests):
            raise TypeError("use gemmakv.Gemma.load(model)")
        self._requests = requests
        self._packed_weights = packed_weights
        self._prefix: PrefixCache | None = None
        self._had_prefix = False

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        threads: int | None = None,
        pin_threads: bool = False,
        progress: Progress = None,
        packed_cache: bool | str | os.PathLike[str] = True,
        quantize: QuantizeType | None = None,
        prefix_cache: bool | PrefixCache = True,
        speculate: Speculate | None = None,
        profile: bool = False,
        draft: Gemma | None = None,
    ) -> Self:
        """Loads a model.

        Args:
          model: an alias ("gemma-3-270m"), the path of a .gguf file or of a
            directory in Hugging Face's form (config.json, *.safetensors), or
            a model of the Hugging Face hub: "org/repo" with one .gguf file or
            with such a directory's files, "org/repo:Q4_K_M" or
            "org/repo/file.gguf" where there are several, or
            "org/repo@revision" with a branch, tag or commit. It is
            downloaded once; a download that broke off continues.
            HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE hold. Needs
            the extra "hub": `.venv/bin/pip install "gemmakv[hub]"`.
          threads: threads to compute with; default: one for each core that
            this process may use (of up to four processors, all of them),
            fewer where its container has less time than theirs. Results do
            not depend on it.
          pin_threads: whether each thread stays on a processor of its own:
            one on each core first, NUMA node after node, of those that this
            process may use. A second model of this process gets others while
            there are some; another process would get the same ones, so give
            each its own (taskset, numactl). `thread_placement` says which.
            A thread that a `logits_processor` starts inherits the processor
            of the engine's. In a child of fork() nothing is pinned.
          progress: callable(done_bytes, total_bytes), called from this
            thread, or True for a line on stderr.
          packed_cache: whether to keep the weights as the kernels read them
            in a file of the user's cache folder, which the next load opens
            instead of packing, and whose memory all processes share; or the
            folder for it. With True, models of less than 16 MB go without,
            and the variable GEMMAKV_PACKED_CACHE names another folder or
            says "off". The file is found by the weights' content, and what a
            step reads of it is checked before it is used: a damaged one is
            replaced, or, if that shows only later, makes the call a
            CorruptFile and the next load make it again. If it cannot be used
            the load does without; `packed_weights` says why.
          quantize: "q8_0", "q5_0", "q4_0" or "bf16": what float matrices of
            the model (F32, F16, BF16) are made while they are loaded, without
            a copy of them in memory. With "q5_0" and "q4_0" the embedding and
            the output head are made Q8_0. Vectors, and the gates of recurrent
            layers, stay as they are, and so do matrices that are quantized
            already; if all are, that is a ValueError.
          prefix_cache: what conversations of this model share of what they
            begin with; True: a `PrefixCache` of its own, in RAM; False: none.
            Results do not depend on it.
          speculate: where guesses of what comes next are from, that calls
            which do not say check along with the next token: "lookup" (what
            the conversation, or another one of this tenant, says already),
            "draft", "off", or None: "draft" if there is one, else "lookup".
            Results do not depend on it.
          draft: a smaller model with the same vocabulary, or the drafter that
            was published beside a Gemma 4, which guesses what
            this one says. Its weights stay in memory for as long as this
            model does, also when it is closed.
          profile: whether steps are timed part by part, see `profile`. Takes
            less than a hundredth of a step's time.

        Raises ValueError, OSError (FileNotFoundError, ...), MemoryError or
        GemmaKVError (CorruptFile for a damaged file, MismatchError for a
        model that is not a supported Gemma).
        """
        pinned = boolean("pin_threads", pin_threads)
        count = count_threads(threads, pinned)
        target = quantize_target(quantize)
        timed = boolean("profile", profile)
        prefix = core_prefix_cache(prefix_cache)
        drafter = draft_engine(draft)
        guesses = speculation(speculate, draft is not None)
        path = models.resolve(model, as_callback(progress, "downloading"))
        loaded = loading.load(
            path,
            count,
            as_callback(progress, "loading"),
            packed_cache,
            target,
            timed,
            pinned,
        )
        engine = loaded.engine
        if drafter is not None:
            engine = engine.with_draft(drafter)
        requests = Requests(
            engine,
            loaded.tokenizer,
            loaded.info,
            guesses,
            draft is not None,
        )
        return cls(requests, loaded.packed_weights)._with_prefix(
            prefix, prefix._salt if prefix else b""
        )

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        source: Any,
        tokenizer: Tokenizer | None = None,
        *,
        threads: int | None = None,
        pin_threads: bool = False,
        quantize: QuantizeType | None = None,
        speculate: Speculate | None = None,
        profile: bool = False,
        draft: Gemma | None = None,
    ) -> Self:
        """Makes a model with weights from anywhere.

        Args:
          config: the model's shape.
          source: mapping of GGUF tensor names ("blk.0.attn_q.weight") to
            float32 arrays [rows, columns] (norm weights [columns], with the
            model's "+ 1" added), or any object with `keys()` and `[name]`.
            Tensors of encoders of images and sound are left out with a
            `PartialModelWarning`.
          tokenizer: needed for str prompts, `stop` and `Generation.text`.
          threads: as for `load`.
          pin_threads: as for `load`.
          quantize: as for `load`.
          speculate: as for `load`.
          profile: as for `load`.
          draft: as for `load`.

        Raises ValueError or CorruptFile naming the tensor that is missing, has
        the wrong shape, or that the model does not have.
        """
        if not isinstance(config, ModelConfig):
            raise unexpected("config", "a ModelConfig", config)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise unexpected("tokenizer", "a Tokenizer or None", tokenizer)
        drafter = draft_engine(draft)
        guesses = speculation(speculate, draft is not None)
        pinned = boolean("pin_threads", pin_threads)
        engine = _core.Engine.from_tensors(
            config,
            source,
            count_threads(threads, pinned),
            quantize_target(quantize),
            boolean("profile", profile),
            pinned,
        )
        loading.give_tokenizer(engine, tokenizer)
        loading.warn_of_parts(
            "tensors in memory", parts_beside(source.keys()), stacklevel=3
        )
        if drafter is not None:
            engine = engine.with_draft(drafter)
        return cls(
            Requests(engine, tokenizer, ModelInfo(), guesses, draft is not None)
        )

    def __repr__(self) -> str:
        name = self.config.name or self.config.architecture
        if self.closed:
            return f"<Gemma {name}, closed>"
        return f"<Gemma {name}, {self.threads} threads>"

    def __enter__(self) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise GemmaKVError(
            "gemma: weights cannot be pickled; expected a pickler whose "
            "persistent_id names the model, or Session.to_bytes"
        )

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the weights; also done by `with` and garbage collection.

        Streams that still run are cancelled; calls that run in other threads
        end as usual, and the memory is free then, that of a prefix cache of
        its own, too. Any later call that computes is a ValueError. Caches can
        still be looked at, saved, and used with another Gemma of the same
        weights.
        """
        if not self.closed:
            self._requests.close()
            # One of its own goes, with its memory.
            self._had_prefix = self._prefix is not None
            self._prefix = None
            _core.trim_heap()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._requests.closed

    @property
    def prefix_cache(self) -> ModelPrefixCache | None:
        """The part of its prefix cache that this model has; None for none."""
        prefix = self._prefix
        if prefix is None:
            if self._had_prefix:
                _ = self._requests.engine  # says that it is closed
            return None
        return ModelPrefixCache(prefix, self._requests)

    def with_salt(self, salt: str | bytes | None) -> Self:
        """Returns the same model for another tenant of its prefix cache.

        Nothing that one salt computes is found, or waited for, by another, nor
        is it guessed from what another said, with a prefix cache and without.
        Weights and threads are shared. None is the part of everybody; an empty
        salt raises ValueError.
        """
        return self._with_prefix(self._prefix, salt_bytes(salt))

    def _with_prefix(self, prefix: PrefixCache | None, salt: bytes) -> Self:
        engine = _core.with_prefix_cache(
            self._requests.engine, prefix._core if prefix else None, salt
        )
        model = type(self)(
            self._requests.with_engine(engine), self._packed_weights
        )
        model._prefix = prefix
        return model

    @property
    def model_type(self) -> ModelType | None:
        """The named type of this model; None for custom shapes."""
        return type_of(self.config)

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return self._requests.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its files have none."""
        return self._requests.tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template in the model's file; None if it
        has none.
        """
        return self._requests.info.chat_template

    @property
    def sampling_defaults(self) -> Options:
        """The options that the model's makers recommend: keywords for
        `generate`, or `options` of a `Session`. They come from
        generation_config.json, if that samples, or from the GGUF keys
        general.sampling.*; empty if these say nothing. Calls do not use them
        by themselves. Raises ValueError for values that are out of range.
        """
        found = dict(self._requests.info.sampling)
        GenerationOptions.check(found, self.config.vocab_size)
        return cast(Options, found)

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Ids of tokens that calls never sample, as the model's makers say:
        suppress_tokens of generation_config.json, or the GGUF key
        tokenizer.ggml.suppress_tokens. A call that states a logit_bias of one
        takes that instead.
        """
        return self._requests.info.suppressed

    @property
    def instruction_tuned(self) -> bool:
        """Whether the model is called one that was tuned for chat ("it")."""
        return self._requests.info.instruction_tuned

    @property
    def fingerprint(self) -> str:
        """Hex digest of the configuration, the weights' values and the
        arithmetic: what a cache belongs to.

        With `quantize`, also of the types that they were quantized to.
        """
        return self._requests.engine.fingerprint

    @property
    def weights_fingerprint(self) -> str:
        """The fingerprint without the arithmetic: the same on all processors
        and in all versions."""
        return self._requests.engine.weights_fingerprint

    @property
    def packed_weights(self) -> PackedWeights:
        """The place of the weights: a packed file, or memory and why."""
        return self._packed_weights

    @property
    def threads(self) -> int:
        return self._requests.engine.threads

    @property
    def thread_placement(self) -> ThreadPlacement:
        """The processors that compute, as they are now."""
        return placement_of(self._requests.engine)

    @property
    def preemptions(self) -> int:
        """The number of times that a request gave way to another, because the
        `BlockPool` of its conversation had no memory for both. It goes on
        later, with the same result.
        """
        return self._requests.engine.preemptions

    @property
    def profiled(self) -> bool:
        """Whether steps are timed part by part."""
        return self._requests.engine.profiled

    def profile(self) -> StepProfile:
        """Says where the time of all steps so far went.

        Raises ValueError if the model was loaded without `profile=True`.
        """
        if not self.profiled:
            raise ValueError(
                "profile: the steps of this model are not timed; expected one "
                "that was loaded with profile=True"
            )
        return profile_of(self._requests.engine)

    def new_cache(
        self,
        capacity_tokens: int | None = None,
        kv_dtype: KvDtype = "bf16",
        *,
        block_tokens: int = 64,
        checkpoint_bytes: int | None = None,
        pool: BlockPool | None = None,
    ) -> KVCache:
        """Makes an empty conversation for this model.

        Arguments and errors are those of `gemmakv.create_kv_cache`.
        """
        return create_kv_cache(
            self.config,
            capacity_tokens,
            kv_dtype,
            block_tokens=block_tokens,
            checkpoint_bytes=checkpoint_bytes,
            pool=pool,
        )

    @overload
    def generate(
        self,
        cache: KVCache | None = None,
        prompt: Prompt = ...,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        cache: KVCache | None = None,
        prompt: Prompt = ...,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompt, /, *, n: None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompt, /, *, n: int, **options: Unpack[Options]
    ) -> list[Generation]: ...

    def generate(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Appends a prompt to a conversation, or begins a new one, and samples
        a completion.

            gemma.generate("Once upon a time").text
            gemma.generate(cache, "and then").text

        A prompt alone begins a conversation that is dropped with the result.
        A str gets BOS in front if the conversation is empty; token ids are
        taken as they are. An empty str continues what is there.

        Keywords are those of `gemmakv.options.Options`, which docs/options.md
        lists: max_tokens=256, temperature=0.0 (greedy), seed, stop, ...

        With `n`, the prompt is computed once and continued n times on forks:
        the result is a list, each with its own `cache`, and `cache` itself
        ends with the prompt. Sample i uses seed + i.

        A prompt that does not fit raises CacheFullError before any work; any
        call that raises (Ctrl-C included) leaves the cache as it was.
        """
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        if n is not None:
            return ask.done(ask.samples(cache, prompt, n, options))
        return ask.done(ask.reply(cache, prompt, options))

    @overload
    async def agenerate(
        self,
        cache: KVCache | None = None,
        prompt: Prompt = ...,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    async def agenerate(
        self,
        cache: KVCache | None = None,
        prompt: Prompt = ...,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, /, *, n: None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, /, *, n: int, **options: Unpack[Options]
    ) -> list[Generation]: ...

    async def agenerate(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Does `generate` without blocking the event loop, also where it waits
        for a cache that is in use.

        A task that is cancelled leaves the cache as it was; it ends with the
        step of the model that runs.
        """
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        if n is not None:
            return await ask.adone(ask.samples(cache, prompt, n, options))
        return await ask.adone(ask.reply(cache, prompt, options))

    def prefill(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        parse_special: bool = False,
        progress: Progress = None,
    ) -> Prefill:
        """Appends a prompt to a conversation and computes it, and what else
        of the conversation is not computed yet; samples nothing.

        Arguments and errors are those of `generate`. A prompt without a
        conversation is computed for the prefix cache alone.
        """
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        options = {"parse_special": parse_special, "progress": progress}
        return ask.done(ask.prefill(cache, prompt, options))

    async def aprefill(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        parse_special: bool = False,
        progress: Progress = None,
    ) -> Prefill:
        """Does `prefill` without blocking the event loop, as `agenerate`."""
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        options = {"parse_special": parse_special, "progress": progress}
        return await ask.adone(ask.prefill(cache, prompt, options))

    def generate_batch(
        self,
        caches: Sequence[KVCache],
        prompts: Sequence[Prompt],
        **options: Unpack[BatchOptions],
    ) -> list[Generation]:
        """Generates for several conversations at once, each weight read once.

        The results are those of single calls, in the caller's order. An
        option is one value for all, or a list with one per row. The same
        cache twice is a ValueError. If the call raises, all caches are left
        as they were.
        """
        ask = self._requests
        return ask.done(ask.batch(caches, prompts, options))

    async def agenerate_batch(
        self,
        caches: Sequence[KVCache],
        prompts: Sequence[Prompt],
        **options: Unpack[BatchOptions],
    ) -> list[Generation]:
        """Generates for several conversations at once without blocking the
        event loop.

        A task that is cancelled leaves all caches as they were.
        """
        ask = self._requests
        return await ask.adone(ask.batch(caches, prompts, options))

    def stream(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Generates piece by piece: an iterator and an async iterator.

        Arguments are those of `generate`; bad ones raise here, before
        anything runs. A stream that is cancelled keeps every token that it
        returned, and if that is none, not the prompt either.
        """
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        return ask.done(ask.stream(cache, prompt, options))

    async def astream(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Does `stream` without blocking the event loop: it waits for a cache
        that is in use like `agenerate`.
        """
        ask = self._requests
        cache, prompt = ask.place(cache, prompt)
        return await ask.adone(ask.stream(cache, prompt, options))

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> ChatStream: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> Generation | ChatStream: ...

    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        cache: KVCache | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        think: bool | None = None,
        template: Template | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation | ChatStream:
        """Replies to a whole conversation, which the caller keeps.

            gemma.chat(messages).text
            for piece in gemma.chat(messages, stream=True):
                print(piece.text, end="", flush=True)

        Args:
          messages: each a `Message` or a dict of role and content; see
            `apply_chat_template`.
          stream: whether to return a stream of pieces at once, whose `result`
            is the reply.
          cache: what it already holds of the conversation is not computed
            again, what else it holds is removed; on return it holds the
            conversation and the reply. The result is the same as without, bit
            for bit. None for a new one, which is dropped.
          tools: functions that the model may call: Python's, or JSON schemas of
            them; the result has `tool_calls`. Needs the extra `grammar`.
          tool_choice: "auto" (the default), "none", "required" (at least one
            call) or the name of the tool that is to be called.
          parallel_tool_calls: whether there may be several calls.
          think: whether the model is to think before it replies, if its
            template knows how; the result has `reasoning`. None: as the
            template has it.
          template: as for `apply_chat_template`.
          template_kwargs: keywords of `apply_chat_template` for the template.
          **options: those of `generate`; `stop` adds to what ends a reply
            anyway.

        The result's `text` is without white space around it. Thoughts of a
        reply that stands among the messages are said again only if the
        template says them, as long as the turn goes on. Calls with one
        cache at the same time do not wait for each other: it holds what the
        last of them leaves. A call that raises leaves it as it was. A stream
        leaves it so until its end, and if it is cancelled before its first
        piece.

        Raises what `apply_chat_template` and `generate` raise.
        """
        reply = self._begin_reply(
            messages, cache, tools, tool_choice, parallel_tool_calls, think,
            template, template_kwargs, options,
        )  # fmt: skip
        ask = self._requests
        if boolean("stream", stream):
            return reply.stream(ask.done(ask.stream(*reply.request)))
        return reply.finish(ask.done(ask.reply(*reply.request)))

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> ChatStream: ...

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> Generation | ChatStream: ...

    async def achat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        cache: KVCache | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        think: bool | None = None,
        template: Template | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation | ChatStream:
        """Replies as `chat` does without blocking the event loop.

            async for piece in await gemma.achat(messages, stream=True):
                print(piece.text, end="", flush=True)

        A task that is cancelled leaves the cache as it was.
        """
        reply = self._begin_reply(
            messages, cache, tools, tool_choice, parallel_tool_calls, think,
            template, template_kwargs, options,
        )  # fmt: skip
        ask = self._requests
        if boolean("stream", stream):
            return reply.stream(await ask.adone(ask.stream(*reply.request)))
        return reply.finish(await ask.adone(ask.reply(*reply.request)))

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template: Template | str | None = None,
        **kwargs: Any,
    ) -> TokenArray:
        """Turns a conversation into token ids, int32 [n], BOS first.

        Control tokens are those of the template. Text of messages, tools and
        keywords never becomes one.

        Args:
          messages: each a `Message` or a dict of role and content.
          tools: functions that the model may call: Python's, or JSON schemas of
            them. To a template that knows no tools they are said in text, and
            so are calls and results among the messages.
          add_generation_prompt: whether the reply's turn is opened.
          template: "file", "gemma", "gemma4", "plain" or a Template; None
            chooses what fits the model, see `gemmakv.templates.template_for`.
          **kwargs: variables of the file's template.

        Raises ValueError naming the message or tool that the template cannot
        express, GemmaKVError if the template cannot be used.
        """
        encoder = Encoder(self._needed_tokenizer(), self.config.bos_id)
        return encoder.encode(
            render(
                self._template(template),
                messages_of(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        )

    def count_tokens(
        self,
        messages: Messages | str,
        *,
        tools: Tools | None = None,
        template: Template | str | None = None,
        **kwargs: Any,
    ) -> int:
        """Counts the tokens of a text, without BOS, or of a conversation as
        `chat` computes it, with the opening of the reply.

        Raises ValueError for a text with anything else: that is for messages.
        """
        if isinstance(messages, str):
            keywords = {"tools": tools, "template": template, **kwargs}
            for key, value in keywords.items():
                if value is not None:
                    raise ValueError(
                        f"{key}: a text is counted without a template; "
                        "expected messages with it, found a str"
                    )
            return len(self._needed_tokenizer().encode(messages))
        return len(
            self.apply_chat_template(
                messages, tools=tools, template=template, **kwargs
            )
        )

    def logits(
        self, cache: KVCache, tokens: Prompt, all_positions: bool = False
    ) -> npt.NDArray[np.float32]:
        """Appends a text or token ids and gives the logits of what follows.

        Returns float32 [vocab_size] after the last token, or with
        `all_positions` [n, vocab_size] for the n tokens. A text is encoded as
        in `generate`. Raises ValueError for no tokens or one that is out of
        range, CacheFullError if they do not fit; the cache is then as it was.
        """
        compute = self._requests.logits(cache, tokens, bool(all_positions))
        return compute(None)

    async def alogits(
        self, cache: KVCache, tokens: Prompt, all_positions: bool = False
    ) -> npt.NDArray[np.float32]:
        """Computes `logits` on a thread of its own.

        A task that is cancelled ends with the step of the model that runs,
        and leaves the cache as it was unless that was the last step.
        """
        return await off_the_loop(
            self._requests.logits(cache, tokens, bool(all_positions))
        )

    def score(
        self,
        prompt: Prompt,
        choices: Sequence[Prompt],
        *,
        cache: KVCache | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Computes how likely each choice is to follow the prompt.

            ids = gemma.apply_chat_template(messages)
            yes, no = gemma.score(ids, ["Yes", "No"])

        Args:
          prompt: a text or token ids, as in `generate`.
          choices: 1 to 1,024 texts, or sequences of token ids, no two with the
            same tokens. A text is encoded by itself, so one that follows a
            word begins with its space.
          cache: a conversation that the prompt continues; it stays as it is.
          parse_special: whether texts may spell control tokens.

        Returns float32 [len(choices)], of sum 1: the probability of each
        choice's tokens after the prompt, divided by the sum of all. What would
        follow a choice does not count, so nothing is taken off where one begins
        with another. Sampling options have no part in it.

        Raises ValueError naming a bad argument, CacheFullError if prompt and
        choice do not fit.
        """
        compute = self._requests.scores(prompt, choices, cache, parse_special)
        return compute(None)

    async def ascore(
        self,
        prompt: Prompt,
        choices: Sequence[Prompt],
        *,
        cache: KVCache | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Computes `score` on a thread of its own.

        A task that is cancelled ends with the step of the model that runs.
        """
        return await off_the_loop(
            self._requests.scores(prompt, choices, cache, parse_special)
        )

    @property
    def embedding_dims(self) -> list[int]:
        """Lengths of vectors that `embed` can make, the whole one first."""
        return Embedder(self._requests).dims

    @property
    def embedding_prompts(self) -> dict[str, str]:
        """The texts that `embed` can put in front, by name: of the model's
        config_sentence_transformers.json, or what EmbeddingGemma was
        published with; empty for models that generate.
        """
        return Embedder(self._requests).prompts

    def embed(
        self,
        texts: Iterable[Prompt],
        *,
        dim: int | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Computes vectors of texts, whose dot products say how near their
        meanings are.

            queries = gemma.embed(["What is a fork?"], prompt="query")
            documents = gemma.embed(pages, prompt="document")
            scores = queries @ documents.T

        Args:
          texts: texts, or sequences of token ids, which are taken as they
            are. They are computed together, by length; the bits of a vector
            depend on its own text alone.
          dim: length of the vectors, one of `embedding_dims`: the leading
            values, made a unit vector again. None: the whole one.
          prompt: a name of `embedding_prompts`, or a text of your own with
            {text} where texts are to stand ("{text}" alone: nothing else).
            None: what the model's files state as the default, which of
            EmbeddingGemma is nothing.
          pooling: for models that generate, which are not trained for this:
            "last" or "mean", the hidden state of the last position or the
            mean over all, after the final norm.
          parse_special: whether texts may spell control tokens.

        Returns float32 [texts, dim], rows of length 1.

        Raises ValueError naming a bad argument: a text that is empty or
        longer than the model's context, an unknown dim or prompt, pooling
        where the model has its own, or none where it has not. Ctrl-C ends it
        between two steps.
        """
        embedder = Embedder(self._requests)
        return embedder.compute(
            embedder.prepare(texts, dim, prompt, pooling, parse_special)
        )

    async def aembed(
        self,
        texts: Iterable[Prompt],
        *,
        dim: int | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Does `embed` without blocking the event loop. One that is cancelled
        ends with the step that runs.
        """
        embedder = Embedder(self._requests)
        listed = items("texts", texts, "a list of texts")
        return await off_the_loop(
            lambda check: embedder.compute(
                embedder.prepare(
                    listed, dim, prompt, pooling, parse_special, check=check
                ),
                check,
            )
        )

    def _begin_reply(
        self,
        messages: Messages,
        cache: KVCache | None,
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool,
        think: bool | None,
        template: Template | str | None,
        template_kwargs: Mapping[str, Any] | None,
        options: Options,
    ) -> _Reply:
        """Checks the arguments of `chat`, and encodes what is to be computed:
        in a cache of its own, which begins with what `cache` holds of it.
        """
        # It is a fork that is computed in; a cache that is closed has none.
        if cache is None:
            work = self.new_cache()
        else:
            work = check_cache("cache", cache).fork()
        chosen = self._template(template)
        tokenizer = self._needed_tokenizer()
        use = Toolset(
            chosen, tokenizer, tools, tool_choice, parallel_tool_calls
        )
        more = use.options_of(options)
        check_reply_options(more)
        if not isinstance(template_kwargs, Mapping | None):
            raise unexpected(
                "template_kwargs", "a mapping or None", template_kwargs
            )
        variables = thinking(chosen, think) | dict(template_kwargs or {})
        ids = self.apply_chat_template(
            messages, tools=use.said, template=chosen, **variables
        )
        # The last token is computed anew: its logits are not kept.
        work.truncate(min(common_exact(work.tokens, ids), len(ids) - 1))
        more["stop"] = stop_texts(chosen, more)
        ends = stop_ids(chosen, tokenizer)
        request = work, ids[len(work) :], more, ends
        return _Reply(request, cache, tokenizer, use.form)

    def _template(self, template: Template | str | None) -> Template:
        if template is None:
            return self._own_template
        return template_for(self, template)

    @cached_property
    def _own_template(self) -> Template:
        return template_for(self)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "gemma: this model has no tokenizer (a folder needs a "
                "tokenizer.model or tokenizer.json), and messages need one"
            )
        return self.tokenizer
