"""The chat template that a model's file carries, in Jinja."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from gemmakv.chat._templates import Message, Segment, check_turns
from gemmakv.errors import GemmaKVError
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# Code points that Unicode leaves to private use.
_PRIVATE = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))


class FileTemplate:
    """Renders a Jinja chat template in a sandbox.

    The template sees `messages` (dicts of role "system", "user" or
    "assistant" and content), `add_generation_prompt`, `bos_token`,
    `eos_token`, `raise_exception` and `strftime_now`.

    Control tokens are those that the template itself writes. To tell them
    from the same characters in a message, the letters of messages are
    replaced by private stand-ins while the template runs, and put back in
    what it has made. A template whose output depends on the letters of
    messages shows by rendering otherwise without the stand-ins, and is
    refused.
    """

    name = "file"
    stop: tuple[str, ...] = ()
    stop_tokens = ("<end_of_turn>",)

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        bos_id: int,
        eos_ids: Sequence[int],
    ) -> None:
        """Raises GemmaKVError without jinja2, or if `source` is not sound."""
        self._tokenizer = tokenizer
        self._template = _compile(source)
        self._tokens = {
            "bos_token": tokenizer.piece_of(bos_id) if bos_id >= 0 else "",
            "eos_token": tokenizer.piece_of(eos_ids[0]) if eos_ids else "",
        }
        self._source = source

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[Segment]:
        """A template without a system role (Gemma 1 and 2) gets the system
        message at the beginning of the first user turn, as that of Gemma 3
        places it. Raises ValueError if the template rejects the messages,
        GemmaKVError if it fails.
        """
        check_turns(messages)
        try:
            return self._render(messages, add_generation_prompt)
        except _Rejected as error:
            rejection = ValueError(
                f"messages: the file's chat template rejects them: {error}"
            )
        if messages[0].role != "system" or len(messages) < 2:
            raise rejection
        try:
            return self._render(_folded(messages), add_generation_prompt)
        except _Rejected:
            raise rejection from None

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[Segment]:
        contents = [message.content for message in messages]
        expected = self._run(messages, contents, add_generation_prompt)
        letters = self._tokenizer.special_letters
        there = _stand_ins(letters, [self._source, expected, *contents])
        back = {ord(new): chr(old) for old, new in there.items()}
        found = self._run(
            messages,
            [content.translate(there) for content in contents],
            add_generation_prompt,
        )
        if found.translate(back) != expected:
            raise GemmaKVError(
                "template: what the file's chat template makes depends on the "
                "letters of the messages, so control tokens cannot be told "
                "from text; choose template='gemma' or 'plain'"
            )
        segments = []
        for text, token in self._tokenizer.split_special(found):
            if token is None:
                segments.append(Segment(text.translate(back)))
            else:
                segments.append(Segment(text, special=True))
        return segments

    def _run(
        self, messages: Sequence[Message], contents: Sequence[str], reply: bool
    ) -> str:
        import jinja2

        roles = {"model": "assistant"}
        try:
            return self._template.render(
                messages=[
                    {"role": roles.get(m.role, m.role), "content": content}
                    for m, content in zip(messages, contents)
                ],
                add_generation_prompt=reply,
                **self._tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError,
                TypeError, ValueError, AttributeError,
                RecursionError) as error:
            raise GemmaKVError(
                "template: the file's chat template fails: "
                f"{_line(error)}; choose template='gemma' or 'plain'"
            ) from None


class _Rejected(Exception):
    """The template called `raise_exception`."""


def _folded(messages: Sequence[Message]) -> list[Message]:
    """The system message as the beginning of the first user turn."""
    system, first, *others = messages
    text = f"{system.content}\n\n{first.content.strip()}"
    return [Message("user", text), *others]


def _compile(source: str) -> jinja2.Template:
    import jinja2.ext
    import jinja2.sandbox  # 50 ms that most programs need not spend

    # The settings that templates of this kind are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise GemmaKVError(
            f"template: the file's chat template is not sound: {_line(error)};"
            " choose template='gemma' or 'plain'"
        ) from None


def _raise_exception(message: Any) -> NoReturn:
    raise _Rejected(_line(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _line(value: object) -> str:
    return " ".join(str(value).split())[:300]


def _stand_ins(letters: str, texts: Sequence[str]) -> dict[int, str]:
    """Private characters for `letters` that occur in none of the texts.

    For `str.translate`. Raises ValueError if the texts use nearly all.
    """
    used = set().union(*map(set, texts))
    free = (
        chr(point)
        for first, last in _PRIVATE
        for point in range(first, last + 1)
        if chr(point) not in used
    )
    table = {ord(letter): new for letter, new in zip(letters, free)}
    if len(table) != len(letters):
        raise ValueError("messages: no private-use character is left unused")
    return table
