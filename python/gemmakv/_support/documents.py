"""Files of a model directory, and JSON documents read strictly."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmakv.errors import CorruptFile, brief

# Longer files are no configuration and no tokenizer of a model.
_MAX_BYTES = 256 << 20


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object that `text` is. Keys that come twice are an error.

    Raises CorruptFile with `source` in its message.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CorruptFile(f"{source}: the key {brief(key)} comes twice")
            found[key] = value
        return found

    try:
        document = json.loads(
            text.decode("utf-8-sig"), object_pairs_hook=unique
        )
    except CorruptFile:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"{source}: expected JSON, found {_reason(error)}"
        ) from None
    if not isinstance(document, dict):
        raise CorruptFile(
            f"{source}: expected a JSON object, found {brief(document)}"
        )
    return document


def check_regular(path: Path) -> os.stat_result:
    """Raises OSError for what is no file: opening a pipe would wait."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), str(path)
        )
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return found


def read_bytes(path: Path) -> bytes:
    """What a file of moderate size holds. Raises OSError or CorruptFile."""
    size = check_regular(path).st_size
    if size > _MAX_BYTES:
        raise CorruptFile(
            f"{path}: {size} bytes, expected at most {_MAX_BYTES}"
        )
    return path.read_bytes()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError or CorruptFile."""
    return parse_object(read_bytes(path), str(path))


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "objects nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


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

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> CorruptFile:
        return CorruptFile(
            f"{self.source}: {self.prefix}{key} is "
            f"{brief(self.values.get(key))}, expected {expected}"
        )

    def size(self, key: str, default: int) -> int:
        """A positive integer."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer")
        if not 0 < value <= 1 << 30:
            raise self.wrong(key, f"1..{1 << 30}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "a finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(entry, str) for entry in value
        ):
            raise self.wrong(key, "a list of strings")
        return list(value)

    def section(self, key: str) -> Section | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Section(value, self.source, f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> list[int] | None:
        """One token id or a list of them."""
        value = self.values.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if (
                isinstance(token, bool)
                or not isinstance(token, int)
                or not 0 <= token < 1 << 31
            ):
                raise self.wrong(key, "a token id or a list of them")
        return list(ids)
