"""`gemmakv chat` as a person uses it, on a terminal."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmakv import _core
from support.chat_screen import (
    CTRL_C,
    CTRL_D,
    DOWN,
    ENTER,
    ESCAPE,
    TAB,
    UP,
    Screen,
)
from support.stored import stored_session, stored_sessions
from support.waits import wait_until

Start = Callable[..., Screen]
REPLY = r"12 tokens · [\d,.]+ tokens/s · first after"


@pytest.fixture
def start(
    talker_path: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Start]:
    """Starts chats whose sessions lie in `tmp_path`; ends them.

    They are forks, but where `new` asks for a new process of Python.
    """
    screens = []
    cache = tmp_path_factory.mktemp("cache")
    # It is there: nothing is said of it.
    _core.FolderStore(
        str(cache / "gemmakv/prefix"),
        tier="disk",
        mapped=False,
        budget_bytes=1 << 30,
    )

    def run(
        *arguments: object,
        max_tokens: int = 12,
        new: bool = False,
        **options: Any,
    ) -> Screen:
        screen = Screen(
            "chat", "--model", talker_path, "--max-tokens", max_tokens,
            *arguments, XDG_DATA_HOME=str(tmp_path),
            XDG_CACHE_HOME=str(cache), new=new, **options,
        )  # fmt: skip
        screens.append(screen)
        return screen

    yield run
    for screen in screens:
        screen.close()


def say(screen: Screen, text: str, name: str = "main") -> None:
    """Sends a message and waits for the reply and the next prompt."""
    before = screen.raw.count(b"tokens/s")
    screen.line(text)
    screen.wait_until(lambda: screen.raw.count(b"tokens/s") > before, "reply")
    screen.wait_for_prompt(name)


def recall(screen: Screen, name: str, text: str) -> None:
    """Finds `text` among what was typed before, by the Up and Down keys.

    It is read in the background and shown when the program comes to it, so
    that a key may find nothing yet, and the next go one too far.
    """
    keys = itertools.cycle([UP] * 6 + [DOWN] * 6)

    def found() -> bool:
        screen.type(next(keys))
        screen.update(0.3)
        return screen.prompt == f"{name}> {text}"

    screen.wait_until(found, text)


class Keys:
    """The keys that a chat with the program `before` has read."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "keys"
        self._file.touch()
        self.before = (
            "from gemmakv.cli.chat.paste import PasteParser\n"
            "feed = PasteParser.feed\n"
            "def note(self, data):\n"
            "    feed(self, data)\n"
            f"    with open({str(self._file)!r}, 'ab') as file:\n"
            "        file.write(data.encode())\n"
            "PasteParser.feed = note\n"
        )

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text.encode() in self._file.read_bytes())


