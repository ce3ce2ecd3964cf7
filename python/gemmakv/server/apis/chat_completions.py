"""OpenAI's chat completions; `session` goes on with a conversation."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.generation._result import ToolCall
from gemmakv.server.apis.call import Call, CallDep
from gemmakv.server.apis.fields import Body, Whole
from gemmakv.server.apis.kept import named, past_of
from gemmakv.server.apis.logprobs import has_logprob
from gemmakv.server.apis.openai import (
    Completion,
    CompletionFields,
    CompletionShape,
    FinishReason,
    finish_reason,
    spent,
    think_of,
)
from gemmakv.server.apis.prompt_logprobs import PromptPlace
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.streams import SSE, Reply, answer
from gemmakv.server.apis.timings import prompt_progress
from gemmakv.server.apis.tools import arguments_of, read_tools, text_of
from gemmakv.server.service.errors import invalid, unexpected, unsupported
from gemmakv.server.service.events import (
    Called,
    Event,
    Finished,
    Progress,
    Started,
    Token,
)
from gemmakv.server.service.requests import ChatRequest

ROUTER = router()
_NOT_TEXT = ("image_url", "input_audio", "file", "video_url")


class ChatMessage(Body):
    """A message of a conversation; what it says is read by the model's
    template.
    """

    role: Any = None
    content: Any = Field(None, description="A text, or a list of text parts.")
    name: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class ChatBody(CompletionFields):
    messages: list[ChatMessage]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    thinking: Any = None
    chat_template_kwargs: Any = None
    session: str | None = None
    replaces: str | None = Field(
        None, description="The session's last turn, whose place it takes."
    )
    store: bool | None = None
    return_progress: bool | None = Field(
        None, description="How much of the prompt is computed, in a stream."
    )

    def options(self) -> dict[str, Any]:
        found = super().options()
        most = self.max_completion_tokens
        if most is not None:
            if self.max_tokens not in (None, most):
                raise invalid(
                    "max_tokens",
                    "expected max_completion_tokens or max_tokens, found both",
                )
            found["max_tokens"] = most
        if self.top_logprobs is not None and not self.logprobs:
            raise unexpected(
                "top_logprobs", "logprobs: true with it", self.logprobs
            )
        return found


class LogprobList(TypedDict):
    content: list[dict[str, Any]]
    refusal: None


class Function(TypedDict):
    name: str
    arguments: str


class FunctionCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class Custom(TypedDict):
    name: str
    input: str


class CustomCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: Custom


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCall | CustomCall]]


class Choice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: LogprobList | None
    finish_reason: FinishReason


class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    choices: list[Choice]
    prompt_logprobs: NotRequired[list[PromptPlace | None]]
    session: NotRequired[dict[str, Any]]


@ROUTER.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=streams(SSE),
    summary="OpenAI's chat completions; `session` goes on with a session",
)
async def chat_completions(call: CallDep, body: ChatBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    body.check_stream_options()
    options = body.options()
    call.names = body.names()
    if body.max_completion_tokens is not None:
        call.names = {**call.names, "max_tokens": "max_completion_tokens"}
    if body.session is not None and body.store is False:
        raise invalid("store", "expected true with a session, found false")
    past = past_of(call, body.session, replaces=body.replaces)
    tools = read_tools(body.tools, body.tool_choice, flat=False)
    call.names = {**call.names, **tools.names}
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=_messages(body.messages),
        past=past,
        options=options,
        prompt_logprobs=body.prompt_top(),
        tools=tools.functions,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        think=think_of(call, body.said()),
        n=body.n or 1,
        progress=bool(body.return_progress),
        arrived=call.arrived,
        not_enforced=tools.not_enforced,
    )
    shape = _Chat(call, body, tools.custom)
    shape.head.update(named(past))
    return await answer(call, request, shape, body.stream)


def _messages(given: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the service has them; refuses what asks for more than text
    in them.
    """
    found = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        for name in ("function_call", "audio"):
            if message.others.get(name):
                raise unsupported(f"{where}.{name}")
        if message.role == "function":
            raise unsupported(f"{where}.role", "results of functions")
        content = message.content
        if isinstance(content, list):
            content = _parts(content, f"{where}.content")
        if message.role == "tool" and content is None:
            content = ""
        said = {"role": message.role, "content": content}
        for name in ChatMessage.model_fields:
            value = getattr(message, name)
            if name not in said and value is not None:
                said[name] = value
        if isinstance(message.tool_calls, list):
            said["tool_calls"] = [_call_in(one) for one in message.tool_calls]
        found.append(said)
    return found


