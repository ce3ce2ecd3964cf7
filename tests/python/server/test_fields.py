"""What is said of a field that is not as its type has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

msgspec = pytest.importorskip("msgspec")
for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed, reason="the extra `server` is not installed")

from gemmakv.server._body import typed  # noqa: E402
from gemmakv.server._errors import RequestError  # noqa: E402


class Inner(msgspec.Struct):
    mode: Literal["a", "b"] = "a"


class Shape(msgspec.Struct):
    order: Literal["asc", "desc"] | None = None
    salt: Annotated[str, msgspec.Meta(min_length=1, max_length=4)] = "x"
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    seed: int = 0
    inner: list[Inner] = []


@pytest.mark.parametrize("document, message", [
    ({"order": "up"}, "order: expected one of asc, desc, found 'up'"),
    ({"inner": [{}, {"mode": "c"}]},
     "inner[1].mode: expected one of a, b, found 'c'"),
    ({"salt": "x" * 5}, "salt: expected `str` of length <= 4, found one of 5"),
    ({"salt": ""}, "salt: expected `str` of length >= 1, found one of 0"),
    ({"limit": 0}, "limit: expected `int` >= 1, found 0"),
    ({"limit": 101}, "limit: expected `int` <= 100, found 101"),
    ({"limit": "x"}, "limit: expected `int`, found `str`"),
    ({"seed": 1.5}, "seed: expected `int`, found `float`"),
])  # fmt: skip
def test_says_what_was_expected_and_what_found(
    document: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        typed(document, Shape)
    assert str(caught.value) == message


def test_of_a_query() -> None:
    with pytest.raises(RequestError) as caught:
        typed({"limit": "101"}, Shape, texts=True)
    assert str(caught.value) == "limit: expected `int` <= 100, found '101'"
