"""Headers of safetensors files: where each tensor lies.

A file is the length of its header (8 bytes, little-endian), the header (a JSON
object) and the tensors' bytes, without gaps. Only headers are read here; the
bytes are mapped by the core.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemmakv._support.documents import (
    check_regular,
    is_size,
    parse_object,
    read_object,
)
from gemmakv.errors import CorruptFile, brief

# The limit of the format.
_MAX_HEADER_BYTES = 100_000_000

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# Bytes that are read at a time.
_CHUNK_BYTES = 4 << 20

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor's place. `offset` counts from the beginning of the file."""

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


def byte_size(tensor: StoredTensor) -> int:
    """Bytes that a tensor takes in its file."""
    return math.prod(tensor.shape) * _DTYPE_BITS[tensor.dtype] // 8


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors hold the same; reads both. Raises OSError."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left = byte_size(a)
    with open(a.path, "rb") as one, open(b.path, "rb") as other:
        one.seek(a.offset)
        other.seek(b.offset)
        while left > 0:
            chunk = one.read(min(left, _CHUNK_BYTES))
            if not chunk or chunk != other.read(len(chunk)):
                return False
            left -= len(chunk)
    return True


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises OSError or CorruptFile."""
    file_bytes = check_regular(path).st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CorruptFile(
                f"{path}: expected a safetensors file, found {file_bytes} bytes"
            )
        (length,) = struct.unpack("<Q", start)
        if length > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise CorruptFile(
                f"{path}: the header takes {length} bytes, expected at most "
                f"{min(_MAX_HEADER_BYTES, file_bytes - 8)}; is it whole?"
            )
        header = parse_object(file.read(length), f"{path}: header")
    header.pop("__metadata__", None)
    data = 8 + length
    found = {
        name: _stored(path, name, entry, data) for name, entry in header.items()
    }
    _check_cover(path, found, file_bytes, data)
    return found


def _stored(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    def wrong(what: str, value: Any, expected: str) -> CorruptFile:
        return CorruptFile(
            f"{path}: tensor {brief(name)}: {what} is {brief(value)}, expected "
            + expected
        )

    if not isinstance(entry, dict):
        raise wrong("its description", entry, "an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise wrong("dtype", dtype, f"one of {', '.join(_DTYPE_BITS)}")
    shape = entry.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > 8
        or not all(is_size(n) for n in shape)
    ):
        raise wrong("shape", shape, "a list of at most 8 sizes")
    offsets = entry.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(is_size(n) for n in offsets)
    ):
        raise wrong("data_offsets", offsets, "two offsets")
    begin, end = offsets
    tensor = StoredTensor(str(path), data + begin, dtype, tuple(shape))
    size = byte_size(tensor)
    if end - begin != size:
        raise wrong(
            "data_offsets", offsets, f"{size} bytes for {dtype} {brief(shape)}"
        )
    return tensor


def _check_cover(
    path: Path, found: dict[str, StoredTensor], file_bytes: int, data: int
) -> None:
    """Tensors lie one behind the other and fill the file."""
    position = data

    def place(item: tuple[str, StoredTensor]) -> tuple[int, int]:
        return item[1].offset, byte_size(item[1])  # empty ones come first

    for name, tensor in sorted(found.items(), key=place):
        if tensor.offset != position:
            raise CorruptFile(
                f"{path}: tensor {brief(name)} begins at byte {tensor.offset}, "
                f"expected {position}, where the one before it ends"
            )
        position += byte_size(tensor)
    if position != file_bytes:
        raise CorruptFile(
            f"{path}: the tensors end at byte {position}, expected the end of "
            f"the file, {file_bytes}; is it whole?"
        )


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's directory, from its one file or its shards.

    Raises OSError or CorruptFile.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _read_shards(folder, index)
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    single = single_file(names)
    if single is not None:
        return read_header(folder / single)
    holds = f"found {', '.join(names[:5])}" if names else "found none"
    raise CorruptFile(
        f"{folder}: expected {SINGLE_NAME}, or shards with {INDEX_NAME}; "
        + holds
    )


def single_file(names: Iterable[str]) -> str | None:
    """Finds the file of weights that have no index among a directory's; None
    if there are several, or none.
    """
    found = [
        name for name in names
        if name.endswith(".safetensors") and "/" not in name
    ]
    if SINGLE_NAME in found:
        return SINGLE_NAME
    return found[0] if len(found) == 1 else None


def _is_file_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value not in ("", "..")
        and value == Path(value).name
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensors' names and those of the files in the same directory that hold
    them. Raises OSError or CorruptFile.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(
            f"{index}: weight_map is {brief(weight_map)}, expected an object "
            "of tensor names and files"
        )
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise CorruptFile(
                f"{index}: tensor {brief(name)} is in {brief(shard)}, expected "
                "the name of a file in the same directory"
            )
    return weight_map


def _read_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_weight_map(index)
    shards: dict[str, dict[str, StoredTensor]] = {}
    found = {}
    for name, shard in weight_map.items():
        if shard not in shards:
            if not (folder / shard).exists():
                raise FileNotFoundError(
                    2, f"missing; {INDEX_NAME} names it", str(folder / shard)
                )
            shards[shard] = read_header(folder / shard)
        if name not in shards[shard]:
            raise CorruptFile(
                f"{folder / shard}: tensor {brief(name)} is missing, which "
                f"{INDEX_NAME} places there"
            )
        found[name] = shards[shard][name]
    for shard, tensors in shards.items():
        for name in tensors:
            if weight_map.get(name) != shard:
                raise CorruptFile(
                    f"{folder / shard}: holds tensor {brief(name)}, which "
                    f"{INDEX_NAME} does not place there"
                )
    return found
