"""The loop on a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app_or_none
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.styles import Style

from gemmakv._support.interrupts import handled
from gemmakv._support.sizes import in_bytes
from gemmakv.cli import describe
from gemmakv.cli.chat import commands, table
from gemmakv.cli.chat.actions import Leave
from gemmakv.cli.chat.chat import Chat
from gemmakv.cli.chat.completion import ChatCompleter
from gemmakv.cli.chat.emoji import SeparateEmoji, separate
from gemmakv.cli.chat.history import TypedHistory
from gemmakv.cli.chat.keyboard import Keyboard
from gemmakv.cli.chat.reply import reply
from gemmakv.cli.chat.view import TerminalView
from gemmakv.errors import GemmaKVError

_STYLE = Style.from_dict(
    {
        "name": "bold ansigreen",
        "continuation": "ansibrightblack",
        "bottom-toolbar": "noreverse ansibrightblack",
        "hint": "noreverse ansiyellow",
    }
)
_MENU_LINES = 6


class Terminal:
    """Reads lines with editing, history and completion; runs them."""

    def __init__(
        self, chat: Chat, view: TerminalView, history_path: Path | None
    ) -> None:
        self._chat = chat
        self._view = view
        self._leaving = False  # Ctrl-C on an empty line has been pressed once
        self._ended_by = 0  # a signal that ends the chat
        self._busy = False  # a line runs
        self._completer = ChatCompleter(chat)
        self._typed = TypedHistory(history_path)
        self._prompt: PromptSession[str] = PromptSession(
            self._message,
            multiline=True,
            prompt_continuation=self._continuation,
            completer=self._completer,
            complete_while_typing=Condition(self._is_command),
            history=self._typed.history,
            input_processors=[SeparateEmoji()],
            key_bindings=self._bindings(),
            bottom_toolbar=self._toolbar,
            enable_suspend=True,
            reserve_space_for_menu=_MENU_LINES,
            style=_STYLE,
            color_depth=(
                ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None
            ),
        )
        self._prompt.default_buffer.on_text_changed += self._stay
        app = self._prompt.app
        self._keyboard = Keyboard(app.input, app.output)
        view.keyboard = self._keyboard

    def run(self) -> int:
        """Runs until the person leaves; returns the exit code."""
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    stack.enter_context(handled(number, self._end))
            stack.enter_context(self._keyboard.silent())
            stack.enter_context(contextlib.suppress(EOFError, Leave))
            try:
                self._read_lines()
            except OSError:
                if not self._ended_by:  # the terminal may be gone with it
                    raise
        return 128 + self._ended_by if self._ended_by else 0

    def _read_lines(self) -> None:
        while not self._ended_by:
            # A signal may come at any moment, also in the prompt.
            try:
                self._chat.report_failures()
                text = self._prompt.prompt(pre_run=self._leave_if_ended)
                if failure := self._typed.take_failure():
                    self._view.error(failure)
                self._busy = True
                if self._ended_by:  # until now it stopped nothing
                    return
                with self._keyboard.keep(self._view.resume):
                    self._run_line(text)
            except KeyboardInterrupt:
                self._view.error("interrupted")
            finally:
                self._busy = False

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Ends the chat: what runs is stopped as by Ctrl-C, and kept, also a
        message whose reply has not begun.
        """
        del frame
        self._ended_by = number
        if self._busy:
            signal.raise_signal(signal.SIGINT)
        app = get_app_or_none()
        if app is not None and app.loop is not None:
            app.loop.call_soon_threadsafe(self._leave_if_ended)

    def _leave_if_ended(self) -> None:
        """Ends a prompt; the Up key brings back what is typed there."""
        app = get_app_or_none()
        if self._ended_by and app is not None and not app.is_done:
            self._prompt.default_buffer.append_to_history()
            app.exit(exception=EOFError)

    def _run_line(self, text: str) -> None:
        if not text.strip():
            return
        view = self._view
        try:
            _check_unicode(text)
            if commands.is_command(text):
                # Whole: what is in memory then is on disk, too.
                with handled(signal.SIGINT, self._ignore):
                    commands.run(self._chat, text)
            else:
                message = commands.message_of(text)
                reply(
                    self._chat,
                    message,
                    self._keyboard.drop,
                    lambda: self._ended_by != 0,
                )
        except KeyboardInterrupt:
            self._keyboard.drop()
            view.error("interrupted")
        except MemoryError:
            view.error("out of memory; /delete sessions that you do not need")
        except (ValueError, OSError, GemmaKVError) as error:
            view.error(describe(error))

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C where nothing is to be stopped; see `View.stoppable`."""
        del number, frame
        self._keyboard.drop()

    def _message(self) -> StyleAndTextTuples:
        name = separate(self._chat.book.current.name)
        return [("class:name", name), ("", "> ")]

    def _continuation(
        self, width: int, line_number: int, is_soft_wrap: int
    ) -> StyleAndTextTuples:
        del line_number
        mark = "" if is_soft_wrap else ". "
        return [("class:continuation", mark.rjust(width))]

    def _toolbar(self) -> StyleAndTextTuples:
        if self._leaving:
            return [("class:hint", "Ctrl-C again or Ctrl-D leaves the chat")]
        entry = self._chat.book.current
        session = self._chat.session(entry)
        cache = session.cache
        held = in_bytes(cache.nbytes + cache.shared_nbytes)
        return [
            (
                "",
                f"{table.count(session.turns, 'turn')} · "
                f"{entry.record.tokens:,} of {cache.capacity_tokens:,} "
                f"tokens · KV {held} · /help",
            )
        ]

    def _is_command(self) -> bool:
        return commands.is_command(self._prompt.default_buffer.text)

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        # In a search (Ctrl-R), keys are prompt_toolkit's own.
        here = has_focus(DEFAULT_BUFFER)

        @keys.add("enter", filter=here)
        def send(event: KeyPressEvent) -> None:
            self._leaving = False
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=here)
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("tab", filter=here)
        def complete(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state:
                buffer.complete_next()
                return
            asked = CompleteEvent(completion_requested=True)
            found = list(
                self._completer.get_completions(buffer.document, asked)
            )
            if len(found) == 1:
                buffer.apply_completion(found[0])
            else:
                buffer.start_completion(insert_common_part=True)

        @keys.add("c-c", filter=here)
        def clear(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.text:
                buffer.reset()
                self._leaving = False
            elif self._leaving:
                event.app.exit(exception=EOFError)
            else:
                self._leaving = True

        return keys

    def _stay(self, buffer: Buffer) -> None:
        """Something was typed, pasted or brought back: nobody leaves."""
        del buffer
        self._leaving = False


def _check_unicode(text: str) -> None:
    """Raises ValueError where bytes were typed or pasted that are no text."""
    for i, character in enumerate(text, 1):
        if "\ud800" <= character <= "\udfff":
            raise ValueError(
                f"character {i} of what was typed: expected UTF-8, found byte "
                f"0x{ord(character) & 0xFF:02X}; nothing was sent, and the Up "
                "key brings it back"
            )
