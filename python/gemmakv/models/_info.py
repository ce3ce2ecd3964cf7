"""What a model's file says about it, beside its shape."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from gemmakv import _core
from gemmakv._support.documents import Section, is_size
from gemmakv.errors import CorruptFile
from gemmakv.models._embedding import PUBLISHED_PROMPTS, EmbeddingInfo

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
    """Reads an open GGUF file; `embeds`: of a model of embeddings.

    Values of a wrong type count as absent, but for those that change what is
    computed or let through what is never to be sampled. Raises CorruptFile.
    """
    known = {*_NAMES, _TEMPLATE, *_GGUF_SAMPLING, _SUPPRESSED, _ADDS_EOS}
    values = {key: file.get(key) for key in known & set(file.keys())}
    stated = Section(values, path, "metadata ")

    def text(key: str) -> str | None:
        value = values.get(key)
        return value if isinstance(value, str) and value else None

    stem = os.path.splitext(os.path.basename(path))[0]
    embedding = EmbeddingInfo()
    if embeds:
        adds_eos = stated.flag(_ADDS_EOS, False)
        embedding = EmbeddingInfo(PUBLISHED_PROMPTS, None, adds_eos)
    suppressed = values.get(_SUPPRESSED, [])
    if not isinstance(suppressed, list) or not all(map(is_size, suppressed)):
        raise stated.wrong(_SUPPRESSED, "a list of token ids")
    return ModelInfo(
        names=tuple(filter(None, [*map(text, _NAMES), stem])),
        chat_template=text(_TEMPLATE),
        sampling=_sampling(values, _GGUF_SAMPLING),
        embedding=embedding,
        suppressed=tuple(sorted(set(suppressed))),
    )


_NAMES = ("general.name", "general.basename", "general.finetune")
_TEMPLATE = "tokenizer.chat_template"
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"
_ADDS_EOS = "tokenizer.ggml.add_eos_token"


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