def _parts(parts: list[Any], where: str) -> list[Any]:
    found = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _NOT_TEXT:
            raise unsupported(f"{where}[{i}].type", f"{kind}")
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        found.append(part)
    return found


def _call_in(call: Any) -> Any:
    """A call of a message; one of a custom tool as that of a function."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    arguments = arguments_of(str(custom.get("input")))
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


class _Chat(CompletionShape):
    prefix = "chatcmpl-"
    kind = "chat.completion.chunk"

    def __init__(
        self, call: Call, body: ChatBody, custom: Container[str]
    ) -> None:
        """`custom`: names of tools that take one text."""
        super().__init__(call, body)
        self.custom = custom
        self._calls: dict[int, tuple[str, str]] = {}  # those that grow
        self.rows = body.n or 1
        self.wants_logprobs = bool(body.logprobs)

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            opening = {"role": "assistant", "content": "", "refusal": None}
            return b"".join(self._delta(i, opening) for i in range(self.rows))
        if isinstance(event, Progress):
            more = prompt_progress(event)
            return self._delta(event.index, {}, more=more)
        if isinstance(event, Token):
            return self._token(event)
        if isinstance(event, Called):
            return self._called(event)
        if isinstance(event, Finished):
            return self._delta(event.index, {}, None, finish_reason(event))
        return self.end(event)

    def text_chunk(self, index: int, text: str) -> bytes:
        return self._delta(index, {"content": text})

    def whole(self, reply: Reply) -> object:
        choices = [self._choice(i, reply) for i in sorted(reply.finished)]
        places = self.prompt_places(reply, 0)
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            **({} if places is None else {"prompt_logprobs": places}),
            **spent(reply.usage),
        }

    def _token(self, event: Token) -> bytes:
        logprobs = None
        if self.wants_logprobs and has_logprob(event):
            logprobs = self._list([event])
        delta = {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.text or (logprobs is not None and not delta):
            delta["content"] = event.text
        if not delta:
            return b""
        if logprobs is None and not event.reasoning:
            return self.say(event.index, event.text)
        return self._delta(event.index, delta, logprobs)

    def _choice(self, i: int, reply: Reply) -> Choice:
        tokens = reply.tokens.get(i, [])
        calls = reply.calls.get(i, [])
        message: AssistantMessage = {
            "role": "assistant",
            "content": reply.texts.get(i, "") or (None if calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning := reply.reasoning.get(i, ""):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return {
            "index": i,
            "message": message,
            "logprobs": self._list(tokens) if self.wants_logprobs else None,
            "finish_reason": finish_reason(reply.finished[i]),
        }

    def _list(self, tokens: list[Token]) -> LogprobList:
        entries = [self.logprobs.entry(t) for t in tokens if has_logprob(t)]
        return {"content": entries, "refusal": None}

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: LogprobList | None = None,
        reason: FinishReason | None = None,
        more: Mapping[str, Any] = {},
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return self.chunk(choice, more)

    def _called(self, event: Called) -> bytes:
        """A part of a call. The text of a custom tool is known, and told,
        once its call is whole.
        """
        part = event.part
        if part.start is not None:
            self._calls[event.index] = part.start
        custom = self._calls[event.index][1] in self.custom
        if custom and part.end is None:
            return b""
        delta: dict[str, Any] = {"index": part.call}
        if custom:
            assert part.end is not None
            delta |= self._call(part.end)
        else:
            function: dict[str, Any] = {"arguments": part.arguments}
            if part.start is not None:
                delta |= {"id": part.start[0], "type": "function"}
                function["name"] = part.start[1]
            delta["function"] = function
        return self._delta(event.index, {"tool_calls": [delta]})

    def _call(self, call: ToolCall) -> FunctionCall | CustomCall:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        if call.name in self.custom:
            custom: Custom = {"name": call.name, "input": text_of(arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function: Function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}
