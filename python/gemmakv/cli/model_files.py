"""The contents of a model's files, as JSON has them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from gemmakv import _core
from gemmakv._support.documents import Section, read_object
from gemmakv.cli import model_types
from gemmakv.errors import CorruptFile, MismatchError, one_line
from gemmakv.models._forms import describe_parts, parts_beside
from gemmakv.models.huggingface import ModelFolder
from gemmakv.models.huggingface._safetensors import byte_size, read_folder

# Types of the format that models may not use, as {id: (name, values and bytes
# of a block)}.
_OTHER_TYPES = {
    3: ("Q4_1", 32, 20), 7: ("Q5_1", 32, 24), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip


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
        _gguf_tensor(name, type_name, type_id, shape, nbytes)
        for name, type_name, type_id, shape, nbytes in gguf.tensors()
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
        _check_types(tensors)
        document |= {
            **_left_out(parts_beside(tensor["name"] for tensor in tensors)),
            "model": model_types.describe(config),
            "supported": True,
        }
    except MismatchError as error:
        document |= _unsupported(error)
    document["tensors"] = tensors
    return document


def _left_out(names: list[str]) -> dict[str, Any]:
    """Parts that the model is loaded without."""
    found: dict[str, Any] = {"left_out_tensors": len(names)}
    if names:
        found["left_out"] = describe_parts(names)
    return found


# Of drafters: what chooses clusters of tokens is not read from this format.
_UNREAD = "masked_embd_"


def _check_types(tensors: list[dict[str, Any]]) -> None:
    known = _core.tensor_types()
    for tensor in tensors:
        name = tensor["name"]
        if name.startswith(_UNREAD) or parts_beside([name]):
            continue
        if tensor["type"] not in known:
            raise MismatchError(
                f"tensor {tensor['name']} is {tensor['type']}, expected one "
                f"of {', '.join(known)}"
            )


def _gguf_tensor(
    name: str, type_name: str, type_id: int, shape: list[int], nbytes: int
) -> dict[str, Any]:
    """`bytes` is None for a type that nobody knows."""
    values = math.prod(shape)
    size: int | None = nbytes
    if type_id in _OTHER_TYPES:
        type_name, block, block_bytes = _OTHER_TYPES[type_id]
        size = values // block * block_bytes
    elif nbytes == 0:
        type_name, size = f"type {type_id}", None
    return {
        "name": name,
        "type": type_name,
        "shape": [int(n) for n in reversed(shape)],
        "values": values,
        "bytes": size,
    }


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
            **_left_out(model.left_out),
            "model": model_types.describe(model.config),
            "supported": True,
        }
    except MismatchError as error:
        document |= _unsupported(error)
    document["tensors"] = tensors
    return document


def _unsupported(error: MismatchError) -> dict[str, Any]:
    return {"model": None, "supported": False, "reason": one_line(error)}


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
        if tensor["bytes"] is None or entry["bytes"] is None:
            entry["bytes"] = None
        else:
            entry["bytes"] += tensor["bytes"]
    sizes = [tensor["bytes"] for tensor in tensors]
    return {
        "parameters": sum(t["values"] for t in tensors),
        "tensor_bytes": None if None in sizes else sum(sizes),
        "types": sorted(
            types.values(), key=lambda e: (-(e["bytes"] or 0), e["type"])
        ),
    }
