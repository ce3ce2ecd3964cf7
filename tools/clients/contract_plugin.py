"""Runs inside the tests of contract.py: keeps outcomes, has what tests name by
example be there, and sends requests again without what the server refuses.

A request whose answer is a 400 or a 404 that names a field is sent again
without that field, as often as the answer names another one. What was left out
is kept with the outcomes.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

_MOST_AGAIN = 40  # of one request
_MESSAGE = re.compile(r"([A-Za-z_][\w-]*(?:\[\d+\]|\.[\w-]+)*): ")
_outcomes: dict[str, str] = {}
_left_out: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.removeprefix("tests/api_resources/")
    tells = report.when == "call" or report.outcome != "passed"
    if tells and _outcomes.get(name) != "failed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish() -> None:
    found = {"outcomes": _outcomes, "left_out": _left_out}
    Path(os.environ["CONTRACT_OUTCOMES"]).write_text(json.dumps(found))


@pytest.fixture(autouse=True)
def without_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the clients send requests again, without refused fields."""
    send, send_async = httpx2.Client.send, httpx2.AsyncClient.send

    def sent(self: Any, request: Any, **more: Any) -> Any:
        request = _with_examples(request)
        response = send(self, request, **more)
        for _ in range(_MOST_AGAIN):
            if response.status_code in (400, 404):
                response.read()
            smaller = _without_refused(request, response)
            if smaller is None:
                break
            request = smaller
            response = send(self, request, **more)
        return response

    async def sent_async(self: Any, request: Any, **more: Any) -> Any:
        request = _with_examples(request)
        response = await send_async(self, request, **more)
        for _ in range(_MOST_AGAIN):
            if response.status_code in (400, 404):
                await response.aread()
            smaller = _without_refused(request, response)
            if smaller is None:
                break
            request = smaller
            response = await send_async(self, request, **more)
        return response

    monkeypatch.setattr(httpx2.Client, "send", sent)
    monkeypatch.setattr(httpx2.AsyncClient, "send", sent_async)


def _without_refused(request: Any, response: Any) -> Any:
    """The request without the field that the answer refuses; None if it
    refuses none that is there.
    """
    if response.status_code not in (400, 404):
        return None
    error = response.json().get("error")
    error = error if isinstance(error, dict) else {"message": str(error)}
    named = _MESSAGE.match(error.get("message") or "")
    path = error.get("param") or (named and named[1])
    if not path:
        return None
    steps: list[str | int] = [
        int(index) if index else name
        for name, index in re.findall(r"([^.\[\]]+)(?!\])|\[(\d+)\]", path)
    ]
    url, body = request.url, None
    if steps[0] in url.params:
        removed = url.params.remove(str(steps[0]))
        url = url.copy_with(params=removed)
    elif request.content:
        body = json.loads(request.content)
        if not _remove(body, steps):
            return None
    else:
        return None
    kind = re.sub(r"\[\d+\]", "[]", path)
    _left_out[f"{request.method} {_route_of(url.path)} {kind}"] += 1
    return _changed(request, url, body)


def _changed(request: Any, url: Any, body: Any) -> Any:
    """A request with another address and, unless it is None, another body."""
    content = request.content
    if body is not None:
        content = json.dumps(body).encode()
    headers = request.headers.copy()
    for name in ("content-length", "transfer-encoding"):
        headers.pop(name, None)
    return httpx2.Request(
        request.method,
        url,
        headers=headers,
        content=content or None,
        extensions=request.extensions,
    )


def _remove(body: Any, steps: list[str | int]) -> bool:
    """Removes what is at the place, or the last part on the way to it that is
    there; says whether there is any.
    """
    found = None
    for step in steps:
        there = (
            step in body
            if isinstance(body, dict)
            else isinstance(body, list)
            and isinstance(step, int)
            and step < len(body)
        )
        if not there:
            break
        found = (body, step)
        body = body[step]
    if found is None:
        return False
    whole, last = found
    del whole[last]
    return True


def _route_of(path: str) -> str:
    return re.sub(r"/(resp|conv|sess|msg|fc)_\w+", r"/ID", path)


# What OpenAI's examples name. Tests retrieve and delete these, and none makes
# one.
_RESPONSE = re.compile("resp_677efb5139a88190b512bc3fef8e535d|response_id")
_CONVERSATION = re.compile("(?<=/conversations/)conv_123")
_ITEM = re.compile("(?<=/items/)msg_abc")
_MODEL = re.compile("(?<=/models/)[^/]+")


def _with_examples(request: Any) -> Any:
    """The request with what is there in the place of the examples."""
    path = real = request.url.path
    if _RESPONSE.search(path):
        body = {"input": "Hello", "max_output_tokens": 4}
        real = _RESPONSE.sub(_made("/responses", body)["id"], path)
    elif _CONVERSATION.search(path):
        item = {"role": "user", "content": "Hello"}
        id = _made("/conversations", {"items": [item]})["id"]
        real = _CONVERSATION.sub(id, path)
        if _ITEM.search(path):
            items = _made(f"/conversations/{id}/items", {"items": [item]})
            real = _ITEM.sub(items["first_id"], real)
    else:
        real = _MODEL.sub(os.environ["CONTRACT_MODEL"], path)
    if real == path:
        return request
    return _changed(request, request.url.copy_with(path=real), None)


def _made(path: str, body: Any) -> Any:
    call = urllib.request.Request(
        os.environ["TEST_API_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        return json.load(answer)
