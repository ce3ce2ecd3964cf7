"""OpenAI's API: chat completions, completions, models."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from gemmakv.errors import brief
from gemmakv.generation._result import ToolCall
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.options import GenerationOptions
from gemmakv.server.apis.body import Salt
from gemmakv.server.apis.http import (
    CLIENT_NAMES,
    SSE,
    Call,
    Called,
    ClientNames,
    Ended,
    Event,
    Finished,
    Reply,
    Started,
    Template,
    Token,
    serve,
    sse,
)
from gemmakv.server.apis.logprobs import Logprobs, finite, has_logprob
from gemmakv.server.apis.prompt_logprobs import by_token, echoed, unlisted
from gemmakv.server.apis.sessions import named, past_of
from gemmakv.server.apis.timings import timings
from gemmakv.server.apis.unsupported import check_supported
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    missing,
    refuse_others,
    thoughtless,
    unexpected,
)
from gemmakv.server.service.forms import FORM_FIELDS, stated_form
from gemmakv.server.service.requests import (
    ChatRequest,
    aliased,
    penalized,
)

_DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_COMPLETION_TOKENS = 16  # the original's default for /v1/completions
_SEEDS = 1 << 64
_LAST_TOKENS = 64  # that llama-server's penalties look at by default
_STARTED = int(time.time())
_TYPES = {
    401: "authentication_error", 403: "permission_error",
    408: "timeout_error", 429: "rate_limit_error", 500: "server_error",
    503: "server_error",
}  # fmt: skip

# Generation options that JSON can say.
JSON_OPTIONS = tuple(
    name
    for name, option in GenerationOptions.table.items()
    if option.kind.schema() is not None
)

# All but the first have a model think that can.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Padding against those who measure packets says nothing.
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")
# Of messages, beside role and content.
_SAID = (
    "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
)  # fmt: skip


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: Salt | None = None


class ChatBody(_Common, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_logprobs: int | None = None
    session: str | None = None
    store: bool | None = None


class ModelsQuery(msgspec.Struct, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    after_id: str | None = None
    before_id: str | None = None


class CompletionBody(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None


async def chat_completions(call: Call) -> None:
    body, document = await call.json(ChatBody)
    call.check_model(body.model)
    options = _options(body, document)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise invalid(
                "max_tokens",
                "expected max_completion_tokens or max_tokens, found both",
            )
        options["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise unexpected(
            "top_logprobs", "logprobs: true with it", body.logprobs
        )
    if body.session is not None and body.store is False:
        raise invalid("store", "expected true with a session, found false")
    past = past_of(call, body.session)
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        messages=_messages(body.messages),
        past=past,
        options=options,
        prompt_logprobs=_prompt_logprobs(body),
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        think=_think(call, document),
        n=_count(body),
        arrived=call.arrived,
    )
    shape = _Chat(call, body, bool(body.logprobs))
    shape.head.update(named(past))
    with renamed(document):
        await serve(call, request, shape, bool(body.stream))


async def completions(call: Call) -> None:
    body, document = await call.json(CompletionBody)
    call.check_model(body.model)
    refuse(
        document,
        {
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "session": (),
            "reasoning_effort": ("none",),
            "thinking": ({"type": "disabled"},),
            "chat_template_kwargs": ({},),
        },
    )
    options = _options(body, document)
    options.pop("logprobs", None)
    if body.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": body.logprobs}
    n = _count(body)
    if body.best_of not in (None, n):
        raise missing("best_of", "a choice among more than n")
    prompts = _prompts(body.prompt)
    call.chat.check_rows(len(prompts), n)
    tops = [_prompt_logprobs(body), body.logprobs if body.echo else None]
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        prompts=prompts,
        prompt_logprobs=max(
            (one for one in tops if one is not None), default=None
        ),
        add_bos=body.add_special_tokens is not False,
        options=options,
        n=n,
        default_max_tokens=_COMPLETION_TOKENS,
        arrived=call.arrived,
    )
    shape = _Completion(call, body, prompts, n)
    with renamed(document):
        await serve(call, request, shape, bool(body.stream))


async def models(call: Call) -> None:
    """Of Anthropic's pages only those who ask for them are told."""
    query = call.query_of(ModelsQuery)
    names = list(dict.fromkeys(call.settings.served_model_name))
    first = _place(names, "after_id", query.after_id, -1) + 1
    end = _place(names, "before_id", query.before_id, len(names))
    within = names[first:end]
    shown = within[: query.limit]
    if query.before_id is not None and query.limit is not None:
        shown = within[-query.limit :]  # those next to it
    found: dict[str, Any] = {
        "object": "list",
        "data": [_model(call, name) for name in shown],
    }
    if "anthropic-version" in call.headers:
        found |= {
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
            "has_more": len(shown) < len(within),
        }
    await call.answer(found)


