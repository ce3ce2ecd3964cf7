"""The looks of a chat: on a terminal with colours, on a pipe as bare lines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from contextlib import AbstractContextManager
from textwrap import indent
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from gemmakv._support.interrupts import handled
from gemmakv.cli import console, fail
from gemmakv.cli.chat import table
from gemmakv.cli.chat.table import count, printable, quoted
from gemmakv.cli.chat.wrap import WordWrap

if TYPE_CHECKING:
    from gemmakv.chat._messages import Message
    from gemmakv.cli.chat.keyboard import Keyboard
    from gemmakv.generation._result import Generation

_SHOWN_LINES, _SHOWN_TURNS = 6, 8
# How messages begin on a screen, and their looks; the others are dim.
_MARKS = {"user": ("", "cyan"), "assistant": ("", ""), "call": ("call: ", "")}
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
_NO_CURSOR = b"\x1b[?25l"


class View:
    """The place for replies, answers of commands and errors.

    What a view does not show, it passes over. `notes` are told after the
    first reply.
    """

    notes: console.Notes
    _console: Console

    @property
    def width(self) -> int:
        """Columns that a table may take."""
        return self._console.width

    def say(self, line: str) -> None:
        """An answer of a command, one line."""

    def error(self, line: str) -> None:
        """Shows what went wrong and what to do next, one line."""

    def show(self, renderable: RenderableType) -> None:
        """A table or a tree."""

    def show_input(self, line: str) -> None:
        """Something to type, one line that can be copied whole."""

    def show_turn(self, messages: list[tuple[str, str]]) -> None:
        """A reminder of (role, content) pairs said before."""

    def show_messages(
        self, name: str, messages: list[tuple[int, Message]], whole: bool
    ) -> None:
        """Shows messages of the session `name`, each with the number of its
        turn; of many, and of long ones, parts unless it is to be `whole`.
        """

    def begin_reply(self) -> None:
        """Begins a reply; pieces come until `end_reply` or `drop_reply`."""

    def reading(self, done: int, total: int) -> None:
        """Tells how many tokens were read of those that the reply needs."""

    def piece(self, text: str) -> None:
        """The next text of the reply."""

    def thought(self, text: str) -> None:
        """The next text of what the model thinks before it replies."""

    def end_reply(self, name: str, generation: Generation) -> None:
        """The reply of the session `name` is whole."""

    def drop_reply(self) -> None:
        """The reply has failed."""

    def stoppable(self) -> AbstractContextManager[None]:
        """Ctrl-C ends the body, though the command around it runs whole."""
        return contextlib.nullcontext()

    def confirm(self, question: str) -> bool:
        """Asks whether to go on; yes where there is nobody to ask."""
        del question
        return True


class TerminalView(View):
    """Everything on the screen; replies as they come, wrapped at words."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=False)
        self.notes = console.Notes(lambda line: self.say(f"note: {line}"))
        self._waiting: Status | None = None
        self._wrap: WordWrap | None = None
        self._thinks = False  # what was written last is a thought
        self.keyboard: Keyboard | None = None

    def say(self, line: str) -> None:
        self._begin_line()
        self._console.print(Text(printable(line), style="dim"))

    def error(self, line: str) -> None:
        self._begin_line()
        self._console.print(Text(printable(line), style="red"))

    def _begin_line(self) -> None:
        """Goes below the part of a reply that is there."""
        if self._wrap is not None:
            self._wrap.end()

    def show(self, renderable: RenderableType) -> None:
        self._console.print(renderable)

    def show_input(self, line: str) -> None:
        # The terminal wraps it.
        text = Text(f" {printable(line)}", style="cyan")
        self._console.print(text, soft_wrap=True)

    def show_turn(self, messages: list[tuple[str, str]]) -> None:
        for role, content in messages:
            lines = printable(content).splitlines()
            if len(lines) > _SHOWN_LINES:
                lines = [*lines[:_SHOWN_LINES], "…"]
            text = "\n".join(lines)
            if role == "user":
                indented = text.replace("\n", "\n  ")
                self._console.print(Text(f"> {indented}", style="dim cyan"))
            else:
                self._console.print(Text(text, style="dim"))

    def show_messages(
        self, name: str, messages: list[tuple[int, Message]], whole: bool
    ) -> None:
        if not messages:
            self.say(f"{name}: nothing said yet")
        turns = sorted({turn for turn, _ in messages if turn})
        left_out = turns[_SHOWN_TURNS : -_SHOWN_TURNS]
        if whole or len(left_out) < 2:  # a line for one saves none
            left_out = []
        for turn, message in messages:
            if turn in left_out:
                if message.role == "user" and turn == left_out[0]:
                    more = count(len(left_out), "more turn")
                    self.say(f"… {more}; /show all shows them")
                continue
            if message.role == "user" and turn > 1:
                self._console.print()
            for kind, text in texts_of(message):
                lines = printable(text).splitlines()
                if not whole and len(lines) > _SHOWN_LINES:
                    more = f"… /show {turn or 'all'} shows the rest"
                    lines = [*lines[:_SHOWN_LINES], more]
                mark, style = _MARKS.get(kind, (f"{kind}: ", "dim"))
                mark = f"{turn}> " if kind == "user" else mark
                told = "\n".join(lines)
                told = mark + indent(told, "  ").lstrip() if mark else told
                self._console.print(Text(told, style=style))

    def begin_reply(self) -> None:
        self._waiting = self._console.status("reading", spinner="dots")
        self._waiting.start()
        self._wrap = WordWrap(console.write, self._columns)

    def _columns(self) -> int:
        """Returns the width at which replies are wrapped."""
        if self._console.is_dumb_terminal:  # what is there stays there
            return sys.maxsize
        return shutil.get_terminal_size().columns

    def reading(self, done: int, total: int) -> None:
        if self._waiting is not None and done < total:  # it takes some steps
            self._waiting.update(f"reading {done:,} of {total:,} tokens")

    def piece(self, text: str) -> None:
        if text and self._wrap is not None:
            self._stop_waiting()
            if self._thinks:
                self._thinks = False
                self._wrap.end()
                console.write("\n")
            self._wrap.write(printable(text))

    def thought(self, text: str) -> None:
        if text and self._wrap is not None:
            self._stop_waiting()
            self._thinks = True
            coloured = self._console.color_system is not None
            console.write(_DIM if coloured else "")
            self._wrap.write(printable(text))
            console.write(_NORMAL if coloured else "")

    def end_reply(self, name: str, generation: Generation) -> None:
        del name
        self.drop_reply()
        self._console.print(Text("  " + summary(generation), style="dim"))
        self.notes.tell()
        self._console.print()

    def drop_reply(self) -> None:
        self._stop_waiting()
        self._thinks = False
        if self._wrap is not None:
            self._wrap.end()
            self._wrap = None

    def resume(self) -> None:
        """The program was stopped, and other things are on the screen."""
        if self._console.is_dumb_terminal:
            return
        if self._waiting is not None:
            # Past the buffer of stdout, which the signal may find in use.
            os.write(sys.stdout.fileno(), _NO_CURSOR)
        elif self._wrap is not None:
            self._wrap.redraw()

    def stoppable(self) -> AbstractContextManager[None]:
        return handled(signal.SIGINT, signal.default_int_handler)

    def confirm(self, question: str) -> bool:
        return self.keyboard is None or self.keyboard.confirm(question)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None