class HeldReply(Keys):
    """A reply that stands still after its first pieces until `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._gate, self._stands = folder / "gate", folder / "stands"
        written = folder / "written"
        self._gate.touch()
        self.before += (
            "import itertools, os, time\n"
            "from gemmakv.cli.chat.view import TerminalView\n"
            "piece, number = TerminalView.piece, itertools.count()\n"
            "def hold(self, text):\n"
            "    piece(self, text)\n"
            "    if next(number) == 120:\n"
            f"        with open({str(written)!r}, 'w') as file:\n"
            "            file.write(self._wrap._line)\n"
            f"        os.rename({str(written)!r}, {str(self._stands)!r})\n"
            f"        while os.path.exists({str(self._gate)!r}):\n"
            "            time.sleep(0.001)\n"  # the test opens it soon
            "TerminalView.piece = hold\n"
        )

    def line(self) -> str:
        """Waits until the reply stands, and gives the line that it is in."""
        wait_until(self._stands.exists)
        return self._stands.read_text().rstrip()

    def go(self) -> None:
        self._gate.unlink()


@pytest.fixture
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def held(tmp_path_factory: pytest.TempPathFactory) -> HeldReply:
    return HeldReply(tmp_path_factory.mktemp("held"))


@pytest.mark.slow
def test_many_sessions(start: Start) -> None:
    screen = start(new=True)
    screen.wait_for_prompt("main")
    assert "/help" in screen.text
    say(screen, "hello there")
    screen.wait_for(REPLY, regex=True)
    screen.line("/fork")
    screen.wait_for(r"forked main at 1 turn in [\d,]+ µs", regex=True)
    screen.wait_for_prompt("main-2")
    say(screen, "and then?", "main-2")
    screen.line("/new other")
    screen.wait_for_prompt("other")
    screen.line("/tree")
    screen.wait_for("└── main-2  from turn 1  2 turns  “and then?”")
    screen.wait_for("other ← here  0 turns")
    screen.line("/switch main-2")
    screen.wait_for_prompt("main-2")
    screen.wait_for("main-2: 2 turns")
    screen.line("/undo")
    screen.wait_for("took back “and then?”; 1 turn left")
    screen.line("/goto 0")
    screen.wait_for("main-2: nothing said yet")
    screen.line("/rename second")
    screen.wait_for_prompt("second")
    screen.line("/stats")
    text = screen.wait_for("prefill saved")
    assert re.search(r"last fork +[\d.]+ µs", text)
    screen.line("/delete")
    screen.wait_for("deleted second; you are in main now")
    screen.line("/list")
    screen.wait_for(
        r"\* +main +1 turn +[\d,]+ tokens +(just now|\d+ minutes? ago) +"
        "“hello there”",
        regex=True,
    )
    screen.line("/exit")
    assert screen.wait_for_exit() == 0


def test_ctrl_c_stops_the_reply_and_the_session_goes_on(start: Start) -> None:
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.type(CTRL_C)
    screen.wait_for("stopped")
    screen.wait_for_prompt("main")
    screen.line("/set max_tokens 12")
    screen.wait_for("max_tokens is 12 now")
    say(screen, "go on")
    screen.line("/undo 2")
    screen.wait_for("took back 2 turns; 0 turns left")
    assert "Traceback" not in screen.text


# Until it is stopped for the first time, no reply comes to its first token.
LONG_READING = """
import time
from gemmakv.chat._session import Session
from gemmakv.generation._stream import Stream

cancel, stream, stopped = Stream.cancel, Session.stream, []

def note(self):
    cancel(self)
    stopped.append(True)

def wait(token_ids, logits):
    while not stopped:
        time.sleep(0.001)

def hold(self, text, **options):
    processor = None if stopped else wait
    return stream(self, text, logits_processor=processor, **options)

