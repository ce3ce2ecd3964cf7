"""What `--lenient` takes: settings that a server refuses otherwise are left
out of a request, one after the other, and named in its answer.

What is said to the model is never touched: messages, prompts, results of
tools. Nor are keys, limits, the queue and what is wrong with the server
itself. A request is tried as it is first; each refusal that names a field of
the lists below takes that field away, and the request is tried again. So a
refused field changes nothing but itself, and there is one way through the
server for both kinds of requests.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmakv.server.apis.http import header_name
from gemmakv.server.apis.openai import JSON_OPTIONS
from gemmakv.server.service.errors import RequestError

if TYPE_CHECKING:
    from gemmakv.server.apis.http import Call, Handler

_STATUSES = (400, 404)
_MOST = 64  # fields of one request
# What becomes of a field: it goes, or names the model that is served.
_OUT, _SERVED = object(), object()
_ANY_OBJECT = {"type": "object"}
_PART = re.compile(r"[^.\[\]]+|\[\d+\]")

_Fields = Mapping[str, Any]


def _out(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _OUT)


_MODEL = {"model": _SERVED}
_TOOLS = _out("tools", "tool_choice")
_PLACES = _out("tools[]")
_PARALLEL = _out("parallel_tool_calls")
_KEPT = _out("session", "conversation", "previous_response_id")
_OPENAI = {**_MODEL, **_TOOLS, **_KEPT, **_out(*JSON_OPTIONS, "n")}
_COMPLETIONS = {
    **_OPENAI,
    **_out(
        "stream_options", "reasoning_effort", "thinking",
        "chat_template_kwargs", "functions", "function_call", "modalities",
        "audio", "web_search_options",
    ),
}  # fmt: skip
_COUNTED = {
    **_MODEL,
    **_TOOLS,
    **_PLACES,
    **_out(
        "thinking", "output_config", "output_config.*", "output_format",
        "context_management", "mcp_servers", "container", "session",
    ),
}  # fmt: skip
_OLLAMA = {
    **_MODEL,
    **_out("options", "options.*", "format", "think", "logprobs"),
    **_out("top_logprobs"),
}

# By route: a field as errors name it, and what becomes of it. [] is any place
# of a list, * any field of an object. Of what fits, the longest counts.
TOLERATED: dict[str, _Fields] = {
    "/v1/chat/completions": {
        **_COMPLETIONS,
        **_PLACES,
        **_PARALLEL,
        **_out("max_completion_tokens"),
        "tools[].function.parameters": _ANY_OBJECT,
    },
    "/v1/completions": {**_COMPLETIONS, **_out("suffix", "best_of")},
    "/v1/responses": {
        **{k: v for k, v in _OPENAI.items() if k != "logprobs"},
        **_PLACES,
        **_PARALLEL,
        **_out(
            "max_output_tokens", "text", "text.format", "reasoning",
            "include", "metadata", "prompt", "prompt_cache_key", "user",
            "background", "truncation", "context_management",
        ),
        "tools[].parameters": _ANY_OBJECT,
    },
    "/v1/responses/input_tokens": {
        **_MODEL,
        **_TOOLS,
        **_PLACES,
        **_KEPT,
        **_out("text", "text.format", "reasoning", "truncation"),
        "tools[].parameters": _ANY_OBJECT,
    },
    "/v1/responses/{response}/input_items": _out("after", "limit", "order"),
    "/v1/responses/{response}": _out("stream", "starting_after"),
    "/v1/models": _out("limit", "after_id", "before_id"),
    "/v1/models/{model:path}": _MODEL,
    "/v1/messages": {
        **_COUNTED,
        **_out(
            "stop_sequences", "temperature", "top_p", "top_k", "deadline",
            "diagnostics",
        ),
        "tools[].input_schema": _ANY_OBJECT,
    },
    "/v1/messages/count_tokens": _COUNTED,
    "/api/chat": {
        **_OLLAMA,
        **_out("session", "tools"),
        **_PLACES,
        "tools[].function.parameters": _ANY_OBJECT,
    },
    "/api/generate": {**_OLLAMA, **_out("suffix", "template", "context")},
    "/api/show": _MODEL,
}  # fmt: skip
# What a request has that does not say it.
LACKING: dict[str, _Fields] = {"/v1/responses": {"input": ""}}


async def tolerant(call: Call, route: str, handler: Handler) -> None:
    """Runs a handler until it refuses nothing that is tolerated."""
    request = _Request(call, route)
    for left in reversed(range(_MOST + 1)):
        try:
            await handler(call)
            return
        except RequestError as error:
            if (
                not left
                or call.status  # the answer has begun
                or error.status not in _STATUSES
                or error.param is None
                or not request.goes_without(error.param)
            ):
                raise


class _Request:
    """What is left of a request."""

    def __init__(self, call: Call, route: str) -> None:
        self._call = call
        self._rules = TOLERATED.get(route, {})
        self._lacking = LACKING.get(route, {})
        # Of lists that places were taken from: where the others stood.
        self._places: dict[str, list[int]] = {}

    def goes_without(self, param: str) -> bool:
        """Whether it goes on without the field that an error names."""
        call = self._call
        if call.document is None:  # it has no body
            if (
                self._rules.get(param) is _OUT
                and param in call.query
                and param not in call.without
            ):
                call.without.add(param)
                call.ignored.append(param)
                return True
            params = call.scope["path_params"]
            if param not in self._rules or params.get(param) in (
                None,
                call.name,
            ):
                return False
            params[param] = call.name
            call.ignored.append(param)
            return True
        if param in self._lacking and param not in call.document:
            call.document[param] = self._lacking[param]
            call.ignored.append(param)
            return True
        parts: list[str | int] = [
            int(part[1:-1]) if part[0] == "[" else part
            for part in _PART.findall(param)
        ]
        for length in range(len(parts), 0, -1):
            rule = _rule(parts[:length])
            if rule not in self._rules:
                rule = rule.rpartition(".")[0] + ".*"
            if rule in self._rules:
                return self._change(parts[:length], self._rules[rule])
        return False

    def _change(self, parts: Sequence[str | int], becomes: Any) -> bool:
        """Whether that changed anything."""
        owner: Any = self._call.document
        sent = ""  # the field as the client sent it
        for depth, part in enumerate(parts):
            last = depth + 1 == len(parts)
            if isinstance(part, int):
                if not isinstance(owner, list) or part >= len(owner):
                    return False
                places = self._places.setdefault(sent, list(range(len(owner))))
                sent += f"[{places[part]}]"
                if last and becomes is _OUT:
                    del places[part]
            else:
                if not isinstance(owner, dict) or part not in owner:
                    return False
                sent += f".{part}" if sent else part
            if not last:
                owner = owner[part]
            elif becomes is _OUT:
                del owner[part]
            else:
                if becomes is _SERVED:
                    becomes = self._call.name
                if owner[part] == becomes:
                    return False
                owner[part] = copy.deepcopy(becomes)
        self._call.ignored.append(header_name(sent))
        return True


def _rule(parts: Sequence[str | int]) -> str:
    """The rule of a place."""
    names = ("[]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(names).lstrip(".")
