"""Texts that are Unicode, and those that are not."""

from __future__ import annotations

import pytest

from gemmakv._support.text import (
    check_unicode,
    encode_utf8,
    is_unicode,
    overlap,
    utf8_text,
)
from gemmakv.errors import ArgumentError


@pytest.mark.parametrize("text", ["", "a", "\0", "\ud7ff\ue000", "\U0001f600"])
def test_unicode_text(text: str) -> None:
    assert is_unicode(text)
    check_unicode("x", text)
    assert utf8_text(encode_utf8("x", text)) == text


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfff c", "ab\ud83d\ude00"])
def test_lone_surrogates(text: str) -> None:
    assert not is_unicode(text)
    with pytest.raises(ArgumentError) as caught:
        check_unicode("x", text)
    code = f"U+{ord(text[2]):04X}"
    assert caught.value.argument == "x" and caught.value.found == text
    assert str(caught.value) == (
        f"x: expected Unicode text, found a lone surrogate ({code}) at index 2"
    )


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ValueError, match=r"0xFF at offset 2$"):
        utf8_text(b"ab\xff")


@pytest.mark.parametrize("text, marks, count", [
    ("", ["ab"], 0), ("ab", [], 0), ("ab", ["ab"], 0), ("a", ["ab"], 1),
    ("xab<", ["<end>", "ab<y"], 3), ("aba", ["abab"], 3), ("a", [""], 0),
])  # fmt: skip
def test_what_a_mark_may_begin_with(
    text: str, marks: list[str], count: int
) -> None:
    assert overlap(text, *marks) == count
