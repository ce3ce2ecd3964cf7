"""Edits of a model's file that make it a bad one, and what is said then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assert_says(error: BaseException, *words: object) -> None:
    """Expects one line that has all of these, which are what was found and
    what was expected; how it is put does not matter.
    """
    text = one_line(error)
    for word in words:
        assert str(word) in text


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.strip() == text and "\n" not in text
    assert len(text) > 10
    return text

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def put(key: str, kind: int, value: object) -> Edit:
    def edit(meta: dict[str, Any], weights: dict[str, Any]) -> None:
        meta[key] = (kind, value)

    return edit


def forget(key: str) -> Edit:
    return lambda meta, weights: meta.pop(key)
