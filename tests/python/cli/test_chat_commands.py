"""The table of commands: parsing, help, completion; names and ancestry."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

import gemmakv
from gemmakv.chat.store import Record
from gemmakv.cli.chat import commands, table
from gemmakv.cli.chat.actions import Leave
from gemmakv.cli.chat.arguments import Kind
from gemmakv.cli.chat.book import Book, Entry
from gemmakv.cli.chat.chat import Chat, Defaults
from gemmakv.cli.chat.completion import ChatCompleter
from gemmakv.cli.chat.reply import reply
from gemmakv.cli.chat.settings import SETTINGS, show
from gemmakv.cli.chat.view import PipeView, TerminalView, summary
from gemmakv.cli.chat.wrap import WordWrap
from gemmakv.conversations import StoreFailed, Turn, new_id
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._store import Conversations
from support.bad_files import assert_says
from support.stored import stored_sessions


def store_of(gemma: gemmakv.Gemma, folder: Path) -> ChatStore:
    return ChatStore.open(folder, gemma.weights_fingerprint)


class FakeView:
    """Keeps what a view would show."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown: list[Any] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    error = say

    def show(self, renderable: Any) -> None:
        self.shown.append(renderable)

    def show_turn(self, messages: list[tuple[str, str]]) -> None:
        self.shown.append(messages)

    def show_messages(
        self, name: str, messages: list[Any], whole: bool
    ) -> None:
        self.shown.append((name, messages, whole))

    def begin_reply(self) -> None:
        pass

    def reading(self, done: int, total: int) -> None:
        pass

    def piece(self, text: str) -> None:
        pass

    thought = piece
    stoppable = contextlib.nullcontext

    def end_reply(self, name: str, generation: gemmakv.Generation) -> None:
        self.lines.append(f"{name}: {generation.text}")

    def drop_reply(self) -> None:
        self.lines.append("dropped")

    width = 80

    def confirm(self, question: str) -> bool:
        self.lines.append(question)
        return True


@pytest.fixture
def chat(talker: gemmakv.Gemma) -> Iterator[Chat]:
    chat = Chat(talker, FakeView(), Defaults(options={"max_tokens": 4}), None)
    chat.open(None)
    yield chat
    chat.close()


def run(chat: Chat, *lines: str) -> str:
    """Runs commands and messages; the last line that was said."""
    for line in lines:
        if commands.is_command(line):
            commands.run(chat, line)
        else:
            reply(chat, line)
    return chat.view.lines[-1]


def complete(chat: Chat, text: str) -> list[str]:
    found = ChatCompleter(chat).get_completions(
        Document(text), CompleteEvent(completion_requested=True)
    )
    return [text[: len(text) + c.start_position] + c.text for c in found]


# ---- Parsing ----


@pytest.mark.parametrize(
    "name, tail, values",
    [
        ("new", "", [None]),
        ("new", " a ", ["a"]),
        ("undo", "3", [3]),
        ("save", " my file.bin ", ["my file.bin"]),
        ("save", '"my file.bin"', ["my file.bin"]),
        ("save", "it's", ["it's"]),
        ("system", "You are\na  pirate. ", ["You are\na  pirate."]),
        ("set", "stop two words", ["stop", "two words"]),
        ("set", "stop", ["stop", None]),
        ("set", "", [None, None]),
        ("tree", "", [None]),
        ("tree", " all ", ["all"]),
        ("show", "", [None]),
        ("show", "2", [2]),
        ("show", "all", ["all"]),
    ],
)
def test_reading_arguments(name: str, tail: str, values: list[Any]) -> None:
    assert commands.find(name).read(tail) == values


@pytest.mark.parametrize(
    "name, tail",
    [("new", "a b"), ("switch", ""), ("undo", "-1"), ("undo", "1.5"),
     ("undo", "9" * 50), ("goto", ""), ("list", "x"), ("save", ""),
     ("tree", "everything"), ("tree", "all of it"),
     ("show", "much"), ("show", "1 all"), ("show", "-1")],
)
def test_errors_show_the_usage(name: str, tail: str) -> None:
    command = commands.find(name)
    with pytest.raises(ValueError, match=re.escape(command.usage)):
        command.read(tail)


def test_lines_that_are_commands() -> None:
    assert commands.is_command("/list")
    assert not commands.is_command("//list")
    assert not commands.is_command("list /")
    assert commands.message_of("//list") == "/list"
    assert commands.message_of("a // b") == "a // b"