def _place(
    names: list[str], field: str, wanted: str | None, absent: int
) -> int:
    """Of a name that a query's field says. Raises RequestError."""
    if wanted is None:
        return absent
    if wanted not in names:
        raise invalid(
            field,
            f"expected a model that is served ({' or '.join(names)}), found "
            + brief(wanted),
        )
    return names.index(wanted)


async def model(call: Call) -> None:
    name = call.scope["path_params"]["model"]
    call.check_model(name)
    await call.answer(_model(call, name))


def error_style(error: RequestError, request_id: str) -> tuple[int, object]:
    del request_id  # in a header
    code = error.code
    kind = _TYPES.get(error.status, "invalid_request_error")
    body = {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": code,
        **error.more,
    }
    return error.status, {"error": body}


class renamed:
    """Has errors name the fields that the client wrote, also those that a
    stream tells of.

    `names` are theirs by ours, as of `ClientNames`.
    """

    def __init__(
        self, document: Mapping[str, Any], names: Mapping[str, str] = {}
    ) -> None:
        _, more = aliased(document, table_options(document))
        more |= stated_form(document)[1]
        if "max_completion_tokens" in document:
            more["max_tokens"] = "max_completion_tokens"
        self._names = ClientNames({**names, **more})

    def __enter__(self) -> None:
        self._before = CLIENT_NAMES.set(self._names)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        CLIENT_NAMES.reset(self._before)
        if isinstance(error, RequestError):
            self._names.rename(error)


def refuse(document: Mapping[str, Any], nothing: Mapping[str, Any]) -> None:
    """Raises RequestError for a field that asks for something that is not
    there.
    """
    for name, harmless in nothing.items():
        value = document.get(name)
        if value is not None and value not in harmless:
            raise missing(name)


def thinks(param: str, effort: object) -> bool:
    """Whether an effort has the model think. Raises RequestError for what is
    none. They bound what a model thinks, and one that does not think stays
    within all of them.
    """
    if effort not in _EFFORTS:
        raise invalid(
            param,
            f"expected one of {', '.join(_EFFORTS)}, found " + brief(effort),
        )
    return effort != _EFFORTS[0]


