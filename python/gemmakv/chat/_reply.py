"""The parts of a reply: thoughts, text and calls of tools.

Thoughts, and calls of a model's own form, stand between control tokens. These
have no text, so they are found by their ids: the same characters in a text
are text.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Iterable, Sequence

from gemmakv.chat._native_calls import (
    CALL,
    CALL_END,
    NATIVE,
    QUOTE,
    QUOTE_MARK,
    THOUGHT,
    THOUGHT_END,
    NativeForm,
    read_call,
)
from gemmakv.chat._tools import CallPart, CallReader, ToolGrammar
from gemmakv.generation._result import Generation, ToolCall
from gemmakv.tokenizers._tokenizer import Tokenizer

_NAME = "thought\n"  # the first line of the channel
# What opens something, and what ends it beside the others of these.
_ENDS = {THOUGHT: THOUGHT_END, CALL: CALL_END}


@dataclasses.dataclass(frozen=True)
class Thought:
    """A part of what the model thinks before it replies."""

    text: str


Part = str | Thought | CallPart


class ReplyReader:
    """Tells the parts of a reply apart that comes token by token.

    All texts joined are the reply without white space around it, and so are
    all thoughts. Which tokens a text is of is known exactly, also where it
    comes later than they: text that may become a stop string is held back.

    Attributes:
      calls: whole calls so far.
      reasoning_tokens: those of thoughts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: str | None = None,
        begun: bool = False,
        grammar: object = None,
    ) -> None:
        """Takes the form of calls: "json", one of `NATIVE`, or None for text.
        `begun`: other text stands before the reply, and white space between
        the two belongs to it. `grammar` is what the reply follows: where it
        allows calls or an answer of some form, only one of them is there.
        """
        self.calls = 0
        self.reasoning_tokens = 0
        self._table = tokenizer.token_bytes
        self._native = NATIVE.get(form or "")
        self._marks = marks_of(tokenizer, self._native)
        self._json = None
        if form == "json":
            answers = isinstance(grammar, ToolGrammar) and bool(grammar.answer)
            self._json = CallReader(begins=answers)
        self._thinks = False  # the tokens that come, see `reasoning_tokens`
        self._cut = b""  # the beginning of a character
        self._said = 0  # characters that the tokens have come to
        self._done = 0  # of these, told apart
        self._held = ""  # what came after these
        self._ahead: tuple[tuple[int, str], ...] = ()  # marks, their places
        self._in = ""  # the mark that opened what is read, "" in text
        self._naming: str | None = None  # what came of a channel's name
        self._call = ""  # what came of a call
        self._started = begun  # there was text
        self._thought = False  # there was one
        self._spaces = self._thought_spaces = ""  # text may follow it

    def push(self, token: int, text: str) -> list[Part]:
        """Gives what is certain with a token and the text that came with it;
        `token` -1 for text of earlier ones.
        """
        if not self._marks:
            return self._text(text)
        if token >= 0:
            self.note(token)
        self._held += text
        found: list[Part] = []
        come = self._done + len(self._held)
        while self._ahead and self._ahead[0][0] <= come:
            (place, mark), *rest = self._ahead
            self._ahead = tuple(rest)
            found += self._inside(place - self._done)
            found += self._at(mark)
        return found + self._inside(len(self._held))

    def note(self, token: int) -> None:
        """Takes a token whose text is still to come."""
        mark = self._marks.get(token)
        if mark is not None:
            self._ahead += ((self._said, mark),)
            if mark in (THOUGHT, THOUGHT_END, CALL):
                self._thinks = mark == THOUGHT
                return
        self.reasoning_tokens += self._thinks
        data = self._table[token] if token < len(self._table) else b""
        if data:
            data = self._cut + data
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._cut = data[used:]
            self._said += len(text)

    def end(self) -> list[Part]:
        """Gives what was held back, at the end of the reply. A call that was
        cut short is nothing.
        """
        if self._json is None:
            return []
        text, _ = said(self._json.end())
        return [text.rstrip()] if text.strip() else []

    def _inside(self, count: int) -> list[Part]:
        """Reads the first characters that are held, between two marks."""
        text, self._held = self._held[:count], self._held[count:]
        self._done += len(text)
        if not text:
            return []
        if self._in == CALL:
            self._call += text
            return []
        if self._in != THOUGHT:
            return self._text(text)
        if self._naming is not None:
            text = self._naming + text
            if text != _NAME and _NAME.startswith(text):
                self._naming = text
                return []
            self._naming = None
            text = text.removeprefix(_NAME)
        return self._think(text)

    def _at(self, mark: str) -> list[Part]:
        if self._in == CALL and mark == QUOTE:
            self._call += QUOTE_MARK
            return []
        opens = mark in _ENDS
        if not opens and self._in != CALL and mark != _ENDS.get(self._in):
            return []  # the end of what was not open
        found: list[Part] = []
        if self._in == CALL:
            found = self._called(mark)
        elif self._naming and self._naming != _NAME.rstrip():
            found = self._think(self._naming)  # a thought without a name
        self._in = mark if opens else ""
        self._naming = "" if mark == THOUGHT else None
        if mark == THOUGHT and self._thought:
            self._thought_spaces = "\n\n"
        return found

    def _called(self, mark: str) -> list[Part]:
        """Gives the call that ends with `mark`; as text, if it is none."""
        said, self._call = self._call, ""
        call = read_call(said) if mark == CALL_END else None
        if call is None:
            assert self._native is not None
            end = self._native.call_end if mark == CALL_END else ""
            said = said.replace(QUOTE_MARK, self._native.quote)
            return self._text(self._native.call + said + end)
        self._spaces = ""
        self.calls += 1
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        name = (call.id, call.name)
        return [CallPart(self.calls - 1, name, arguments, call)]

    def _think(self, text: str) -> list[Part]:
        text = self._thought_spaces + text
        if not self._thought:
            text = text.lstrip()
        shown = text.rstrip()
        self._thought_spaces = text[len(shown) :]
        self._thought = self._thought or bool(shown)
        return [Thought(shown)] if shown else []

    def _text(self, text: str) -> list[Part]:
        text = self._spaces + text
        if not self._started:
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        self._started = self._started or bool(shown)
        if self._json is None or not shown:
            return [shown] if shown else []
        parts = self._json.push(shown)
        self.calls = self._json.calls
        return list(parts)


