"""Anthropic's API: messages, count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from gemmakv.server._errors import RequestError, invalid, missing
from gemmakv.server._http import (
    SSE,
    Call,
    Ended,
    Event,
    Finished,
    Reply,
    Started,
    Token,
    serve,
    sse,
)
from gemmakv.server._openai import refuse, renamed
from gemmakv.server._service import ChatRequest

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error",
    403: "permission_error", 404: "not_found_error", 405: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip
_OVERLOADED = 529  # the original's status for it
_PING = sse({"type": "ping"}, "ping")
# It differs in every request of one client, and says nothing to a model.
_BILLING = "x-anthropic-billing-header:"
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}

_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},), "mcp_servers": ([],),
    "container": (),
    "diagnostics": (), "context_management": (),
}  # fmt: skip


class CountBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


async def messages(call: Call) -> None:
    body, document = await call.json(MessagesBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    if body.max_tokens < 1:
        raise invalid(
            "max_tokens", f"expected at least 1, found {body.max_tokens}"
        )
    options = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "deadline": document.get("deadline"),
        "response_format": _format(document),
    }
    request = ChatRequest(
        tenant=call.owner,
        messages=_conversation(body),
        options={k: v for k, v in options.items() if v is not None},
        arrived=call.arrived,
    )
    with renamed({}, _NAMES):
        await serve(call, request, _Messages(call), bool(body.stream))


async def count_tokens(call: Call) -> None:
    body, document = await call.json(CountBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    ids = await call.chat.chat_ids(_conversation(body))
    await call.answer({"input_tokens": len(ids)})


def error_style(error: RequestError, request_id: str) -> tuple[int, object]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    status = _OVERLOADED if error.status == 503 else error.status
    return status, {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def _format(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """`output_config.format`, or `output_format` as it was called before."""
    config = document.get("output_config")
    given = document.get("output_format")
    if isinstance(config, Mapping):
        refuse(
            {f"output_config.{k}": v for k, v in config.items()},
            {"output_config.effort": (), "output_config.task_budget": ()},
        )
        given = config.get("format") or given
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise invalid(
            "output_config.format", "expected {'type': 'json_schema', ...}"
        )
    schema = {"schema": given.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


def _conversation(body: CountBody) -> list[dict[str, Any]]:
    """Messages as templates take them: turns of one side after each other are
    one, as in the original.
    """
    found: list[dict[str, Any]] = []
    system = [
        part
        for part in _parts(body.system or [], "system")
        if not part["text"].startswith(_BILLING)
    ]
    if system:
        found.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise invalid(
                f"messages[{i}].role",
                f"expected 'user' or 'assistant', found {str(role)[:40]!r}",
            )
        parts = _parts(message.get("content"), f"messages[{i}].content")
        if found and found[-1]["role"] == role:
            found[-1]["content"] += parts
        else:
            found.append({"role": role, "content": parts})
    if not body.messages:
        raise invalid("messages", "expected at least one, found none")
    if found[-1]["role"] == "assistant":
        raise missing(
            f"messages[{len(body.messages) - 1}].role",
            "the beginning of a reply, written by the client",
        )
    return found


def _parts(content: Any, where: str) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, "expected a text or a list of content blocks")
    parts = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise invalid(f"{where}[{i}].type", "expected it, found none")
        if kind != "text":
            raise missing(f"{where}[{i}].type", kind[:40])
        if not isinstance(block.get("text"), str):
            raise invalid(f"{where}[{i}].text", "expected a text")
        parts.append({"type": "text", "text": block["text"]})
    return parts


class _Messages:
    """One message."""

    kind = SSE
    ping = _PING

    def __init__(self, call: Call) -> None:
        self._head = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": call.name,
        }
        self._finished: Finished | None = None

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            return self._opening(event)
        if isinstance(event, Token):
            if not event.text:
                return b""
            delta = {"type": "text_delta", "text": event.text}
            return _frame("content_block_delta", index=0, delta=delta)
        if isinstance(event, Finished):
            self._finished = event
            return _frame("content_block_stop", index=0)
        assert self._finished is not None
        return _frame(
            "message_delta",
            delta=_ending(self._finished),
            usage=_usage(event),
        ) + _frame("message_stop")

    def whole(self, reply: Reply) -> object:
        return {
            **self._head,
            "content": [
                {"type": "text", "text": reply.texts.get(0, "")},
            ],
            **_ending(reply.finished[0]),
            "usage": _usage(reply.usage),
        }

    def failure(self, error: RequestError) -> bytes:
        return sse(error_style(error, "")[1], "error")

    def _opening(self, event: Started) -> bytes:
        # What of the prompt is cached shows when it has been read; the last
        # event says it.
        usage = {
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
        block = {"type": "text", "text": ""}
        return (
            _frame("message_start", message=message)
            + _frame("content_block_start", index=0, content_block=block)
            + _PING
        )


def _frame(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _ending(finished: Finished) -> dict[str, Any]:
    reason = "max_tokens"
    if finished.reason == "stop":
        reason = "end_turn" if finished.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(ended: Ended) -> dict[str, Any]:
    return {
        "input_tokens": ended.prompt_tokens - ended.cached_tokens,
        "cache_read_input_tokens": ended.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": ended.completion_tokens,
    }
