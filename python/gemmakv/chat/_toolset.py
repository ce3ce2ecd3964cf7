"""The tools of a conversation: what is said of them, and what may be replied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gemmakv.chat._answers import answer_of
from gemmakv.chat._functions import Function
from gemmakv.chat._messages import Message, Template, Tools, items
from gemmakv.chat._native_calls import grammar_of
from gemmakv.chat._templates import call_form
from gemmakv.chat._tools import (
    ToolChoice,
    ToolUse,
    functions_of,
    plain_tools,
    tool_use,
)
from gemmakv.errors import ArgumentError, unexpected, within
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._message import fields_of, message_of, result_content
from gemmakv.generation._result import ToolCall
from gemmakv.tokenizers._tokenizer import Tokenizer

Choice = ToolChoice | str | Mapping[str, Any] | None


class Toolset:
    """Tools, how they are to be called, and the grammars of replies.

    The choice holds for replies to what the user says. A reply to results of
    calls may call further tools or not: a conversation in which a tool must be
    called would come to no end. Nothing of it changes.

    Attributes:
      given: the tools, as they were given.
      choice: as it was given.
      parallel: whether a reply may have several calls.
      said: the tools as the model is told; None if it is told none.
      form: of calls, as `ReplyReader` takes it; None: they are not read.
      functions: the Python functions among the tools, by their names.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        tools: Tools | None = None,
        choice: Choice = None,
        parallel: bool = True,
    ) -> None:
        """Raises ValueError that names what is bad."""
        self.given: list[Any] = [] if tools is None else items("tools", tools)
        self.choice = choice
        self.parallel = parallel
        self.functions: dict[str, Function] = functions_of(self.given)
        self.said: Sequence[Any] | None = None
        self.form: str | None = None
        self._tokenizer = tokenizer
        self._use: ToolUse | None = None
        if tools is None and choice is None:
            return
        form = call_form(template)
        if form is None:
            if choice not in (None, "auto"):
                raise ArgumentError(
                    "tool_choice",
                    f"'auto', as the template {template.name!r} has a form of "
                    "calls of its own, which is not read here",
                    choice,
                )
            self.said = plain_tools(self.given)
            return
        use = tool_use(self.given, choice, parallel)
        if use is not None:
            self.said, self.form, self._use = use.tools, form, use
            self._grammar = grammar_of(form, tokenizer, use)

    @cached_property
    def _use_after_results(self) -> ToolUse:
        assert self._use is not None
        if self._use.free:
            return self._use
        free = tool_use(self.given, "auto", self.parallel)
        assert free is not None
        return free

    @cached_property
    def _grammar_after_results(self) -> Grammar:
        assert self.form is not None
        return grammar_of(self.form, self._tokenizer, self._use_after_results)

    @property
    def schemas(self) -> list[Any]:
        """The tools as JSON has them."""
        return list(plain_tools(self.given) or ())

    def options_of(
        self, options: Mapping[str, Any], answers: bool = False
    ) -> dict[str, Any]:
        """Gives the options of a reply with the grammar that it follows: calls,
        or text of the form that the options state. `answers`: it is one to
        results of calls. Raises ValueError for a form that is bad.
        """
        if self._use is None or self.form is None:
            return dict(options)
        rest, answer = answer_of(options)
        grammar = self._grammar_after_results if answers else self._grammar
        if answer is not None:
            use = self._use_after_results if answers else self._use
            grammar = grammar_of(self.form, self._tokenizer, use, answer)
        return {**rest, "grammar": grammar}


def open_calls(messages: Sequence[Message]) -> list[ToolCall]:
    """Gives the calls of a conversation that have no results yet."""
    last = messages[-1:]
    return [
        ToolCall(
            call.get("id") or "",
            call["function"]["name"],
            dict(call["function"].get("arguments") or {}),
        )
        for message in last
        for call in message.tool_calls
    ]


def said_messages(said: Any, calls: Sequence[ToolCall]) -> list[Message]:
    """Makes messages of what `Session.send` is given: one of the user, or the
    results of all calls.
    """
    expected = (
        "a str of more than white space, a message of the user, its parts, or "
        "messages with the results of the last reply's calls"
    )
    if isinstance(said, str):
        listed: list[Any] = [Message("user", said)]
    elif fields_of(said) is not None or not isinstance(said, Iterable):
        listed = [said]
    else:
        listed = list(said)
    if listed and all(map(_is_part, listed)):
        listed = [{"role": "user", "content": listed}]
    try:
        messages = [message_of(one) for one in listed]
    except TypeError:
        raise unexpected("text", expected, said) from None
    except ValueError as error:
        raise within("text.", error) from None
    roles = {message.role for message in messages}
    if roles == {"tool"}:
        return result_messages("text", calls, messages)
    if roles != {"user"} or len(messages) > 1 or not messages[0].text.strip():
        raise unexpected("text", expected, said)
    return messages


def result_messages(
    name: str, calls: Sequence[ToolCall], results: Any
) -> list[Message]:
    """Makes the messages that give results back, in the order of the calls.

    `results` has one for each call: in their order, or by their ids or the
    names of their tools. Raises ArgumentError that begins with `name`.
    """
    if not calls:
        expected = "none, as the last reply asks for no calls"
        raise unexpected(name, expected, results)
    expected = (
        f"a result for each of {len(calls)} calls, in a list or in a dict by "
        "their ids or their tools' names"
    )
    if isinstance(results, Mapping) and not _is_result(results):
        names = [call.name for call in calls]
        keys = [
            call.name
            if call.id not in results and names.count(call.name) == 1
            else call.id
            for call in calls
        ]
        if len(keys) != len(results) or results.keys() != {*keys}:
            raise unexpected(name, expected, results)
        results = [results[key] for key in keys]
    listed = [
        message_of(one) if _is_result(one) else one
        for one in items(name, results, expected)
    ]
    ids = [getattr(one, "tool_call_id", None) for one in listed]
    places = [call.id for call in calls]
    if any(ids):
        if sorted(map(str, ids)) != sorted(places):
            raise unexpected(name, expected, results)
        listed = [listed[ids.index(id)] for id in places]
    if len(listed) != len(calls):
        raise unexpected(name, expected, results)
    return [_result(call, one) for call, one in zip(calls, listed)]


def _result(call: ToolCall, result: Any) -> Message:
    id = call.id or None
    if not isinstance(result, Message) or result.role != "tool":
        content: Any = result_content(result)
        return Message("tool", content, name=call.name, tool_call_id=id)
    return dataclasses.replace(
        result, name=result.name or call.name, tool_call_id=id
    )


def _is_result(value: Any) -> bool:
    """Tells a message with a result from the result itself."""
    fields = value.to_dict() if isinstance(value, Message) else fields_of(value)
    return (
        fields is not None
        and fields.get("role") == "tool"
        and "content" in fields
    )


def _is_part(value: Any) -> bool:
    fields = fields_of(value)
    return fields is not None and "type" in fields and "role" not in fields