class PipeView(View):
    """Stdout holds one line for each reply, and nothing else ever.

    With `as_json`, that line is a JSON object, and so is the line that tells
    all messages that are to be shown. Everything else is on stderr.
    """

    def __init__(self, as_json: bool = False) -> None:
        self._as_json = as_json
        self.notes = console.Notes()
        self._console = Console(
            stderr=True, color_system=None, highlight=False, width=200
        )

    def say(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def error(self, line: str) -> None:
        fail(printable(line))

    def show(self, renderable: RenderableType) -> None:
        with self._console.capture() as capture:
            self._console.print(renderable)
        for line in capture.get().splitlines():
            self._console.print(Text(line.rstrip()))

    def show_turn(self, messages: list[tuple[str, str]]) -> None:
        for role, content in messages:
            self._console.print(Text(f"{role}: {quoted(content)}"))

    def show_messages(
        self, name: str, messages: list[tuple[int, Message]], whole: bool
    ) -> None:
        if self._as_json:
            told = [{"turn": turn, **one.to_dict()} for turn, one in messages]
            document = {"session": name, "messages": told}
            console.write(json.dumps(document, ensure_ascii=False) + "\n")
            return
        for turn, message in messages:
            for kind, text in texts_of(message):
                self.say(f"{turn} {kind}: {indent(text, '  ').lstrip()}")

    def end_reply(self, name: str, generation: Generation) -> None:
        if self._as_json:
            line = json.dumps(_document(name, generation), ensure_ascii=False)
        else:
            line = " ".join(printable(generation.text).split())
        console.write(line + "\n")
        self.notes.tell()


def texts_of(message: Message) -> list[tuple[str, str]]:
    """The texts of a message, each after what it is: the role, or a part of
    what an assistant says.
    """
    texts = [("thought", message.reasoning)] if message.reasoning else []
    if message.text:
        name = f" {message.name}" if message.name else ""
        texts.append((f"{message.role}{name}", message.text))
    for call in message.tool_calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        texts.append(("call", f"{function['name']} {arguments}"))
    if message.incomplete:
        texts.append(("note", "cut short"))
    return texts


def summary(generation: Generation) -> str:
    """Length and speed of a reply, and why it ended if not by itself."""
    timings = generation.timings
    parts = [count(generation.usage.completion_tokens, "token")]
    if timings.decode_tokens_per_s > 0:
        parts.append(f"{timings.decode_tokens_per_s:.1f} tokens/s")
    if generation.token_ids:
        parts.append(f"first after {timings.prefill_s:.2f} s")
    usage = generation.usage
    if usage.drafted:
        parts.append(f"{usage.accepted:,} of {usage.drafted:,} guesses right")
    if usage.cached:
        parts.append(table.by_tier(usage.cached))
    if generation.finish_reason == "cancelled":
        parts.append("stopped")
    elif generation.finish_reason == "length":
        parts.append("cut at the limit")
    elif generation.finish_reason == "deadline":
        parts.append("cut at the deadline")
    return " · ".join(parts)


def _document(name: str, generation: Generation) -> dict[str, object]:
    return {
        "session": name,
        "text": generation.text,
        "reasoning": generation.reasoning,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "usage": vars(generation.usage),
        "timings": vars(generation.timings),
    }