def table_options(document: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are generation options by their names; null is none."""
    return {
        name: document[name]
        for name in JSON_OPTIONS
        if document.get(name) is not None
    }


def _options(body: _Common, document: Mapping[str, Any]) -> dict[str, Any]:
    known = (*body.__struct_fields__, *JSON_OPTIONS, *FORM_FIELDS)
    check_supported({k: v for k, v in document.items() if k not in known})
    if body.stream_options is not None and not body.stream:
        raise unexpected("stream_options", "stream: true with it", body.stream)
    refuse_others(
        "stream_options", document.get("stream_options"), _STREAM_OPTIONS
    )
    options, _ = aliased(document, table_options(document))
    options = penalized(
        options, document.get("repeat_last_n"), "repeat_last_n", _LAST_TOKENS
    )
    options |= stated_form(document)[0]
    if body.logit_bias is not None:
        options["logit_bias"] = _bias(body.logit_bias)
    if body.seed is not None:
        options["seed"] = seed_of(body.seed)
    return options


def seed_of(seed: int, name: str = "seed") -> int:
    """An integer of 64 bits, signed as in these APIs or not. Raises
    RequestError for any other.
    """
    if not -_SEEDS // 2 <= seed < _SEEDS:
        raise invalid(
            name, f"expected an integer of 64 bits, found {brief(seed)}"
        )
    return seed % _SEEDS


def _think(call: Call, document: Mapping[str, Any]) -> bool | None:
    """Whether the model is to think, which three fields may say."""
    found: dict[str, bool] = {}
    effort = document.get("reasoning_effort")
    if effort is not None:
        wanted = thinks("reasoning_effort", effort)
        if call.chat.can_think:
            found["reasoning_effort"] = wanted
    given = document.get("thinking")
    if given is not None:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in ("enabled", "disabled"):
            raise unexpected("thinking.type", "enabled or disabled", kind)
        found["thinking"] = kind == "enabled"
    variables = document.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise unexpected("chat_template_kwargs", "an object", variables)
    for name, value in (variables or {}).items():
        field = f"chat_template_kwargs.{name[:60]}"
        if name != "enable_thinking":
            raise missing(field)
        if not isinstance(value, bool):
            raise unexpected(field, "true or false", value)
        found[field] = value
    if len(set(found.values())) > 1:
        raise invalid(min(found), f"expected as {max(found)} has it")
    for name, value in found.items():
        if value and not call.chat.can_think:
            if name == "thinking":
                raise thoughtless("thinking.type", "'disabled'", "'enabled'")
            raise thoughtless(name, "false", "true")
    return next(iter(found.values()), None)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        plain = key.isascii() and key.isdigit() and len(key) <= 10
        if not plain or key != str(int(key)):  # "05" is no other token than "5"
            raise invalid(
                "logit_bias", f"expected token ids as keys, found {key[:40]!r}"
            )
        found[int(key)] = value
    return found


def _count(body: _Common) -> int:
    if body.n is None:
        return 1
    if body.n < 1:
        raise invalid("n", f"expected at least 1, found {body.n}")
    return body.n


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what says nothing; refuses what asks for more than text."""
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        for name in ("function_call", "audio"):
            if message.get(name):
                raise missing(f"{where}.{name}")
        if message.get("role") == "function":
            raise missing(f"{where}.role", "results of functions")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, f"{where}.content")
        said = {"role": message.get("role"), "content": content}
        for name in _SAID:
            if message.get(name) is not None:
                said[name] = message[name]
        messages.append(said)
    return messages


def _check_parts(parts: list[Any], where: str) -> None:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "file", "video_url"):
            raise missing(f"{where}[{i}].type", f"{kind}")


def _prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """vLLM's, which has them in whole answers alone, too."""
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "expected none in a stream")
    return body.prompt_logprobs


def _prompts(given: str | list[Any]) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt", "expected at least one, found none")
    kinds = {type(one) for one in given}
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return given
    raise unexpected(
        "prompt", "a text, texts, token ids or lists of token ids", given
    )


def usage(ended: Ended) -> dict[str, Any]:
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.completion_tokens,
        "total_tokens": ended.prompt_tokens + ended.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": ended.cached_tokens,
            "cache_write_tokens": ended.cache_write_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": ended.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _spent(ended: Ended) -> dict[str, Any]:
    """Tokens, as llama-server has it the time that they took, and what the
    prefix cache gave of them.
    """
    return {
        "usage": usage(ended),
        "timings": timings(
            ended.prompt_tokens,
            ended.cached_tokens,
            ended.completion_tokens,
            ended.prefill_s,
            ended.decode_s,
            ended.drafted,
            ended.accepted,
        ),
        "cache": {"cached": ended.cached, "miss_reason": ended.miss_reason},
    }


def _reason(finished: Finished) -> str:
    if finished.calls and finished.reason == "stop":
        return "tool_calls"
    return "stop" if finished.reason == "stop" else "length"