def test_every_command_has_help_and_is_asked_for() -> None:
    wanted = ("new list switch fork undo goto rename delete restore save load "
              "system set show stats tree help exit")
    assert list(commands.COMMANDS) == wanted.split()
    for command in commands.COMMANDS.values():
        assert command.help and len(command.help) < 72
        rest = [a for a in command.arguments if a.takes_rest]
        assert not rest or rest == [command.arguments[-1]]
    assert commands.find("quit") is commands.find("/exit")


# ---- What commands do ----


def test_fork_undo_and_switch(chat: Chat) -> None:
    run(chat, "one", "/fork", "two")
    assert chat.book.current.name == "main-2"
    assert [e.record.turns for e in chat.book.entries] == [1, 2]
    run(chat, "/fork", "/switch main", "/fork")
    assert [e.name for e in chat.book.entries] == [
        "main", "main-2", "main-3", "main-4"
    ]
    assert run(chat, "/switch main-2", "/undo 2").endswith("0 turns left")
    assert chat.book.current.record.messages == []
    with pytest.raises(ValueError, match="main, main-2"):
        run(chat, "/switch mai")


def add(chat: Chat, name: str, parent: Entry | None) -> Entry:
    """An entry without a session."""
    record = Record(name, parent=None if parent is None else parent.id)
    return chat.book.add(Entry(record))


