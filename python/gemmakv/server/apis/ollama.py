"""Ollama's API: chat, generate, tags, ps, show, version."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gemmakv.chat._templates import call_form
from gemmakv.errors import brief
from gemmakv.generation._result import ToolCall
from gemmakv.server.apis.body import Salt
from gemmakv.server.apis.http import (
    NDJSON,
    Call,
    Called,
    Ended,
    Event,
    Finished,
    Reply,
    Token,
    ndjson,
    serve,
)
from gemmakv.server.apis.logprobs import Logprobs, has_logprob
from gemmakv.server.apis.openai import refuse, renamed, seed_of
from gemmakv.server.apis.sessions import named, past_of
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    missing,
    thoughtless,
    unexpected,
)
from gemmakv.server.service.requests import ChatRequest, penalized, whole

# No seconds, in a number or a text: 0, "0", "0s", "0h0m".
_NO_TIME = re.compile(r"[+-]?0+(\.0*)?((ns|us|µs|ms|s|m|h)[0.nuµmsh]*)?")
# In the name of a model: gemma-3-270m, gemma-2-9b.
_PARAMETERS = re.compile(r"-([0-9.]+[mb])\b")
_STARTED = datetime.datetime.now(datetime.UTC).isoformat()
# Names of generation options there and here, in llama-server's API as well.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip
_OPTIONS = {"num_predict": "max_tokens", **SAMPLING}
_NAMES = {ours: f"options.{theirs}" for theirs, ours in _OPTIONS.items()}
_NAMES["response_format"] = "format"
_NAMES["response_format.json_schema.schema"] = "format"
# Of these, values that change nothing.
_OPTIONS_NOTHING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,),
}  # fmt: skip
# Tokens that penalties look at, there and in llama-server, where a request
# does not say it.
LAST_TOKENS = 64
# The version of Ollama that has what is answered here: `logprobs` came with
# it, the `id` of a call just before. Clients look for 0.6.4 or later.
_API_VERSION = "0.12.11"
# When a model goes that stays: there is no end of it.
_NEVER = "9999-12-31T23:59:59Z"
_NOTHING: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",), "template": ("",), "context": ([],),
}  # fmt: skip


class _Common(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    cache_salt: Salt | None = None


class ChatBody(_Common, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    session: str | None = None


class GenerateBody(_Common, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None


async def chat(call: Call) -> None:
    body, document = await call.json(ChatBody)
    options = _checked(call, body, document)
    think = _think(call, document)
    said = body.messages or []
    past = past_of(call, body.session)
    shape = _Shape(call, body, "message", named(past))
    if not said:
        await call.answer(shape.loaded(document))
        return
    for i, message in enumerate(said):
        if message.get("images"):
            raise missing(f"messages[{i}].images")
    messages = [_message(message) for message in said]
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=messages,
        past=past,
        options=options,
        tools=body.tools,
        think=think,
        arrived=call.arrived,
    )
    with renamed({}, _NAMES):
        await serve(call, request, shape, body.stream is not False)


async def generate(call: Call) -> None:
    body, document = await call.json(GenerateBody)
    refuse(document, {"session": ()})
    options = _checked(call, body, document)
    think = _think(call, document)
    if think and body.raw:
        raise invalid("think", "expected false with raw, found true")
    shape = _Shape(call, body, "response")
    if not body.prompt:
        await call.answer(shape.loaded(document))
        return
    messages = None
    if not body.raw:
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=messages,
        prompts=[body.prompt],
        options=options,
        think=think,
        arrived=call.arrived,
    )
    with renamed({}, _NAMES):
        await serve(call, request, shape, body.stream is not False)


async def tags(call: Call) -> None:
    await call.answer({"models": _models(call)})


async def ps(call: Call) -> None:
    """The model, which never goes; none of it is in a GPU's memory."""
    loaded = {
        "expires_at": _NEVER,
        "size_vram": 0,
        "context_length": call.chat.context,
    }
    await call.answer({"models": [one | loaded for one in _models(call)]})