Stream.cancel, Session.stream = note, hold
"""


def test_ctrl_c_while_reading_takes_the_message_back(start: Start) -> None:
    screen = start(columns=100, rows=60, before=LONG_READING)
    screen.wait_for_prompt("main")
    text = "\n".join(["once more with feeling " * 40] * 60)
    screen.type(f"\x1b[200~{text}\x1b[201~")
    screen.wait_for(r"feeling\s*\n\n*0 turns", regex=True)
    screen.type(ENTER)
    screen.wait_for("reading")
    screen.type(CTRL_C)
    screen.wait_for("so the message is taken back")
    screen.wait_for("0 turns ·")
    say(screen, "hello")
    screen.wait_for("1 turn ·")


def test_a_long_reading_shows_how_far_it_is(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = tmp_path_factory.mktemp("reading") / "gate"
    gate.touch()
    wait = (
        "import os, time\n"
        "from gemmakv.chat._session import Session\n"
        "stream = Session.stream\n"
        "def hold(self, text, prompt_progress, **options):\n"
        "    prompt_progress(3072, 9000)\n"
        f"    while os.path.exists({str(gate)!r}):\n"
        "        time.sleep(0.001)\n"  # the test opens it soon
        "    return stream(self, text, **options)\n"
        "Session.stream = hold\n"
    )
    screen = start(before=wait)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for("reading 3,072 of 9,000 tokens")
    gate.unlink()
    screen.wait_for("tokens/s")
    screen.wait_for_prompt("main")
    assert "reading" not in screen.text


def test_ctrl_c_at_the_prompt(start: Start) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    screen.type("half a tho")
    screen.wait_for("half a tho")
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    screen.type(CTRL_C)
    screen.wait_for("Ctrl-C again")
    screen.type("x")  # changed their mind
    screen.wait_for("main> x")
    screen.wait_until(lambda: "Ctrl-C again" not in screen.text, "no question")
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    screen.type(CTRL_C)
    screen.wait_for("Ctrl-C again")
    screen.type("\x1b[200~pasted\x1b[201~")
    screen.wait_for("main> pasted")
    screen.wait_until(lambda: "Ctrl-C again" not in screen.text, "no question")
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    screen.type(CTRL_C)
    screen.wait_for("Ctrl-C again")
    screen.type(CTRL_C)
    assert screen.wait_for_exit() == 0


@pytest.mark.slow
def test_kill_and_resume(start: Start, tmp_path: Path) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    say(screen, "remember me")
    screen.line("/fork twig")
    screen.wait_for_prompt("twig")
    say(screen, "twice", "twig")
    os.kill(screen.process.pid, signal.SIGKILL)
    assert screen.wait_for_exit() == -signal.SIGKILL

    screen = start()
    screen.wait_for_prompt("twig")
    assert re.search(r"twig: 2 turns, [\d,]+ tokens", screen.text)
    assert "> twice" in screen.text
    screen.line("/tree")
    screen.wait_for("└── twig ← here  from turn 1  2 turns")
    say(screen, "a third time", "twig")

    recall(screen, "twig", "twice")
    screen.type(CTRL_C, CTRL_D)
    assert screen.wait_for_exit() == 0
    assert len(stored_sessions(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.tmp"))
    folder = tmp_path / "gemmakv/conversations"
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0


def test_two_chats_at_the_same_time(start: Start, tmp_path: Path) -> None:
    first = start()
    first.wait_for_prompt("main")
    say(first, "mine")
    second = start(columns=200)
    second.wait_for_prompt("main-2")
    assert "other chats have the stored sessions open" in second.text
    say(second, "yours", "main-2")
    second.line("/switch main")
    second.wait_for(f"another gemmakv chat (process {first.process.pid})")
    second.type(CTRL_D)
    assert second.wait_for_exit() == 0
    say(first, "still here")
    first.line("/switch main-2")  # it is free now
    first.wait_for("main-2: 1 turn")
    first.type(CTRL_D)
    assert first.wait_for_exit() == 0
    third = start()
    third.wait_for("main-2: 1 turn")
    third.wait_for("> yours")
    third.wait_for_prompt("main-2")
    third.line("/switch main")
    third.wait_for("main: 2 turns")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_chat_and_keeps_all(
    start: Start, number: signal.Signals
) -> None:
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    os.kill(screen.process.pid, number)
    assert screen.wait_for_exit() == 128 + number

    screen = start()
    screen.wait_for_prompt("main")
    screen.wait_for("1 turn ·")  # above it may be more than the screen holds
    screen.type("half a thought")
    screen.wait_for("half a thought")
    os.kill(screen.process.pid, number)
    assert screen.wait_for_exit() == 128 + number
    assert screen.raw.rstrip().endswith(b"\x1b[?2004l")  # as it was before

    screen = start()
    screen.wait_for_prompt("main")
    recall(screen, "main", "half a thought")


def test_a_terminal_that_goes_while_a_reply_runs(start: Start) -> None:
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.hang_up()
    screen = start()
    screen.wait_for_prompt("main")
    screen.wait_for("1 turn ·")  # above it may be more than the screen holds


def test_a_terminal_that_goes_before_a_reply_begins(
    start: Start, tmp_path: Path
) -> None:
    """As for `kill -9`; Ctrl-C takes the message back."""
    wait = (
        "import time\n"
        "from gemmakv.chat._session import Session\n"
        "from gemmakv.cli.chat.terminal import Terminal\n"
        "end, stream, ended = Terminal._end, Session.stream, []\n"
        "def note(self, *arguments):\n"
        "    end(self, *arguments)\n"
        "    ended.append(True)\n"
        "def hold(self, text, **options):\n"
        "    while not ended:\n"
        "        time.sleep(0.001)\n"  # the terminal goes soon
        "    return stream(self, text, **options)\n"
        "Terminal._end, Session.stream = note, hold\n"
    )
    screen = start(before=wait)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for("reading")
    screen.hang_up()
    stored = stored_session(tmp_path)
    assert stored["messages"] == []
    assert stored["draft"] == "tell me everything"


def test_the_exit_code_tells_what_could_not_be_stored(
    start: Start, tmp_path: Path
) -> None:
    screen = start(columns=200)
    screen.wait_for_prompt("main")
    folder = tmp_path / "gemmakv/conversations"
    kept = folder.rename(folder.with_name("away"))
    say(screen, "hello")
    screen.wait_for("main is not saved: ")
    screen.type(CTRL_D)
    screen.wait_for("not saved: main")
    assert screen.wait_for_exit() == 1

    kept.rename(folder)
    screen = start(columns=200)
    screen.wait_for_prompt("main")
    folder.rename(kept)
    say(screen, "hello")
    kept.rename(folder)  # there is a place for it again
    screen.type(CTRL_D)
    assert screen.wait_for_exit() == 0
    screen = start()
    screen.wait_for("main: 1 turn")


def test_no_persist(start: Start, tmp_path: Path) -> None:
    screen = start("--no-persist")
    screen.wait_for_prompt("main")
    say(screen, "forget me")
    screen.type(CTRL_D)
    assert screen.wait_for_exit() == 0
    assert not list(tmp_path.rglob("*"))


def test_a_search_finds_what_was_said(start: Start) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    say(screen, "hello there")

    def is_recalled() -> bool:
        """Asks until the history has been read, on another thread."""
        if screen.prompt == "main> hello there":
            return True
        screen.type("\x1b[A")
        return False

    def is_empty() -> bool:
        """It may be there twice: said while the history was read."""
        if screen.prompt == "main>":
            return True
        screen.type("\x1b[B")
        return False

    screen.wait_until(is_recalled, "the last line")
    screen.wait_until(is_empty, "an empty line")
    screen.type("\x12")
    screen.wait_for("I-search backward:")
    screen.type("hel")
    screen.wait_for(r"main> hello there\n+I-search .*: hel", regex=True)
    screen.type(ENTER)
    screen.wait_until(lambda: "I-search" not in screen.text, "no search")
    screen.wait_until(lambda: screen.prompt == "main> hello there", "found")
    screen.type(CTRL_C, "\x12")
    screen.wait_for("I-search backward:")
    screen.type(CTRL_C)
    screen.wait_until(lambda: "I-search" not in screen.text, "no search")
    assert "Ctrl-C again" not in screen.text


def test_a_history_that_cannot_be_written(
    start: Start, tmp_path: Path
) -> None:
    screen = start(columns=200)
    screen.wait_for_prompt("main")
    say(screen, "hello")
    history = tmp_path / "gemmakv/chat/history"
    history.unlink()
    history.mkdir()
    say(screen, "and you?")
    screen.wait_for(f"{history}: Is a directory; the chat continues")
    say(screen, "said once")
    assert screen.text.count("is not kept for later starts") == 1
    recall(screen, "main", "said once")


def test_a_paste_without_an_end(start: Start, keys: Keys) -> None:
    """It blocked the prompt for ever."""
    screen = start(before=keys.before)
    screen.wait_for_prompt("main")
    screen.type("\x1b[200~one\ntwo")
    screen.wait_for(r"main> one\n +\. two", regex=True)
    screen.type(" and more")
    screen.wait_for("two and more")
    screen.type("\nthree\n")  # of the paste, as one letter would not be
    screen.wait_for(r"more\n +\. three\n +\.", regex=True)
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    say(screen, "hello")
    screen.wait_for("1 turn ·")
    # Ctrl-C does not wait for the pause.
    screen.type("\x1b[200~half\n")
    keys.wait_for("half\n")
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    say(screen, "hello again")
    screen.wait_for("2 turns ·")


def test_a_paste_without_an_end_while_a_reply_runs(
    start: Start, held: HeldReply
) -> None:
    screen = start(max_tokens=200, before=held.before)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.type("\x1b[200~one\ntwo")
    held.wait_for("two")
    held.go()
    screen.wait_for(r"main> one\n +\. two", regex=True)


def test_bytes_that_are_no_text(start: Start) -> None:
    screen = start(columns=120)
    screen.wait_for_prompt("main")
    for before in ("caf", "/system caf"):
        screen.type(before.encode() + b"\xe9 x")
        screen.wait_for(before)
        screen.type(ENTER)
        place = len(before) + 1
        screen.wait_for(f"character {place} ")
        screen.wait_for("0xE9")
        screen.wait_for_prompt("main")
    screen.line("/list")
    screen.wait_for(r"\* +main +0 turns", regex=True)


def test_a_dumb_terminal(start: Start) -> None:
    screen = start("--temperature", 1, max_tokens=400, TERM="dumb")
    screen.wait_for_prompt("main")
    screen.type("hello", ENTER)
    screen.wait_for("tokens/s")
    screen.wait_for_prompt("main")
    screen.line("/list")
    screen.wait_for("1 turn")
    assert b"\x1b[?2004" not in screen.raw and b"\x1b[K" not in screen.raw


def test_completion(start: Start) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    screen.type("/sw")
    screen.wait_for("go to another session")
    screen.type(TAB)
    screen.wait_for("main> /switch")
    screen.type(CTRL_C)
    screen.line("/new alpha")
    screen.wait_for_prompt("alpha")
    screen.type("/switch m", TAB, ENTER)
    screen.wait_for_prompt("main")
    screen.type("/set temp", TAB)
    screen.wait_for("main> /set temperature")
    screen.type("0.5", ENTER)
    screen.wait_for("temperature is 0.5 now")


def test_several_lines_are_one_message(start: Start) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    screen.type("first", ESCAPE + ENTER, "second")
    screen.wait_for(r"main> first\n +\. second", regex=True)
    screen.type(ENTER)
    screen.wait_for("first after")
    screen.wait_for_prompt("main")
    screen.line("/list")
    screen.wait_for("“first second”")
    screen.wait_for_prompt("main")
    screen.type("\x1b[200~one\ntwo\nthree\x1b[201~")
    screen.wait_for(r"main> one\n +\. two\n +\. three", regex=True)
    screen.type(ENTER)
    screen.wait_for_prompt("main")
    screen.line("/list")
    screen.wait_for("2 turns")
    screen.wait_for("“one two three”")


def test_bad_commands_say_what_to_do(start: Start) -> None:
    screen = start(columns=120)
    screen.wait_for_prompt("main")
    for line, answer in (
        ("/swich x", "/switch?"),
        ("/switch", "/switch SESSION"),
        ("/switch maim", "main?"),
        ("/undo x", "/undo [N]"),
        ("/undo 3", "main has 0 turns"),
        ("/goto 9", "0 to 0"),
        ("/set nope 1", "max_tokens,"),
        ("/set top_p 7", "top_p"),
        ("/set seed -5", "at least 0, found -5"),
        ("/load /no/such", "No such file"),
        ("/save /", "folder"),
    ):
        screen.line(line)
        screen.wait_for(answer)
        screen.wait_for_prompt("main")
    assert "Traceback" not in screen.text


@pytest.mark.parametrize("joins", [False, True])
def test_emoji_that_some_terminals_draw_as_one(
    start: Start, joins: bool
) -> None:
    """What follows them, and the prompt itself, was shown elsewhere."""
    emoji = ["👨‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "🏴‍☠️", "👩🏽‍🚀"]
    text = f"one {' '.join(emoji)} two"
    screen = start(joins=joins)
    screen.wait_for_prompt("main")
    screen.type(text)
    shown = "main> one 👨👩👧 DE 👍 ❤ 🏴☠ 👩🚀"
    screen.wait_until(lambda: screen.prompt == f"{shown} two", "all")
    screen.type("\x1b[D" * 4 + "!")  # behind the astronaut
    screen.wait_until(lambda: screen.prompt == f"{shown}! two", "a letter")
    screen.type("\x15")  # Ctrl-U, to the beginning of the line
    screen.wait_until(lambda: screen.prompt == "main>  two", "the end of it")
    screen.type("\x0b")
    screen.wait_for_prompt("main")
    screen.type(text)
    screen.wait_until(lambda: screen.prompt == f"{shown} two", "all")
    screen.type(ENTER)
    screen.wait_for("tokens/s")
    screen.wait_for_prompt("main")
    screen.line("/show")
    screen.wait_until(lambda: text.encode() in screen.raw, "the whole message")


def test_words_are_not_broken(start: Start) -> None:
    screen = start(columns=40, max_tokens=200)
    screen.wait_for_prompt("main")
    say(screen, "hello")
    shown = screen.text.split("hello\n", 1)[1].split("\n  200 tokens")[0]
    assert len(shown.split()) > 3
    assert all(len(line) < 40 for line in shown.splitlines())


def test_a_narrow_window_and_no_colour(start: Start) -> None:
    screen = start(columns=30, rows=12, NO_COLOR="1")
    screen.wait_for_prompt("main")
    say(screen, "hi")
    assert b"\x1b[32m" not in screen.raw and b";32m" not in screen.raw




def test_text_typed_while_a_reply_runs_waits_unsent(
    start: Start, held: HeldReply
) -> None:
    screen = start(max_tokens=200, before=held.before)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.type("and this", ENTER, "/delete", ENTER)
    held.wait_for("/delete\r")
    held.go()
    screen.wait_for(r"main> and this\n +\. /delete\n", regex=True)


PASTE = "\x1b[200~one\n/delete\n\x1b[201~"


@pytest.mark.parametrize("lines", [2, 3000])
def test_a_paste_while_a_reply_runs_is_one_message(
    start: Start, held: HeldReply, lines: int
) -> None:
    screen = start(max_tokens=200, before=held.before)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    text = "\n".join(["/delete"] * lines)
    screen.wait_until(
        lambda: b"?2004h" in screen.raw.rpartition(b"everything")[2],
        "pastes are told apart",
    )
    screen.type(f"\x1b[200~{text}\x1b[201~", "!")
    held.wait_for("\x1b[201~!")
    held.go()
    screen.wait_for("/delete!")
    screen.type(CTRL_C)
    screen.wait_for_prompt("main")
    screen.line("/list")
    screen.wait_for(r"\* +main +1 turn", regex=True)


def test_ctrl_c_drops_what_was_typed_meanwhile(
    start: Start, keys: Keys
) -> None:
    screen = start(max_tokens=1_000_000, before=keys.before)
    screen.wait_for_prompt("main")
    screen.type("tell me everything" + ENTER + "/new typed" + ENTER)
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.type("typed again", ENTER, PASTE, "\x1b[200~half a paste")
    keys.wait_for("half a paste")
    screen.type(CTRL_C)
    screen.wait_for("stopped")
    screen.wait_for_prompt("main")
    assert "typed" not in screen.text and "paste" not in screen.text
    screen.line("/stats")  # no paste goes on
    screen.wait_for("prefill saved")


class HeldDisk:
    """A disk on which, in a chat with the program `before`, nothing is stored
    while it is held.
    """

    def __init__(self, folder: Path) -> None:
        self._gates, self._begun = folder / "gates", folder / "begun"
        self._gates.mkdir()
        self._begun.mkdir()
        self._holds = 0  # each has a gate: one sees nothing of another
        self.before = (
            "import os, time\n"
            "from gemmakv.conversations._chat import ChatStore\n"
            "real = ChatStore.write_record\n"
            "def write_record(*rest):\n"
            f"    while gates := os.listdir({str(self._gates)!r}):\n"
            f"        begun = os.path.join({str(self._begun)!r}, gates[0])\n"
            "        open(begun, 'w').close()\n"
            "        time.sleep(0.001)\n"  # the test lets go soon
            "    real(*rest)\n"
            "ChatStore.write_record = write_record\n"
        )

    def hold(self) -> None:
        self._holds += 1
        (self._gates / str(self._holds)).touch()

    def wait_until_stored_to(self) -> None:
        """Until something is to be stored, which `go` lets happen."""
        wait_until((self._begun / str(self._holds)).exists)

    def go(self) -> None:
        (self._gates / str(self._holds)).unlink()


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> HeldDisk:
    return HeldDisk(tmp_path_factory.mktemp("disk"))


def test_ctrl_c_while_a_turn_is_stored(
    start: Start, disk: HeldDisk, tmp_path: Path
) -> None:
    screen = start(max_tokens=1_000_000, before=disk.before)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    disk.hold()
    screen.type(CTRL_C)
    disk.wait_until_stored_to()
    os.kill(screen.process.pid, signal.SIGINT)  # it is there at once
    disk.go()
    screen.wait_for("stopped")
    screen.wait_for_prompt("main")
    disk.hold()
    screen.type("/undo" + ENTER)
    disk.wait_until_stored_to()
    os.kill(screen.process.pid, signal.SIGINT)
    disk.go()
    screen.wait_for("took back “tell me everything”; 0 turns left")
    screen.wait_for_prompt("main")
    assert "interrupted" not in screen.text
    os.kill(screen.process.pid, signal.SIGKILL)
    stored = stored_session(tmp_path)
    assert (stored["messages"], stored["draft"]) == ([], None)


def test_ctrl_c_right_after_enter(start: Start) -> None:
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.type("tell me everything" + ENTER + CTRL_C)
    screen.wait_for("interrupted|taken back|stopped", regex=True)
    screen.wait_for_prompt("main")


def signal_in(function: str, number: signal.Signals) -> str:
    """A program after which a signal comes as a function of the package is
    called for the first time.
    """
    return (
        "import signal, sys\n"
        "def look(frame, event, argument):\n"
        "    code = frame.f_code\n"
        f"    if event == 'call' and code.co_qualname == {function!r}:\n"
        "        sys.setprofile(None)\n"
        f"        signal.raise_signal({int(number)})\n"
        "sys.setprofile(look)\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_right_behind_a_prompt(
    start: Start, number: signal.Signals
) -> None:
    """The reply ran to its end before the chat looked for one again."""
    screen = start(before=signal_in("TypedHistory.take_failure", number))
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    assert screen.wait_for_exit() == 128 + number
    assert b"tokens/s" not in screen.raw
    screen = start()
    screen.wait_for_prompt("main")
    recall(screen, "main", "tell me everything")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_a_reply_begins(
    start: Start, number: signal.Signals
) -> None:
    """The message was taken back, and the next start did not have it."""
    screen = start(before=signal_in("TerminalView.begin_reply", number))
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    assert screen.wait_for_exit() == 128 + number
    assert "taken back" not in screen.text
    screen = start(columns=120)
    screen.wait_for("your last message has no reply; send it again if you like")
    screen.wait_for_prompt("main")
    screen.wait_for("0 turns ·")
    say(screen, "tell me everything")
    screen.wait_for("1 turn ·")


@pytest.mark.parametrize("function", ["Keyboard._start", "Keyboard._enter"])
def test_ctrl_c_before_keys_are_kept(start: Start, function: str) -> None:
    """The next line ended the chat: a thread that never ran was waited for."""
    screen = start(before=signal_in(function, signal.SIGINT))
    screen.wait_for_prompt("main")
    screen.line("hello")
    screen.wait_for("interrupted")
    screen.wait_for_prompt("main")
    say(screen, "hello")
    say(screen, "and again")
    screen.type(CTRL_D)
    assert screen.wait_for_exit() == 0


@pytest.mark.parametrize("answer", ["n", CTRL_C])
def test_delete_asks(start: Start, answer: str) -> None:
    screen = start()
    screen.wait_for_prompt("main")
    say(screen, "dear to me")
    screen.line("/delete")
    screen.wait_for("Delete main with its 1 turn? (y/n)")
    screen.type(answer)
    screen.wait_for("main is kept")
    screen.wait_for_prompt("main")
    screen.line("/new other")
    screen.wait_for_prompt("other")
    screen.line("/delete")  # nothing is lost
    screen.wait_for("deleted other; you are in main now")
    screen.line("/delete main")
    screen.wait_until(lambda: screen.text.count("(y/n)") == 2, "question")
    screen.type("y")
    screen.wait_for("deleted main; you are in main now")


def test_after_a_stop_the_line_is_shown_again(
    start: Start, held: HeldReply
) -> None:
    screen = start(max_tokens=200, before=held.before)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    line = held.line()
    assert 20 < len(line) < 60
    screen.wait_until(lambda: screen.prompt == line, "the line")
    screen.stop()
    screen.feed(b"\r\nStopped\r\n$ fg\r\n")
    os.kill(screen.process.pid, signal.SIGCONT)
    screen.wait_until(lambda: screen.prompt == line, "the line")
    held.go()
    text = screen.wait_for(r"\$ fg\n.+\n[a-z]", regex=True)
    shown = text.split("$ fg\n")[1].splitlines()[0]
    assert shown.startswith(line) and len(shown) > 60
    screen.wait_for("cut at the limit")


def test_a_stop_in_the_middle_of_what_is_written(start: Start) -> None:
    """It ended the chat: stdout was written to twice at once."""
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    for _ in range(40):
        os.kill(screen.process.pid, signal.SIGCONT)
        screen.update()
    screen.type(CTRL_C)
    screen.wait_for("stopped")
    screen.wait_for_prompt("main")
    assert "Traceback" not in screen.text


def test_a_new_width_holds_for_a_reply_that_runs(start: Start) -> None:
    screen = start(max_tokens=1_000_000)
    screen.wait_for_prompt("main")
    screen.line("tell me everything")
    screen.wait_for(r"[a-z]{5}\n[a-z ]{5}", regex=True)
    screen.resize(30)
    screen.wait_until(
        lambda: all(0 < len(s) < 30 for s in screen.text.splitlines()[-9:]),
        "lines of the new width",
    )
    screen.type(CTRL_C)
    screen.wait_for("stopped")


def test_tables_in_a_narrow_window(start: Start) -> None:
    screen = start(columns=20, rows=120)
    screen.wait_for_prompt("main")
    screen.line("/stats")
    screen.wait_for("  tokens\n    0 of 1,048,576\n")
    screen.line("/set")
    screen.wait_for("  temperature = 0.0\n    0 is greedy,")
    assert "…" not in screen.text


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_list_and_stats_fit(start: Start, columns: int) -> None:
    screen = start(columns=columns)
    screen.wait_for_prompt("main")
    name = "a-name-of-25-characters-x"
    screen.line(f"/new {name}")
    screen.wait_for_prompt(name)
    say(screen, "a long text", name)
    screen.line("/list")
    screen.wait_for(rf" \*  {name} ", regex=True)
    screen.wait_for(rf" \*  {name} +1 turn", regex=True)
    screen.wait_for_prompt(name)
    assert ("“a long" in screen.text.split("/list")[1]) == (columns >= 80)
    screen.line("/stats")
    screen.wait_for("prefill saved")
    screen.wait_for_prompt(name)
    for label in ("session ", "tokens ", "KV cache ", "all sessions "):
        assert f"\n  {label}" in screen.text


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding(start: Start, encoding: str) -> None:
    screen = start(PYTHONIOENCODING=encoding)
    screen.wait_for_prompt("main")
    say(screen, "hello")
    screen.line("/list")
    screen.wait_for(r" \*  main  1 turn .*hello", regex=True)
    assert "Traceback" not in screen.text
