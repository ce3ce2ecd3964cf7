"""The words that Tab offers: commands, names, settings, values and paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
)
from prompt_toolkit.document import Document

from gemmakv.cli.chat import commands
from gemmakv.cli.chat.arguments import Kind
from gemmakv.cli.chat.chat import Chat
from gemmakv.cli.chat.emoji import separate
from gemmakv.cli.chat.settings import DEFAULT_WORD, SETTINGS, show
from gemmakv.cli.chat.table import preview

_Choices = Iterator[tuple[str, str]]  # a word and what it means


class ChatCompleter(Completer):
    """Completes lines that are commands, argument by argument."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not commands.is_command(text) or "\n" in text:
            return
        head, space, tail = text[1:].partition(" ")
        if not space:
            yield from _offer(head, _all_commands())
            return
        command = commands.COMMANDS.get(head)
        if command is None:
            return
        words = tail.split()
        if words and not tail.endswith(" "):
            words.pop()
        # Whatever takes the rest of the line is the last argument.
        index = min(len(words), len(command.arguments) - 1)
        if index < 0:
            return
        kind = command.arguments[index].kind
        typed = tail.lstrip().split(None, index)[-1] if tail.strip() else ""
        if len(tail.split()) <= index:
            typed = ""
        if kind is Kind.PATH:
            yield from self._paths.get_completions(
                Document(typed), complete_event
            )
        elif len(words) <= index:
            yield from _offer(typed, self._choices(kind, words))

    def _choices(self, kind: Kind, words: list[str]) -> _Choices:
        if kind is Kind.COMMAND:
            for name, meaning in _all_commands():
                yield name.strip(), meaning
        elif kind is Kind.SESSION:
            for entry in self._chat.book.entries:
                yield entry.name, preview(entry.record.last_text)
        elif kind in (Kind.ALL, Kind.TURN_OR_ALL):
            yield Kind.ALL.value, "none left out"
        elif kind is Kind.SETTING:
            session = self._chat.session()
            for setting in SETTINGS.values():
                value = show(self._chat.setting_value(session, setting))
                yield setting.name + " ", f"{setting.help} (now {value})"
        elif kind is Kind.VALUE:
            named = SETTINGS.get(words[0])
            if named is not None:
                for choice in named.choices:
                    yield choice, named.help
                default = named.default_for(self._chat.gemma)
                yield DEFAULT_WORD, show(default)


def _all_commands() -> _Choices:
    for command in commands.COMMANDS.values():
        yield command.name + (" " if command.arguments else ""), command.help


def _offer(typed: str, choices: _Choices) -> Iterator[Completion]:
    for word, meaning in choices:
        if word.startswith(typed):
            yield Completion(
                word,
                start_position=-len(typed),
                display=separate(word.strip()),
                display_meta=separate(meaning),
            )
