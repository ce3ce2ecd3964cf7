"""Files of a model directory, and JSON documents read strictly."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmakv._support.json import loads
from gemmakv.errors import CorruptFile, MismatchError, brief, unexpected

# Longer files are no configuration and no tokenizer of a model.
_MAX_BYTES = 256 << 20


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Reads a JSON object. Keys that come twice are an error.

    Raises CorruptFile with `source` in its message.
    """
    document = loads(source, text, kind=CorruptFile)
    if not isinstance(document, dict):
        raise unexpected(source, "a JSON object", document, CorruptFile)
    return document


def check_regular(path: Path) -> os.stat_result:
    """Raises OSError for what is no regular file: opening a pipe would wait."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), str(path)
        )
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return found


def read_bytes(path: Path) -> bytes:
    """Reads a file of moderate size. Raises OSError or CorruptFile."""
    size = check_regular(path).st_size
    if size > _MAX_BYTES:
        raise CorruptFile(
            f"{path}: {size} bytes, expected at most {_MAX_BYTES}"
        )
    return path.read_bytes()


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises OSError or CorruptFile."""
    return parse_object(read_bytes(path), str(path))


def is_size(value: object) -> bool:
    """Tells whether a value is an integer >= 0 that is not too large."""
    return type(value) is int and 0 <= value < 1 << 62


class Section:
    """An object of a document whose values are asked for by type.

    A value of another type is a CorruptFile that names the file, the key, what
    was found and what was expected. null counts as absent.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, prefix: str = ""
    ) -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    @classmethod
    def of_file(cls, path: Path) -> Section:
        """Reads the object in a file; an empty one if there is no such file.
        Raises OSError or CorruptFile.
        """
        return cls(read_object(path) if path.exists() else {}, str(path))

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> CorruptFile:
        return CorruptFile(
            f"{self.source}: {self.prefix}{key} is "
            f"{brief(self.values.get(key))}, expected {expected}"
        )

    def refusal(self, key: str, expected: str) -> MismatchError:
        """Makes the error for a value that is sound and not supported."""
        return MismatchError(str(self.wrong(key, expected)))

    def size(self, key: str, default: int) -> int:
        """Gives a positive integer."""
        value: int = self._typed(key, int, "an integer", default)
        if key in self and not 0 < value <= 1 << 30:
            raise self.wrong(key, f"1..{1 << 30}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._typed(key, (int, float), "a number", default)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "a finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        found: bool = self._typed(key, bool, "true or false", default)
        return found

    def text(self, key: str, default: str) -> str:
        found: str = self._typed(key, str, "a string", default)
        return found

    def texts(self, key: str) -> list[str] | None:
        value = self._typed(key, list, "a list of strings", [])
        if not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of strings")
        return list(value) if key in self else None

    def section(self, key: str) -> Section | None:
        value = self._typed(key, dict, "an object", {})
        if key not in self:
            return None
        return Section(value, self.source, f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> list[int] | None:
        """Gives a list of token ids; one id alone is one."""
        if key not in self:
            return None
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not is_size(token) or token >= 1 << 31:
                raise self.wrong(key, "a token id or a list of them")
        return list(ids)

    def _typed(
        self, key: str, kind: Any, expected: str, default: object
    ) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        # A bool of Python is an int, one of JSON is not.
        if not isinstance(value, kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise self.wrong(key, expected)
        return value