async def show(call: Call) -> None:
    body, _ = await call.json(ShowBody)
    name = body.model or body.name
    if not name:
        found = body.model if body.name is None else body.name
        raise unexpected("model", "a name", found)
    call.check_model(name)
    service = call.chat
    await call.answer(
        {
            "license": "",
            "modelfile": "",
            "parameters": "\n".join(
                f"{key} {value}" for key, value in service.defaults.items()
            ),
            "template": service.gemma.chat_template or "",
            "details": _details(call),
            "model_info": _model_info(service),
            "capabilities": _capabilities(service),
            "modified_at": _STARTED,
        }
    )


async def version(call: Call) -> None:
    await call.answer({"version": _API_VERSION})


def error_style(error: RequestError, request_id: str) -> tuple[int, object]:
    del request_id  # in a header
    return error.status, {"error": error.message}


def _checked(
    call: Call, body: _Common, document: Mapping[str, Any]
) -> dict[str, Any]:
    """Generation options of a body that asks for nothing that is not there."""
    call.check_model(body.model)
    refuse(document, _NOTHING)
    given = body.options or {}
    refuse(
        {f"options.{k}": v for k, v in given.items()},
        {f"options.{k}": v for k, v in _OPTIONS_NOTHING.items()},
    )
    options = {
        ours: given[theirs]
        for theirs, ours in _OPTIONS.items()
        if given.get(theirs) is not None
    }
    if whole(options.get("max_tokens")) == -2:  # as much as fits, too
        options["max_tokens"] = -1
    last, name = given.get("repeat_last_n"), "options.repeat_last_n"
    options = penalized(options, last, name, LAST_TOKENS)
    if given.get("penalize_newline") is False:
        # Line ends are not spared; without a penalty none is there to spare.
        penalized(options, 1, "options.penalize_newline", LAST_TOKENS)
    seed = whole(options.get("seed"))
    if isinstance(seed, int) and not isinstance(seed, bool):
        options["seed"] = seed_of(seed, "options.seed")
    form = document.get("format")
    if form == "json":
        options["response_format"] = {"type": "json_object"}
    elif isinstance(form, Mapping):
        options["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form},
        }
    elif form not in (None, ""):
        raise unexpected("format", '"json" or a JSON schema', form)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    if body.top_logprobs is not None:
        options["top_logprobs"] = body.top_logprobs
        if not body.logprobs:
            raise unexpected(
                "top_logprobs", "logprobs: true with it", body.logprobs
            )
    return options


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: given.get(name) for name in ("role", "content")}
    if given.get("tool_calls"):
        said["tool_calls"] = given["tool_calls"]
        said["content"] = said["content"] or None
    if given.get("thinking"):
        said["reasoning"] = given["thinking"]
    name = given.get("tool_name") or given.get("name")
    if name is not None:
        said["name"] = name
    if given.get("tool_call_id") is not None:
        said["tool_call_id"] = given["tool_call_id"]
    return said


def _models(call: Call) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _STARTED,
            "size": call.chat.gemma.packed_weights.nbytes,
            "digest": call.chat.gemma.fingerprint,
            "details": _details(call),
        }
        for name in call.settings.served_model_name
    ]


def _capabilities(service: ChatService) -> list[str]:
    if service.gemma.config.bidirectional:
        return ["embedding"]
    found = ["completion"]
    if call_form(service.template) is not None:
        found.append("tools")
    if service.can_think:
        found.append("thinking")
    return found


def _think(call: Call, document: Mapping[str, Any]) -> bool | None:
    think = document.get("think")
    if think is None or think is False:
        return think
    if think not in (True, "low", "medium", "high"):
        raise unexpected(
            "think", 'true, false, "low", "medium" or "high"', think
        )
    if not call.chat.can_think:
        raise thoughtless(
            "think", "false", "true" if think is True else brief(think)
        )
    return True


