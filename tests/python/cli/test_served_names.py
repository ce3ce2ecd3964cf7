"""The names that a server's model has in requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

for needed in ("typer", "pydantic_settings", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="an extra is not installed")

from gemmakv.cli.serve import _for_server  # noqa: E402
from gemmakv.cli.serve_settings import ServeSettings  # noqa: E402
from gemmakv.server import settings  # noqa: E402


@pytest.mark.parametrize("model, given, names", [
    ("gemma-3-270m", [], ["gemma-3-270m"]),
    ("gemma-3-270m", ["one", "two"], ["one", "two"]),
    ("gemma-3-270m", ["*"], ["gemma-3-270m", "*"]),
    ("gemma-3-270m", ["one", "*"], ["one", "*"]),
])  # fmt: skip
def test_a_model_has_a_name_of_its_own(
    model: str, given: list[str], names: Sequence[str]
) -> None:
    """Answers to requests that ask for none have it."""
    said = ServeSettings(model=model, served_model_name=given)
    found = _for_server(said, settings, [], b"")
    assert found.served_model_name == tuple(names)
