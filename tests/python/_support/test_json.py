"""JSON is read and written more strictly than Python does it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from gemmakv._support.json import loads, loads_finite, plain_json, to_json
from gemmakv.errors import ArgumentError, CorruptFile

DEEP = "[" * 200_000


def test_what_json_says_is_read() -> None:
    for data in ('{"a": [1, 2.5, null]}', b'\xef\xbb\xbf{"a": [1, 2.5, null]}'):
        assert loads("x", data) == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", "JSON"), ("{", "JSON"), ("1 2", "JSON"), (b"\xff", "JSON"),
        (DEEP, "JSON"), ("9" * 10_000, "JSON"),
        ('{"a": 1, "a": 1}', "each key once"),
        ('[{"b": {"a": 1, "c": 2, "a": 3}}]', "each key once"),
    ],
)  # fmt: skip
def test_what_is_not_strict_json(data: str | bytes, expected: str) -> None:
    with pytest.raises(ArgumentError, match=f"^x: expected {expected}, found "):
        loads("x", data)
    with pytest.raises(CorruptFile, match=f"^x: expected {expected}, found "):
        loads("x", data, kind=CorruptFile)


def test_the_last_of_two_equal_keys_counts_where_both_may_stand() -> None:
    assert loads("x", '{"a": 1, "a": 2}', unique=False) == {"a": 2}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "[1e999]"])
def test_numbers_that_are_not_finite(text: str) -> None:
    loads("x", text)  # Python's own may be in files of others
    with pytest.raises(ArgumentError, match="no number of JSON's"):
        loads("x", text, finite=True)


def test_numbers_beyond_all_floats_can_be_written_again() -> None:
    found = loads_finite("[1e999, -1e999, 1.5]")
    assert plain_json("x", found) == found


def test_plain_values_hold_nothing_of_the_caller() -> None:
    class Loud(str):
        pass

    given: dict[str, Any] = {"a": MappingProxyType({"b": (Loud("c"), True)})}
    found = plain_json("x", given)
    assert found == {"a": {"b": ["c", True]}}
    assert type(found["a"]["b"][0]) is str


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object(), b"a"])
def test_what_json_cannot_say(value: object) -> None:
    with pytest.raises(ArgumentError, match="^x: expected JSON's, found "):
        plain_json("x", value, "JSON's")


def test_files_take_every_str() -> None:
    assert to_json("x", ["\ud800", "é"]) == b'["\\ud800", "\\u00e9"]'
    with pytest.raises(ArgumentError, match="^x: expected what JSON can say"):
        to_json("x", [object()])
