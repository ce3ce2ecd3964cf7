"""Real GGUF files: with other metadata, or as their weights alone."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from support.tiny_gguf import ALIGNMENT, ARRAY, STR

_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

# A key's type and value, as they stand in the file.
Entries = dict[str, bytes]


def rewrite(
    source: Path, target: Path, edit: Callable[[Entries], None]
) -> Path:
    """Copies a file with the entries that `edit` makes of its own."""
    with source.open("rb") as file:
        reader = _Reader(file)
        magic, tensors, count = struct.unpack("<8sQQ", reader.take(24))
        entries = dict(reader.entry() for _ in range(count))
        assert "general.alignment" not in entries
        start = file.tell()
        for _ in range(tensors):
            reader.tensor()
        end = file.tell()
        edit(entries)
        with target.open("wb") as out:
            out.write(struct.pack("<8sQQ", magic, tensors, len(entries)))
            for key, value in entries.items():
                out.write(struct.pack("<Q", len(key.encode())) + key.encode())
                out.write(value)
            file.seek(start)
            out.write(file.read(end - start))
            out.write(bytes(-out.tell() % ALIGNMENT))
            file.seek(end + -end % ALIGNMENT)
            shutil.copyfileobj(file, out, 1 << 24)
    return target


def read_tensors(source: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The values of all tensors, vectors and matrices.

    They are those that `gguf` gives, whose reader takes ten seconds for the
    vocabulary of a real model.
    """
    file = _core.GgufFile(str(source))
    return {
        name: file.read_tensor(name).reshape(shape[::-1])
        for name, _, _, shape, _ in file.tensors()
    }


def append_to_array(entry: bytes, value: bytes) -> bytes:
    """An array's entry with one more value."""
    kind, element, count = struct.unpack_from("<IIQ", entry)
    assert kind == ARRAY
    return struct.pack("<IIQ", kind, element, count + 1) + entry[16:] + value


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def take(self, size: int) -> bytes:
        data = self.file.read(size)
        assert len(data) == size
        return data

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(f"<{form}", self.take(size))[0])

    def string(self) -> bytes:
        return self.take(self.number("Q"))

    def entry(self) -> tuple[str, bytes]:
        key = self.string().decode()
        start = self.file.tell()
        self.skip(self.number("I"))
        end = self.file.tell()
        self.file.seek(start)
        return key, self.take(end - start)

    def skip(self, kind: int) -> None:
        if kind == STR:
            self.string()
        elif kind == ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element in _BYTES:
                self.take(_BYTES[element] * count)
                return
            if element == STR:  # a loop of its own: there are 262,144
                read = self.file.read
                for _ in range(count):
                    read(int.from_bytes(read(8), "little"))
                return
            for _ in range(count):
                self.skip(element)
        else:
            self.take(_BYTES[kind])

    def tensor(self) -> None:
        self.string()
        self.take(8 * self.number("I") + 12)
