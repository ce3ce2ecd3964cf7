"""What a loaded model is asked for, as jobs of its engine.

`Requests` belongs to one `gemmakv.Gemma`, for one tenant. Its methods check
what a caller gave, and return work: a generator of jobs, which `done` does on
the caller's thread and `adone` on the caller's event loop. Sessions and the
server ask it directly, by `requests_of`, for what the public methods do not
take: tokens that end a reply, and positions that others may begin with.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._support.arguments import integer, items
from gemmakv._support.progress import (
    Report,
    all_reports,
    as_callback,
    check_prompt_progress,
    report_to,
)
from gemmakv.cache._kv_cache import KVCache, create_kv_cache
from gemmakv.errors import ArgumentError, GemmaKVError, unexpected
from gemmakv.generation._constraints import Compiler
from gemmakv.generation._option_kinds import MAX_INT
from gemmakv.generation._options import (
    DEFAULT_MAX_TOKENS,
    GenerationOptions,
    core_options,
    grammar_of,
    speculation,
    split_rows,
)
from gemmakv.generation._prompts import (
    Prompt,
    TokenArray,
    check_cache,
    prompt_ids,
)
from gemmakv.generation._result import Generation, Prefill, generation_of
from gemmakv.generation._scores import (
    PromptLogprobs,
    choice_ids,
    probabilities,
    prompt_logprobs,
)
from gemmakv.generation._stream import OwnProcessor, Stream
from gemmakv.generation._work import Job, Work, adone, done, time_left
from gemmakv.models._info import ModelInfo
from gemmakv.tokenizers._tokenizer import Tokenizer

_T = TypeVar("_T")

# Computes what was checked before. Calls what it is given now and then, and
# ends with what that raises.
Computation = Callable[
    [Callable[[], None] | None], npt.NDArray[np.float32]
]


class Row(NamedTuple):
    """One conversation of a call.

    Attributes:
      cache: the conversation.
      prompt: what is appended to it.
      optional_bos: whether the prompt begins with a BOS that is for an empty
        conversation alone.
      options: checked; those that were not given are left out.
    """

    cache: KVCache
    prompt: TokenArray
    optional_bos: bool
    options: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        found: int = self.options.get("max_tokens", DEFAULT_MAX_TOKENS)
        return found


class Requests:
    """Turns calls into jobs of one engine.

    Attributes:
      config: the model's shape.
      tokenizer: None for a model without one.
      info: what its files say of it.
      compiler: of grammars.
      speculate: where guesses come from in calls that do not say.
      has_draft: whether the engine has a draft model.
      warned: kinds of warnings that were given, whichever tenant got them.
    """

    def __init__(
        self,
        engine: _core.Engine,
        tokenizer: Tokenizer | None,
        info: ModelInfo,
        speculate: str = "lookup",
        has_draft: bool = False,
    ) -> None:
        self._engine: _core.Engine | None = engine
        self.config = engine.config
        self.tokenizer = tokenizer
        self.info = info
        self.compiler = Compiler(tokenizer, self.config)
        self.speculate = speculate
        self.has_draft = has_draft
        self.warned: set[str] = set()

    def with_engine(self, engine: _core.Engine) -> Self:
        """Makes the same for an engine of the same weights."""
        other = copy.copy(self)
        other._engine = engine
        return other

    @property
    def engine(self) -> _core.Engine:
        """The engine. Raises ValueError once `close` was called."""
        if self._engine is None:
            raise ValueError(
                "gemma: closed; load the model again with Gemma.load"
            )
        return self._engine

    @property
    def closed(self) -> bool:
        return self._engine is None

    def close(self) -> None:
        """Lets go of the engine; calls that run end as usual."""
        self._engine = None

    def done(self, work: Work[_T]) -> _T:
        """Does some work, waiting on this thread."""
        return done(self.engine, work)

    async def adone(self, work: Work[_T]) -> _T:
        """Does some work, waiting on this thread's event loop."""
        return await adone(self.engine, work)

    # What is checked before anything runs.

    def place(
        self, cache: KVCache | Prompt | None, prompt: Prompt | None
    ) -> tuple[KVCache, Prompt]:
        """Tells a conversation and a prompt apart; a prompt alone gets a new
        conversation. Raises ArgumentError for a conversation alone.
        """
        if prompt is not None and cache is not None:
            return check_cache("cache", cache), prompt
        alone = cache if prompt is None else prompt
        if alone is None or isinstance(alone, KVCache):
            raise unexpected("prompt", "a text or token ids", prompt)
        return create_kv_cache(self.config), alone

    def encode(
        self, name: str, prompt: Prompt, parse_special: bool = False
    ) -> tuple[TokenArray, bool]:
        """Does `prompt_ids` for this model."""
        return prompt_ids(
            name, prompt, self.config, self.tokenizer, parse_special
        )

    def check_fits(self, cache: KVCache) -> None:
        """Raises what each call with this conversation would raise."""
        self.engine.check_fits(cache._core)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises what a call with these would raise before it runs, but for
        the text of a grammar: compiling it may take seconds.
        """
        GenerationOptions.check(options, self.config.vocab_size)
        as_callback(options.get("progress"), "generating")
        check_prompt_progress(options.get("prompt_progress"))
        draft = draft_engine(options.get("draft"))
        if draft is not None:
            self.engine.with_draft(draft)
        has_draft = draft is not None or self.has_draft
        speculation(options.get("speculate"), has_draft)

    def compile(
        self, options: Mapping[str, Any], seconds: float | None = None
    ) -> Sequence[str]:
        """Has the grammar of a call's options ready, within that many seconds
        of a processor, and returns the paths of what it does not enforce.
        Raises as the call, and MemoryError.
        """
        [row] = split_rows(options, 1, batch=False)
        name, grammar = grammar_of(row)
        if grammar is None:
            return ()
        return self.compiler.compile(name, grammar, seconds).left_out

    # Work.

    def batch(
        self,
        caches: Sequence[KVCache],
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
    ) -> Work[list[Generation]]:
        """Generates for several conversations, each weight read once."""
        rows = self._rows(
            items("caches", caches),
            items("prompts", prompts),
            options,
            batch=True,
        )
        return (yield from self._generate(rows, options))

    def reply(
        self,
        cache: KVCache,
        prompt: Prompt,
        options: Mapping[str, Any],
        end_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
    ) -> Work[Generation]:
        """Generates a text that `end_ids` end as well as eos; `boundaries` are
        positions that others are likely to begin with.
        """
        row = self._row(cache, prompt, options)
        [generation] = yield from self._generate(
            [row], options, end_ids, [boundaries]
        )
        return generation

    def stream(
        self,
        cache: KVCache,
        prompt: Prompt,
        options: Mapping[str, Any],
        end_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
    ) -> Work[Stream]:
        """Does `reply` piece by piece."""
        row = self._row(cache, prompt, options)
        callback = as_callback(options.get("progress"), "generating")
        own = None
        if row.options.get("logits_processor") is not None:
            own = OwnProcessor(row.options["logits_processor"])
            row.options["logits_processor"] = own.for_core()
        job = self._job([row], options, None, end_ids, [boundaries])
        call = yield job._replace(streamed=True)
        return Stream(
            call,
            (self, own),
            row.max_tokens,
            callback,
            options.get("prompt_progress"),
        )

    def samples(
        self, cache: KVCache, prompt: Prompt, n: int, options: Mapping[str, Any]
    ) -> Work[list[Generation]]:
        """Generates several texts after one prompt, each on a fork."""
        count = integer("n", n, 1, MAX_INT)
        row = self._row(cache, prompt, options)
        callback = as_callback(options.get("progress"), "generating")
        begin = time.monotonic()
        # Computes the prompt and, as it has all the options, checks them.
        said = yield self._job(
            [row._replace(options=row.options | {"max_tokens": 0})],
            options,
            report_to(
                options.get("prompt_progress"),
                _count_prompts([row]),
                early=True,
            ),
        )._replace(constraints=())
        if "deadline" in row.options:
            left = time_left(row.options["deadline"], begin)
            row.options["deadline"] = left
        try:
            spoken = _at_the_end(row, said.prompt_range)
            seed = row.options.get("seed")
            none = np.empty(0, np.int32)
            rows = [
                Row(spoken.fork(), none, False, row.options | (
                    {} if seed is None else {"seed": (seed + i) % (1 << 64)}
                ))
                for i in range(count)
            ]  # fmt: skip
            call = yield self._job(
                rows, options, report_to(callback, count * row.max_tokens)
            )
        except BaseException:
            said.abort()  # unless somebody used the cache meanwhile
            raise
        [prompt_result] = said.results()
        return [
            generation_of(result, one.cache, prompt_result)
            for result, one in zip(call.results(), rows)
        ]

    def prefill(
        self, cache: KVCache, prompt: Prompt, options: Mapping[str, Any]
    ) -> Work[Prefill]:
        """Computes a prompt, and samples nothing."""
        generation = yield from self.reply(
            cache, prompt, {**options, "max_tokens": 0}
        )
        return Prefill(generation.usage, generation.timings)

    # What the engine computes on the thread that asks.

    def logits(
        self, cache: KVCache, tokens: Prompt, all_positions: bool
    ) -> Computation:
        """Prepares `Gemma.logits`; texts are encoded with the computation."""
        engine, core = self.engine, check_cache("cache", cache)._core
        held = len(cache)

        def compute(
            check: Callable[[], None] | None,
        ) -> npt.NDArray[np.float32]:
            ids = self._appended("tokens", tokens, held, False)
            return engine.logits(core, ids, all_positions, check)

        return compute

    def scores(
        self,
        prompt: Prompt,
        choices: Sequence[Prompt],
        cache: KVCache | None,
        parse_special: bool,
    ) -> Computation:
        """Prepares `Gemma.score`; texts are encoded with the computation."""
        engine = self.engine
        if cache is None:
            branch = create_kv_cache(self.config)
        else:
            branch = check_cache("cache", cache).fork()

        def compute(
            check: Callable[[], None] | None,
        ) -> npt.NDArray[np.float32]:
            found = choice_ids(
                choices,
                lambda name, choice: self._appended(
                    name, choice, 1, parse_special
                ),
            )
            ids = self._appended("prompt", prompt, len(branch), parse_special)
            return probabilities(
                lambda cache, ids, every: engine.logits(
                    cache._core, ids, every, check
                ),
                branch,
                ids,
                found,
            )

        return compute

    def prompt_logprobs(
        self, cache: KVCache, ids: TokenArray, top: int
    ) -> Callable[[Callable[[], None] | None], PromptLogprobs]:
        """Checks the arguments of `_scores.prompt_logprobs`."""
        vocab_size = self.config.vocab_size
        integer("prompt_logprobs", top, 0, vocab_size)
        engine = self.engine

        def compute(check: Callable[[], None] | None) -> PromptLogprobs:
            return prompt_logprobs(
                lambda cache, ids, every: engine.logits(
                    cache._core, ids, every, check
                ),
                cache,
                ids,
                top,
                vocab_size,
            )

        return compute

    # Parts of the above.

    def _appended(
        self, name: str, prompt: Prompt, held: int, parse_special: bool
    ) -> TokenArray:
        """Encodes a token or more, to follow the `held` ones of a
        conversation. Raises ArgumentError.
        """
        ids, bos = self.encode(name, prompt, parse_special)
        if held:
            ids = ids[bos:]
        if not len(ids):
            raise unexpected(name, "a token or more", prompt)
        return ids

    def _row(
        self, cache: KVCache, prompt: Prompt, options: Mapping[str, Any]
    ) -> Row:
        [row] = self._rows([cache], [prompt], options, batch=False)
        return row

    def _rows(
        self,
        caches: list[KVCache],
        prompts: list[Prompt],
        options: Mapping[str, Any],
        batch: bool,
    ) -> list[Row]:
        """Checks the arguments of a call, and encodes its prompts."""
        if len(caches) != len(prompts):
            raise unexpected(
                "prompts", f"one per cache ({len(caches)})", len(prompts)
            )
        if not caches:
            raise ArgumentError("caches", "at least one", caches, shown="none")
        drafts = options.get("draft") is not None
        rows = []
        for i, (cache, prompt, own) in enumerate(
            zip(caches, prompts, split_rows(options, len(caches), batch))
        ):
            own.setdefault("speculate", "draft" if drafts else self.speculate)
            speculation(own["speculate"], drafts or self.has_draft)
            check_cache(f"caches[{i}]" if batch else "cache", cache)
            if self.tokenizer is None and own.get("stop"):
                raise ValueError("stop: this model has no tokenizer")
            ids, bos = self.encode(
                f"prompts[{i}]" if batch else "prompt",
                prompt,
                own.get("parse_special", False),
            )
            rows.append(Row(cache, ids, bos, own))
        as_callback(options.get("progress"), "generating")
        told = check_prompt_progress(options.get("prompt_progress"))
        if batch and told is not None:
            raise unexpected("prompt_progress", "none for a batch", told)
        return rows

    def _job(
        self,
        rows: Sequence[Row],
        options: Mapping[str, Any],
        report: Report | None,
        end_ids: Sequence[int] = (),
        boundaries: Sequence[Sequence[int]] = (),
    ) -> Job:
        suppressed = self.info.suppressed
        return Job(
            [row.cache._core for row in rows],
            [row.prompt for row in rows],
            [core_options(row.options, end_ids, suppressed) for row in rows],
            report,
            optional_bos=[row.optional_bos for row in rows],
            boundaries=boundaries,
            constraints=[
                self.compiler.later(*grammar_of(row.options)) for row in rows
            ],
            draft=draft_engine(options.get("draft")),
        )

    def _generate(
        self,
        rows: Sequence[Row],
        options: Mapping[str, Any],
        end_ids: Sequence[int] = (),
        boundaries: Sequence[Sequence[int]] = (),
    ) -> Work[list[Generation]]:
        to_read = _count_prompts(rows)
        to_sample = sum(row.max_tokens for row in rows)
        reports = all_reports(
            report_to(options.get("prompt_progress"), to_read, early=True),
            report_to(
                as_callback(options.get("progress"), "generating"),
                to_read + to_sample,
            ),
        )
        call = yield self._job(rows, options, reports, end_ids, boundaries)
        return [generation_of(result) for result in call.results()]


class Asked:
    """The base of `Gemma`, which `requests_of` knows it by."""

    _requests: Requests


def requests_of(gemma: object, name: str = "gemma") -> Requests:
    """Returns what a `Gemma` is asked for. Raises ArgumentError that names
    `name` for what is no Gemma.
    """
    if not isinstance(gemma, Asked):
        raise unexpected(name, "a Gemma", gemma)
    return gemma._requests


def draft_engine(draft: object) -> _core.Engine | None:
    """Returns the engine of a `Gemma` that is to guess, None for None. Raises
    ValueError for what cannot.
    """
    if draft is None:
        return None
    requests = requests_of(draft, "draft")
    if requests.closed:
        raise ArgumentError(
            "draft", "a Gemma that is open", draft, shown="one that is closed"
        )
    return requests.engine


def _at_the_end(row: Row, prompt_range: tuple[int, int]) -> KVCache:
    """Forks the conversation as it was when its prompt had been computed:
    others may have appended to it since.
    """
    spoken = row.cache.fork()
    first, end = prompt_range
    if len(spoken) > end:
        spoken.truncate(end)
    ids = row.prompt[len(row.prompt) - (end - first) :]
    if spoken.tokens[first:].tolist() != ids.tolist():
        raise GemmaKVError(
            "cache: somebody took the prompt back before it was continued; "
            "expected no truncate during the call"
        )
    return spoken


def _count_prompts(rows: Iterable[Row]) -> int:
    """Counts the tokens of prompts, as they are appended."""
    return sum(
        len(row.prompt) - (row.optional_bos and len(row.cache) > 0)
        for row in rows
    )
