"""What a model's file says about it, beside its shape."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from gemmakv import _core
from gemmakv._support.documents import is_size
from gemmakv.errors import CorruptFile, brief
from gemmakv.models._embedding import EmbeddingInfo, embedding_of_gguf

# "gemma-3-1b-it", "Gemma 2 2b It", "gemma-it.Q4_0": a word of its own.
_TUNED = re.compile(r"(?i)(?:^|[-_. ])(?:it|instruct|chat)(?:[-_. ]|$)")


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Names and chat template of a model.

    names: what it is called, in its metadata and, as the last one, on disk.
    chat_template: Jinja source of its chat template, None if it has none.
    sampling: generation keywords that its makers recommend, unchecked.
    embedding: how texts are put before a model of embeddings.
    suppressed: ids of tokens that are never to be sampled.
    """

    names: tuple[str, ...] = ()
    chat_template: str | None = None
    sampling: Mapping[str, object] = dataclasses.field(default_factory=dict)
    embedding: EmbeddingInfo = EmbeddingInfo()
    suppressed: tuple[int, ...] = ()

    @property
    def instruction_tuned(self) -> bool:
        """Whether one of its names says that it was tuned for chat."""
        return any(_TUNED.search(name) for name in self.names)

    @property
    def is_anonymous(self) -> bool:
        """Whether files say nothing of what the model is called: no name in
        them, and on disk none of Gemma's.
        """
        return len(self.names) == 1 and "gemma" not in self.names[0].lower()


def info_of_gguf(
    path: str, file: _core.GgufFile, embeds: bool
) -> ModelInfo:
    """Of an open GGUF file; values of a wrong type count as absent, but for
    those that would let through what is never to be sampled. `embeds`: whether
    it is a model of embeddings.

    Raises CorruptFile.
    """
    present = set(file.keys())

    def text(key: str) -> str | None:
        value = file.get(key) if key in present else None
        return value if isinstance(value, str) and value else None

    keys = ("general.name", "general.basename", "general.finetune")
    names = [text(key) for key in keys]
    stem = os.path.splitext(os.path.basename(path))[0]
    return ModelInfo(
        names=tuple(name for name in [*names, stem] if name),
        chat_template=text("tokenizer.chat_template"),
        sampling=_sampling(
            {key: file.get(key) for key in present & set(_GGUF_SAMPLING)},
            _GGUF_SAMPLING,
        ),
        embedding=embedding_of_gguf(path, file) if embeds else EmbeddingInfo(),
        suppressed=_suppressed_of_gguf(
            path, file.get(_SUPPRESSED) if _SUPPRESSED in present else []
        ),
    )


_SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def _suppressed_of_gguf(path: str, found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(is_size(i) for i in found):
        raise CorruptFile(
            f"{path}: metadata {_SUPPRESSED} is {brief(found)}, expected a "
            "list of token ids"
        )
    return tuple(sorted(set(found)))


def check_suppressed(info: ModelInfo, path: str, vocab_size: int) -> None:
    """Raises CorruptFile naming a suppressed token that there is none of."""
    for token in info.suppressed:
        if token >= vocab_size:
            raise CorruptFile(
                f"{path}: suppress_tokens has {token}, expected ids below "
                f"{vocab_size}"
            )


# Of which GGUF key, or key of generation_config.json, an option is.
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_JSON_SAMPLING = {name: name for name in _GGUF_SAMPLING.values()}


def sampling_of_json(config: Mapping[str, object]) -> dict[str, object]:
    """Of a generation_config.json; nothing if it does not sample."""
    if config.get("do_sample") is not True:
        return {}
    return {"temperature": 1.0} | _sampling(config, _JSON_SAMPLING)


def _sampling(
    values: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    found = {
        name: values[key]
        for key, name in names.items()
        if values.get(key) is not None
    }
    # The others mean nothing to a greedy choice.
    return {"temperature": 1.0} | found if found else {}
