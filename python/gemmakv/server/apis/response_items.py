"""The output of responses: turns and replies as documents and items."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from gemmakv.chat._messages import messages_of
from gemmakv.conversations import Turn
from gemmakv.server.apis.call import Call
from gemmakv.server.apis.tools import text_of
from gemmakv.server.service.history import BEGUN, DROPPED, PENDING
from gemmakv.server.service.requests import Past

CUSTOM = "custom_tools"  # among a turn's `params`: names of such tools


def past_of_turn(turn: Turn) -> Past:
    """Gives the past with which a turn was asked for, also by a chat request.
    """
    params = {
        "instructions": turn.system,
        "previous_response_id": turn.parent,
        "tools": [shown_tool(tool["function"]) for tool in turn.tools],
        **turn.params,
    }
    return Past(id=turn.id, created=turn.created, params=params)


def said_in(turn: Turn) -> str:
    """Gives the text of a turn's answer: its reply without the beginning that
    the client wrote.
    """
    text: str = turn.reply.get("content") or ""
    return text[turn.params.get(BEGUN, 0) :]


def output_items_of(turn: Turn) -> list[dict[str, Any]]:
    """Makes the items of a turn's answer."""
    reply = turn.reply
    return items_of(
        turn.id,
        reply.get("reasoning") or "",
        said_in(turn),
        reply.get("tool_calls") or [],
        turn.reason,
        [],
        turn.params.get(CUSTOM, ()),
    )


def custom_calls_of(turns: Iterable[Turn]) -> set[str]:
    """Collects the ids of the calls of tools that take one text."""
    return {
        call["id"]
        for turn in turns
        for message in (*turn.messages, turn.reply)
        for call in message.get("tool_calls") or ()
        if call["function"]["name"] in turn.params.get(CUSTOM, ())
        and call.get("id")
    }


