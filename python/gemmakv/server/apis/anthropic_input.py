"""Reads Anthropic's messages into those that templates take.

A message is a text or a list of blocks. Blocks of text are the message's
text, and so are documents, search results and names of tools that were found,
where they are text. Results of tools become messages of their own. Blocks of
tools that another server ran, and what only that server can read, are left
out: `Conversation.left_out` names them. Any other block is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gemmakv.server.apis.fields import Body
from gemmakv.server.service.errors import unexpected, unsupported

# It differs in every request of one client, and says nothing to a model.
_BILLING = "x-anthropic-billing-header:"
# Ends of types of blocks: calls and results of tools that a server ran.
_OF_SERVERS = ("_tool_use", "_tool_result", "_tool_listing")
_LEFT_OUT = ("container_upload", "fallback")


class TextBlockParam(Body):
    type: Literal["text"]
    text: str


class ThinkingBlockParam(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlockParam(Body):
    """The thoughts of another server, which alone can read them."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlockParam(Body):
    """A call; some clients leave its id out."""

    type: Literal["tool_use"]
    id: str | None = None
    name: str
    input: dict[str, Any] | None = None


class ToolReferenceBlockParam(Body):
    type: Literal["tool_reference"]
    tool_name: str


class SearchResultBlockParam(Body):
    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlockParam]


class CompactionBlockParam(Body):
    """A summary of what was said before; null: there is none."""

    type: Literal["compaction"]
    content: str | None = None


class Source(Body):
    """A document: only texts are read."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class DocumentBlockParam(Body):
    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None


class ToolResultBlockParam(Body):
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class OtherBlockParam(Body):
    type: str


def _tag(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if kind in _KINDS else "<other>"


Block = Annotated[
    Annotated[TextBlockParam, Tag("<text>")]
    | Annotated[ThinkingBlockParam, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlockParam, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlockParam, Tag("<tool_use>")]
    | Annotated[ToolResultBlockParam, Tag("<tool_result>")]
    | Annotated[ToolReferenceBlockParam, Tag("<tool_reference>")]
    | Annotated[DocumentBlockParam, Tag("<document>")]
    | Annotated[SearchResultBlockParam, Tag("<search_result>")]
    | Annotated[CompactionBlockParam, Tag("<compaction>")]
    | Annotated[OtherBlockParam, Tag("<other>")],
    Discriminator(_tag),
]
_KINDS = (
    "text", "thinking", "redacted_thinking", "tool_use", "tool_result",
    "tool_reference", "document", "search_result", "compaction",
)  # fmt: skip


class MessageParam(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Block]


System = str | list[TextBlockParam]
Messages = Annotated[list[MessageParam], Field(min_length=1)]


@dataclasses.dataclass
class Conversation:
    """The messages of a conversation, as templates take them.

    Attributes:
      places: what the client calls each.
      left_out: blocks that are not in them.
    """

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)


def conversation_of(messages: list[MessageParam]) -> Conversation:
    """Reads messages. Raises RequestError for a block that asks for more than
    text.
    """
    found = Conversation()
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        said = _turn(message, f"{place}.content", found.left_out)
        found.messages += said
        found.places += [place] * len(said)
    return found


def system_parts(system: System | None) -> list[dict[str, str]]:
    """Gives the parts of the system text."""
    texts = system or []
    if isinstance(texts, str):
        return [_part(texts)]
    return [_part(b.text) for b in texts if not b.text.startswith(_BILLING)]


def _turn(
    message: MessageParam, where: str, left_out: list[str]
) -> list[dict[str, Any]]:
    """Returns a turn as templates take it: its results of tools, each a
    message of its own, and the rest of it.
    """
    role, content = message.role, message.content
    if isinstance(content, str):
        return [{"role": role, "content": [_part(content)]}]
    replies = role == "assistant"
    results: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, block in enumerate(content):
        here = f"{where}[{i}]"
        if isinstance(block, ToolUseBlockParam) and replies:
            calls.append(_call_of(block))
        elif isinstance(block, ThinkingBlockParam) and replies:
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResultBlockParam) and role == "user":
            results.append(_result(block, here))
        elif _is_left_out(block, replies):
            left_out.append(here)
        else:
            text = _text(block, here)
            if not isinstance(block, TextBlockParam):
                text += "\n\n"  # what follows says something of it
            texts.append(_part(text))
    if texts or calls or not results:
        rest: dict[str, Any] = {"role": role, "content": texts}
        if calls:
            rest["tool_calls"] = calls
        if thoughts:
            rest["reasoning"] = "\n\n".join(thoughts)
        results.append(rest)
    return results


def _is_left_out(block: Body, replies: bool) -> bool:
    if isinstance(block, RedactedThinkingBlockParam):
        return replies
    if isinstance(block, CompactionBlockParam):
        return block.content is None
    return isinstance(block, OtherBlockParam) and (
        block.type in _LEFT_OUT or block.type.endswith(_OF_SERVERS)
    )


def _call_of(block: ToolUseBlockParam) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlockParam, where: str) -> dict[str, Any]:
    text = _texts(block.content or "", f"{where}.content")
    if block.is_error:
        text = f"error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}


def _text(block: Any, where: str) -> str:
    """Gives the text of a block. Raises RequestError for one without text."""
    if isinstance(block, TextBlockParam):
        return block.text
    if isinstance(block, ToolReferenceBlockParam):
        return block.tool_name
    if isinstance(block, CompactionBlockParam):
        return block.content or ""
    if isinstance(block, SearchResultBlockParam):
        texts = [one.text for one in block.content]
        return "\n".join([block.title, block.source, *texts])
    if isinstance(block, DocumentBlockParam):
        text = _source_text(block.source, f"{where}.source")
        return "\n".join(filter(None, (block.title, block.context, text)))
    raise unsupported(f"{where}.type", block.type[:40])


def _source_text(source: Source, where: str) -> str:
    if source.type == "text":
        if source.data is None:
            raise unexpected(f"{where}.data", "a text", None)
        return source.data
    if source.type == "content":
        return _texts(source.content or "", f"{where}.content")
    raise unsupported(f"{where}.type", source.type[:40])


def _texts(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        _text(block, f"{where}[{i}]") for i, block in enumerate(content)
    )


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