def _model_info(service: ChatService) -> dict[str, Any]:
    """Returns the sizes that clients fit their requests to, by GGUF's names."""
    gemma = service.gemma
    config, name = gemma.config, gemma.config.architecture
    return {
        "general.architecture": name,
        "general.basename": service.settings.served_model_name[0],
        f"{name}.context_length": service.context,
        f"{name}.embedding_length": config.embedding_dim or config.hidden_size,
        f"{name}.block_count": config.num_layers,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": config.bos_id,
        "tokenizer.ggml.eos_token_id": next(iter(config.eos_ids), -1),
    }


def _details(call: Call) -> dict[str, Any]:
    gemma = call.chat.gemma
    architecture = gemma.config.architecture
    found = _PARAMETERS.search(str(gemma.model_type or ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": found[1].upper() if found else "",
        "quantization_level": "",
    }


class _Shape:
    kind = NDJSON
    ping = b""

    def __init__(
        self,
        call: Call,
        body: _Common,
        field: str,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        """`named`: fields that each object begins with."""
        self._name = body.model
        self._named = named or {}
        self._field = field
        self._logprobs = Logprobs(call.chat.tokenizer)
        self._wants_logprobs = bool(body.logprobs)
        self._begin = call.arrived
        self._finished: Finished | None = None

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Token):
            more = self._entries([event])
            if not event.text and not event.reasoning and not more:
                return b""
            head = self._head(event.text, thinking=event.reasoning)
            return ndjson({**head, "done": False, **more})
        if isinstance(event, Called) and event.part.end is not None:
            head = self._head("", [event.part.end], first=event.part.call)
            return ndjson({**head, "done": False})
        if isinstance(event, Finished):
            self._finished = event
        if isinstance(event, Ended):
            assert self._finished is not None
            return ndjson(
                {**self._head(""), **self._end(self._finished, event)}
            )
        return b""

    def whole(self, reply: Reply) -> object:
        return {
            **self._head(
                reply.texts.get(0, ""),
                reply.calls.get(0, []),
                reply.reasoning.get(0, ""),
            ),
            **self._end(reply.finished[0], reply.usage),
            **self._entries(reply.tokens.get(0, [])),
        }

    def failure(self, error: RequestError) -> bytes:
        return ndjson({"error": error.message})

    def loaded(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that only has the model loaded, or, by its
        `keep_alive`, not any longer: the model stays either way.
        """
        kept = str(document.get("keep_alive", "")).strip()
        reason = "unload" if _NO_TIME.fullmatch(kept) else "load"
        return {**self._head(""), "done": True, "done_reason": reason}

    def _head(
        self,
        text: str,
        calls: Sequence[ToolCall] = (),
        thinking: str = "",
        first: int = 0,
    ) -> dict[str, Any]:
        """Returns the fields that an object begins with. `first` is the place
        of its first call among those of the reply.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat()
        said: Any = text
        thoughts = {"thinking": thinking} if thinking else {}
        if self._field == "message":
            said = {"role": "assistant", "content": text, **thoughts}
            thoughts = {}
            if calls:
                said["tool_calls"] = [
                    {
                        "id": c.id,
                        "function": {
                            "index": i,
                            "name": c.name,
                            "arguments": c.arguments,
                        },
                    }
                    for i, c in enumerate(calls, first)
                ]
        return {
            "model": self._name,
            "created_at": now,
            **self._named,
            self._field: said,
            **thoughts,
        }

    def _entries(self, tokens: list[Token]) -> dict[str, Any]:
        if not self._wants_logprobs:
            return {}
        found = [self._logprobs.entry(t) for t in tokens if has_logprob(t)]
        return {"logprobs": found} if found else {}

    def _end(self, finished: Finished, ended: Ended) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": ("stop" if finished.reason == "stop" else "length"),
            "total_duration": _ns(time.monotonic() - self._begin),
            "load_duration": 0,
            "prompt_eval_count": ended.prompt_tokens,
            "prompt_eval_duration": _ns(ended.prefill_s),
            "eval_count": ended.completion_tokens,
            "eval_duration": _ns(ended.decode_s),
        }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