def marks_of(
    tokenizer: Tokenizer, calls: NativeForm | None
) -> dict[int, str]:
    """Ids of the control tokens around thoughts and `calls`, and what they
    are called here; none of a vocabulary without them.
    """
    names = {THOUGHT: THOUGHT, THOUGHT_END: THOUGHT_END}
    if calls is not None:
        names |= {
            calls.call: CALL, calls.call_end: CALL_END, calls.quote: QUOTE,
        }  # fmt: skip
    ids = {tokenizer.id_of(name): ours for name, ours in names.items()}
    return {token: name for token, name in ids.items() if token is not None}


def rendered_anew(tokenizer: Tokenizer) -> list[int]:
    """Control tokens of what templates say otherwise in later turns, or not
    at all.
    """
    think = tokenizer.id_of("<|think|>")
    found = [
        token for form in NATIVE.values() for token in marks_of(tokenizer, form)
    ]
    return found if think is None else [*found, think]


def read_reply(reader: ReplyReader, generation: Generation) -> list[Part]:
    """Gives the parts of a generation that has ended."""
    for token in generation.token_ids:
        reader.note(token)
    return [*reader.push(-1, generation.text), *reader.end()]


def said(parts: Iterable[Part]) -> tuple[str, str]:
    """Gives the text and the thoughts among parts."""
    texts, thoughts = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Thought):
            thoughts.append(part.text)
    return "".join(texts), "".join(thoughts)


def calls_in(parts: Iterable[Part]) -> tuple[ToolCall, ...]:
    """Gives the whole calls among parts."""
    return tuple(
        part.end for part in parts if isinstance(part, CallPart) and part.end
    )


def with_parts(generation: Generation, parts: Sequence[Part]) -> Generation:
    """Makes the generation with its parts apart."""
    text, reasoning = said(parts)
    return dataclasses.replace(
        generation,
        text=text.strip(),
        reasoning=reasoning,
        tool_calls=list(calls_in(parts)),
    )
