"""The first screen of a chat with a pretrained model, and the notes after the
first answer.
"""

from __future__ import annotations

import functools
import io
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.cli import console, main
from gemmakv.cli.chat import first_screen, terminal
from gemmakv.cli.chat.chat import Chat
from gemmakv.cli.chat.reply import reply
from gemmakv.cli.chat.view import TerminalView
from support import template_folders
from support.tokenizer_folders import directory

KEPT = "is kept for later starts"
PACKED = "packed weights"
TRY = "This model is pretrained"

Run = Callable[..., tuple[int, list[str]]]


class _Stream(io.TextIOWrapper):
    """Stands for the terminal, or for both pipes: what is written, in order."""

    def __init__(self, content: bytes = b"", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content), "utf-8", write_through=True)
        self._terminal = terminal
        self.buffer.isatty = lambda: terminal  # type: ignore[method-assign]

    def isatty(self) -> bool:
        return self._terminal

    def lines(self) -> list[str]:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode().splitlines()


class _Terminal:
    """Stands for the loop on a terminal: says one thing and leaves."""

    def __init__(self, chat: Chat, view: TerminalView, history: Any) -> None:
        del view, history
        self._chat = chat

    def run(self) -> int:
        reply(self._chat, "hello")
        return 0


@pytest.fixture
def run(
    talker_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a command in this process, with folders of its own; gives its exit
    code and the lines of stdout and stderr as they came.
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMMAKV_PACKED_CACHE", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(terminal, "Terminal", _Terminal)
    load = gemmakv.Gemma.load

    def pack(*arguments: Any, **options: Any) -> gemmakv.Gemma:
        # By itself no model is packed that is as small as this.
        options["packed_cache"] = tmp_path / "packed"
        return load(*arguments, **options)

    monkeypatch.setattr(gemmakv.Gemma, "load", pack)

    def run(
        command: str,
        *arguments: object,
        text: str = "",
        model: Path = talker_path,
        on_terminal: bool = False,
    ) -> tuple[int, list[str]]:
        both = _Stream(terminal=on_terminal)
        length = () if command == "embed" else ("--max-tokens", "4")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", _Stream(text.encode(), on_terminal))
            patch.setattr(sys, "stdout", both)
            patch.setattr(sys, "stderr", both)
            code = main(
                [
                    *(command, "--model", str(model), *length),
                    *map(str, arguments),
                ]
            )
        return code, both.lines()

    return run


def places(lines: list[str], *words: str) -> list[int]:
    """The number of the only line with each of these."""
    found = []
    for word in words:
        [place] = [i for i, line in enumerate(lines) if word in line]
        found.append(place)
    return found


def test_notes_follow_the_first_reply_on_a_pipe(run: Run) -> None:
    code, lines = run("chat", text="one\ntwo\n")
    assert code == 0 and len(lines) == 4
    assert sorted(places(lines, KEPT, PACKED)) == [1, 2]
    assert lines[1].startswith("gemmakv: note: ")
    assert len(run("chat", text="one\n")[1]) == 1


@pytest.mark.parametrize("text", ["", "/nothing\none\n"])
def test_notes_are_told_without_a_reply(run: Run, text: str) -> None:
    code, lines = run("chat", text=text)
    assert code == (1 if text else 0)
    assert sorted(places(lines, KEPT, PACKED)) == ([1, 2] if text else [0, 1])


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_notes_follow_what_generate_prints(
    run: Run, tmp_path: Path, flags: list[str]
) -> None:
    disk = ("--prefix-cache-disk", f"{tmp_path / 'kv'}:900TB")
    code, lines = run("generate", *flags, *disk, "Hi")
    assert code == 0 and len(lines) == 3
    assert "Hi" in lines[0]
    assert sorted(places(lines, "900 TB", PACKED)) == [1, 2]


def test_notes_follow_what_embed_prints(run: Run) -> None:
    code, lines = run("embed", "--pooling", "last", "one", "two")
    assert code == 0 and len(lines) == 3
    assert '"one"' in lines[0] and '"two"' in lines[1]
    assert lines[2].startswith("gemmakv: note: ") and PACKED in lines[2]
    again = run("embed", "--pooling", "last", "one", "two")
    assert again == (0, lines[:2])


def test_notes_are_told_where_embed_fails(run: Run) -> None:
    code, lines = run("embed", "one")
    assert code == 2 and len(lines) == 2
    assert places(lines, PACKED, "gemmakv: error: ") == [0, 1]


def test_notes_are_told_where_generate_fails(run: Run) -> None:
    code, lines = run("generate", "--capacity-tokens", 1, "many words")
    assert code == 1 and len(lines) == 2
    places(lines, PACKED, "gemmakv: error: ")


def test_notes_are_told_where_generate_is_interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> None:
        del text
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "write", interrupted)
    code, [line] = run("generate", "--json", "Hi")
    assert code == 130 and PACKED in line


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]])
def test_warnings_do_not_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    load = gemmakv.Gemma.load

    def warn(*arguments: Any, **options: Any) -> gemmakv.Gemma:
        warnings.warn("a part", gemmakv.PartialModelWarning, stacklevel=2)
        return load(*arguments, **options)

    monkeypatch.setattr(gemmakv.Gemma, "load", warn)
    code, lines = run(*command, text="one\n")
    assert code == 0
    assert lines[0] == "gemmakv: warning: a part"


def test_notes_left_are_told_once_and_a_lost_terminal_does_no_harm() -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="x"), console.Notes(told.append) as a:
        a.add("one")
        a.tell()
        a.add("two")
        raise ValueError("x")
    assert told == ["one", "two"]

    def gone(line: str) -> None:
        raise OSError(line)

    with console.Notes(gone) as notes:
        notes.add("three")


