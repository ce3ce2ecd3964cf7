"""What stands behind a model of embeddings, in the files of the package
sentence-transformers: modules.json, and a folder for each module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmakv._support.documents import Section, read_bytes, read_object
from gemmakv._support.json import loads
from gemmakv.errors import CorruptFile, MismatchError, brief, unexpected
from gemmakv.models._embedding import PUBLISHED_PROMPTS, EmbeddingInfo
from gemmakv.models.huggingface._safetensors import StoredTensor, read_folder

_LIST_NAME = "modules.json"
_PROMPTS_NAME = "config_sentence_transformers.json"
_LENGTH_NAME = "sentence_bert_config.json"
_UNLIMITED = 1 << 24
# Behind the model itself: what EmbeddingGemma has, with or without its two
# products.
_WITHOUT_DENSE = ("Pooling", "Normalize")
_WITH_DENSE = ("Pooling", "Dense", "Dense", "Normalize")


@dataclasses.dataclass(frozen=True)
class Modules:
    """dense_dim: values between the two products; 0 without such.
    dense: their folders.
    """

    dense_dim: int = 0
    dense: tuple[Path, ...] = ()


def longest_text(folder: Path) -> int:
    """Tokens that a text may have; very many where no file says it.

    Raises OSError or CorruptFile.
    """
    section = Section.of_file(folder / _LENGTH_NAME)
    return section.size("max_seq_length", _UNLIMITED)


def check_no_modules(folder: Path) -> None:
    """Raises MismatchError if modules stand behind a model that looks one way:
    it was made for vectors, and what it generates means nothing.
    """
    path = folder / _LIST_NAME
    if path.exists():
        raise MismatchError(
            f"{path}: found modules of a model of embeddings, expected none "
            "beside a config.json without use_bidirectional_attention; without "
            "this file it generates, and embed takes pooling 'last' or 'mean'"
        )


def read_modules(folder: Path, hidden_size: int) -> Modules:
    """The modules of a directory; none without a modules.json. `hidden_size` is
    that of the model's output.

    Raises OSError, CorruptFile for values that are wrong, MismatchError for
    modules that are not supported.
    """
    path = folder / _LIST_NAME
    if not path.exists():
        return Modules()
    listed = loads(str(path), read_bytes(path), kind=CorruptFile)
    if not isinstance(listed, list):
        raise unexpected(path, "a list of modules", listed, CorruptFile)
    entries = [_entry(path, entry) for entry in listed]
    kinds = tuple(kind for kind, _ in entries)
    if kinds[:1] != ("Transformer",) or kinds[1:] not in (
        _WITHOUT_DENSE[:1], _WITHOUT_DENSE, _WITH_DENSE[:3], _WITH_DENSE,
    ):
        raise MismatchError(
            f"{path}: the modules are {', '.join(kinds) or 'none'}, expected "
            "Transformer, Pooling, with or without two Dense and a Normalize "
            "behind them"
        )
    if entries[0][1] != folder:
        raise MismatchError(
            f"{path}: the model is in {brief(entries[0][1].name)}, expected "
            "it beside this file"
        )
    _check_pooling(entries[1][1], hidden_size)
    dense = tuple(where for kind, where in entries if kind == "Dense")
    if not dense:
        return Modules()
    first, inner = _dense_sizes(dense[0])
    found, last = _dense_sizes(dense[1])
    for where, key, size, expected in (
        (dense[0], "in_features", first, hidden_size),
        (dense[1], "in_features", found, inner),
        (dense[1], "out_features", last, hidden_size),
    ):
        if size != expected:
            raise CorruptFile(
                f"{where / 'config.json'}: {key} is {size}, expected {expected}"
            )
    return Modules(inner, dense)


def dense_tensors(modules: Modules) -> dict[str, StoredTensor]:
    """The products' weights by the names that the core has for them."""
    found = {}
    for name, where in zip(("dense_2", "dense_3"), modules.dense):
        stored = read_folder(where)
        if set(stored) != {"linear.weight"}:
            raise CorruptFile(
                f"{where}: found tensors {', '.join(sorted(stored)[:5])}, "
                "expected linear.weight"
            )
        found[f"{name}.weight"] = stored["linear.weight"]
    return found


def read_embedding_info(
    folder: Path, published: Mapping[str, str] = PUBLISHED_PROMPTS
) -> EmbeddingInfo:
    """Prompts and the end of texts; `published`: those of a model without a
    file of them. Raises OSError or CorruptFile.
    """
    prompts = dict(published)
    section = Section.of_file(folder / _PROMPTS_NAME)
    stated = section.section("prompts")
    if stated is not None:
        prompts = {key: stated.text(key, "") for key in stated.values}
    default = section.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise section.wrong(
            "default_prompt_name", f"one of {', '.join(prompts) or 'none'}"
        )
    return EmbeddingInfo(prompts, default, _adds_eos(folder))


def _adds_eos(folder: Path) -> bool:
    section = Section.of_file(folder / "tokenizer_config.json")
    if "add_eos_token" in section:
        return section.flag("add_eos_token", False)
    section = Section.of_file(folder / "tokenizer.json")
    found: Any = section.values.get("post_processor") or {}
    steps = found.get("processors", [found]) if isinstance(found, dict) else []
    for step in steps:
        # [{"SpecialToken": {"id": "<bos>", ...}}, {"Sequence": ...}, ...]
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single:
            last = single[-1]
            special = last.get("SpecialToken") if isinstance(last, dict) else 0
            if isinstance(special, dict) and special.get("id") == "<eos>":
                return True
    return False


def _entry(path: Path, entry: object) -> tuple[str, Path]:
    """(kind, folder) of a module."""
    if not isinstance(entry, dict):
        raise unexpected(path, "modules", entry, CorruptFile)
    section = Section(entry, str(path))
    place = section.text("path", "")
    if place in (".", "..") or "/" in place or "\\" in place:
        raise section.wrong("path", "a folder beside the file, or nothing")
    kind = section.text("type", "").rsplit(".", 1)[-1]
    return kind, path.parent / place if place else path.parent


def _check_pooling(where: Path, hidden_size: int) -> None:
    path = where / "config.json"
    section = Section(read_object(path), str(path))
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if section.size(key, hidden_size) != hidden_size:
            raise section.wrong(key, f"{hidden_size} by config.json")
    if section.text("pooling_mode", "mean") != "mean":
        raise section.refusal("pooling_mode", "'mean'")
    modes = [key for key in section.values if key.startswith("pooling_mode_")]
    for key in modes:
        expected = key == "pooling_mode_mean_tokens"
        if section.flag(key, False) != expected:
            raise section.refusal(key, str(expected).lower())
    if not section.flag("include_prompt", True):
        raise section.refusal("include_prompt", "true")


def _dense_sizes(where: Path) -> tuple[int, int]:
    path = where / "config.json"
    section = Section(read_object(path), str(path))
    for key in ("in_features", "out_features"):
        if key not in section:
            raise section.wrong(key, "a size")
    if section.flag("bias", True):
        raise section.refusal("bias", "false")
    # What the class assumes where the file says nothing.
    activation = section.text("activation_function", "Tanh")
    if activation.rsplit(".", 1)[-1] != "Identity":
        raise section.refusal("activation_function", "Identity")
    return section.size("in_features", 1), section.size("out_features", 1)