def tree(chat: Chat, line: str = "/tree", width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with pytest.MonkeyPatch.context() as patch, console.capture() as capture:
        patch.setattr(chat.view, "width", width)
        patch.setattr(chat.view, "show", console.print)
        commands.run(chat, line)
    return capture.get()


@pytest.mark.parametrize("here", [None, 0, 8, 50, 91, 92, 99])
def test_a_tree_of_a_hundred_forks(chat: Chat, here: int | None) -> None:
    """It was a hundred lines."""
    main = chat.book.current
    forks = [add(chat, f"s{number}", main) for number in range(100)]
    if here is not None:
        chat.book.select(add(chat, "leaf", add(chat, "twig", forks[here])))
    text = tree(chat)
    assert text.count("← here") == 1
    found = re.findall(r"── (?:s(\d+) |… (\d+) more)", text)
    names = [int(name) for name, _ in found if name]
    ends = [*range(8), *range(92, 100)]
    middle = [here] if here is not None and 8 <= here < 92 else []
    assert names == sorted(ends + middle)
    # Each gap says how many are in it.
    at = 0
    for name, gap in found:
        if name:
            assert int(name) == at
        at += int(gap or 1)
    assert at == 100
    assert text.count("more; /tree all shows them") == (
        2 if here == 50 else 1
    )
    whole = tree(chat, "/tree all")
    assert re.findall(r"── s(\d+) ", whole) == [str(i) for i in range(100)]
    assert "more;" not in whole and whole.count("← here") == 1


def test_a_tree_of_a_hundred_beginnings(chat: Chat) -> None:
    others = [add(chat, f"s{number}", None) for number in range(100)]
    text = tree(chat)
    lines = text.splitlines()
    assert len(lines) == 17 and "main ← here" in lines[0]
    assert lines[8].strip() == "… 85 more; /tree all shows them"
    chat.book.select(others[50])
    lines = tree(chat).splitlines()
    assert len(lines) == 19 and "s50 ← here" in lines[9]
    assert len(tree(chat, "/tree all").splitlines()) == 101


def test_a_tree_leaves_out_two_or_more(chat: Chat) -> None:
    main = chat.book.current
    for number in range(17):
        add(chat, f"s{number}", main)
    assert "more" not in tree(chat)
    add(chat, "s17", main)
    assert "… 2 more;" in tree(chat)


@pytest.mark.parametrize("width", [30, 80])
def test_a_tree_of_a_thousand_generations(chat: Chat, width: int) -> None:
    """It ran out of the screen, and out of stack."""
    parent = chat.book.current
    for number in range(1200):
        parent = add(chat, f"s{number}", parent)
    text = tree(chat, width=width)
    for number in range(1200):
        assert f"── s{number} " in text
    assert max(map(len, text.splitlines())) <= width
    lines = text.splitlines()
    cut = [
        re.search(r"── (s\d+) ", line)[1]
        for line, after in zip(lines, lines[1:])
        if "└── … 1 fork" in after
    ]
    assert cut
    assert re.findall(r"^  (s\d+), continued:", text, re.M) == cut


def test_delete_goes_to_the_parent(chat: Chat) -> None:
    run(chat, "one", "/fork twig", "two", "/fork leaf", "/switch twig")
    run(chat, "/delete")
    assert chat.book.current.name == "main"
    leaf = chat.book.find("leaf")
    assert leaf.record.parent == chat.book.find("main").id
    assert leaf.record.forked_at == 1
    assert "leaf" in run(chat, "/delete leaf")
    assert [entry.name for entry in chat.book.entries] == ["main"]
    # The last one leaves an empty one behind.
    run(chat, "/delete")
    assert chat.book.current.name == "main"
    assert chat.session().turns == 0


def test_delete_goes_to_one_that_no_other_chat_has_open(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    defaults = Defaults(options={"max_tokens": 2})
    one = Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
    one.open(None)
    run(one, "hello", "/new twig", "hello", "/new mine", "hello")
    one.close()
    two = Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
    two.open("mine")
    other = store_of(talker, tmp_path)
    assert other.hold(two.book.find("twig").id)
    assert "you are in main now" in run(two, "/delete")
    other.close()
    two.close()


def test_a_session_in_which_a_server_runs_a_turn(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    """There is no chat that could be closed."""
    store = store_of(talker, tmp_path)
    chat = Chat(talker, FakeView(), Defaults(), store)
    chat.open(None)
    record = Record("trip")
    assert store.hold(record.id)
    store.write_record(record)
    store.release(record.id)
    server = Conversations.open(tmp_path)
    server.leases.take("", record.id, "me")
    with pytest.raises(ValueError, match="trip .*a server") as caught:
        run(chat, "/switch trip")
    assert "close it" not in str(caught.value)
    server.leases.release(record.id, "me")
    assert "trip" in run(chat, "/switch trip")
    server.close()
    chat.close()


def test_two_of_one_name_keep_it(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    """To open the second one had renamed it, for servers and pages, too."""
    server = Conversations.open(tmp_path)
    ids = [server.sessions.create("", "trip", None).id for _ in range(2)]
    chat = Chat(
        talker, FakeView(), Defaults(options={"max_tokens": 2}),
        store_of(talker, tmp_path),
    )  # fmt: skip
    chat.open(None)

    def names() -> list[str | None]:
        return [server.sessions.get("", id).name for id in ids]

    run(chat, "/switch trip-2", "one")
    assert chat.book.current.id == ids[1]
    assert chat.book.current.name == "trip-2" and names() == ["trip", "trip"]
    run(chat, "/new", "/list", "/switch trip-2", "two")
    assert names() == ["trip", "trip"]
    with pytest.raises(ValueError, match="there is a session 'trip' already"):
        run(chat, "/rename trip")
    run(chat, "/rename trip-2")
    assert names() == ["trip", "trip-2"]
    run(chat, "/switch main")
    chat.close()
    # What is renamed elsewhere is not renamed back.
    chat = Chat(talker, FakeView(), Defaults(), store_of(talker, tmp_path))
    chat.open("main")
    server.sessions.rename("", ids[0], "tour")
    run(chat, "/switch to")
    run(chat, "/system brief")
    assert chat.book.current.name == "tour" and names() == ["tour", "trip-2"]
    server.close()
    chat.close()


def test_forks_outlive_what_they_were_forked_from(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    """They are those of its parent, whoever deletes it, and whoever has them
    open.
    """
    server = Conversations.open(tmp_path)
    defaults = Defaults(options={"max_tokens": 2})
    chat, other = (
        Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
        for _ in range(2)
    )
    chat.open("root")
    run(chat, "one", "two", "/fork middle", "/undo", "/fork leaf", "three")
    leaf = chat.book.current
    middle = chat.book.find("middle")
    run(chat, "/switch root", "/undo 2")
    chat._release(middle)
    middle.session = None
    page = server.sessions.fork("", middle.id, None, "page")
    assert page.settings["forked_at"] == 1
    server.sessions.delete("", middle.id)
    root = chat.book.find("root").id

    def parents(of: Chat) -> dict[str, tuple[str | None, int]]:
        of.refresh()
        return {
            e.name: (e.record.parent, e.record.forked_at)
            for e in of.book.entries
        }

    wanted = {"root": (None, 0), "leaf": (root, 1), "page": (root, 1)}
    assert parents(chat) == wanted
    run(chat, "/switch leaf", "four")  # which is held here
    assert leaf.record.parent == root
    other.refresh()
    other.open("page")
    assert parents(other) == wanted
    run(chat, "/delete root")
    run(other, "five")
    wanted = {"leaf": (None, 0), "page": (None, 0)}
    assert parents(chat) == parents(other) == wanted
    run(chat, "/restore")
    assert parents(other) == {**wanted, "root": (None, 0)}
    for one in (chat, other, server):
        one.close()


@pytest.mark.parametrize("how", ["deleted", "in the trash", "with tools"])
def test_a_session_that_is_none_for_chats_any_more(
    talker: gemmakv.Gemma, tmp_path: Path, how: str
) -> None:
    """What a server had said there was lost, or no save succeeded."""
    store, other = (store_of(talker, tmp_path) for _ in range(2))
    record = Record("trip")
    assert other.hold(record.id)
    other.write_record(record)
    chat = Chat(talker, FakeView(), Defaults(), store)
    chat.open("main")
    [entry] = [one for one in chat.book.entries if one.name == "trip"]
    if how == "in the trash":
        other.delete(record.id)
    other.close()
    server = Conversations.open(tmp_path)
    if how == "deleted":
        server.sessions.delete("", record.id)
    elif how == "with tools":
        server.leases.take("", record.id, "me")
        call = {"id": "a", "type": "function",
                "function": {"name": "f", "arguments": "{}"}}  # fmt: skip
        turn = Turn(
            id=new_id("resp"), tenant="", parent=None, depth=1, system=None,
            tools=[], messages=[{"role": "user", "content": "hi"}],
            reply={"role": "assistant", "tool_calls": [call]}, reason="stop",
            usage={}, basis="", whole=True, tokens=np.empty(0, np.int32),
        )  # fmt: skip
        server.turns.add(turn, record.id, "me")
    before = stored_sessions(tmp_path), stored_sessions(tmp_path, deleted=True)
    assert not chat.may_open(entry)
    with pytest.raises(ValueError, match="trip was deleted elsewhere, or"):
        chat.session(entry)
    assert not entry.held and not store.holder(record.id)
    assert before == (
        stored_sessions(tmp_path), stored_sessions(tmp_path, deleted=True)
    )  # fmt: skip
    chat.refresh()
    assert [one.name for one in chat.book.entries] == ["main"]
    server.close()
    chat.close()


def test_a_store_that_cannot_be_read_stops_no_command(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    chat = Chat(talker, FakeView(), Defaults(), store_of(talker, folder))
    chat.open(None)
    folder.rename(tmp_path / "moved")
    run(chat, f"/save {tmp_path / 'saved'}", "/help")
    assert (tmp_path / "saved").stat().st_size
    said = [one for one in chat.view.lines if "cannot be read" in one]
    assert len(said) == 1 and str(folder) in said[0]
    with pytest.raises(Leave):
        run(chat, "/exit")
    (tmp_path / "moved").rename(folder)
    run(chat, "/new")
    folder.rename(tmp_path / "moved")
    run(chat, "/help")
    said = [one for one in chat.view.lines if "cannot be read" in one]
    assert len(said) == 2
    (tmp_path / "moved").rename(folder)
    chat.close()


def test_a_store_that_fails_after_a_save_is_said(
    talker_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = gemmakv.PrefixCache("64MiB", disk=tmp_path / "prefix")
    gemma = gemmakv.Gemma.load(talker_path, prefix_cache=prefix)
    defaults = Defaults(options={"max_tokens": 4})
    store = store_of(gemma, tmp_path / "store")
    chat = Chat(gemma, FakeView(), defaults, store)
    chat.open(None)
    run(chat, "one and much more of it, which is taken back")

    def fails(gone: object) -> None:
        raise StoreFailed("sessions: disk I/O error")

    monkeypatch.setattr(store, "shared", fails)
    entry = chat.book.current
    chat.session(entry).undo(1)
    chat.save(entry)
    assert "disk I/O error" in chat.view.lines[-1]
    assert store.read_record(entry.id).messages == []
    chat.close()


def test_delete_opens_no_other_session(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    defaults = Defaults(options={"max_tokens": 2})
    chat = Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
    chat.open(None)
    run(chat, "/fork twig")
    chat.close()
    chat = Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
    chat.open("mine")
    run(chat, "/delete twig")
    other = store_of(talker, tmp_path)
    assert other.hold(chat.book.find("main").id)
    other.close()
    chat.close()


def test_delete_asks_only_where_it_can_delete(
    talker: gemmakv.Gemma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = Defaults(options={"max_tokens": 2})
    one, two = (
        Chat(talker, FakeView(), defaults, store_of(talker, tmp_path))
        for _ in range(2)
    )
    one.open(None)
    run(one, "hello", "/fork twig")
    two.open("mine")
    with pytest.raises(ValueError, match="main .*another"):
        run(two, "/delete main")
    assert not any("Delete main" in line for line in two.view.lines)
    one.close()
    monkeypatch.setattr(two.view, "confirm", lambda question: False)
    assert "kept" in run(two, "/delete main")
    three = store_of(talker, tmp_path)  # and is nobody's
    assert three.hold(two.book.find("main").id)
    three.close()
    monkeypatch.undo()
    assert "deleted" in run(two, "/delete main")
    two.close()


def test_system_text(chat: Chat) -> None:
    assert "/system TEXT" in run(chat, "/system")
    assert "computed again" not in run(chat, "/system Be brief.")
    run(chat, "one")
    assert "computed again" in run(chat, "/system Be long.")
    shown = run(chat, "/system")
    assert "Be long." in shown and "/system none" in shown
    run(chat, "/system none")
    assert chat.session().system is None and chat.session().turns == 1


def test_a_view_is_told_how_much_was_read(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(chat.view, "reading", lambda *read: told.append(read))
    run(chat, "word " * 600)
    assert told == sorted(told)
    done, total = told[-1]
    assert done == total > 600


def test_show_gives_all_messages(chat: Chat) -> None:
    commands.run(chat, "/show")
    assert chat.view.shown.pop() == ("main", [], False)
    with pytest.raises(ValueError, match="0 turns.* 1 "):
        run(chat, "/show 1")
    run(chat, "/system Be brief.", "one", "two", "/show")
    _, shown, whole = chat.view.shown.pop()
    assert [message for _, message in shown] == chat.session().messages
    assert [turn for turn, _ in shown] == [0, 1, 1, 2, 2] and not whole
    run(chat, "/show all")
    assert chat.view.shown.pop() == ("main", shown, True)
    run(chat, "/show 2")
    assert chat.view.shown.pop() == ("main", shown[3:], True)
    for turn in (0, 3):
        with pytest.raises(ValueError, match="2 turns"):
            run(chat, f"/show {turn}")


def on_screen(
    messages: list[tuple[int, gemmakv.Message]], whole: bool = False
) -> str:
    """What a terminal shows of messages."""
    view, file = TerminalView(), io.StringIO()
    view._console = Console(file=file, width=80, color_system=None)
    view.show_messages("main", messages, whole)
    return file.getvalue()


def test_each_part_of_a_message_is_shown_as_what_it_is() -> None:
    arguments = {"city": "Zürich"}
    call = {"function": {"name": "weather", "arguments": arguments}}
    say = gemmakv.Message
    messages = [
        (0, say("system", "Be brief.")),
        (1, say("user", "one\ntwo \x1b[31m")),
        (1, say("assistant", "", extra={"reasoning": "a\nb"},
                tool_calls=[call])),
        (1, say("tool", {"degrees": 7}, name="weather")),
        (1, say("assistant", "Cold.", incomplete=True)),
        (2, say("user", "three")),
    ]  # fmt: skip
    assert on_screen(messages) == (
        "system: Be brief.\n"
        "1> one\n  two ␛[31m\n"
        "thought: a\n  b\n"
        'call: weather {"city": "Zürich"}\n'
        'tool weather: {"degrees": 7}\n'
        "Cold.\n"
        "note: cut short\n"
        "\n"
        "2> three\n"
    )
    assert on_screen([]) == "main: nothing said yet\n"


def test_of_many_turns_the_first_and_last_are_shown() -> None:
    messages = [(0, gemmakv.Message("system", "s"))]
    for turn in range(1, 101):
        messages += [(turn, gemmakv.Message("user", f"q{turn}")),
                     (turn, gemmakv.Message("assistant", f"a{turn}"))]
    ends = [*range(1, 9), *range(93, 101)]
    text = on_screen(messages)
    assert re.findall(r"> q(\d+)", text) == [str(n) for n in ends]
    assert re.findall(r"^a(\d+)", text, re.M) == [str(n) for n in ends]
    assert text.count("… 84 more turns; /show all shows them") == 1
    assert "… " not in on_screen(messages[: 1 + 2 * 17])
    assert "… 2 more turns;" in on_screen(messages[: 1 + 2 * 18])
    whole = on_screen(messages, whole=True)
    assert re.findall(r"> q(\d+)", whole) == [str(n) for n in range(1, 101)]
    assert "… " not in whole


def test_of_long_messages_the_beginning_is_shown() -> None:
    text = "\n".join(f"line {n}" for n in range(1, 101))
    messages = [(3, gemmakv.Message("user", text))]
    shown = on_screen(messages)
    assert "line 6\n  … /show 3 shows the rest\n" in shown
    assert "line 7" not in shown
    assert "line 100" in on_screen(messages, whole=True)


def test_a_pipe_shows_messages_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    messages = [
        (number, gemmakv.Message("user", "ä" * 500 + "\nb"))
        for number in range(1, 31)
    ]
    PipeView().show_messages("main", messages, False)
    out, err = capfd.readouterr()
    assert not out and err.splitlines() == [
        line
        for number in range(1, 31)
        for line in (f"{number} user: " + "ä" * 500, "  b")
    ]
    PipeView(as_json=True).show_messages("main", messages, False)
    out, err = capfd.readouterr()
    assert not err and out.count("\n") == 1
    document = json.loads(out)
    assert document["session"] == "main"
    assert document["messages"] == [
        {"turn": turn, "role": "user", "content": message.content}
        for turn, message in messages
    ]


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("max_tokens", "7", 7),
        ("temperature", "0.5", 0.5),
        ("seed", "12", 12),
        ("stop", "a b", ["a b"]),
        ("stop", r"\nUser:", ["\nUser:"]),
        ("stop", '["a", "b\\n"]', ["a", "b\n"]),
        ("stop", '["none"]', ["none"]),
        ("min_tokens", "3", 3),
        ("stop_token_ids", "300, 301", [300, 301]),
        ("ignore_eos", "on", True),
        ("deadline", "60", 60.0),
    ],
)
def test_set(chat: Chat, key: str, text: str, value: object) -> None:
    said = run(chat, f"/set {key} {text}")
    assert key in said and show(value) in said
    assert chat.session().options[key] == value
    assert chat.book.current.record.options[key] == value
    run(chat, f"/set {key} default")
    assert key not in chat.session().options
    run(chat, "one")


@pytest.mark.parametrize(
    "key, text",
    [("max_tokens", "-1"), ("max_tokens", "many"), ("temperature", "-1"),
     ("temperature", "nan"), ("top_p", "0"), ("min_p", "2"),
     ("repetition_penalty", "0"), ("seed", "-1"), ("stop", "[1]"),
     ("stop", "[oh"), ("overflow", "wrap"),
     ("max_tokens", "99999999999"), ("max_tokens", "true"),
     ("stop_token_ids", "99999"), ("ignore_eos", "maybe")],
)
def test_bad_values_are_refused_at_once(
    chat: Chat, key: str, text: str
) -> None:
    before = dict(chat.session().options)
    with pytest.raises(ValueError, match=key):
        run(chat, f"/set {key} {text}")
    assert chat.session().options == before


def test_none_unsets(chat: Chat) -> None:
    for key, text in (("stop", "x"), ("seed", "5"), ("deadline", "9")):
        run(chat, f"/set {key} {text}")
        assert key in chat.session().options
        assert "none" in run(chat, f"/set {key} none")
        assert key not in chat.session().options


def test_overflow_is_a_setting_too(chat: Chat) -> None:
    run(chat, "/set overflow drop_oldest_turns")
    assert chat.session().overflow == "drop_oldest_turns"
    run(chat, "/set overflow default")
    assert chat.session().overflow == "error"


def test_guesses_are_switched(chat: Chat) -> None:
    assert isinstance(chat.view, FakeView)
    commands.run(chat, "/set speculate off")
    assert chat.session().options["speculate"] == "off"
    with pytest.raises(ValueError, match="--draft"):
        commands.run(chat, "/set speculate draft")
    with pytest.raises(ValueError) as caught:
        commands.run(chat, "/set speculate much")
    assert_says(caught.value, "speculate: ", "'off', 'lookup'", "'much'")
    commands.run(chat, "/set speculate default")
    assert "speculate" not in chat.session().options
    # What the model does then, which is not nothing.
    assert chat.view.lines[-1] == "speculate is lookup now"
    assert SETTINGS["speculate"].choices[:3] == ("off", "lookup", "draft")


def test_a_draft_may_guess_where_there_is_one(
    tiny: gemmakv.Gemma, tiny_path: Path
) -> None:
    with gemmakv.Gemma.load(tiny_path, draft=tiny) as gemma:
        defaults = Defaults(options={"max_tokens": 4})
        chat = Chat(gemma, FakeView(), defaults, None)
        chat.open(None)
        assert run(chat, "/set speculate").startswith("speculate is draft ")
        commands.run(chat, "/set speculate draft")
        reply(chat, "Hello")
        assert chat.session().options["speculate"] == "draft"
        assert chat.session().turns == 1
        chat.close()


def test_a_session_whose_draft_is_missing_goes_on_without(
    talker: gemmakv.Gemma, tmp_path: Path
) -> None:
    store = store_of(talker, tmp_path)
    record = Record("main", options={"speculate": "draft", "max_tokens": 4})
    assert store.hold(record.id)
    store.write_record(record)
    store.close()
    view = FakeView()
    chat = Chat(talker, view, Defaults(), store_of(talker, tmp_path))
    chat.open("main")
    assert "--draft" in view.lines[0]
    assert chat.session().options == {"max_tokens": 4}
    reply(chat, "Hello")
    chat.close()


def test_the_status_line_says_how_many_guesses_were_right(
    talker: gemmakv.Gemma,
) -> None:
    cache = gemmakv.create_kv_cache(talker.config)
    plain = talker.generate(cache, "a", max_tokens=3, speculate="off")
    assert "guesses" not in summary(plain)
    usage = dataclasses.replace(plain.usage, drafted=1200, accepted=7)
    line = summary(dataclasses.replace(plain, usage=usage))
    assert "7 of 1,200 guesses right" in line


def test_the_status_line_says_that_the_deadline_ended_a_reply(
    talker: gemmakv.Gemma,
) -> None:
    cache = gemmakv.create_kv_cache(talker.config)
    late = talker.generate(cache, "a", max_tokens=3, deadline=0)
    assert summary(late) == "0 tokens · cut at the deadline"


def test_settings_are_those_of_generation() -> None:
    from gemmakv.generation._options import Options

    assert set(SETTINGS) - {"overflow", "think"} <= set(Options.__annotations__)


def test_a_failed_reply_changes_nothing(chat: Chat) -> None:
    run(chat, "one")
    before = chat.book.current.record.to_json()
    with pytest.raises(ValueError, match="surrogate"):
        run(chat, "\ud800")
    assert chat.view.lines[-1] == "dropped"
    assert chat.book.current.record.to_json() == before


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", __file__])
def test_loading_what_is_no_session(chat: Chat, path: str) -> None:
    """Its first bytes are enough to tell: /dev/zero has no end."""
    with pytest.raises(gemmakv.CorruptFile) as found:
        run(chat, f"/load {path}")
    assert_says(found.value, f"{path}: ", "saved session")
    assert str(found.value).count("expected") == 1
    assert [entry.name for entry in chat.book.entries] == ["main"]


def test_loading_a_part_of_a_session(chat: Chat, tmp_path: Path) -> None:
    """One of ten bytes was said to begin with the wrong ones."""
    path = tmp_path / "saved"
    run(chat, "one", f"/save {path}")
    data = path.read_bytes()
    for size, words in (
        (10, ["saved session", " 10 bytes"]),
        (100, [f" {len(data)} bytes", " 100"]),
    ):
        path.write_bytes(data[:size])
        with pytest.raises(gemmakv.CorruptFile) as caught:
            run(chat, f"/load {path}")
        assert_says(caught.value, f"{path}: ", *words)


# ---- Completion ----


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_paths_that_are_none(chat: Chat, command: str) -> None:
    for path, found in (
        ("~nobody-here/a", "~nobody-here/a: "),
        ("''", "path of a file"),
        ("a\0b", r"'a\x00b'"),
    ):
        with pytest.raises(ValueError) as caught:
            run(chat, f"{command} {path}")
        assert_says(caught.value, found)


def test_an_error_while_loading_names_the_file(chat: Chat) -> None:
    with pytest.raises(OSError) as caught:
        run(chat, "/load /proc/self/mem")
    assert caught.value.filename == "/proc/self/mem"


def test_completion_of_each_kind(chat: Chat, tmp_path: Path) -> None:
    run(chat, "/new alpha", "/new beta")
    assert complete(chat, "/sw") == ["/switch "]
    assert complete(chat, "/st") == ["/stats"]
    assert complete(chat, "/switch ") == [
        "/switch main", "/switch alpha", "/switch beta"
    ]
    assert complete(chat, "/switch al") == ["/switch alpha"]
    assert complete(chat, "/switch alpha ") == []
    assert complete(chat, "/set top") == ["/set top_k ", "/set top_p "]
    assert complete(chat, "/set overflow d") == [
        "/set overflow drop_oldest_turns", "/set overflow default"
    ]
    assert complete(chat, "/help u") == ["/help undo"]
    assert complete(chat, "/tree ") == ["/tree all"]
    (tmp_path / "talk.chat").touch()
    assert complete(chat, f"/load {tmp_path}/ta") == [
        f"/load {tmp_path}/talk.chat"
    ]
    for none in ("hello /sw", "//sw", "/list ", "/nope x", "/sw\nx"):
        assert complete(chat, none) == []


def test_every_kind_completes_without_an_error(chat: Chat) -> None:
    for command in commands.COMMANDS.values():
        for argument in command.arguments:
            assert isinstance(argument.kind, Kind)
        complete(chat, f"/{command.name} ")
        complete(chat, f"/{command.name} a b c")


# ---- Names ----


def test_names_that_only_a_newer_version_can_read() -> None:
    book = Book([Record("a", created=1), Record("b", created=2)], {"b"})
    assert [entry.name for entry in book.entries] == ["a", "b-2"]
    with pytest.raises(ValueError, match="newer gemmakv"):
        book.check_new_name("b")
    book.update([Record("c")], ())  # other chats' changes
    assert [entry.name for entry in book.entries] == ["c"]
    assert book.check_new_name("b") == "b"


def test_names(chat: Chat) -> None:
    for bad in ("/x", "a" * 41, "a\x1bb", "main", '""', '"a"', "'"):
        with pytest.raises(ValueError):
            run(chat, f"/new {bad}")
    assert len(chat.book.entries) == 1
    run(chat, "/new", "/rename émile")
    assert [e.name for e in chat.book.entries] == ["main", "émile"]
    run(chat, "/new rock'n'roll")
    with pytest.raises(ValueError, match="letters that show"):
        run(chat, "/new \u202ename")


def test_a_book_of_odd_records() -> None:
    """Names that are double and parents that are gone do no harm."""
    book = Book([
        Record("a", created=2, parent="gone", forked_at=3),
        Record("a", created=1),
    ])
    assert [entry.name for entry in book.entries] == ["a", "a-2"]
    assert len(book.children(None)) == 2


def test_a_fork_of_a_deleted_fork_moves_up() -> None:
    root = Record("root")
    middle = Record("middle", parent=root.id, forked_at=2)
    leaf = Record("leaf", parent=middle.id, forked_at=5)
    book = Book([root, middle, leaf])
    changed = book.remove(book.find("middle"))
    assert changed == [book.find("leaf")]
    assert (leaf.parent, leaf.forked_at) == (root.id, 2)
    assert book.heirs(book.find("leaf")) == [book.find("root")]


# ---- How things are put ----


def test_words() -> None:
    assert table.count(1, "turn") == "1 turn"
    assert table.count(1234, "token") == "1,234 tokens"
    assert table.preview("a\n b " * 50)[-1] == "…"
    assert table.printable("a\x1b[31m\x07\x9b\n") == "a␛[31m␇\ufffd\n"


def wrapped(text: str, width: int, size: int) -> list[str]:
    """The lines that a terminal shows, the text written in small pieces."""
    import pyte

    screen = pyte.Screen(width, 20)
    stream = pyte.Stream(screen)
    wrap = WordWrap(
        lambda out: stream.feed(out.replace("\n", "\r\n")), lambda: width
    )
    for at in range(0, len(text), size):
        wrap.write(text[at : at + size])
    wrap.end()
    assert screen.cursor.x == 0
    lines = [line.rstrip() for line in screen.display]
    return lines[: screen.cursor.y]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_wrapping(size: int) -> None:
    assert wrapped("one two three four", 10, size) == [
        "one two", "three", "four"
    ]
    assert wrapped("123456789 b", 10, size) == ["123456789", "b"]
    assert wrapped("a 123456789", 10, size) == ["a", "123456789"]
    assert wrapped("a 1234567890123 b", 10, size) == [
        "a", "123456789", "0123 b"
    ]
    assert wrapped("a\n\n  b", 10, size) == ["a", "", "  b"]
    assert wrapped("日本 日本語 x", 10, size) == ["日本", "日本語 x"]


def test_a_line_is_redrawn_after_what_is_being_written() -> None:
    """A signal may ask for it then: stdout refused to be written to twice at
    once, and the chat ended.
    """
    written: list[str] = []

    def write(text: str) -> None:
        if not written:
            wrap.redraw()
        written.append(text)

    wrap = WordWrap(write, lambda: 80)
    wrap.write("one")
    wrap.write(" two")
    assert written == ["one", "\r\x1b[Kone", " two"]
