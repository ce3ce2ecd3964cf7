"""Anthropic's API: messages and count_tokens."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.chat._tools import CallPart
from gemmakv.server.apis.anthropic_input import (
    Conversation,
    Messages,
    System,
    conversation_of,
    system_parts,
)
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.errors import anthropic_error
from gemmakv.server.apis.fields import Body, Salt, Whole
from gemmakv.server.apis.kept import named, past_of
from gemmakv.server.apis.openai import thinks
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.streams import SSE, Reply, answer, sse
from gemmakv.server.service.diagnostics import Fingerprint, fingerprint
from gemmakv.server.service.errors import (
    RequestError,
    cannot_think,
    invalid,
    refuse_others,
    unexpected,
    unsupported,
)
from gemmakv.server.service.events import (
    Called,
    Ended,
    Event,
    Finished,
    Started,
    Token,
)
from gemmakv.server.service.requests import ChatRequest

ROUTER = router()
_PING = sse({"type": "ping"}, "ping")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Edits that take old thoughts out of a conversation: there are none in it.
_NO_EDITS = "clear_thinking_"


class ToolParam(Body):
    """A tool of the client's; those of the service's own have other types."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1)
    disable_parallel_tool_use: bool | None = None


class ThinkingConfigParam(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None


class JSONOutputFormatParam(Body):
    type: Literal["json_schema"]
    schema_: Any = Field(None, alias="schema")


class OutputConfigParam(Body):
    effort: str | None = None
    format: JSONOutputFormatParam | None = None


class ContextEdit(Body):
    type: str


class ContextManagement(Body):
    edits: list[ContextEdit] | None = None


class DiagnosticsParam(Body):
    previous_message_id: str | None = None


class MessageCountTokensParams(Body):
    """`output_format` is what `output_config.format` was called before."""

    messages: Messages
    model: str | None = None
    system: System | None = None
    session: str | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfigParam | None = None
    output_config: OutputConfigParam | None = None
    output_format: JSONOutputFormatParam | None = None
    context_management: ContextManagement | None = None

    def ignored(self) -> list[str]:
        more = {} if self.thinking is None else self.thinking.others
        return super().ignored() + [f"thinking.{name}" for name in more]

    def check_hints(self) -> None:
        """Raises RequestError for an effort that is none, and for edits of
        the conversation that change it.
        """
        config = self.output_config
        if config is not None and config.effort is not None:
            thinks("output_config.effort", config.effort)
        managed = self.context_management
        for i, edit in enumerate((managed and managed.edits) or ()):
            if not edit.type.startswith(_NO_EDITS):
                raise unsupported(
                    f"context_management.edits[{i}].type", edit.type[:60]
                )

    def form(self) -> tuple[dict[str, Any], str]:
        """Returns the option that states the form of the reply, if there is
        one, and the field that has it. Raises RequestError.
        """
        config = self.output_config
        given, field = self.output_format, "output_format"
        if config is not None:
            refuse_others("output_config", config.others, ())
            if config.format is not None:
                if given not in (None, config.format):
                    raise invalid(
                        "output_format",
                        "expected it or output_config.format, found both",
                    )
                given, field = config.format, "output_config.format"
        if given is None:
            return {}, field
        refuse_others(field, given.others, ())
        form = {"type": "json_schema", "json_schema": {"schema": given.schema_}}
        return {"response_format": form}, field


class MessageCreateParams(MessageCountTokensParams):
    """A `max_tokens` of -1 is as much as fits."""

    max_tokens: Whole
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    deadline: float | None = None
    cache_salt: Salt | None = None
    diagnostics: DiagnosticsParam | None = None

    def options(self) -> dict[str, Any]:
        """The generation options. Raises RequestError."""
        if self.max_tokens < 1 and self.max_tokens != -1:
            raise invalid(
                "max_tokens",
                "expected at least 1, or -1 for no limit, found "
                f"{self.max_tokens}",
            )
        found = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "deadline": self.deadline,
        }
        return {k: v for k, v in found.items() if v is not None}


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Ending(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


class Message(Ending):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    session: NotRequired[dict[str, Any]]
    diagnostics: NotRequired[dict[str, Any] | None]


class MessageTokensCount(TypedDict):
    input_tokens: int


@ROUTER.post(
    "/v1/messages",
    response_model=Message,
    responses=streams(SSE),
    summary="Anthropic's messages",
)
async def messages(call: CallDep, body: MessageCreateParams) -> Response:
    _check_thread(body)
    call.takes(body)
    call.check_model(body.model)
    options = body.options()
    most = None if body.max_tokens == -1 else body.max_tokens
    request = dataclasses.replace(
        _request(call, body, options, most),
        tenant=call.owner_of(body.cache_salt),
    )
    shape = _Messages(call, body, request)
    await shape.diagnose(call, body, request)
    return await answer(call, request, shape, body.stream)


@ROUTER.post(
    "/v1/messages/count_tokens",
    response_model=MessageTokensCount,
    summary="The tokens of messages",
)
async def count_tokens(
    call: CallDep, body: MessageCountTokensParams
) -> Response:
    _check_thread(body)
    call.takes(body)
    call.check_model(body.model)
    count = await call.service.count(_request(call, body, {}, None))
    found: MessageTokensCount = {"input_tokens": count}
    return JsonResponse(found)


def _check_thread(body: MessageCountTokensParams) -> None:
    """Raises RequestError where the server is to keep the conversation. The
    tool runners of Anthropic's clients ask for that first, and send whole
    conversations after this error, and new messages alone without it.
    """
    if body.others.get("thread") is None:
        return
    raise RequestError(
        400,
        "thread: expected none, since requests have whole conversations here "
        "(or a `session`), found one",
        param="thread",
        code="unsupported_field",
        more={
            "details": {
                "error_code": "thread_unsupported_request",
                "unsupported": ["thread"],
            }
        },
    )


def _request(
    call: Call,
    body: MessageCountTokensParams,
    options: dict[str, Any],
    max_tokens: int | None,
) -> ChatRequest:
    """Makes the request that a body is, with these options and the form of
    the reply. Raises RequestError.
    """
    body.check_hints()
    form, field = body.form()
    said = conversation_of(body.messages)
    call.ignored = [*call.ignored, *said.left_out]
    parts = system_parts(body.system)
    system = None
    if parts and body.session is not None:
        # Said with every request, and once in a conversation.
        system = "\n".join(part["text"] for part in parts)
    elif parts:
        said.messages.insert(0, {"role": "system", "content": parts})
        said.places.insert(0, "system")
    call.names = _names(body, said, field)
    choice = body.tool_choice
    return ChatRequest(
        tenant=call.owner,
        messages=said.messages,
        past=past_of(call, body.session, system),
        options={**options, **form},
        tools=_tools(body.tools or ()),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        think=_think(call, body.thinking, max_tokens),
        arrived=call.arrived,
    )


def _names(
    body: MessageCountTokensParams, said: Conversation, form: str
) -> dict[str, str]:
    """Maps fields to the client's names for them; `form` is the field that
    states the form of the reply.
    """
    names = {
        "stop": "stop_sequences",
        "response_format": form,
        "response_format.json_schema": form,
    }
    for i, place in enumerate(said.places):
        names[f"messages[{i}]"] = place
    for i in range(len(body.tools or ())):
        ours, theirs = f"tools[{i}].function", f"tools[{i}]"
        names[f"{ours}.name"] = f"{theirs}.name"
        names[f"{ours}.parameters"] = f"{theirs}.input_schema"
    return names


def _think(
    call: Call, given: ThinkingConfigParam | None, max_tokens: int | None
) -> bool | None:
    """Whether the model is to think; None if the request does not say."""
    if given is None:
        return None
    if given.type == "disabled":
        return False
    if not call.service.prompts.can_think:
        if given.type == "enabled":
            raise cannot_think(
                "thinking.type", "'disabled' or 'adaptive'", "'enabled'"
            )
        return None  # as much as it needs, which is none
    budget = given.budget_tokens
    if given.type == "enabled" and (
        budget is None
        or budget < 1
        or max_tokens is not None
        and budget >= max_tokens
    ):
        raise unexpected(
            "thinking.budget_tokens", "a number below max_tokens", budget
        )
    return True


def _tools(given: Sequence[ToolParam]) -> list[dict[str, Any]] | None:
    """Returns tools as OpenAI has them. Raises RequestError."""
    found = []
    for i, tool in enumerate(given):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools[{i}].type", tool.type[:40])
        function = {
            "name": tool.name,
            "description": tool.description,
            "strict": tool.strict,
            "parameters": tool.input_schema,
        }
        said = {k: v for k, v in function.items() if v is not None}
        found.append({"type": "function", "function": said})
    return found or None


def _choice(choice: ToolChoiceParam | None) -> str | None:
    if choice is None:
        return None
    refuse_others("tool_choice", choice.others, ())
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise unexpected("tool_choice.name", "the name of a tool", None)
    return choice.name


class _Messages:
    """The shape of one message."""

    media_type = SSE
    ping = _PING

    def __init__(
        self, call: Call, body: MessageCreateParams, request: ChatRequest
    ) -> None:
        # Whether it is text, and nothing else.
        self._plain = not request.tools and not request.think
        self._open = ""  # the kind of block that is open
        self._blocks = 0
        self._head: dict[str, Any] = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": body.model or call.model,
            **named(request.past),
        }
        self._request_id = call.request_id
        self._finished: Finished | None = None
        self._owner = call.owner.label
        self._known = call.service.diagnostics
        self._made_of: Fingerprint | None = None

    async def diagnose(
        self, call: Call, body: MessageCreateParams, request: ChatRequest
    ) -> None:
        """Has the answer tell why the cache had less of the request than of
        the one before it, if the body asks for that.
        """
        if body.diagnostics is None:
            return
        system: object = None
        said = list(request.messages or ())
        if said and said[0]["role"] == "system":
            system = said.pop(0)
        elif request.past is not None:
            system = request.past.system
        self._made_of = await call.service.threads.run_texts(
            fingerprint, self._head["model"], system, request.tools, said
        )
        before = body.diagnostics.previous_message_id
        reason = None
        if before is not None:
            reason = self._known.reason(self._owner, before, self._made_of)
        self._head["diagnostics"] = reason and {"cache_miss_reason": reason}

    def _note(self, prompt_tokens: int) -> None:
        if self._made_of is not None:
            self._known.note(
                self._owner, self._head["id"], self._made_of, prompt_tokens
            )

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            return self._opening(event)
        if isinstance(event, Token):
            frames = b""
            if event.reasoning:
                frames += self._begin(_thinking(""))
                frames += self._delta(
                    {"type": "thinking_delta", "thinking": event.reasoning}
                )
            if event.text:
                frames += self._begin({"type": "text", "text": ""})
                frames += self._delta(
                    {"type": "text_delta", "text": event.text}
                )
            return frames
        if isinstance(event, Called):
            return self._call(event.part)
        if isinstance(event, Finished):
            self._finished = event
            if self._blocks == 0 and not self._open:
                frames = self._begin({"type": "text", "text": ""})
                return frames + self._close()
            return self._close()
        assert isinstance(event, Ended) and self._finished is not None
        self._note(event.prompt_tokens)
        return _frame(
            "message_delta",
            delta=_ending(self._finished),
            usage=_usage(event),
        ) + _frame("message_stop")

    def whole(self, reply: Reply) -> Message:
        self._note(reply.usage.prompt_tokens)
        text, calls = reply.texts.get(0, ""), reply.calls.get(0, [])
        content: list[ContentBlock] = []
        if reasoning := reply.reasoning.get(0, ""):
            content.append(_thinking(reasoning))
        if text or not calls:
            content.append({"type": "text", "text": text})
        content += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": call.arguments,
            }
            for call in calls
        ]
        return {
            **self._head,  # type: ignore[typeddict-item]
            "content": content,
            **_ending(reply.finished[0]),
            "usage": _usage(reply.usage),
        }

    def failure(self, error: RequestError) -> bytes:
        return sse(anthropic_error(error, self._request_id), "error")

    def _opening(self, event: Started) -> bytes:
        # Nobody knows yet how much of the prompt is cached: the last event
        # says it.
        usage: MessageUsage = {
            "input_tokens": event.prompt_tokens,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        frames = _frame("message_start", message=message)
        if self._plain:
            frames += self._begin({"type": "text", "text": ""})
        return frames + _PING

    def _call(self, part: CallPart) -> bytes:
        frames = b""
        if part.start is not None:
            id, name = part.start
            frames += self._begin(
                {"type": "tool_use", "id": id, "name": name, "input": {}}
            )
        if part.arguments:
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            frames += self._delta(delta)
        if part.end is not None:
            frames += self._close()
        return frames

    def _begin(self, block: ContentBlock) -> bytes:
        """Begins a block, unless it is text or thoughts that go on."""
        kind = block["type"]
        if self._open == kind and kind in ("text", "thinking"):
            return b""
        frames = self._close()
        self._open = block["type"]
        return frames + _frame(
            "content_block_start", index=self._blocks, content_block=block
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._blocks += 1
        return _frame("content_block_stop", index=self._blocks - 1)


def _thinking(text: str) -> ThinkingBlock:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _frame(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _ending(finished: Finished) -> Ending:
    reason: StopReason = "max_tokens"
    if finished.reason == "stop":
        reason = "end_turn" if finished.stop is None else "stop_sequence"
        reason = "tool_use" if finished.calls else reason
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(ended: Ended) -> MessageUsage:
    cached, written = ended.cached_tokens, ended.cache_write_tokens
    return {
        "input_tokens": ended.prompt_tokens - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": ended.completion_tokens,
    }