def input_items_of(
    turn: Turn, custom: Container[str] = ()
) -> list[dict[str, Any]]:
    """Makes the items that a turn was given; `custom`: ids of calls of tools
    that take one text.
    """
    pending = turn.params.get(PENDING) or {"items": (), "messages": 0}
    found: list[dict[str, Any]] = [*pending["items"]]
    messages = turn.messages[pending["messages"] :]
    begun = turn.params.get(BEGUN, 0)
    if begun:
        text = (turn.reply.get("content") or "")[:begun]
        messages.append({"role": "assistant", "content": text})

    def id(kind: str) -> str:
        return f"{kind}_{turn.id.removeprefix('resp_')}_in{len(found)}"

    for message in messages:
        role, text = message["role"], _message_text(message)
        if role == "tool":
            called = message.get("tool_call_id")
            kind = "custom_tool" if called in custom else "function"
            found.append(
                {
                    "id": id("fco"),
                    "type": f"{kind}_call_output",
                    "call_id": called,
                    "output": text,
                    "status": "completed",
                }
            )
            continue
        if role == "assistant":
            if message.get("reasoning"):
                thought = thought_item("", 0, message["reasoning"])
                found.append({**thought, "id": id("rs")})
            if text or not message.get("tool_calls"):
                part = text_part(text, [])
                found.append(message_item(id("msg"), part, "completed"))
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = function.get("arguments") or {}
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                item = call_item(
                    call.get("id") or "", function["name"], arguments,
                    "completed",
                )  # fmt: skip
                kind = "fc"
                if item["call_id"] in custom:
                    item, kind = custom_item(item), "ctc"
                found.append({**item, "id": id(kind)})
            continue
        found.append(
            {
                "id": id("msg"),
                "type": "message",
                "role": role,
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
        )
    return found


def _message_text(message: Mapping[str, Any]) -> str:
    [found] = messages_of([dict(message)])
    return found.text


def document_of_turn(call: Call, turn: Turn) -> dict[str, Any]:
    """Makes the response that a turn was answered with."""
    past = past_of_turn(turn)
    return document_of(
        call,
        turn.id,
        turn.created,
        past.params,
        output_items_of(turn),
        turn.reason,
        turn.usage,
    )


def document_of(
    call: Call,
    id: str,
    created: float,
    params: Mapping[str, Any],
    output: list[dict[str, Any]],
    reason: str | None,
    usage: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Makes a response; `reason` is None as long as it runs."""
    status = status_of(reason) if reason else "in_progress"
    session = params.get("session")
    cut = status == "incomplete"
    found: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": int(created),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": call.model,
        "output": output,
        "conversation": None if session is None else {"id": session},
        "max_tool_calls": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "usage": None if usage is None else usage_of(usage),
    }
    for name, value in _DEFAULTS.items():
        found[name] = params.get(name, value)
    if found["truncation"] == "auto":
        found[DROPPED] = params.get(DROPPED, 0)
    return found


_DEFAULTS: dict[str, Any] = {
    "instructions": None, "previous_response_id": None,
    "max_output_tokens": None, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
    "metadata": {}, "truncation": "disabled", "top_logprobs": 0,
    "prompt_cache_key": None, "user": None,
    "store": True, "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


def usage_of(given: Mapping[str, int]) -> dict[str, Any]:
    """Makes the `usage` of a response, of the counts that a turn keeps."""
    taken, made = given["prompt_tokens"], given["completion_tokens"]
    return {
        "input_tokens": taken,
        "input_tokens_details": {
            "cached_tokens": given["cached_tokens"],
            "cache_write_tokens": given.get("cache_write_tokens", 0),
        },
        "output_tokens": made,
        "output_tokens_details": {
            "reasoning_tokens": given.get("reasoning_tokens", 0)
        },
        "total_tokens": taken + made,
    }


def items_of(
    id: str,
    reasoning: str,
    text: str,
    calls: Sequence[Mapping[str, Any]],
    reason: str,
    entries: list[Any],
    custom: Container[str] = (),
) -> list[dict[str, Any]]:
    """Makes the output items of a reply. `custom` names the tools that take
    one text.
    """
    found = []
    if reasoning:
        found.append(thought_item(id, 0, reasoning))
    if text or not calls:
        found.append(
            message_item(
                message_id(id, len(found)),
                text_part(text, entries),
                status_of(reason),
            )
        )
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        item = call_item(call["id"], function["name"], arguments, "completed")
        if function["name"] in custom:
            item = custom_item(item)
        found.append(item)
    return found


def custom_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the call of a custom tool, of a function's with one text."""
    return {
        "id": "ctc_" + item["call_id"].removeprefix("call_"),
        "type": "custom_tool_call",
        "call_id": item["call_id"],
        "name": item["name"],
        "input": text_of(item["arguments"]),
        "status": item["status"],
    }


def message_id(response: str, number: int) -> str:
    end = f"_{number}" if number else ""
    return "msg_" + response.removeprefix("resp_") + end


def message_item(
    id: str, part: dict[str, Any] | None, status: str
) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if part is None else [part],
    }


def thought_item(response: str, number: int, text: str) -> dict[str, Any]:
    id = message_id(response, number).removeprefix("msg_")
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{id}",
        "type": "reasoning",
        "summary": [],
        "content": content if text else [],
    }


def without_bytes(entries: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Gives log-probabilities as events of a text have them; its parts have
    the bytes, too.
    """
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]}
                for top in entry["top_logprobs"]
            ],
        }
        for entry in entries
    ]


def with_parts(item: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a message whose text is a part, as answers have it."""
    content = item["content"]
    if isinstance(content, str):
        part = {"type": "input_text", "text": content}
        if item.get("role") == "assistant":
            part = text_part(content, [])
        content = [part]
    return {**item, "content": content}


def text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def call_item(
    id: str, name: str, arguments: str, status: str
) -> dict[str, Any]:
    return {
        "id": "fc_" + id.removeprefix("call_"),
        "type": "function_call",
        "call_id": id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def shown_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    if function.get("type") == "custom":
        return dict(function)
    return {
        "type": "function",
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def status_of(reason: str) -> str:
    return "completed" if reason == "stop" else "incomplete"
