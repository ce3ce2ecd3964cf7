"""The common parts of OpenAI's APIs: fields, usage, thoughts, chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gemmakv.errors import brief
from gemmakv.server.apis.call import Call
from gemmakv.server.apis.errors import openai_error
from gemmakv.server.apis.fields import Body, OptionsBody, Salt, Whole
from gemmakv.server.apis.logprobs import Logprobs
from gemmakv.server.apis.prompt_logprobs import PromptPlace, by_token
from gemmakv.server.apis.sampling import LAST_TOKENS
from gemmakv.server.apis.streams import COMMENT, SSE, Reply, Template, sse
from gemmakv.server.apis.timings import timings
from gemmakv.server.service.errors import (
    RequestError,
    cannot_think,
    invalid,
    unexpected,
    unsupported,
)
from gemmakv.server.service.events import Ended, Finished
from gemmakv.server.service.forms import FORM_FIELDS, read_form
from gemmakv.server.service.requests import (
    ALIASES,
    limit_penalties,
    read_aliases,
)

DONE = b"data: [DONE]\n\n"
_SEEDS = 1 << 64
# All but the first have a model think that can.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class StreamOptions(Body):
    include_usage: bool | None = None
    # Padding that would hide lengths from the network: there is none.
    include_obfuscation: bool | None = None


class CompletionFields(OptionsBody):
    """The fields of chat completions and of completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: Whole | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: Whole | None = None
    cache_salt: Salt | None = None

    @property
    def taken(self) -> Sequence[str]:
        return (*super().taken, *ALIASES, *FORM_FIELDS, "repeat_last_n")

    def options(self) -> dict[str, Any]:
        found, _ = read_aliases(self.others, super().options())
        last = self.others.get("repeat_last_n")
        found = limit_penalties(found, last, "repeat_last_n", LAST_TOKENS)
        found |= read_form({**self.others, **found})[0]
        if self.seed is not None:
            found["seed"] = seed_of(self.seed)
        return found

    def names(self) -> dict[str, str]:
        """Gives what the request calls its options, by our names."""
        options = super().options()
        _, names = read_aliases(self.others, options)
        return {**names, **read_form({**self.others, **options})[1]}

    def prompt_top(self) -> int | None:
        """Gives vLLM's `prompt_logprobs`. Raises RequestError for a stream,
        which has none there, either.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "expected none in a stream")
        return self.prompt_logprobs

    def check_stream_options(self) -> None:
        """Raises RequestError for options of a stream without one."""
        if self.stream_options is None:
            return
        if not self.stream:
            raise unexpected(
                "stream_options", "stream: true with it", self.stream
            )
        for name, value in self.stream_options.others.items():
            if value is not False:
                raise unsupported(f"stream_options.{name[:60]}")


class PromptTokens(TypedDict):
    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int


class CompletionTokens(TypedDict):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class CacheUse(TypedDict):
    """The tokens of a prompt that the prefix cache had, and why not more."""

    cached: dict[str, int]
    miss_reason: str | None


class Spent(TypedDict):
    """The tokens of a request, their time in llama-server's form, and the
    use of the prefix cache.
    """

    usage: Usage
    timings: dict[str, float]
    cache: CacheUse


class Completion(Spent):
    """The fields of whole answers, of chats and of completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str


FinishReason = Literal["stop", "length", "tool_calls"]


def usage(ended: Ended) -> Usage:
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


def spent(ended: Ended) -> Spent:
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


def finish_reason(finished: Finished) -> FinishReason:
    if finished.calls and finished.reason == "stop":
        return "tool_calls"
    return "stop" if finished.reason == "stop" else "length"


def seed_of(seed: int, name: str = "seed") -> int:
    """Gives a seed as the library has it, from an integer of 64 bits that may
    be signed. Raises RequestError for any other.
    """
    if not -_SEEDS // 2 <= seed < _SEEDS:
        raise invalid(
            name, f"expected an integer of 64 bits, found {brief(seed)}"
        )
    return seed % _SEEDS


def thinks(param: str, effort: object) -> bool:
    """Whether an effort has the model think. Raises RequestError for an
    unknown one. An effort is a bound: a model that cannot think stays within
    each of them.
    """
    if effort not in EFFORTS:
        raise invalid(
            param,
            f"expected one of {', '.join(EFFORTS)}, found " + brief(effort),
        )
    return effort != EFFORTS[0]


def think_of(call: Call, said: Mapping[str, Any]) -> bool | None:
    """Whether the model is to think, which three fields may say; None if none
    does. Raises RequestError if they differ.
    """
    found: dict[str, bool] = {}
    effort = said.get("reasoning_effort")
    if effort is not None:
        wanted = thinks("reasoning_effort", effort)
        if call.service.prompts.can_think:
            found["reasoning_effort"] = wanted
    given = said.get("thinking")
    if given is not None:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in ("enabled", "disabled"):
            raise unexpected("thinking.type", "enabled or disabled", kind)
        found["thinking"] = kind == "enabled"
    variables = said.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise unexpected("chat_template_kwargs", "an object", variables)
    for name, value in (variables or {}).items():
        field = f"chat_template_kwargs.{name[:60]}"
        if name != "enable_thinking":
            raise unsupported(field)
        if not isinstance(value, bool):
            raise unexpected(field, "true or false", value)
        found[field] = value
    if len(set(found.values())) > 1:
        raise invalid(min(found), f"expected as {max(found)} has it")
    for name, value in found.items():
        if value and not call.service.prompts.can_think:
            if name == "thinking":
                raise cannot_think("thinking.type", "'disabled'", "'enabled'")
            raise cannot_think(name, "false", "true")
    return next(iter(found.values()), None)


class CompletionShape(ABC):
    """The common part of the shapes of chats and of completions."""

    media_type = SSE
    ping = COMMENT
    prefix = ""
    kind = ""  # of chunks

    def __init__(self, call: Call, body: CompletionFields) -> None:
        self.logprobs = Logprobs(call.service.tokenizer)
        asked = body.stream_options
        self.wants_usage = bool(asked is not None and asked.include_usage)
        self.head: dict[str, Any] = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": body.model or call.model,
            "system_fingerprint": "fp_" + call.service.gemma.fingerprint[:12],
        }
        self._prompt_top = body.prompt_top()
        self._templates: dict[int, Template] = {}  # of `say`, by index

    def prompt_places(
        self, reply: Reply, number: int
    ) -> list[PromptPlace | None] | None:
        """Lists a prompt's tokens as vLLM does, if that was asked for."""
        if self._prompt_top is None:
            return None
        found = reply.prompt_logprobs[number]
        return by_token(found, self._prompt_top, self.logprobs)

    def failure(self, error: RequestError) -> bytes:
        return sse(openai_error(error))

    def say(self, index: int, text: str) -> bytes:
        """A chunk of text and nothing else, as nearly all are."""
        template = self._templates.get(index)
        if template is None:
            template = Template(lambda text: self.text_chunk(index, text))
            self._templates[index] = template
        return template(text)

    @abstractmethod
    def text_chunk(self, index: int, text: str) -> bytes: ...

    def chunk(
        self, choice: dict[str, Any], more: Mapping[str, Any] = {}
    ) -> bytes:
        found = {**self.head, "object": self.kind, "choices": [choice], **more}
        if self.wants_usage:
            found["usage"] = None
        return sse(found)

    def end(self, event: Ended) -> bytes:
        frames = b""
        if self.wants_usage:
            last = {**self.head, "object": self.kind, "choices": []}
            frames = sse({**last, **spent(event)})
        return frames + DONE
