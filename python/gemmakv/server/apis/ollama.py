"""Ollama's API: chat, generate, tags, ps, show, version."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.chat._templates import call_form
from gemmakv.errors import brief
from gemmakv.generation._result import ToolCall
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.errors import ollama_error
from gemmakv.server.apis.fields import Body, Salt, Whole
from gemmakv.server.apis.kept import named, past_of
from gemmakv.server.apis.logprobs import Logprobs, has_logprob
from gemmakv.server.apis.openai import seed_of
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.sampling import LAST_TOKENS, SAMPLING
from gemmakv.server.apis.streams import NDJSON, Reply, answer, ndjson
from gemmakv.server.apis.unsupported import UNSUPPORTED
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import (
    RequestError,
    cannot_think,
    invalid,
    unexpected,
    unsupported,
)
from gemmakv.server.service.events import (
    Called,
    Ended,
    Event,
    Finished,
    Token,
)
from gemmakv.server.service.requests import ChatRequest, limit_penalties

ROUTER = router()
# No seconds, in a number or a text: 0, "0", "0s", "0h0m".
_NO_TIME = re.compile(r"[+-]?0+(\.0*)?((ns|us|µs|ms|s|m|h)[0.nuµmsh]*)?")
# In the name of a model: gemma-3-270m, gemma-2-9b.
_PARAMETERS = re.compile(r"-([0-9.]+[mb])\b")
_STARTED = datetime.datetime.now(datetime.UTC).isoformat()
_OPTIONS = {"num_predict": "max_tokens", **SAMPLING}
_NAMES = {ours: f"options.{theirs}" for theirs, ours in _OPTIONS.items()}
_NAMES["response_format"] = "format"
_NAMES["response_format.json_schema.schema"] = "format"
# The version of Ollama that has what is answered here: `logprobs` came with
# it, the `id` of a call just before. Clients look for 0.6.4 or later.
_API_VERSION = "0.12.11"
# When the model is unloaded.
_NEVER = "9999-12-31T23:59:59Z"


class Options(Body):
    """Options that change what is written; others configure how a model is
    loaded.
    """

    num_predict: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    repeat_last_n: Whole | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalize_newline: bool | None = None

    def given(self) -> dict[str, Any]:
        """Returns them by the library's names. Raises RequestError."""
        found = {
            ours: getattr(self, theirs)
            for theirs, ours in _OPTIONS.items()
            if getattr(self, theirs) is not None
        }
        if self.num_predict == -2:  # as much as fits, as -1
            found["max_tokens"] = -1
        if self.seed is not None:
            found["seed"] = seed_of(self.seed, "options.seed")
        last, name = self.repeat_last_n, "options.repeat_last_n"
        found = limit_penalties(found, last, name, LAST_TOKENS)
        if self.penalize_newline is False:
            # Line ends are not spared; without a penalty none is to spare.
            limit_penalties(found, 1, "options.penalize_newline", LAST_TOKENS)
        return found


class BaseGenerateRequest(Body):
    """The fields of chat and of generate."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    cache_salt: Salt | None = None

    def ignored(self) -> list[str]:
        found = super().ignored()
        if self.options is None:
            return found
        for name, value in self.options.others.items():
            if value not in UNSUPPORTED.get(name, (value,)):
                raise unsupported(f"options.{name}")
            found.append(f"options.{name}")
        return found

    def generation_options(self) -> dict[str, Any]:
        """The options of the reply. Raises RequestError."""
        found = {} if self.options is None else self.options.given()
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["response_format"] = {
                "type": "json_schema",
                "json_schema": {"schema": self.format},
            }
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        if self.top_logprobs is not None:
            found["top_logprobs"] = self.top_logprobs
            if not self.logprobs:
                raise unexpected(
                    "top_logprobs", "logprobs: true with it", self.logprobs
                )
        return found


class OllamaMessage(Body):
    """A message of a conversation; its calls are read by the service."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Returns it as the service has messages."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
            found["content"] = self.content or None
        more = {
            "reasoning": self.thinking or None,
            "name": self.tool_name or self.name,
            "tool_call_id": self.tool_call_id,
        }
        return found | {k: v for k, v in more.items() if v is not None}


class OllamaChatBody(BaseGenerateRequest):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    session: str | None = None


class OllamaGenerateBody(BaseGenerateRequest):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowBody(Body):
    """`name` is what `model` was called before."""

    model: str | None = None
    name: str | None = None


class CalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class MessageCall(TypedDict):
    id: str
    function: CalledFunction


class ReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]


class BaseGenerateResponse(TypedDict):
    """Durations are in nanoseconds; only the last object of a stream has
    them.
    """

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[dict[str, Any]]]


class ChatResponse(BaseGenerateResponse):
    message: ReplyMessage
    session: NotRequired[dict[str, Any]]


class GenerateResponse(BaseGenerateResponse):
    response: str
    thinking: NotRequired[str]


class ModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ListResponse(TypedDict):
    models: list[ListedModel]


class LoadedModel(ListedModel):
    expires_at: str
    size_vram: int
    context_length: int


class ProcessResponse(TypedDict):
    models: list[LoadedModel]


