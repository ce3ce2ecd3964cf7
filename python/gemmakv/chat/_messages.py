"""Messages of a conversation, and what templates make of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gemmakv._support.json import dict_of, loads
from gemmakv.errors import unexpected

ROLES = ("system", "user", "assistant", "tool", "developer")
_KINDS: dict[str, tuple[type, ...]] = {
    "incomplete": (bool,),
    "name": (str, type(None)),
    "tool_call_id": (str, type(None)),
    "extra": (Mapping,),
}
_OPTIONAL = ("incomplete", "name", "tool_calls", "tool_call_id")


@dataclasses.dataclass(frozen=True)
class Message:
    """What one side said.

    A dict with these fields as its keys does wherever a Message does. Lists
    and dicts are copied: what becomes of the caller's changes no message.

    Attributes:
      role: "system", "user", "assistant" (or "model", which becomes that),
        "tool" or "developer".
      content: text, or a list of parts {"type": "text", "text": ...}. None if
        a message of the assistant is nothing but tool calls. A tool's may also
        be what it returned: a dict, or a list of dicts without a "type".
      incomplete: whether an error cut the reply short.
      name: of the tool whose result this is.
      tool_calls: [{"type": "function", "function": {"name": ...,
        "arguments": ...}}], with an "id" or without. Arguments are a dict;
        their JSON text becomes one.
      tool_call_id: the call whose result this is.
      extra: any other keys of a dict, for templates that know them.
        "reasoning" or "reasoning_content" is what the model thought.

    Raises ValueError for a role, a content or a part that is none of these.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] | Mapping[str, Any] | None
    incomplete: bool = False
    _: dataclasses.KW_ONLY
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = dataclasses.field(
        default=(), hash=False
    )
    tool_call_id: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        role = "assistant" if self.role == "model" else self.role
        if role not in ROLES:
            raise unexpected("role", f"one of {', '.join(ROLES)}", self.role)
        calls = [
            _call(f"tool_calls[{i}]", call)
            for i, call in enumerate(items("tool_calls", self.tool_calls or ()))
        ]
        _check_content(self.content, role, bool(calls))
        for field, kinds in _KINDS.items():
            value = getattr(self, field)
            if not isinstance(value, kinds):
                raise unexpected(field, f"a {kinds[0].__name__}", value)
        fields = {
            "role": role,
            "content": self.content,
            "tool_calls": tuple(calls),
            "extra": self.extra,
        }
        for field, value in fields.items():
            object.__setattr__(self, field, _own(field, value))

    @property
    def parts(self) -> list[str]:
        """The content's texts: one, or one of each part."""
        content: Any = self.content
        if content is None:
            return []
        if isinstance(content, str):
            return [content]
        if is_parts(content):
            return [part["text"] for part in content]
        return [json.dumps(content, ensure_ascii=False, default=dict_of)]

    @property
    def text(self) -> str:
        """The content as one str: parts are joined by line ends."""
        return "\n".join(self.parts)

    @property
    def reasoning(self) -> str:
        """What the model thought before it said this; "" if nothing."""
        for key in ("reasoning", "reasoning_content"):
            if isinstance(text := self.extra.get(key), str) and text:
                return text
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The message as a dict, without keys that say nothing."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "extra"
        }
        said = {k: v for k, v in fields.items() if v not in (None, False, ())}
        fields = _copied({**self.extra, **said})
        return fields


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
    """What renders messages; any object with these works."""

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


Messages = Sequence[Message | Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def messages_of(values: Messages, name: str = "messages") -> list[Message]:
    """Messages of messages and dicts. Raises ValueError naming what is none,
    and if there are none.
    """
    messages = []
    for i, value in enumerate(items(name, values)):
        try:
            messages.append(_message(value))
        except ValueError as error:
            raise ValueError(f"{name}[{i}].{error}") from None
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


def items(name: str, values: Any) -> list[Any]:
    """A list of what is one. Raises ValueError for text and dicts too."""
    if isinstance(values, Iterable) and not isinstance(
        values, (str, bytes, Mapping)
    ):
        return list(values)
    raise unexpected(name, "a list", values)


def _copied(value: Any) -> Any:
    """A copy of lists and dicts, and of those in them."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_copied(one) for one in value)
    return value


def _own(name: str, value: Any) -> Any:
    """Raises ValueError that begins with `name` if it is nested too deep."""
    try:
        return _copied(value)
    except RecursionError:
        raise unexpected(name, "less nesting", value) from None


def _message(value: Any) -> Message:
    """Raises TypeError for what has not the form of a message at all."""
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) or "role" not in value:
        raise TypeError
    said = {key: one for key, one in value.items() if one is not None}
    known = {key: said.pop(key, None) for key in ("role", "content")}
    known |= {key: said.pop(key) for key in _OPTIONAL if key in said}
    return Message(**known, extra=said)


def is_parts(content: Any) -> bool:
    """Whether a message's content is parts, and no text or tool's data."""
    return isinstance(content, (list, tuple)) and all(
        "type" in part for part in content
    )


def _check_content(content: Any, role: str, calls: bool) -> None:
    if isinstance(content, str) or (content is None and calls):
        return
    data = role == "tool"
    if data and isinstance(content, Mapping):
        return
    if not isinstance(content, (list, tuple)):
        raise unexpected("content", "a str or a list of parts", content)
    for i, part in enumerate(content):
        if data and isinstance(part, Mapping) and "type" not in part:
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (None, "text"):
            raise unexpected(
                f"content[{i}].type",
                "'text' (images and other kinds are not supported)",
                kind,
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise unexpected(
                f"content[{i}]", "{'type': 'text', 'text': ...}", part
            )


def _call(name: str, call: Any) -> dict[str, Any]:
    """A tool call whose arguments are a dict."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(
        function.get("name"), str
    ):
        raise unexpected(
            name, "{'function': {'name': ..., 'arguments': ...}}", call
        )
    if not isinstance(call.get("id"), str | None):
        raise unexpected(f"{name}.id", "a str", call["id"])
    given = arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(
                name, arguments or "{}", unique=False, finite=True
            )
        except ValueError:
            arguments = None
        function = {**function, "arguments": arguments}
    if given is not None and not isinstance(arguments, Mapping):
        raise unexpected(
            f"{name}.function.arguments",
            "a dict or the JSON text of one",
            given,
        )
    return {**call, "function": dict(function)}
