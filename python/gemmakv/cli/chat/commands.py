"""The table of commands: each entry gives parsing, help and completion.

To add a command, write its function in actions.py or reports.py and add an
entry to `COMMANDS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gemmakv.cli.chat import actions, reports, table
from gemmakv.cli.chat.arguments import Argument, split
from gemmakv.cli.chat.settings import SETTINGS

if TYPE_CHECKING:
    from gemmakv.cli.chat.chat import Chat


class Command:
    """`run` takes the chat and a value (or None) for each argument of the
    usage line, which names their kinds.
    """

    def __init__(self, usage: str, help: str, run: Callable[..., None]) -> None:
        self.usage = "/" + usage
        self.name, *arguments = usage.split()
        self.arguments = tuple(map(Argument.of, arguments))
        self.help = help
        self.run = run

    def read(self, tail: str) -> list[str | int | None]:
        """Values of the arguments; ValueError says what is wrong."""
        words = split(tail, self.arguments)
        if len(words) > len(self.arguments):
            extra = words[len(self.arguments)]
            raise ValueError(f"unexpected {extra!r}; usage: {self.usage}")
        values: list[str | int | None] = []
        for i, argument in enumerate(self.arguments):
            if i < len(words):
                try:
                    values.append(argument.read(words[i]))
                except ValueError as error:
                    raise ValueError(f"{error}; usage: {self.usage}") from None
            elif argument.optional:
                values.append(None)
            else:
                raise ValueError(
                    f"/{self.name} needs {argument.kind.value}; usage: "
                    f"{self.usage}"
                )
        return values


def _show_help(chat: Chat, name: str | None) -> None:
    if name is not None:
        command = find(name)
        chat.view.say(f"{command.usage}: {command.help}")
        if command.name == "set":
            rows = [(s.name, s.help) for s in SETTINGS.values()]
            chat.view.show(table.pairs(rows))
        return
    rows = [(command.usage, command.help) for command in _TABLE]
    chat.view.show(table.pairs(rows))
    chat.view.show(table.note(_KEYS))


_KEYS = (
    "Enter sends, Alt-Enter (or Esc, Enter) begins a new line, Tab completes. "
    "Ctrl-C stops a reply; what is typed during one waits, with Enter as a "
    "line break. A message that begins with / is typed with //."
)
_TABLE = (
    Command("new [NAME]", "start a session and go to it", actions.new),
    Command("list", "all sessions", reports.list_sessions),
    Command(
        "switch SESSION",
        "go to another session (the start of its name is enough)",
        actions.switch,
    ),
    Command(
        "fork [NAME]",
        "copy this session, sharing its KV cache, and go to the copy",
        actions.fork,
    ),
    Command(
        "undo [N]", "take back the last N turns (default 1)", actions.undo
    ),
    Command(
        "goto TURN",
        "keep the first TURN turns only (0: start over)",
        actions.goto,
    ),
    Command("rename NAME", "rename this session", actions.rename),
    Command(
        "delete [SESSION]",
        "delete a session (default: this one)",
        actions.delete,
    ),
    Command("restore", "bring back what was deleted", actions.restore),
    Command(
        "save PATH",
        "write this session, KV cache included, to a file",
        actions.save,
    ),
    Command(
        "load PATH",
        "open a file that /save wrote as a new session",
        actions.load,
    ),
    Command(
        "system [TEXT]",
        "show or set what the model is told first (none: nothing)",
        actions.system,
    ),
    Command(
        "set [KEY] [VALUE]",
        "show or change how replies are made (default: as it was)",
        actions.set_option,
    ),
    Command(
        "show [TURN|all]",
        "what was said (of much: the first and last turns, or all)",
        reports.show,
    ),
    Command(
        "stats", "tokens, KV bytes, last fork, prefill saved", reports.stats
    ),
    Command(
        "tree [all]",
        "sessions and their forks (of many: the first and last, or all)",
        reports.tree,
    ),
    Command("help [COMMAND]", "this list, or one command", _show_help),
    Command("exit", "leave (Ctrl-D does too)", actions.leave),
)
COMMANDS: Mapping[str, Command] = {one.name: one for one in _TABLE}
_ALIASES = {"quit": "exit", "q": "exit", "?": "help"}


def is_command(text: str) -> bool:
    """Tells whether a line is a command: it begins with one slash."""
    return text.startswith("/") and not text.startswith("//")


def message_of(text: str) -> str:
    """Returns what a line says as a message: // stands for a leading slash."""
    return text[1:] if text.startswith("//") else text


def find(name: str) -> Command:
    """The command of that name, with or without its slash."""
    bare = name[1:] if name.startswith("/") else name
    command = COMMANDS.get(_ALIASES.get(bare, bare))
    if command is not None:
        return command
    near = difflib.get_close_matches(bare, COMMANDS, 1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists them"
    raise ValueError(
        f"no command /{bare}; {hint} (a message may begin with //)"
    )


def run(chat: Chat, line: str) -> None:
    """Runs a line for which `is_command` holds. Raises ValueError, OSError or
    GemmaKVError in one line that says what to do next."""
    head, *tail = line[1:].split(None, 1) or [""]
    command = find(head)
    chat.refresh()
    command.run(chat, *command.read(tail[0] if tail else ""))
