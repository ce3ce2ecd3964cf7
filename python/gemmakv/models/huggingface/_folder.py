"""A model's directory as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section, read_bytes
from gemmakv.errors import CorruptFile, MismatchError
from gemmakv.models._embedding import PUBLISHED_PROMPTS, EmbeddingInfo
from gemmakv.models._forms import check_no_adapter
from gemmakv.models._info import ModelInfo, sampling_of_json
from gemmakv.models.huggingface._config import read_config
from gemmakv.models.huggingface._modules import (
    dense_tensors,
    read_embedding_info,
)
from gemmakv.models.huggingface._safetensors import (
    StoredTensor,
    read_folder,
    same_bytes,
)
from gemmakv.models.huggingface._tensors import (
    Place,
    place_tensors,
    tied_tensors,
)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """What a directory holds; no weight has been read.

    files: paths of the weights' files; places: the tensors in them, as
    `_core.Engine.load_files` takes them. left_out: tensors of parts that are
    not supported, such as image encoders. tied: the embedding, and an output
    head beside it that the configuration says is the same.
    """

    config: ModelConfig
    files: list[str]
    places: list[Place]
    left_out: list[str]
    info: ModelInfo
    tied: tuple[StoredTensor, StoredTensor] | None

    @classmethod
    def open(cls, path: str) -> ModelFolder:
        """Raises OSError, CorruptFile or MismatchError, naming the file."""
        folder = Path(path)
        check_no_adapter(path, (file.name for file in folder.iterdir()))
        described = read_config(folder)
        stored = read_folder(folder)
        files, places, left_out = place_tensors(
            described.config,
            tied_head=described.tied_head,
            stored=stored,
            folder=folder,
            dense=dense_tensors(described.modules),
        )
        tied = tied_tensors(stored, folder) if described.tied_head else None
        names = (*described.names, _name_of(folder.resolve()))
        generation = Section.of_file(folder / "generation_config.json")
        info = ModelInfo(
            names,
            chat_template_of(folder),
            sampling_of_json(generation.values),
            _embedding_info(folder, described.config),
            _suppressed(generation),
        )
        return cls(described.config, files, places, left_out, info, tied)

    def check_tied_head(self) -> None:
        """Reads a head that should be the embedding, if there is one.

        Raises OSError; MismatchError if it is not, as what the model computes
        would then depend on who reads it.
        """
        if self.tied is not None and not same_bytes(*self.tied):
            raise MismatchError(
                f"{self.tied[1].path}: tensor lm_head.weight is not the "
                "embedding, expected the same: config.json has no "
                "tie_word_embeddings false"
            )


def _suppressed(generation: Section) -> tuple[int, ...]:
    """Tokens that are never sampled. Raises CorruptFile or MismatchError."""
    key = "begin_suppress_tokens"
    if generation.values.get(key):
        raise generation.refusal(key, "null or none")
    return tuple(sorted(set(generation.token_ids("suppress_tokens") or ())))


def _embedding_info(folder: Path, config: ModelConfig) -> EmbeddingInfo:
    if not config.bidirectional:
        return EmbeddingInfo()
    # Those of EmbeddingGemma 2 are known by its own file alone.
    published = {} if config.embedding_dim else PUBLISHED_PROMPTS
    return read_embedding_info(folder, published)


def _name_of(folder: Path) -> str:
    """What a directory is called; in the cache of the hub, its repository."""
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.split("--")[-1]
    return folder.name


def chat_template_of(folder: Path) -> str | None:
    """Jinja source of a directory's chat template; None if it has none."""
    source = folder / "chat_template.jinja"
    if source.exists():
        try:
            return read_bytes(source).decode("utf-8") or None
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{source}: expected UTF-8, {error}") from None
    # The former is the tokenizer's, the latter that of an image processor.
    for name in ("tokenizer_config.json", "chat_template.json"):
        section = Section.of_file(folder / name)
        value = section.values.get("chat_template")
        if isinstance(value, list):
            value = _default_template(section, value)
        if value is not None and not isinstance(value, str):
            raise section.wrong("chat_template", "a string")
        if value:
            return value
    return None


def _default_template(section: Section, entries: list[object]) -> object:
    """That of several named templates which serves conversations."""
    for entry in entries:
        if not isinstance(entry, dict) or "name" not in entry:
            raise section.wrong("chat_template", "templates with names")
        if entry["name"] == "default":
            return entry.get("template")
    return None