@pytest.mark.parametrize(
    "model, steps, said",
    [
        ("gemma-3-270m", [1, 2], "copying"),
        ("org/repo", [1, 2], "downloading"),
        ("org/repo", [], ""),
    ],
)
def test_the_bar_says_what_is_done_if_anything(
    monkeypatch: pytest.MonkeyPatch, model: str, steps: list[int], said: str
) -> None:
    def resolve(name: str, progress: Callable[[int, int], None]) -> str:
        for step in steps:
            progress(step, 2)
        return name

    screen = _Stream(terminal=True)
    monkeypatch.setattr(console.models, "resolve", resolve)
    monkeypatch.setattr(sys, "stderr", screen)
    assert console.fetch(model) == model
    text = "".join(screen.lines())
    assert said in text and bool(text) == bool(said)


def test_notes_follow_the_first_reply_on_a_terminal(run: Run) -> None:
    code, lines = run("chat", on_terminal=True)
    assert code == 0
    [answer] = places(lines, "tokens/s")
    assert sorted(places(lines, KEPT, PACKED)) == [answer + 1, answer + 2]
    # A model of a shape that is not Gemma's: nobody knows what it can do.
    assert not any(TRY in line for line in lines)


@pytest.fixture
def demo(
    gemma: gemmakv.Gemma, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a chat with the demo model, on a terminal."""

    def load(*arguments: Any, **options: Any) -> gemmakv.Gemma:
        del arguments, options
        return gemma

    monkeypatch.setattr(gemmakv.Gemma, "load", load)
    return functools.partial(run, "chat", text="one\n", on_terminal=True)


def test_the_first_screen_until_there_is_an_answer(
    demo: Run, talker_path: Path
) -> None:
    code, lines = demo()
    assert code == 0
    [screen] = places(lines, TRY)
    where, answer = places(lines, "nothing said yet", "tokens/s")
    assert screen < where < answer
    places(lines, *first_screen.QUESTIONS, '"it" in its name')
    [told] = [line for line in lines if first_screen.EXAMPLES in line]
    assert f"generate -m {talker_path} " in told  # as --model has it

    for more in ([], ["--session", "new"]):
        _, lines = demo(*more)
        assert not any(TRY in line for line in lines)


def test_a_chat_left_without_an_answer_shows_it_again(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Terminal, "run", lambda self: 0)
    for _ in range(2):
        places(demo()[1], TRY)


@pytest.mark.parametrize(
    ("flags", "on_terminal"),
    [
        (["--session", "main"], False),
        (["--no-persist"], True),
        (["--template", "gemma"], True),
    ],
)
def test_where_there_is_no_first_screen(
    demo: Run, flags: list[str], on_terminal: bool
) -> None:
    code, lines = demo(*flags, on_terminal=on_terminal)
    assert code == 0 and lines
    assert not any(TRY in line for line in lines)


def test_a_tuned_model_has_none(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemmakv.Gemma, "instruction_tuned", True)
    code, lines = demo("--template", "plain")
    assert code == 0
    assert not any(TRY in line for line in lines)


def test_what_counts_as_pretrained(
    tmp_path: Path, talker: gemmakv.Gemma
) -> None:
    assert first_screen.is_pretrained(talker)
    turns = template_folders.source_of("gemma-3")
    tuned = template_folders.model_with(tmp_path / "gemma", "model", turns)
    assert not first_screen.is_pretrained(tuned)
    directory(tmp_path / "folder", "model")  # which has no name
    nameless = gemmakv.Gemma.load(tmp_path / "folder")
    assert not first_screen.is_pretrained(nameless)


@pytest.mark.parametrize(
    ("on_path", "called", "words"),
    [
        ("/usr/bin/gemmakv", "/usr/bin/gemmakv", "gemmakv"),
        (None, ".venv/bin/gemmakv", ".venv/bin/gemmakv"),
        (None, "/a b/gemmakv", "'/a b/gemmakv'"),
        (None, "/x/gemmakv/__main__.py", "/py -m gemmakv"),
    ],
)
def test_the_commands_can_be_typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_path: str | None,
    called: str,
    words: str,
) -> None:
    monkeypatch.setattr(
        first_screen, "shutil", types.SimpleNamespace(which=lambda _: on_path)
    )
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr(sys, "executable", "/py")
    monkeypatch.setenv("COLUMNS", "40")
    first_screen.show(TerminalView(), "a model.gguf")
    told = [
        line.removeprefix(" ")
        for line in capsys.readouterr().out.splitlines()
        if "generate" in line
    ]
    command = f"{words} generate -m 'a model.gguf' "
    assert len(told) == 2  # each whole, though wider than the terminal
    assert all(line.startswith(command) for line in told)


@pytest.mark.slow
def test_the_demo_model_does_well_with_it(gemma: gemmakv.Gemma) -> None:
    session = gemmakv.Session(gemma, options={"max_tokens": 16})
    for question, city in zip(
        first_screen.QUESTIONS, ("Paris", "Tokyo"), strict=True
    ):
        assert session.send(question).text.endswith(f" is {city}.")
    cache = gemmakv.create_kv_cache(gemma.config)
    examples = gemma.generate(
        cache, first_screen.EXAMPLES, max_tokens=4, stop=[","]
    )
    assert (examples.text, examples.finish_reason) == (" down", "stop")
    cache = gemmakv.create_kv_cache(gemma.config)
    story = gemma.generate(cache, first_screen.STORY, max_tokens=8)
    assert re.match(", there was a [a-z ]+", story.text)
