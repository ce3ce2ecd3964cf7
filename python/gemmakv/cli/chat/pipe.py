"""The loop on a pipe: a message a line in, a reply a line out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gemmakv._support.text import utf8_text
from gemmakv.cli import EXIT_FAILURE, describe
from gemmakv.cli.chat import commands
from gemmakv.cli.chat.actions import Leave
from gemmakv.cli.chat.reply import reply
from gemmakv.errors import GemmaKVError

if TYPE_CHECKING:
    from gemmakv.cli.chat.chat import Chat


def run(chat: Chat, lines: Iterable[bytes]) -> int:
    """Exit code. The first line that fails ends the run.

    What follows would otherwise go to another session than was meant. What
    is not stored when the run ends is a failure as well.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = utf8_text(line).rstrip("\r\n")
            if number == 1:
                text = text.removeprefix("\ufeff")  # as some editors begin
            if not text.strip():
                continue
            if commands.is_command(text):
                commands.run(chat, text)
            else:
                reply(chat, commands.message_of(text))
        except Leave:
            break
        except (ValueError, OSError, GemmaKVError) as error:
            chat.view.error(f"line {number} of stdin: {describe(error)}")
            return EXIT_FAILURE
    return EXIT_FAILURE if chat.unsaved else 0
