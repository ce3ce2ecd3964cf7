"""Texts as vectors: what goes to the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gemmakv._support.arguments import items
from gemmakv._support.text import check_unicode
from gemmakv.errors import ArgumentError, unexpected
from gemmakv.generation._prompts import Prompt, TokenArray, token_ids
from gemmakv.generation._requests import Requests
from gemmakv.generation._work import off_the_loop
from gemmakv.models._config import ModelConfig
from gemmakv.models._embedding import EmbeddingInfo

POOLINGS = ("mean", "last")
PLACE = "{text}"


class EmbeddingJob(NamedTuple):
    """Checked arguments of the core."""

    ids: list[TokenArray]
    dim: int
    pooling: str


class Embedder:
    """Makes vectors of texts with a model."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    @property
    def dims(self) -> list[int]:
        """Lengths of vectors that the model makes, the whole one first."""
        return self._requests.engine.embedding_dims

    @property
    def prompts(self) -> dict[str, str]:
        return dict(self._requests.info.embedding.prompts)

    def prepare(
        self,
        texts: Iterable[Prompt],
        dim: int | None,
        prompt: str | None,
        pooling: str | None = None,
        parse_special: bool = False,
        *,
        longest: int | None = None,
        truncate: bool = False,
        check: Callable[[], None] | None = None,
    ) -> EmbeddingJob:
        """Checks the arguments of `Gemma.embed`, and encodes the texts.

        `longest` replaces the model's context as the tokens of a text at most;
        with `truncate`, the end of one that has more is left out. Calls `check`
        before each text, and ends with what that raises.
        """
        config = self._requests.config
        size = check_dim(dim, self.dims)
        kind = check_pooling(pooling, config)
        most = config.context_length if longest is None else longest
        ids = self._encode(
            texts, prompt, parse_special, most, truncate, check
        )
        return EmbeddingJob(ids, size, kind)

    def _encode(
        self,
        texts: Iterable[Prompt],
        prompt: str | None,
        parse_special: bool,
        most: int,
        truncate: bool,
        check: Callable[[], None] | None,
    ) -> list[TokenArray]:
        """Encodes each text. Raises ValueError naming the text."""
        requests, config = self._requests, self._requests.config
        info, tokenizer = requests.info.embedding, requests.tokenizer
        adds_eos = info.adds_eos and len(config.eos_ids) > 0
        listed = items("texts", texts, "a list of texts")
        before, after = template_of(prompt, info).split(PLACE)
        if not listed:
            raise ArgumentError("texts", "at least one", listed, shown="none")
        found = []
        for index, text in enumerate(listed):
            if check is not None:
                check()
            name = f"texts[{index}]"
            if isinstance(text, str):
                if not text:
                    raise ArgumentError(
                        name, "a text", text, shown="an empty one"
                    )
                check_unicode(name, text)
                whole = f"{before}{text}{after}"
                if tokenizer is not None and not truncate:
                    least = tokenizer._at_least(whole, most + 1)
                    _check_count(name, least, most, "at least ")
                ids, _ = requests.encode(name, whole, parse_special)
                if adds_eos:
                    ids = np.append(ids, np.int32(config.eos_ids[0]))
            elif prompt is not None:
                raise unexpected(
                    name, "a text, which the prompt stands before", text
                )
            else:
                ids = token_ids(name, text, config.vocab_size)
            if len(ids) > most and truncate:
                ended = adds_eos and isinstance(text, str)
                kept = ids[: most - 1 if ended else most]
                ids = np.append(kept, ids[-1:]) if ended else kept
            _check_count(name, len(ids), most)
            found.append(ids)
        return found

    def compute(
        self, job: EmbeddingJob, check: Callable[[], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Computes the vectors. Calls `check` now and then, and ends with what
        that raises.
        """
        return self._requests.engine.embed(*job, check)

    async def acompute(self, job: EmbeddingJob) -> npt.NDArray[np.float32]:
        """Does `compute` without blocking the event loop."""
        return await off_the_loop(lambda check: self.compute(job, check))


def check_dim(dim: int | None, dims: Sequence[int]) -> int:
    """Gives the length, 0 for None. Raises ArgumentError that lists them."""
    if dim is None:
        return 0
    is_int = isinstance(dim, int | np.integer) and not isinstance(dim, bool)
    if not is_int or dim not in dims:
        known = ", ".join(map(str, dims))
        if len(dims) > 1:
            known = f"one of {known} (default: {dims[0]})"
        raise unexpected("dim", known, dim)
    return int(dim)


def check_pooling(pooling: str | None, config: ModelConfig) -> str:
    """Gives the name; "" for the model's own. Raises ArgumentError."""
    if config.bidirectional:
        if pooling is not None:
            raise unexpected(
                "pooling", "none: this model is trained for the mean", pooling
            )
        return ""
    known = " or ".join(map(repr, POOLINGS))
    if pooling is None:
        name = config.name or config.architecture
        raise ArgumentError(
            "pooling",
            known,
            None,
            shown=f"none: {name} is not trained to give embeddings; its hidden "
            "states may serve as such",
        )
    if pooling not in POOLINGS:
        raise unexpected("pooling", known, pooling)
    return pooling


def template_of(prompt: str | None, info: EmbeddingInfo) -> str:
    """Finds the text that texts are put into at PLACE; PLACE alone for none.

    Raises ValueError listing the known prompts.
    """
    prompts: Mapping[str, str] = info.prompts
    if prompt is None:
        if info.default_prompt is None:
            return PLACE
        prompt = info.default_prompt
    if isinstance(prompt, str):
        if prompt in prompts:
            return prompts[prompt] + PLACE
        if prompt.count(PLACE) == 1:
            check_unicode("prompt", prompt)
            return prompt
    known = ", ".join(prompts) or "this model knows none"
    raise unexpected(
        "prompt", f"a name ({known}) or a text with one {PLACE}", prompt
    )


def _check_count(name: str, count: int, most: int, exactly: str = "") -> None:
    if count > most:
        raise ValueError(
            f"{name}: found {exactly}{count} tokens, expected at most {most}"
        )