class ShowResponse(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionResponse(TypedDict):
    version: str


@ROUTER.post(
    "/api/chat",
    response_model=ChatResponse,
    responses=streams(NDJSON),
    summary="Ollama's chat",
)
async def chat(call: CallDep, body: OllamaChatBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    options = body.generation_options()
    think = _think(call, body)
    past = past_of(call, body.session)
    shape = _Shape(call, body, "message", named(past))
    if not body.messages:
        return JsonResponse(shape.loaded(body))
    for i, message in enumerate(body.messages):
        if message.images:
            raise unsupported(f"messages[{i}].images")
    call.names = _NAMES
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=[message.chat_fields() for message in body.messages],
        past=past,
        options=options,
        tools=body.tools,
        think=think,
        arrived=call.arrived,
    )
    return await answer(call, request, shape, body.stream is not False)


@ROUTER.post(
    "/api/generate",
    response_model=GenerateResponse,
    responses=streams(NDJSON),
    summary="Ollama's completions",
)
async def generate(call: CallDep, body: OllamaGenerateBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    options = body.generation_options()
    think = _think(call, body)
    if think and body.raw:
        raise invalid("think", "expected false with raw, found true")
    shape = _Shape(call, body, "response")
    if not body.prompt:
        return JsonResponse(shape.loaded(body))
    messages = None
    if not body.raw:
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
    call.names = _NAMES
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=messages,
        prompts=[body.prompt],
        options=options,
        think=think,
        arrived=call.arrived,
    )
    return await answer(call, request, shape, body.stream is not False)


@ROUTER.get("/api/tags", response_model=ListResponse, summary="The model")
async def tags(call: CallDep) -> Response:
    found: ListResponse = {"models": _models(call)}
    return JsonResponse(found)


@ROUTER.get(
    "/api/ps",
    response_model=ProcessResponse,
    summary="The model, which is loaded",
)
async def ps(call: CallDep) -> Response:
    """Lists the model, which is never unloaded and never in a GPU's memory."""
    models: list[LoadedModel] = [
        {
            **one,
            "expires_at": _NEVER,
            "size_vram": 0,
            "context_length": call.service.context,
        }
        for one in _models(call)
    ]
    found: ProcessResponse = {"models": models}
    return JsonResponse(found)


@ROUTER.post(
    "/api/show", response_model=ShowResponse, summary="What the model is"
)
async def show(call: CallDep, body: OllamaShowBody) -> Response:
    name = body.model or body.name
    if not name:
        given = body.model if body.name is None else body.name
        raise unexpected("model", "a name", given)
    call.check_model(name)
    service = call.service
    defaults = service.defaults.items()
    found: ShowResponse = {
        "license": "",
        "modelfile": "",
        "parameters": "\n".join(f"{key} {value}" for key, value in defaults),
        "template": service.gemma.chat_template or "",
        "details": _details(service),
        "model_info": _model_info(call),
        "capabilities": _capabilities(service),
        "modified_at": _STARTED,
    }
    return JsonResponse(found)


@ROUTER.get(
    "/api/version",
    response_model=VersionResponse,
    summary="The version of Ollama's API",
)
async def version(call: CallDep) -> Response:
    found: VersionResponse = {"version": _API_VERSION}
    return JsonResponse(found)


def _models(call: Call) -> list[ListedModel]:
    gemma = call.service.gemma
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _STARTED,
            "size": gemma.packed_weights.nbytes,
            "digest": gemma.fingerprint,
            "details": _details(call.service),
        }
        for name in call.served
    ]


def _capabilities(service: ChatService) -> list[str]:
    if service.gemma.config.bidirectional:
        return ["embedding"]
    found = ["completion"]
    if call_form(service.prompts.template) is not None:
        found.append("tools")
    if service.prompts.can_think:
        found.append("thinking")
    return found


def _think(call: Call, body: BaseGenerateRequest) -> bool | None:
    """Whether the model is to think; None if the request does not say."""
    think = body.think
    if not think:
        return think
    if not call.service.prompts.can_think:
        raise cannot_think(
            "think", "false", "true" if think is True else brief(think)
        )
    return True


def _model_info(call: Call) -> dict[str, Any]:
    """Returns the sizes that clients fit their requests to, by GGUF's names."""
    service = call.service
    gemma = service.gemma
    config, name = gemma.config, gemma.config.architecture
    return {
        "general.architecture": name,
        "general.basename": call.model,
        f"{name}.context_length": service.context,
        f"{name}.embedding_length": config.embedding_dim or config.hidden_size,
        f"{name}.block_count": config.num_layers,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": config.bos_id,
        "tokenizer.ggml.eos_token_id": next(iter(config.eos_ids), -1),
    }


def _details(service: ChatService) -> ModelDetails:
    gemma = service.gemma
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
    media_type = NDJSON
    ping = b""

    def __init__(
        self,
        call: Call,
        body: BaseGenerateRequest,
        field: str,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        """`named`: fields that each object begins with."""
        self._name = body.model
        self._named = named or {}
        self._field = field
        self._logprobs = Logprobs(call.service.tokenizer)
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
        return ndjson(ollama_error(error))

    def loaded(self, body: BaseGenerateRequest) -> dict[str, Any]:
        """Gives the answer to a request that only loads the model, or unloads
        it by its `keep_alive`. The model stays loaded either way.
        """
        kept = str(body.keep_alive).strip()
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
