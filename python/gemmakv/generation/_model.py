"""A loaded model, without messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    Self,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._support.arguments import (
    QuantizeType,
    boolean,
    integer,
    quantize_target,
)
from gemmakv._support.processors import check_pinned, thread_limit
from gemmakv._support.progress import (
    Callback,
    Progress,
    all_reports,
    as_callback,
    check_prompt_progress,
    prompt_report,
    token_report,
)
from gemmakv.cache._kv_cache import KVCache, KvDtype, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.cache._prefix import (
    PrefixCache,
    core_prefix_cache,
    salt_bytes,
)
from gemmakv.errors import GemmaKVError, unexpected
from gemmakv.generation._constraints import Compiler
from gemmakv.generation._embeddings import (
    check_dim,
    check_pooling,
    embedding_ids,
)
from gemmakv.generation._option_kinds import MAX_INT
from gemmakv.generation._options import (
    DEFAULT_MAX_TOKENS,
    BatchOptions,
    GenerationOptions,
    Options,
    Speculate,
    core_options,
    grammar_of,
    speculation,
    split_rows,
)
from gemmakv.generation._prefix import ModelPrefixCache
from gemmakv.generation._profile import StepProfile, profile_of
from gemmakv.generation._prompts import (
    Prompt,
    TokenArray,
    check_cache,
    placed,
    prompt_ids,
)
from gemmakv.generation._result import Generation, Prefill, generation_of
from gemmakv.generation._scores import choice_ids, probabilities
from gemmakv.generation._stream import OwnProcessor, Stream
from gemmakv.generation._threads import ThreadPlacement, placement_of
from gemmakv.generation._work import (
    Job,
    Work,
    adone,
    done,
    off_the_loop,
    time_left,
)
from gemmakv.models import _catalog as models
from gemmakv.models import _loading as loading
from gemmakv.models._config import ModelConfig, ModelType, type_of
from gemmakv.models._forms import parts_beside
from gemmakv.models._info import ModelInfo
from gemmakv.models._packed import PackedWeights
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")


class Model:
    """The parts of `gemmakv.Gemma` that know nothing of messages."""

    def __init__(
        self,
        engine: _core.Engine,
        tokenizer: Tokenizer | None,
        info: ModelInfo | None = None,
        packed_weights: PackedWeights = PackedWeights("off"),
    ) -> None:
        if not isinstance(engine, _core.Engine):
            raise TypeError("use gemmakv.Gemma.load(model)")
        self._held: _core.Engine | None = engine
        self._tokenizer = tokenizer
        self._config = engine.config
        self._info = ModelInfo() if info is None else info
        self._packed_weights = packed_weights
        # What was warned of; also in the name of those of other tenants.
        self._warned: set[str] = set()
        self._prefix: PrefixCache | None = None
        self._had_prefix = False
        self._compiler = Compiler(tokenizer, self._config)
        self._speculate = speculation(None)
        self._has_draft = False

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
        draft: Model | None = None,
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
        count = _thread_count(threads, pinned)
        target = quantize_target(quantize)
        timed = boolean("profile", profile)
        prefix = core_prefix_cache(prefix_cache)
        draft_engine = _draft_engine(draft)
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
        loaded_model = cls(
            _with_draft(loaded.engine, draft_engine),
            loaded.tokenizer,
            loaded.info,
            loaded.packed_weights,
        )
        loaded_model._speculate = guesses
        loaded_model._has_draft = draft is not None
        return loaded_model._with_prefix(
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
        draft: Model | None = None,
    ) -> Self:
        """A model with weights from anywhere.

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
        draft_engine = _draft_engine(draft)
        guesses = speculation(speculate, draft is not None)
        pinned = boolean("pin_threads", pin_threads)
        engine = _core.Engine.from_tensors(
            config,
            source,
            _thread_count(threads, pinned),
            quantize_target(quantize),
            boolean("profile", profile),
            pinned,
        )
        if tokenizer is not None:
            loading.check_vocab_size(tokenizer, engine)
            engine.set_token_bytes(tokenizer.token_bytes)
        loading.warn_of_parts(
            "tensors in memory", parts_beside(source.keys()), stacklevel=3
        )
        model = cls(_with_draft(engine, draft_engine), tokenizer)
        model._speculate = guesses
        model._has_draft = draft is not None
        return model

    def __repr__(self) -> str:
        name = self._config.name or self._config.architecture
        if self._held is None:
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
        its own, too. Any later call is a ValueError. Caches can still be
        looked at, saved, and used with another Gemma of the same weights.
        """
        if self._held is not None:
            self._held = None
            # One of its own goes, with its memory.
            self._had_prefix = self._prefix is not None
            self._prefix = None
            _core.trim_heap()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._held is None

    @property
    def _engine(self) -> _core.Engine:
        engine = self._held
        if engine is None:
            raise ValueError(
                "gemma: closed; load the model again with Gemma.load"
            )
        return engine

    @property
    def prefix_cache(self) -> ModelPrefixCache | None:
        """What this model has of its prefix cache; None if it has none."""
        prefix = self._prefix
        if prefix is None:
            if self._had_prefix:
                _ = self._engine  # says that it is closed
            return None
        return ModelPrefixCache(
            prefix,
            self._engine,
            self._config,
            self._tokenizer,
            self.prefill,
        )

    def with_salt(self, salt: str | bytes | None) -> Self:
        """The same model for another tenant of its prefix cache.

        Nothing that one salt computes is found, or waited for, by another, nor
        is it guessed from what another said, with a prefix cache and without.
        Weights and threads are shared. None is the part of everybody; an empty
        salt raises ValueError.
        """
        return self._with_prefix(self._prefix, salt_bytes(salt))

    def _with_prefix(self, prefix: PrefixCache | None, salt: bytes) -> Self:
        engine = _core.with_prefix_cache(
            self._engine, prefix._core if prefix else None, salt
        )
        model = type(self)(
            engine, self._tokenizer, self._info, self._packed_weights
        )
        model._prefix = prefix
        model._compiler = self._compiler
        model._speculate = self._speculate
        model._has_draft = self._has_draft
        model._warned = self._warned
        return model

    @property
    def model_type(self) -> ModelType | None:
        """The named type of this model; None for custom shapes."""
        return type_of(self._config)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template in the model's file; None if it
        has none.
        """
        return self._info.chat_template

    @property
    def sampling_defaults(self) -> Options:
        """What the model's makers recommend: keywords for `generate`, or
        `options` of a `Session`. Of generation_config.json, if that samples,
        or of the GGUF keys general.sampling.*; empty if they say nothing.
        Calls do not use them by themselves. ValueError for values that are
        out of range.
        """
        found = dict(self._info.sampling)
        GenerationOptions.check(found, self._config.vocab_size)
        return cast(Options, found)

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Ids of tokens that calls never sample, as the model's makers say:
        suppress_tokens of generation_config.json, or the GGUF key
        tokenizer.ggml.suppress_tokens. A call that states a logit_bias of one
        takes that instead.
        """
        return self._info.suppressed

    @property
    def instruction_tuned(self) -> bool:
        """Whether the model is called one that was tuned for chat ("it")."""
        return self._info.instruction_tuned

    @property
    def fingerprint(self) -> str:
        """Hex digest of the configuration, the weights' values and the
        arithmetic: what a cache belongs to.

        With `quantize`, also of the types that they were quantized to.
        """
        return self._engine.fingerprint

    @property
    def weights_fingerprint(self) -> str:
        """`fingerprint` without the arithmetic: the same on all processors
        and in all versions."""
        return self._engine.weights_fingerprint

    @property
    def packed_weights(self) -> PackedWeights:
        """Where the weights are: in a packed file, or in memory and why."""
        return self._packed_weights

    @property
    def threads(self) -> int:
        return self._engine.threads

    @property
    def thread_placement(self) -> ThreadPlacement:
        """Where the threads compute, as it is now."""
        return placement_of(self._engine)

    @property
    def preemptions(self) -> int:
        """How often a request gave way to another so far, because the
        `BlockPool` of its conversation had no memory for both. It goes on
        later, with the same result.
        """
        return self._engine.preemptions

    @property
    def profiled(self) -> bool:
        """Whether steps are timed part by part."""
        return self._engine.profiled

    def profile(self) -> StepProfile:
        """Where the time of all steps so far went, whoever asked for them.

        Raises ValueError if the model was loaded without `profile=True`.
        """
        if not self.profiled:
            raise ValueError(
                "profile: the steps of this model are not timed; expected one "
                "that was loaded with profile=True"
            )
        return profile_of(self._engine)

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
            self._config,
            capacity_tokens,
            kv_dtype,
            block_tokens=block_tokens,
            checkpoint_bytes=checkpoint_bytes,
            pool=pool,
        )

    @overload
    def generate(
        self,
        cache: KVCache | None,
        prompt: Prompt,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        cache: KVCache | None,
        prompt: Prompt,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompt, *, n: None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompt, *, n: int, **options: Unpack[Options]
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
        cache, prompt = self._place(cache, prompt)
        if n is not None:
            return self._done(self._samples(cache, prompt, n, options))
        return self._done(self._reply(cache, prompt, options))

    @overload
    async def agenerate(
        self,
        cache: KVCache | None,
        prompt: Prompt,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    async def agenerate(
        self,
        cache: KVCache | None,
        prompt: Prompt,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: int, **options: Unpack[Options]
    ) -> list[Generation]: ...

    async def agenerate(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """`generate` on an asyncio event loop, which it never blocks, also
        where it waits for a cache that is in use.

        A task that is cancelled leaves the cache as it was; it ends with the
        step of the model that runs.
        """
        cache, prompt = self._place(cache, prompt)
        if n is not None:
            return await self._adone(self._samples(cache, prompt, n, options))
        return await self._adone(self._reply(cache, prompt, options))

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
        cache, prompt = self._place(cache, prompt)
        options = {"parse_special": parse_special, "progress": progress}
        return self._done(self._prefill(cache, prompt, options))

    async def aprefill(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        *,
        parse_special: bool = False,
        progress: Progress = None,
    ) -> Prefill:
        """Does `prefill` without blocking the event loop, as `agenerate`."""
        cache, prompt = self._place(cache, prompt)
        options = {"parse_special": parse_special, "progress": progress}
        return await self._adone(self._prefill(cache, prompt, options))

    def generate_batch(
        self,
        caches: Sequence[KVCache],
        prompts: Sequence[Prompt],
        **options: Unpack[BatchOptions],
    ) -> list[Generation]:
        """`generate` for several conversations at once, each weight read once.

        The results are those of single calls, in the caller's order. An
        option is one value for all, or a list with one per row. The same
        cache twice is a ValueError. If the call raises, all caches are left
        as they were.
        """
        rows = _listed("caches", caches), _listed("prompts", prompts)
        return self._done(self._rows(*rows, options, batch=True))

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
        rows = _listed("caches", caches), _listed("prompts", prompts)
        return await self._adone(self._rows(*rows, options, batch=True))

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
        cache, prompt = self._place(cache, prompt)
        return self._done(self._streamed(cache, prompt, options))

    async def astream(
        self,
        cache: KVCache | Prompt | None = None,
        prompt: Prompt | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Does `stream` without blocking the event loop: it waits for a cache
        that is in use like `agenerate`.
        """
        cache, prompt = self._place(cache, prompt)
        return await self._adone(self._streamed(cache, prompt, options))

    def logits(
        self, cache: KVCache, tokens: Prompt, all_positions: bool = False
    ) -> npt.NDArray[np.float32]:
        """Appends a text or token ids and gives the logits of what follows.

        Returns float32 [vocab_size] after the last token, or with
        `all_positions` [n, vocab_size] for the n tokens. A text is encoded as
        in `generate`. Raises ValueError for no tokens or one that is out of
        range, CacheFullError if they do not fit; the cache is then as it was.
        """
        ids = self._logits_ids(cache, tokens)
        return self._engine.logits(cache._core, ids, bool(all_positions))

    async def alogits(
        self, cache: KVCache, tokens: Prompt, all_positions: bool = False
    ) -> npt.NDArray[np.float32]:
        """Computes `logits` on a thread of its own.

        A task that is cancelled ends with the step of the model that runs,
        and leaves the cache as it was unless that was the last step.
        """
        ids = self._logits_ids(cache, tokens)
        engine, core, every = self._engine, cache._core, bool(all_positions)
        return await off_the_loop(
            lambda check: engine.logits(core, ids, every, check)
        )

    def _logits_ids(self, cache: KVCache, tokens: Prompt) -> TokenArray:
        """Checks the arguments of `logits`, and encodes a text."""
        check_cache("cache", cache)
        ids, bos = prompt_ids(
            "tokens", tokens, self._config, self._tokenizer, False
        )
        if len(cache):
            ids = ids[bos:]
        if not len(ids):
            raise unexpected("tokens", "a token or more", tokens)
        return ids

    def score(
        self,
        prompt: Prompt,
        choices: Sequence[Prompt],
        *,
        cache: KVCache | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """How likely each choice is to follow the prompt, among the choices.

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
        return self._scores(prompt, choices, cache, parse_special)(None)

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
            self._scores(prompt, choices, cache, parse_special)
        )

    def _scores(
        self,
        prompt: Prompt,
        choices: Sequence[Prompt],
        cache: KVCache | None,
        parse_special: bool,
    ) -> Callable[[Callable[[], None] | None], npt.NDArray[np.float32]]:
        """Checks the arguments of `score`, and returns what computes it: that
        calls a function now and then, and ends with what this raises.
        """
        engine = self._engine
        if cache is not None:
            check_cache("cache", cache)
        found = choice_ids(
            choices, self._config, self._tokenizer, parse_special
        )
        ids, bos = prompt_ids(
            "prompt", prompt, self._config, self._tokenizer, parse_special
        )
        branch = (
            create_kv_cache(self._config) if cache is None else cache.fork()
        )
        if len(branch):
            ids = ids[bos:]
        if not len(ids):
            raise ValueError("prompt: expected a token or more, found none")

        def compute(
            check: Callable[[], None] | None,
        ) -> npt.NDArray[np.float32]:
            return probabilities(
                lambda cache, ids, every: engine.logits(
                    cache._core, ids, every, check
                ),
                branch,
                ids,
                found,
            )

        return compute

    @property
    def embedding_dims(self) -> list[int]:
        """Lengths of vectors that `embed` can make, the whole one first."""
        return self._engine.embedding_dims

    @property
    def embedding_prompts(self) -> dict[str, str]:
        """What `embed` can put in front of a text, by name: of the model's
        config_sentence_transformers.json, or what EmbeddingGemma was
        published with; empty for models that generate.
        """
        return dict(self._info.embedding.prompts)

    def embed(
        self,
        texts: Iterable[Prompt],
        *,
        dim: int | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        parse_special: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Vectors of texts, whose dot products say how near their meanings
        are.

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
            mean over all, behind the final norm.
          parse_special: whether texts may spell control tokens.

        Returns float32 [texts, dim], rows of length 1.

        Raises ValueError naming a bad argument: a text that is empty or
        longer than the model's context, an unknown dim or prompt, pooling
        where the model has its own, or none where it has not. Ctrl-C ends it
        between two steps.
        """
        return self._embed(
            *self._embedding_job(texts, dim, prompt, pooling, parse_special)
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
        """`embed` on an asyncio event loop, which it never blocks. One that is
        cancelled ends between two steps.
        """
        return await self._aembed(
            *self._embedding_job(texts, dim, prompt, pooling, parse_special)
        )

    def _embedding_job(
        self,
        texts: Iterable[Prompt],
        dim: int | None,
        prompt: str | None,
        pooling: str | None = None,
        parse_special: bool = False,
        longest: int | None = None,
        truncate: bool = False,
    ) -> tuple[list[TokenArray], int, str]:
        """Checked arguments of the core. `longest`: tokens of a text at most,
        instead of the model's context; with `truncate`, the end of one that
        has more is left out.
        """
        size = check_dim(dim, self.embedding_dims)
        kind = check_pooling(pooling, self._config)
        ids = embedding_ids(
            texts,
            prompt,
            self._config,
            self._tokenizer,
            self._info.embedding,
            parse_special,
            longest,
            truncate,
        )
        return ids, size, kind

    async def _aembed(
        self, ids: list[TokenArray], dim: int, pooling: str
    ) -> npt.NDArray[np.float32]:
        return await off_the_loop(
            lambda check: self._embed(ids, dim, pooling, check)
        )

    def _embed(
        self,
        ids: list[TokenArray],
        dim: int,
        pooling: str,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        return self._engine.embed(ids, dim, pooling, check)

    def _place(
        self, cache: KVCache | Prompt | None, prompt: Prompt | None
    ) -> tuple[KVCache, Prompt]:
        """Tells them apart, with a new conversation where none is given."""
        found, prompt = placed(cache, prompt)
        return create_kv_cache(self._config) if found is None else found, prompt

    def _prepare(
        self,
        caches: list[KVCache],
        prompts: list[Prompt],
        options: Any,
        batch: bool,
    ) -> tuple[
        list[dict[str, Any]], list[TokenArray], list[bool], Callback | None
    ]:
        """Checks options and encodes prompts: of each row both, and whether
        the prompt begins with a BOS for an empty conversation alone.
        """
        if len(caches) != len(prompts):
            raise ValueError(
                f"prompts: expected one per cache ({len(caches)}), found "
                f"{len(prompts)}"
            )
        if not caches:
            raise ValueError("caches: expected at least one, found none")
        rows = split_rows(options, len(caches), batch)
        drafts = options.get("draft") is not None
        for row in rows:
            row.setdefault("speculate", "draft" if drafts else self._speculate)
            speculation(row["speculate"], drafts or self._has_draft)
        tokens, bos = [], []
        for i, (cache, prompt) in enumerate(zip(caches, prompts)):
            check_cache(f"caches[{i}]" if batch else "cache", cache)
            if self._tokenizer is None and rows[i].get("stop"):
                raise ValueError("stop: this model has no tokenizer")
            ids, added = prompt_ids(
                f"prompts[{i}]" if batch else "prompt",
                prompt,
                self._config,
                self._tokenizer,
                rows[i].get("parse_special", False),
            )
            tokens.append(ids)
            bos.append(added)
        callback = as_callback(options.get("progress"), "generating")
        told = check_prompt_progress(options.get("prompt_progress"))
        if batch and told is not None:
            raise unexpected("prompt_progress", "none for a batch", told)
        return rows, tokens, bos, callback

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raises what a call with these would raise before it runs, but for
        the text of a grammar: compiling it may take seconds.
        """
        GenerationOptions.check(options, self._config.vocab_size)
        as_callback(options.get("progress"), "generating")
        check_prompt_progress(options.get("prompt_progress"))
        draft = _draft_engine(options.get("draft"))
        if draft is not None:
            _with_draft(self._engine, draft)
        has_draft = draft is not None or self._has_draft
        speculation(options.get("speculate"), has_draft)

    def _compile(
        self, options: Any, seconds: float | None = None
    ) -> Sequence[str]:
        """Has the grammar of a call's options ready, within that many seconds
        of a processor, and returns the paths of what it does not enforce.
        Raises as the call, and MemoryError.
        """
        [row] = split_rows(options, 1, batch=False)
        name, grammar = grammar_of(row)
        if grammar is None:
            return ()
        return self._compiler.compile(name, grammar, seconds).left_out

    def _constraint(self, row: dict[str, Any]) -> Any:
        """What makes the constraint of checked options; None if none does."""
        return self._compiler.later(*grammar_of(row))

    def _core_options(
        self, row: dict[str, Any], end_ids: Sequence[int] = ()
    ) -> _core.GenerateOptions:
        """What the core is told of a checked row of options."""
        return core_options(row, end_ids, self._info.suppressed)

    def _rows(
        self,
        caches: list[KVCache],
        prompts: list[Prompt],
        options: Any,
        batch: bool,
        end_ids: Sequence[int] = (),
        boundaries: Sequence[Sequence[int]] = (),
    ) -> Work[list[Generation]]:
        rows, tokens, bos, callback = self._prepare(
            caches, prompts, options, batch
        )
        to_read = _count_prompts(caches, tokens, bos)
        to_sample = sum(
            row.get("max_tokens", DEFAULT_MAX_TOKENS) for row in rows
        )
        call = yield Job(
            [cache._core for cache in caches],
            tokens,
            [self._core_options(row, end_ids) for row in rows],
            all_reports(
                prompt_report(to_read, options.get("prompt_progress")),
                token_report(to_read + to_sample, callback),
            ),
            optional_bos=bos,
            boundaries=boundaries,
            constraints=[self._constraint(row) for row in rows],
            draft=_draft_engine(options.get("draft")),
        )
        return [generation_of(result) for result in call.results()]

    def _check_fits(self, cache: KVCache) -> None:
        """Raises what each call with this conversation would."""
        self._engine.check_fits(cache._core)

    def _reply(
        self,
        cache: KVCache,
        prompt: Prompt,
        options: Any,
        end_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
    ) -> Work[Generation]:
        """`generate` that `end_ids` end as well as eos, with positions of the
        conversation that others are likely to begin with.
        """
        [generation] = yield from self._rows(
            [cache],
            [prompt],
            options,
            batch=False,
            end_ids=end_ids,
            boundaries=[boundaries],
        )
        return generation

    def _streamed(
        self,
        cache: KVCache,
        prompt: Prompt,
        options: Any,
        end_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
    ) -> Work[Stream]:
        """`stream` with what `_reply` takes besides."""
        [row], [tokens], bos, callback = self._prepare(
            [cache], [prompt], options, batch=False
        )
        own = None
        if row.get("logits_processor") is not None:
            own = OwnProcessor(row["logits_processor"])
            row = row | {"logits_processor": own.for_core()}
        call = yield Job(
            [cache._core],
            [tokens],
            [self._core_options(row, end_ids)],
            streamed=True,
            optional_bos=bos,
            boundaries=[boundaries],
            constraints=[self._constraint(row)],
            draft=_draft_engine(options.get("draft")),
        )
        total = row.get("max_tokens", DEFAULT_MAX_TOKENS)
        told = options.get("prompt_progress")
        return Stream(call, (self, cache, own), total, callback, told)

    def _samples(
        self, cache: KVCache, prompt: Prompt, n: int, options: Any
    ) -> Work[list[Generation]]:
        count = integer("n", n, 1, MAX_INT)
        [row], [tokens], bos, callback = self._prepare(
            [cache], [prompt], options, batch=False
        )
        # Computes the prompt and, as it has all the options, checks them.
        begin = time.monotonic()
        prompt_only = self._core_options(row | {"max_tokens": 0})
        said = yield Job(
            [cache._core], [tokens], [prompt_only],
            prompt_report(
                _count_prompts([cache], [tokens], bos),
                options.get("prompt_progress"),
            ),
            optional_bos=bos,
            draft=_draft_engine(options.get("draft")),
        )  # fmt: skip
        if "deadline" in row:
            row["deadline"] = time_left(row["deadline"], begin)
        seed = row.get("seed")
        core_rows = []
        for i in range(count):
            own = {} if seed is None else {"seed": (seed + i) % (1 << 64)}
            core_rows.append(self._core_options(row | own))
        try:
            # Others may have appended to the conversation since.
            spoken = cache.fork()
            first, end = said.prompt_range
            if len(spoken) > end:
                spoken.truncate(end)
            ids = tokens[len(tokens) - (end - first) :]
            if spoken.tokens[first:].tolist() != ids.tolist():
                raise GemmaKVError(
                    "cache: somebody took the prompt back before it was "
                    "continued; expected no truncate during the call"
                )
            forks = [spoken.fork() for _ in range(count)]
            call = yield Job(
                [fork._core for fork in forks],
                [np.empty(0, np.int32)] * count,
                core_rows,
                token_report(
                    count * row.get("max_tokens", DEFAULT_MAX_TOKENS), callback
                ),
                constraints=[self._constraint(row)] * count,
                draft=_draft_engine(options.get("draft")),
            )
        except BaseException:
            said.abort()  # unless somebody used the cache meanwhile
            raise
        [prompt_result] = said.results()
        return [
            generation_of(result, fork, prompt_result)
            for result, fork in zip(call.results(), forks)
        ]

    def _prefill(
        self, cache: KVCache, prompt: Prompt, options: Any
    ) -> Work[Prefill]:
        generation = yield from self._reply(
            cache, prompt, {**options, "max_tokens": 0}
        )
        return Prefill(generation.usage, generation.timings)

    def _done(self, work: Work[_T]) -> _T:
        """Does it, waiting on this thread."""
        return done(self._engine, work)

    async def _adone(self, work: Work[_T]) -> _T:
        """Does it, waiting on this thread's event loop."""
        return await adone(self._engine, work)


def _listed(name: str, rows: Sequence[_T]) -> list[_T]:
    # A str is a sequence of prompts, too, which nobody means.
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise unexpected(name, "a list", rows)
    return list(rows)


def _count_prompts(
    caches: Sequence[KVCache],
    prompts: Sequence[TokenArray],
    bos: Sequence[bool],
) -> int:
    """Counts the tokens of prompts, as they go after these conversations."""
    dropped = sum(one and len(cache) > 0 for cache, one in zip(caches, bos))
    return sum(map(len, prompts)) - dropped


def _thread_count(threads: int | None, pinned: bool) -> int:
    if threads is None:
        return thread_limit() or 0
    count = integer("threads", threads, 1, MAX_INT)
    if pinned:
        check_pinned(count)
    return count


def _draft_engine(draft: object) -> _core.Engine | None:
    """Of a model that is to guess; ValueError for what it cannot be."""
    if draft is None:
        return None
    if not isinstance(draft, Model):
        raise unexpected("draft", "a Gemma or None", draft)
    if draft.closed:
        raise ValueError("draft: expected a Gemma that is open, found one "
                         "that is closed")
    return draft._engine


def _with_draft(
    engine: _core.Engine, draft: _core.Engine | None
) -> _core.Engine:
    return engine if draft is None else engine.with_draft(draft)
