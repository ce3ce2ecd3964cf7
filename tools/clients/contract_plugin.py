"""Of contract.py, inside of pytest: keeps outcomes, and has a response that
tests name be one that there is.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# OpenAI's examples. Tests retrieve and delete them, and none makes one.
_EXAMPLES = ("resp_677efb5139a88190b512bc3fef8e535d", "response_id")
_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.removeprefix("tests/api_resources/")
    tells = report.when == "call" or report.outcome != "passed"
    if tells and _outcomes.get(name) != "failed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["CONTRACT_OUTCOMES"]).write_text(json.dumps(_outcomes))


@pytest.fixture(autouse=True)
def kept_response(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A response of the test's own in the place of the example."""
    names = ("test_responses.py", "responses/test_input_items.py")
    if any(name in request.node.nodeid for name in names):
        from openai._base_client import BaseClient

        real: Any = BaseClient._build_request

        def build(self: Any, options: Any, **more: Any) -> Any:
            for example in _EXAMPLES:
                if example in options.url:
                    new = _new_response()
                    options.url = options.url.replace(example, new)
            return real(self, options, **more)

        monkeypatch.setattr(BaseClient, "_build_request", build)
    yield


def _new_response() -> str:
    body = {"input": "Hello", "max_output_tokens": 4}
    call = urllib.request.Request(
        os.environ["TEST_API_BASE_URL"] + "/responses",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        found: str = json.load(answer)["id"]
    return found
