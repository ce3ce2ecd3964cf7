"""Conversations as the token ids that one template makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gemmakv.chat._messages import Message, Template
from gemmakv.chat._templates import render, thinking
from gemmakv.chat._transcript import Encoder, Ids, common_exact
from gemmakv.tokenizers._tokenizer import Tokenizer


class Rendering:
    """A template with all that it is given beside the messages.

    Where a conversation may go on in several ways, what they have in common
    is found by rendering two that differ. Not thread-safe.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        bos_id: int,
        think: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Raises ValueError if the template cannot say `think`."""
        self.template = template
        self.think = think
        self._tokenizer = tokenizer
        self._bos_id = bos_id
        self._variables = {**thinking(template, think), "tools": tools}
        self._encoder = Encoder(tokenizer, bos_id)
        self._system_ends: dict[tuple[Message, ...], int] = {}

    def encode(self, messages: Sequence[Message], opens: bool) -> Ids:
        """Gives the ids of a conversation; `opens`: with the opening of a
        reply.
        """
        return self._encode(self._encoder, messages, opens)

    def shared_beginning(self, messages: Sequence[Message]) -> Ids:
        """Gives what every way to go on from a conversation begins with: from
        calls of tools, with their results, else with the user.
        """
        if messages and messages[-1].tool_calls:
            try:
                return self._common(
                    self._encoder,
                    [[*messages, *results] for results in _results(messages)],
                )
            except ValueError:
                pass  # the template has no results
        return self._common(
            self._encoder,
            [[*messages, Message("user", text)] for text in "AB"],
        )

    def system_end(self, system: Sequence[Message]) -> int:
        """Counts the tokens that the system text and what stands around it
        take.
        """
        key = tuple(system)
        if key not in self._system_ends:
            # The other encoder remembers the conversation.
            encoder = Encoder(self._tokenizer, self._bos_id)
            ids = self._common(
                encoder, [[*system, Message("user", text)] for text in "AB"]
            )
            self._system_ends = {key: len(ids)}
        return self._system_ends[key]

    def copy(self) -> Rendering:
        """Makes one for another conversation."""
        other = Rendering.__new__(Rendering)
        other.__dict__.update(self.__dict__)
        other._encoder = Encoder(self._tokenizer, self._bos_id)
        return other

    def _common(
        self, encoder: Encoder, ways: Sequence[Sequence[Message]]
    ) -> Ids:
        one, other = (self._encode(encoder, way, True) for way in ways)
        return one[: common_exact(one, other)]

    def _encode(
        self, encoder: Encoder, messages: Sequence[Message], opens: bool
    ) -> Ids:
        segments = render(
            self.template,
            messages,
            add_generation_prompt=opens,
            **self._variables,
        )
        return encoder.encode(segments)


def _results(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Gives two ways to answer the calls of the last message."""
    for text in "AB":
        yield [
            Message(
                "tool",
                text,
                name=call["function"]["name"],
                tool_call_id=call.get("id"),
            )
            for call in messages[-1].tool_calls
        ]
