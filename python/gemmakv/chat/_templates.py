"""How a conversation becomes the text that a model reads.

A template renders messages to segments, each either plain text or the name
of one control token. Text that people or models wrote always is plain text:
a "<end_of_turn>" in it stays a string of characters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from gemmakv.errors import MismatchError, brief

if TYPE_CHECKING:
    from gemmakv.generation._model import Model

ROLES = ("system", "user", "model")


@dataclasses.dataclass(frozen=True)
class Message:
    """What one side said. `role` is "system", "user" or "model".

    `incomplete` marks a reply that an error cut short.
    """

    role: str
    content: str
    incomplete: bool = False


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation.

    If `special`, `text` is the name of one control token, else text without
    any. Each segment is turned into tokens by itself.
    """

    text: str
    special: bool = False


class Template(Protocol):
    """What a `Session` needs of a template; any object with these works."""

    @property
    def name(self) -> str:
        """What a saved session calls it."""

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end a reply."""

    @property
    def stop_tokens(self) -> Sequence[str]:
        """Names of control tokens that end a reply, beside the model's eos
        tokens; those that the model does not know are left out.
        """

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[Segment]:
        """The conversation, with the opening of a reply if that is asked for.

        At most one system message stands first; user and model take turns
        after it. Raises ValueError for messages it cannot express.
        """


class PlainTemplate:
    """A dialogue in plain text, for models that were not tuned for chat.

    A base model goes on with what looks like a conversation written down, and
    what it writes for the other side ends the reply.
    """

    name = "plain"
    stop = ("\nUser:", "\nAssistant:")
    stop_tokens = ("<end_of_turn>",)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[Segment]:
        check_turns(messages)
        segments = [Segment("<bos>", special=True)]
        gap = ""  # between what stands there and what follows
        for message in messages:
            text = message.content.strip()
            if message.role == "system":
                segments.append(Segment(text))
            elif message.role == "user":
                segments.append(Segment(f"{gap}User: {text}\n\nAssistant:"))
            elif text:
                # A segment of its own: the tokens of a turn that is over do
                # not depend on what follows.
                segments.append(Segment(f" {text}"))
            gap = "\n\n"
        if not add_generation_prompt and messages[-1].role == "user":
            segments[-1] = Segment(
                segments[-1].text[: -len("\n\nAssistant:")]
            )
        return segments


class GemmaTemplate:
    """The turns of instruction-tuned Gemma models.

    A system message stands at the beginning of the first user turn, and the
    white space around messages is left out, as the models were trained.
    """

    name = "gemma"
    stop: tuple[str, ...] = ()
    stop_tokens = ("<end_of_turn>",)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> list[Segment]:
        check_turns(messages)
        segments = [Segment("<bos>", special=True)]
        opening = ""
        for message in messages:
            if message.role == "system":
                opening = message.content + "\n\n"
                continue
            segments += [
                Segment("<start_of_turn>", special=True),
                Segment(f"{message.role}\n{opening}{message.content.strip()}"),
                Segment("<end_of_turn>", special=True),
                Segment("\n"),
            ]
            opening = ""
        if add_generation_prompt:
            segments += [
                Segment("<start_of_turn>", special=True),
                Segment("model\n"),
            ]
        return segments


def check_turns(messages: Sequence[Message]) -> None:
    """Raises ValueError unless an optional system message stands first and
    user and model take turns after it.
    """
    if not messages:
        raise ValueError("messages: expected at least one, found none")
    start = 1 if messages[0].role == "system" else 0
    for i, message in enumerate(messages[start:]):
        expected = ROLES[1 + i % 2]
        if message.role != expected:
            raise ValueError(
                f"messages[{start + i}].role: expected {expected!r} (user and "
                f"model take turns), found {brief(message.role)}"
            )


def template_for(
    gemma: Model, template: Template | str | None = None
) -> Template:
    """The template of a name, or the one that fits the model.

    Without a name: the chat template that the model's file carries, else
    Gemma's turns if the model is called instruction-tuned, else the plain
    dialogue. Raises ValueError for a name that is none, MismatchError if the
    file's template is asked for and there is none, GemmaKVError if it does
    not work.
    """
    if template is None:
        if gemma.chat_template is not None:
            template = "file"
        else:
            template = "gemma" if gemma.instruction_tuned else "plain"
    if not isinstance(template, str):
        _check_template(template)
        return template
    if template == "plain":
        return PlainTemplate()
    if template == "gemma":
        return GemmaTemplate()
    if template == "file":
        # Here, as it imports jinja2, which is large and optional.
        from gemmakv.chat._file_template import FileTemplate

        if gemma.chat_template is None or gemma.tokenizer is None:
            raise MismatchError(
                "template: the model carries no chat template of its own; "
                "use 'gemma' or 'plain'"
            )
        return FileTemplate(
            gemma.chat_template,
            gemma.tokenizer,
            bos_id=gemma.config.bos_id,
            eos_ids=gemma.config.eos_ids,
        )
    raise ValueError(
        "template: expected 'file', 'gemma', 'plain', a Template or None, "
        f"found {brief(template)}"
    )


def _check_template(template: object) -> None:
    for attribute in ("name", "stop", "stop_tokens", "render"):
        if not hasattr(template, attribute):
            raise ValueError(
                "template: expected 'file', 'gemma', 'plain', a Template or "
                f"None, found {brief(template)}, which has no {attribute!r}"
            )
