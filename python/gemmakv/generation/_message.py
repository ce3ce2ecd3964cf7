"""A message of a conversation, and what becomes one."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, get_args

from gemmakv._support.arguments import items
from gemmakv._support.json import dict_of, loads
from gemmakv.errors import unexpected

Role = Literal["system", "user", "assistant", "tool", "developer"]
ROLES = get_args(Role)
_KINDS: dict[str, tuple[type, ...]] = {
    "incomplete": (bool,),
    "name": (str, type(None)),
    "tool_call_id": (str, type(None)),
    "extra": (Mapping,),
}
_OPTIONAL = ("incomplete", "name", "tool_calls", "tool_call_id")
# What an object that is no dict may say of itself as its attributes.
_ATTRIBUTES = ("role", "content", *_OPTIONAL, "reasoning", "reasoning_content")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message: what one side said.

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
        "arguments": ...}}], with an "id" or without, or `ToolCall`s.
        Arguments are a dict; their JSON text becomes one.
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
        content: Any = self.content
        if isinstance(content, (list, tuple)):
            content = [fields_of(part) or part for part in content]
        _check_content(content, role, bool(calls))
        for field, kinds in _KINDS.items():
            value = getattr(self, field)
            if not isinstance(value, kinds):
                raise unexpected(field, f"a {kinds[0].__name__}", value)
        fields = {
            "role": role,
            "content": content,
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
        """The model's thoughts before it said this; "" for none."""
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


def message_of(value: Any) -> Message:
    """Makes a message of what says one: a Message, a dict, what a library made
    of an answer of its own, or an object that has one as its `message`.

    Raises TypeError for what has not the form of a message at all, ValueError
    for one that is bad.
    """
    if isinstance(value, Message):
        return value
    said = fields_of(value)
    if said is None:
        inner = getattr(value, "message", None)
        if isinstance(inner, Message):
            return inner
        said = {key: getattr(value, key, None) for key in _ATTRIBUTES}
    if (
        "role" not in said
        or said["role"] is None
        and not isinstance(value, Mapping)
    ):
        raise TypeError
    said = {key: one for key, one in said.items() if one is not None}
    known = {key: said.pop(key, None) for key in ("role", "content")}
    known |= {key: said.pop(key) for key in _OPTIONAL if key in said}
    return Message(**known, extra=said)


def fields_of(value: Any) -> Mapping[str, Any] | None:
    """Gives the fields of a mapping, and of what makes one of itself, as
    pydantic's models do; None of anything else.
    """
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        return None
    fields: Mapping[str, Any] = dump(exclude_none=True)
    return fields


def reply_message(
    text: str,
    reasoning: str = "",
    calls: Sequence[Any] = (),
    incomplete: bool = False,
) -> Message:
    """Makes the message of a reply; `calls` as a message has them."""
    return Message(
        "assistant",
        text if text or not calls else None,
        incomplete,
        tool_calls=calls,
        extra={"reasoning": reasoning} if reasoning else {},
    )


def result_content(value: object) -> str | dict[str, Any]:
    """Makes the content of a tool's message of what the tool returned: text as
    it is, a dict of what has fields, and the JSON text of all else. What JSON
    cannot say is said by its `str`.
    """
    if isinstance(value, str):
        return value
    try:
        text = json.dumps(
            value, ensure_ascii=False, default=_plain, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError):
        return str(value)
    if text.startswith("{"):
        fields: dict[str, Any] = json.loads(text)
        return fields
    return text


def _plain(value: Any) -> object:
    """Gives a value of other kinds than JSON's, as it has them."""
    fields = fields_of(value)
    if fields is not None:
        return dict(fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
        }
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Set):
        return list(value)
    return str(value)


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


def is_parts(content: Any) -> bool:
    """Tells parts from other contents of a message: text and data of tools."""
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


def _call(name: str, given: Any) -> dict[str, Any]:
    """A tool call whose arguments are a dict."""
    dump = getattr(given, "to_dict", None)  # a ToolCall's
    call = fields_of(given) or (dump and dump()) or {}
    function = fields_of(call.get("function"))
    if function is None or not isinstance(function.get("name"), str):
        raise unexpected(
            name, "{'function': {'name': ..., 'arguments': ...}}", given
        )
    if not isinstance(call.get("id"), str | None):
        raise unexpected(f"{name}.id", "a str", call["id"])
    said = arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(
                name, arguments or "{}", unique=False, finite=True
            )
        except ValueError:
            arguments = None
        function = {**function, "arguments": arguments}
    if said is not None and not isinstance(arguments, Mapping):
        raise unexpected(
            f"{name}.function.arguments",
            "a dict or the JSON text of one",
            said,
        )
    return {**call, "function": dict(function)}
