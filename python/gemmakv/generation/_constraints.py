"""Grammars compiled for a model's vocabulary, by llguidance."""

from __future__ import annotations

import copy
import ctypes
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from gemmakv._support.extras import import_extra
from gemmakv.errors import one_line
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._schema_fit import Tried
from gemmakv.generation._trial import STACK_BYTES, Trials
from gemmakv.generation._trial_process import matcher_of
from gemmakv.models._config import ModelConfig
from gemmakv.tokenizers._tokenizer import Tokenizer

_LOG = logging.getLogger("gemmakv")
_KEPT = 64  # compiled grammars
_RUNS = 40  # of forced tokens, that are kept
_stack_size_lock = threading.Lock()
# What compiling and each mask may cost at most; a grammar beyond it is an
# error of its request.
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# One way to write white space: small models fill pages with it otherwise. They
# win over what a schema says of itself ("x-guidance").
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
# What is said of options that are not the caller's, or by no keyword.
_WORDS = (
    (
        re.compile(r"oneOf constraints are not supported\..*"),
        "oneOf: not supported of schemas that one text may satisfy together",
    ),
    (
        re.compile(r"patternProperty regexes (.*) are not disjoint"),
        r"patternProperties: not supported of \1, which one name may match",
    ),
    (
        re.compile(r"Unimplemented keys: .*"),
        "not supported, no grammar enforces it",
    ),
    (
        re.compile(r"number out of range at line \d+ column \d+"),
        "expected numbers that a double holds, found a larger one",
    ),
)
_ELSEWHERE = re.compile(r"Resource '(?P<place>.*?)#?' is not present in a")
_NOWHERE = re.compile(r"Pointer '(?P<place>.*)' does not exist")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Of a schema or a pattern in a grammar, with the grammar's lines after it.
_IN_PATTERN = re.compile(
    r"at (?P<line>\d+)\(\d+\): invalid regex .*?\nerror: (?P<what>[^\n]*)",
    re.DOTALL,
)
_IN_SCHEMA = re.compile(
    r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: "
    r"(?P<what>.*?)\s*(?:\n|$)",
    re.DOTALL,
)


_T = TypeVar("_T")


