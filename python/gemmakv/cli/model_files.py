"""What the files of a model state, as JSON has it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from gemmakv import _core
from gemmakv._support.documents import Section, read_object
from gemmakv.cli import model_types
from gemmakv.errors import CorruptFile, MismatchError
from gemmakv.models.huggingface import ModelFolder
from gemmakv.models.huggingface._safetensors import byte_size, read_folder


def describe(path: str) -> dict[str, Any]:
    """Everything that `gemmakv info` knows of a GGUF file or a directory.

    Raises OSError or CorruptFile; a model that is not supported is described
    as far as it can be.
    """
    return _of_folder(path) if os.path.isdir(path) else _of_gguf(path)


def _of_gguf(path: str) -> dict[str, Any]:
    gguf = _core.GgufFile(os.fsencode(path))
    keys = set(gguf.keys())

    def metadata(key: str) -> Any:
        return gguf.get(key) if key in keys else None

    architecture = metadata("general.architecture")
    if not isinstance(architecture, str):
        raise CorruptFile(
            f"{path}: expected a string general.architecture, found "
            f"{architecture!r}"
        )
    tensors = [
        {
            "name": name,
            "type": type_name,
            "shape": [int(n) for n in reversed(shape)],
            "values": math.prod(shape),
            "bytes": size_bytes,
        }
        for name, type_name, _, shape, size_bytes in gguf.tensors()
    ]
    document: dict[str, Any] = {
        "file": path,
        "format": "GGUF",
        "gguf_version": gguf.version,
        "architecture": architecture,
        "name": metadata("general.name"),
        **_sums(tensors),
    }
    try:
        config = _core.ModelConfig.from_gguf(os.fsencode(path))
        document |= {"model": model_types.describe(config), "supported": True}
    except MismatchError as error:
        document |= _unsupported(error)
    document["tensors"] = tensors
    return document


def _of_folder(path: str) -> dict[str, Any]:
    config_path = Path(path) / "config.json"
    config = Section(read_object(config_path), str(config_path))
    tensors = [
        {
            "name": name,
            "type": tensor.dtype,
            "shape": list(tensor.shape),
            "values": math.prod(tensor.shape),
            "bytes": byte_size(tensor),
        }
        for name, tensor in read_folder(Path(path)).items()
    ]
    document: dict[str, Any] = {
        "file": path,
        "format": "safetensors",
        "architecture": config.text("model_type", ""),
        "name": config.text("_name_or_path", "") or Path(path).resolve().name,
        **_sums(tensors),
    }
    try:
        model = ModelFolder.open(path)
        document |= {
            "left_out_tensors": len(model.left_out),
            "model": model_types.describe(model.config),
            "supported": True,
        }
    except MismatchError as error:
        document |= _unsupported(error)
    document["tensors"] = tensors
    return document


def _unsupported(error: MismatchError) -> dict[str, Any]:
    reason = " ".join(str(error).split())
    return {"model": None, "supported": False, "reason": reason}


def _sums(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals, and those of each type, the one with most bytes first."""
    types: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        entry = types.setdefault(
            tensor["type"],
            {"type": tensor["type"], "count": 0, "values": 0, "bytes": 0},
        )
        entry["count"] += 1
        entry["values"] += tensor["values"]
        entry["bytes"] += tensor["bytes"]
    return {
        "parameters": sum(t["values"] for t in tensors),
        "tensor_bytes": sum(t["bytes"] for t in tensors),
        "types": sorted(
            types.values(), key=lambda e: (-e["bytes"], e["type"])
        ),
    }