class _Shape(ABC):
    """What both kinds of completions have in common."""

    kind = SSE
    ping = PING
    prefix = ""

    def __init__(self, call: Call, body: _Common) -> None:
        self.logprobs = Logprobs(call.chat.tokenizer)
        asked = body.stream_options
        self.wants_usage = bool(asked is not None and asked.include_usage)
        self.head: dict[str, Any] = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": call.name,
            "system_fingerprint": "fp_" + call.chat.gemma.fingerprint[:12],
        }
        self._templates: dict[int, Template] = {}  # of `_said`, by index

    def failure(self, error: RequestError) -> bytes:
        return sse(error_style(error, "")[1])

    def prompt_list(
        self, reply: Reply, number: int, top: int | None
    ) -> dict[str, Any]:
        """vLLM's field of a prompt, if it was asked for."""
        if top is None:
            return {}
        found = reply.prompt_logprobs[number]
        return {"prompt_logprobs": by_token(found, top, self.logprobs)}

    def _said(self, index: int, text: str) -> bytes:
        """A chunk of text and nothing else, as nearly all are."""
        template = self._templates.get(index)
        if template is None:
            template = Template(lambda text: self._text_chunk(index, text))
            self._templates[index] = template
        return template(text)

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> bytes: ...

    def end(self, event: Ended, kind: str) -> bytes:
        frames = b""
        if self.wants_usage:
            frames = sse(
                {
                    **self.head,
                    "object": kind,
                    "choices": [],
                    **_spent(event),
                }
            )
        return frames + _DONE