class Compiler:
    """Compiles grammars for one vocabulary and keeps the newest. Safe from
    several threads.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, config: ModelConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._trials = Trials(_LIMITS, _JSON)

    def later(
        self, name: str, grammar: Grammar | None
    ) -> Callable[[], Matcher] | None:
        """Gives a call of `compile` for a thread that may take its time."""
        if grammar is None:
            return None
        return lambda: self.compile(name, grammar)

    def compile(
        self, name: str, grammar: Grammar, seconds: float | None = None
    ) -> Matcher:
        """Makes what the core takes, to be cloned for each use.

        `seconds` of a processor are what it may take of one that is not kept;
        without, what it takes. Raises ValueError that begins with `name`,
        naming what of the grammar is not supported, or that it takes longer;
        GemmaKVError without llguidance; MemoryError.
        """
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None and found.has_failed:
                del self._kept[grammar]
                found = None
            if found is not None:
                self._kept.move_to_end(grammar)
        if found is None:
            _llguidance()
            found = self._made(name, grammar, seconds)
            with self._lock:
                self._kept[grammar] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return found.named(name + grammar._place)

    def _made(
        self, name: str, grammar: Grammar, seconds: float | None
    ) -> Matcher:
        """Compiles a grammar that is not kept."""
        place = name + grammar._place

        def compiled(one: Grammar) -> Matcher:
            return _with_deep_stack(lambda: self._compiled(place, one))

        left = math.inf if seconds is None else seconds

        def attempt(tried: Sequence[Tried]) -> list[str | None]:
            nonlocal left
            if seconds is None:
                found = _with_deep_stack(
                    lambda: self._trials.refusals_here(tried)
                )
            else:
                ended = None
                if left > 0:
                    ended = self._trials.refusals(tried, left)
                if ended is None:
                    raise ValueError(
                        f"{name}: expected what can be compiled within "
                        f"{seconds:g} s of a processor and 1 GiB, found what "
                        "cannot"
                    )
                found, took = ended
                left -= took
            return [
                None if why is None else _reason(why, one.text)
                for one, why in zip(tried, found, strict=True)
            ]

        if seconds is None and grammar.kind in ("regex", "lark"):
            return compiled(grammar)
        fitted, paths = grammar._fitted(place, attempt)
        found = compiled(fitted)
        found.left_out = paths
        if paths and seconds is None:
            _LOG.warning("not enforced: %s", ", ".join(paths))
        return found

    def prepare(self) -> None:
        """Makes what all grammars need: some seconds for a vocabulary of
        262,144, once.
        """
        with self._making:
            _ = self._vocabulary

    def _compiled(self, name: str, grammar: Grammar) -> Matcher:
        guidance = _llguidance()
        if self._tokenizer is None:
            raise ValueError(
                f"{name}: this model has no tokenizer, and a grammar needs one"
            )
        self.prepare()
        try:
            core = matcher_of(
                guidance,
                self._vocabulary,
                guidance.LLParserLimits(**_LIMITS),
                Tried(grammar.kind, grammar.text).job(_JSON),
            )
        except ValueError as error:
            raise ValueError(
                f"{name}: {_reason(str(error), grammar.text)}"
            ) from None
        first = core.deep_copy()
        if not first.is_error():
            # The first mask is the slowest: it makes most of the lexer.
            first.compute_bitmask()
        if first.is_error():
            raise ValueError(
                f"{name}: {_reason(first.get_error(), grammar.text)}"
            )
        return Matcher(core, self._ends)

    @cached_property
    def _ends(self) -> list[int]:
        """Ids that llguidance ends a text with: the model's, else any that
        has no text.
        """
        assert self._tokenizer is not None
        silent = sorted(self._tokenizer._silent)
        ends = list(self._config.eos_ids) or silent[:1]
        if not ends:
            raise ValueError(
                "grammar: expected a vocabulary with an end token or another "
                "control token, found none"
            )
        return ends

    @cached_property
    def _vocabulary(self) -> Any:
        """Requires: `_making` is held, or it was made."""
        assert self._tokenizer is not None
        return _llguidance().LLTokenizer(
            _Vocabulary(self._tokenizer, self._ends),
            n_vocab=self._config.vocab_size,
            eos_token=self._ends,
        )


def _with_deep_stack(function: Callable[[], _T]) -> _T:
    """Calls a function on a thread of its own, with a deep stack.

    llguidance follows references (of a schema, of rules) by calling itself, 16
    KiB of stack each, and 128 KiB of text can have 13,000 in a row. Only what
    is used takes memory.
    """
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)

    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="gemmakv-compile")
            thread.start()
        except RuntimeError:
            raise MemoryError("no memory for a thread that compiles") from None
        finally:
            threading.stack_size(before)
    thread.join()
    for error in failed:
        raise error
    return found[0]


class Matcher:
    """The place in a grammar that a text has reached. The core calls it on its
    threads, one call at a time.

    Where the grammar forces text, llguidance cuts all of it into tokens for
    each mask, and allows the first of them alone. Here a run of such tokens is
    kept: text of 100 KiB would take 50 ms of every step otherwise. A run
    begins where the one before it has ended, whoever asks and whatever is
    taken back, so masks depend on the text alone.

    Attributes:
      left_out: paths of what its schemas say that it does not hold to.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, core: Any, ends: Sequence[int]) -> None:
        self._core = core
        self._name = "grammar"  # begins errors
        self._ends = ends
        # Copies share what llguidance has made of the grammar so far: when one
        # has no room for more, none has.
        self._failed = threading.Event()
        self._position = 0  # tokens that were taken in
        self._runs: list[tuple[int, list[int]]] = []  # with their beginnings

    @property
    def has_failed(self) -> bool:
        """Whether a copy of it could not go on."""
        return self._failed.is_set()

    def compute_mask(
        self, token_ids: list[int], address: int, nbytes: int
    ) -> bool:
        """Takes in tokens and sets the bits of those that may follow; whether
        the text may end here.
        """
        core = self._core
        self._take(token_ids)
        if core.is_stopped():
            self._check()
            ctypes.memset(address, 0, nbytes)
            return True
        forced = self._forced(1)
        if forced:
            ctypes.memset(address, 0, nbytes)
            word = ctypes.c_uint32.from_address(address + forced[0] // 32 * 4)
            word.value = 1 << forced[0] % 32
            return False
        core.unsafe_compute_mask_ptr(address, nbytes)
        self._check()
        may_end: bool = core.is_accepting()
        for token in self._ends:
            word = ctypes.c_uint32.from_address(address + token // 32 * 4)
            word.value &= ~(1 << token % 32)
        return may_end

    def forced_tokens(self, token_ids: list[int], most: int) -> list[int]:
        """Takes in tokens; those that come next whatever the model says, as
        far as that is known.
        """
        self._take(token_ids)
        return [] if self._core.is_stopped() else self._forced(most)

    def _take(self, token_ids: list[int]) -> None:
        if token_ids and not self._core.consume_tokens(token_ids):
            self._check()
        self._position += len(token_ids)

    def _forced(self, most: int) -> list[int]:
        """Gives the tokens of the run that goes on here, or begins."""
        if self._runs:
            begin, last = self._runs[-1]
            at = self._position - begin
            if at < len(last):
                return last[at : at + most]
        run: list[int] = self._core.compute_ff_tokens()
        self._check()
        for at, token in enumerate(run):
            if token in self._ends:
                run = run[:at]
                break
        if run:
            # More than a step's guesses are never taken back.
            self._runs = [*self._runs[-_RUNS:], (self._position, run)]
        return run[:most]

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        self._core.rollback(count)
        self._check()
        self._position -= count
        while self._runs and self._runs[-1][0] > self._position:
            self._runs = self._runs[:-1]

    def clone(self) -> Matcher:
        other = copy.copy(self)
        other._core = self._core.deep_copy()
        return other

    def named(self, name: str) -> Matcher:
        """Makes a copy for a field of that name, which nobody follows."""
        other = copy.copy(self)
        other._name = name
        return other

    def _check(self) -> None:
        """Raises ValueError if it is in no state to go on."""
        if self._core.is_error():
            self._failed.set()
            raise ValueError(
                f"{self._name}: expected a form that can be followed within "
                "bounded time and memory, found one that cannot after "
                f"{self._position} tokens ({_shown(self._core.get_error())})"
            )


def _shown(error: str, source: str = "") -> str:
    """An error of llguidance, about a schema by its keyword."""
    said = one_line(ValueError(error.replace("<non-verbose/>", "")))
    for pattern, words in _WORDS:
        said = pattern.sub(words, said)
    elsewhere = _ELSEWHERE.search(said)
    if elsewhere:
        place = elsewhere["place"]
        draft = re.search(rf'"\$schema": "{re.escape(place)}#?"', source)
        said = f"$ref: expected a place in the schema, found {place!r}"
        if draft:
            said = f"$schema: expected a draft of JSON Schema, found {place!r}"
    nowhere = _NOWHERE.search(said)
    if nowhere:
        place = f"#{nowhere['place']}"
        said = f"$ref: expected a place in the schema, found {place!r}"
    return said[:400]


def _reason(error: str, source: str) -> str:
    """Says why llguidance refuses a grammar, without places in a grammar's text
    that nobody sent.
    """
    found = _IN_PATTERN.match(error) or _IN_SCHEMA.match(error)
    if found is not None:
        lines = source.splitlines()
        at = int(found["line"]) - 1
        source = lines[at] if at < len(lines) else ""
        error = found["what"]
    _, mark, last = error.rpartition("\nerror: ")
    shown = _shown(last if mark else error, source)
    if "Expected token" in shown and _GBNF_RULE.search(source):
        shown += "; expected Lark's form (start: ...), found GBNF's (::=)"
    return shown


class _Vocabulary:
    """A tokenizer as llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        table = tokenizer.token_bytes
        self._encode = tokenizer.encode
        self.eos_token_id = ends[0]
        # 0xFF marks names that no text is.
        self.tokens = [text or b"\xff<%d>" % i for i, text in enumerate(table)]
        self.special_token_ids = [i for i, text in enumerate(table) if not text]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return self._encode(text)


def _llguidance() -> Any:
    return import_extra("llguidance", "grammar", "grammar: compiling one")
