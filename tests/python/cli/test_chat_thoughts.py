"""Thoughts in `gemmakv chat`: shown apart, switched on and off, kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gemmakv
from gemmakv.chat._session import Session
from gemmakv.chat.store import Record, from_store
from gemmakv.cli import console
from gemmakv.cli.chat import commands
from gemmakv.cli.chat.chat import Chat, Defaults
from gemmakv.cli.chat.reply import reply
from gemmakv.cli.chat.view import PipeView, TerminalView, View
from gemmakv.conversations._chat import ChatStore
from support import gemma4_files
from support.bad_files import assert_says
from support.gemma4_files import IDS, script

pytest.importorskip("tokenizers", reason="the extra `tokenizers`")
pytest.importorskip("llguidance", reason="the extra `grammar` is not there")
REPLY = script("<|channel>thought\nthe in\n<channel|>Yes and no")
OPTIONS: dict[str, Any] = {"max_tokens": 60, "grammar": REPLY}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> gemmakv.Gemma:
    path = tmp_path_factory.mktemp("gemma4") / "tiny-it.gguf"
    gemma4_files.write(path)
    return gemmakv.Gemma.load(path, packed_cache=False, prefix_cache=False)


def shown(
    monkeypatch: pytest.MonkeyPatch, gemma: gemmakv.Gemma, view: View
) -> str:
    """What a view writes of one reply."""
    written: list[str] = []
    monkeypatch.setattr(console, "write", written.append)
    chat = Chat(gemma, view, Defaults(options=OPTIONS, think=True), None)
    chat.open(None)
    reply(chat, "Hello")
    chat.close()
    return "".join(written)


@pytest.mark.parametrize("colours", ["standard", None])
def test_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, gemma: gemmakv.Gemma, colours: Any
) -> None:
    view = TerminalView()
    view._console = Console(
        file=io.StringIO(), force_terminal=True, color_system=colours
    )
    text = shown(monkeypatch, gemma, view)
    if colours:
        thought, _, rest = text.rpartition("\x1b[22m")
        assert rest == "\n\nYes and no\n"
        bare = thought.replace("\x1b[2m", "").replace("\x1b[22m", "")
        assert bare == "the in" and thought.startswith("\x1b[2m")
    else:
        assert text == "the in\n\nYes and no\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch, gemma: gemmakv.Gemma, as_json: bool
) -> None:
    text = shown(monkeypatch, gemma, PipeView(as_json))
    if not as_json:
        assert text == "Yes and no\n"
        return
    document = json.loads(text)
    assert document["text"] == "Yes and no"
    assert document["reasoning"] == "the in"


class Quiet(View):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    error = say


def test_a_setting(gemma: gemmakv.Gemma) -> None:
    view = Quiet()
    chat = Chat(gemma, view, Defaults(options={"max_tokens": 3}), None)
    chat.open(None)
    session = chat.session()
    for text, think in (("on", True), ("off", False), ("default", None)):
        commands.run(chat, f"/set think {text}")
        assert session.think is think
        reply(chat, "Hello")
        thinks = IDS["<|think|>"] in session.cache.tokens
        assert thinks == (think is True)
    commands.run(chat, "/set think")
    assert "think is none" in view.lines[-1]
    with pytest.raises(ValueError) as caught:
        commands.run(chat, "/set think much")
    assert_says(caught.value, "think: ", "on or off", "much")
    chat.close()


def test_a_model_that_cannot(talker: gemmakv.Gemma) -> None:
    chat = Chat(talker, Quiet(), Defaults(think=True), None)
    expected = "think: .* think .* plain"
    with pytest.raises(ValueError, match=expected):
        chat.open(None)
    chat.defaults = Defaults(think=False)
    chat.open(None)
    with pytest.raises(ValueError, match=expected):
        commands.run(chat, "/set think on")
    assert chat.session().think is False
    chat.close()


def test_a_session_whose_template_is_gone_thinks_no_more(
    talker: gemmakv.Gemma,
) -> None:
    """It could not be opened, and no chat could start with it."""
    session = Session(talker, options={"max_tokens": 3})
    session.send("hello")
    record = Record("main", messages=session.messages, think=True)
    again, line = from_store(talker, record, None, lambda: Session(talker))
    assert again.messages == session.messages and again.think is None
    assert line.endswith("think is none now, as the template plain has no "
                         "thoughts")


def test_the_reply_is_among_the_tokens_that_are_shown(
    gemma: gemmakv.Gemma,
) -> None:
    # The cache ends before it: the template says it in another way than the
    # model did, and the next turn computes it anew.
    view = Quiet()
    chat = Chat(gemma, view, Defaults(options=OPTIONS), None)
    chat.open(None)
    session = chat.session()
    for _ in range(2):
        reply(chat, "Hello")
        shown = chat.book.current.record.tokens
        assert shown > len(session.cache)
        assert shown == len(
            gemma.apply_chat_template(
                session.messages, add_generation_prompt=False
            )
        )
        chat.show_where()
        assert view.lines[-1].endswith(f"{shown} tokens")
    chat.close()


@pytest.mark.parametrize("think", [True, None])
def test_stored(
    gemma: gemmakv.Gemma, tmp_path: Path, think: bool | None
) -> None:
    defaults = Defaults(options=OPTIONS, think=think)
    folder, weights = tmp_path / "store", gemma.weights_fingerprint
    store = ChatStore.open(folder, weights)
    chat = Chat(gemma, Quiet(), defaults, store)
    chat.open("a")
    reply(chat, "Hello")
    messages, record = chat.session().messages, chat.book.current.record
    assert messages[-1].reasoning == "the in"
    # A record without a choice is one that older versions read.
    assert (b'"think"' in record.to_json()) == (think is not None)
    chat.close()
    store = ChatStore.open(folder, weights)
    again = Chat(gemma, Quiet(), Defaults(), store)
    again.open("a")
    assert again.session().messages == messages
    assert again.session().think is think
    again.close()
