"""Models in several GGUF files, as `x-00001-of-00003.gguf`."""

from __future__ import annotations

import re

_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def parts_of(path: str) -> list[str]:
    """All files of the model that `path` is a part of, the first one first;
    `path` alone if its name is not that of a part.
    """
    match = _PART.fullmatch(path)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= 1000:
        return [path]
    stem, _, count = match.groups()
    return [
        f"{stem}{number:05d}-of-{count}.gguf"
        for number in range(1, int(count) + 1)
    ]