class _Chat(_Shape):
    prefix = "chatcmpl-"

    def __init__(self, call: Call, body: ChatBody, logprobs: bool) -> None:
        super().__init__(call, body)
        self.prompt_top = body.prompt_logprobs
        self.rows = body.n or 1
        self.wants_logprobs = logprobs

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            opening = {"role": "assistant", "content": "", "refusal": None}
            return b"".join(self._chunk(i, opening) for i in range(self.rows))
        if isinstance(event, Token):
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
                return self._said(event.index, event.text)
            return self._chunk(event.index, delta, logprobs)
        if isinstance(event, Called):
            return self._chunk(event.index, {"tool_calls": _call_deltas(event)})
        if isinstance(event, Finished):
            return self._chunk(event.index, {}, None, _reason(event))
        return self.end(event, "chat.completion.chunk")

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"content": text})

    def whole(self, reply: Reply) -> object:
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(i, reply) for i in sorted(reply.finished)],
            **self.prompt_list(reply, 0, self.prompt_top),
            **_spent(reply.usage),
        }

    def _choice(self, i: int, reply: Reply) -> dict[str, Any]:
        tokens = reply.tokens.get(i, [])
        calls = reply.calls.get(i, [])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.texts.get(i, "") or (None if calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning := reply.reasoning.get(i, ""):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": i,
            "message": message,
            "logprobs": self._list(tokens) if self.wants_logprobs else None,
            "finish_reason": _reason(reply.finished[i]),
        }

    def _list(self, tokens: list[Token]) -> dict[str, Any]:
        return {
            "content": [
                self.logprobs.entry(t) for t in tokens if has_logprob(t)
            ],
            "refusal": None,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        chunk = {
            **self.head,
            "object": "chat.completion.chunk",
            "choices": [choice],
        }
        if self.wants_usage:
            chunk["usage"] = None
        return sse(chunk)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_deltas(event: Called) -> list[dict[str, Any]]:
    part = event.part
    delta: dict[str, Any] = {"index": part.call}
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.start is not None:
        delta |= {"id": part.start[0], "type": "function"}
        function["name"] = part.start[1]
    return [{**delta, "function": function}]


class _Completion(_Shape):
    prefix = "cmpl-"

    def __init__(
        self, call: Call, body: CompletionBody, prompts: list[Any], n: int
    ) -> None:
        super().__init__(call, body)
        self.wants_logprobs = body.logprobs is not None
        self.echoes: list[str] = []
        if body.echo:
            decode = call.chat.tokenizer.decode
            for prompt in prompts:
                text = prompt if isinstance(prompt, str) else None
                self.echoes += (
                    [text] * n
                    if text is not None
                    else ([_decoded(decode, prompt)] * n)
                )
        self.n = n
        self.prompt_top = body.prompt_logprobs
        # Likeliest tokens of each place of an echo; None: it has no lists.
        self.echo_top = body.logprobs if body.echo else None
        self.listed: dict[int, int] = {}  # tokens, by index
        self.offsets: dict[int, int] = {}

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            return b"".join(
                self._chunk(i, text, self._echoed(i, event.prompt_logprobs))
                for i, text in enumerate(self.echoes)
            )
        if isinstance(event, Token):
            logprobs = None
            if self.wants_logprobs and has_logprob(event):
                logprobs = self._list([event], event.index)
            if not event.text and logprobs is None:
                return b""
            if logprobs is None:
                return self._said(event.index, event.text)
            return self._chunk(event.index, event.text, logprobs)
        if isinstance(event, Called):
            return b""  # prompts have no tools
        if isinstance(event, Finished):
            last = self._unlisted(event)
            logprobs = self._list(last, event.index) if last else None
            return self._chunk(event.index, "", logprobs, _reason(event))
        return self.end(event, "text_completion")

    def _echoed(
        self, index: int, found: Sequence[PromptLogprobs]
    ) -> dict[str, Any] | None:
        """The lists of the prompt that a choice begins with."""
        if self.echo_top is None:
            return None
        self.offsets[index] = len(self.echoes[index])
        prompt = found[index // self.n]
        return echoed(prompt, self.echo_top, self.logprobs)

    def _unlisted(self, finished: Finished) -> list[Token]:
        if self.echo_top is None:
            return []
        index = finished.index
        listed = self.listed.get(index, 0)
        return unlisted(finished.generation, listed, index)

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk(index, text)

    def whole(self, reply: Reply) -> object:
        choices = []
        for i in sorted(reply.finished):
            echo = self.echoes[i] if self.echoes else ""
            choices.append(
                {
                    "index": i,
                    "text": echo + reply.texts.get(i, ""),
                    "logprobs": self._lists(i, reply),
                    "finish_reason": _reason(reply.finished[i]),
                    **self.prompt_list(reply, i // self.n, self.prompt_top),
                }
            )
        return {
            **self.head,
            "object": "text_completion",
            "choices": choices,
            **_spent(reply.usage),
        }

    def _lists(self, index: int, reply: Reply) -> dict[str, Any] | None:
        """Of all tokens of a choice, with those of an echo."""
        if not self.wants_logprobs:
            return None
        lists = self._echoed(index, reply.prompt_logprobs)
        tokens = [t for t in reply.tokens.get(index, []) if has_logprob(t)]
        said = self._list(tokens, index)
        if lists is None:
            return said
        last = self._list(self._unlisted(reply.finished[index]), index)
        for more in (said, last):
            for name, values in more.items():
                if lists[name] is not None:
                    lists[name] += values or []
        return lists

    def _list(self, tokens: list[Token], index: int) -> dict[str, Any]:
        self.listed[index] = self.listed.get(index, 0) + len(tokens)
        texts = [self.logprobs.text(t.token_id) for t in tokens]
        offsets = []
        for text in texts:
            offset = self.offsets.get(index, 0)
            offsets.append(offset)
            self.offsets[index] = offset + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(t.logprob or 0.0) for t in tokens],
            # All have them, or none has: `logprobs` is 0.
            "top_logprobs": [
                self.logprobs.top_texts(t.top_logprobs)
                for t in tokens
                if t.top_logprobs is not None
            ]
            or None,
            "text_offset": offsets,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        chunk = {
            **self.head,
            "object": "text_completion",
            "choices": [choice],
        }
        if self.wants_usage:
            chunk["usage"] = None
        return sse(chunk)


def _decoded(decode: Any, ids: list[int]) -> str:
    try:
        text: str = decode(ids)
    except ValueError as error:
        raise invalid("prompt", str(error)) from None
    return text


def _model(call: Call, name: str) -> dict[str, Any]:
    config = call.chat.gemma.config
    found: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "gemmakv",
        "max_model_len": call.chat.context,
        "meta": {  # llama-server's
            "n_vocab": config.vocab_size,
            "n_ctx": call.chat.context,
            "n_ctx_train": config.context_length,
            "n_embd": config.hidden_size,
        },
    }
    if "anthropic-version" in call.headers:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(_STARTED))
        found |= {
            "type": "model",
            "display_name": name,
            "created_at": stamp,
            "lifecycle": "active",
            "max_input_tokens": call.chat.context,
        }
    return found
