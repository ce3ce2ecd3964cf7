"""Messages of a conversation, and what templates make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gemmakv._support.arguments import items
from gemmakv.errors import unexpected, within
from gemmakv.generation._message import ROLES, Message, is_parts, message_of

__all__ = [
    "Message",
    "Messages",
    "SaysMessage",
    "Segment",
    "Template",
    "Tools",
    "check_turns",
    "is_parts",
    "items",
    "messages_of",
]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation.

    Each segment is turned into tokens by itself.

    Attributes:
      text: the name of one control token, or text without any.
      special: whether it is a control token.
    """

    text: str
    special: bool = False


class Template(Protocol):
    """An object that renders messages; any with these works."""

    @property
    def name(self) -> str:
        """The name that a saved session has for it."""

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end a reply."""

    @property
    def stop_tokens(self) -> Sequence[str]:
        """Names of control tokens that end a reply, beside the model's eos
        tokens; those that the model does not know are left out.
        """

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Segment]:
        """The conversation, with the opening of a reply if that is asked for.

        `tools` are the JSON schemas of functions that the model may call;
        other keywords are variables of the template, and ignored by one that
        does not know them. Raises ValueError for messages or tools it cannot
        express.
        """


class Dumps(Protocol):
    """An object that makes a dict of itself, as models of pydantic do:
    messages of openai's library, its calls of tools and its tools among them.
    """

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        """Gives the fields."""


class SaysMessage(Protocol):
    """An object that has the message of a reply, as a `Generation` does."""

    @property
    def message(self) -> Message:
        """The reply as a message."""


Said = Message | Mapping[str, Any] | SaysMessage | Dumps
Messages = Sequence[Said]
Tools = Sequence[Mapping[str, Any] | Dumps | Callable[..., object]]


def messages_of(values: Messages, name: str = "messages") -> list[Message]:
    """Makes messages of what `message_of` takes. Raises ValueError naming what
    is none, and if there are none.
    """
    messages = []
    for i, value in enumerate(items(name, values)):
        try:
            messages.append(message_of(value))
        except ValueError as error:
            raise within(f"{name}[{i}].", error) from None
        except TypeError:
            raise unexpected(
                f"{name}[{i}]",
                "a Message or a dict with 'role' and 'content'",
                value,
            ) from None
    if not messages:
        raise ValueError(f"{name}: expected at least one, found none")
    return messages


def check_turns(messages: Sequence[Message]) -> None:
    """Raises ValueError unless user and assistant take turns, after a system
    or developer message if one stands first.
    """
    if not messages:
        raise ValueError("messages: expected at least one, found none")
    start = 1 if messages[0].role in ("system", "developer") else 0
    for i, message in enumerate(messages[start:]):
        expected = ROLES[1 + i % 2]
        if message.role != expected:
            raise unexpected(
                f"messages[{start + i}].role",
                f"{expected!r} (user and assistant take turns)",
                message.role,
            )
