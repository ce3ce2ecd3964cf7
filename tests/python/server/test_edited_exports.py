"""An export whose texts and tokens no longer belong together: what the model
reads is what is shown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import USER, get, post
from support.kept import prompts_of

SESSIONS, CHAT = "/v1/sessions", "/v1/chat/completions"
Edit = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def document(kept: App) -> dict[str, Any]:
    id = post(kept, SESSIONS, {"system": "Be kind."}).json()["id"]
    for text in ("one", "two", "three"):
        said = [{"role": "user", "content": f"question {text}"}]
        post(kept, CHAT, {"session": id, "messages": said})
    found: dict[str, Any] = get(kept, f"{SESSIONS}/{id}/export").json()
    return found


def _text(turns: list[dict[str, Any]]) -> None:
    turns[1]["messages"][0]["content"] = "another question"


def _reply(turns: list[dict[str, Any]]) -> None:
    turns[1]["reply"]["content"] = "another reply"


def _tokens(turns: list[dict[str, Any]]) -> None:
    turns[1]["tokens"][-1] += 1


def _system(turns: list[dict[str, Any]]) -> None:
    turns[1]["system"] = "Be rude."


def _gone(turns: list[dict[str, Any]]) -> None:
    turns[0]["messages"] += turns[0]["messages"]


def test_an_export_as_it_was(kept: App, document: dict[str, Any]) -> None:
    digests = [turn["digest"] for turn in document["turns"]]
    assert len(set(digests)) == 3 and all(digests)
    made = post(kept, f"{SESSIONS}/import", document).json()
    assert not any(made["rendered"].values())
    again = get(kept, f"{SESSIONS}/{made['id']}/export").json()
    assert again["turns"] == document["turns"]


@pytest.mark.parametrize("edit, first", [
    (_text, 1), (_reply, 1), (_tokens, 1), (_system, 1), (_gone, 0),
])  # fmt: skip
def test_the_model_reads_what_is_shown(
    kept: App, document: dict[str, Any], edit: Edit, first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Once it read the tokens of the texts that had stood there."""
    edited = copy.deepcopy(document)
    edit(edited["turns"])
    made = post(kept, f"{SESSIONS}/import", edited).json()
    rendered = made["rendered"]
    assert rendered["edited"] == [first]
    assert rendered["after_these"] == list(range(first + 1, 3))
    id = made["id"]
    turns = get(kept, f"{SESSIONS}/{id}").json()["turns"]
    for turn, given in zip(turns, edited["turns"]):
        assert turn["messages"] == given["messages"]
    prompts = prompts_of(kept, monkeypatch)
    body = {"session": id, "messages": USER, "max_tokens": 1}
    assert post(kept, CHAT, body).status_code == 200
    service = kept.service
    assert service is not None
    said: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for turn in edited["turns"]:
        said += [*turn["messages"], turn["reply"]]
    assert prompts == [service.prompts.render([*said, *USER]).tolist()]


def test_an_export_without_digests_is_read_as_text(
    kept: App, document: dict[str, Any]
) -> None:
    """Those of earlier versions have none."""
    for turn in document["turns"]:
        del turn["digest"]
    made = post(kept, f"{SESSIONS}/import", document).json()
    assert made["rendered"]["no_digest"] == [0, 1, 2]
    again = get(kept, f"{SESSIONS}/{made['id']}/export").json()
    assert not any(turn["tokens"] for turn in again["turns"])


def test_turns_that_change_places(kept: App, document: dict[str, Any]) -> None:
    turns = document["turns"]
    for turn in turns[1:]:
        turn["whole"] = True
        turn["tokens"] = []
    turns[1], turns[2] = turns[2], turns[1]
    made = post(kept, f"{SESSIONS}/import", document).json()
    assert made["rendered"]["edited"] == [1, 2]


def test_tokens_of_another_model_are_named(
    kept: App, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.kept import history

    monkeypatch.setattr(history(kept), "basis", "another")
    made = post(kept, f"{SESSIONS}/import", document).json()
    assert made["rendered"]["other_model"] == [0, 1, 2]
    assert made["rendered"]["edited"] == []
