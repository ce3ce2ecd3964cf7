"""What a call of `generate` gives back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv.generation._message import (
    Message,
    reply_message,
    result_content,
)

if TYPE_CHECKING:
    from gemmakv.cache._kv_cache import KVCache


FinishReason = Literal["stop", "length", "deadline", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one call.

    Attributes:
      prompt_tokens: those given.
      cached_tokens: those that were not computed: they stood in the
        conversation's cache before, or came from the prefix cache.
      completion_tokens: those sampled.
      cached: tokens that came from the prefix cache, by the tier that had
        them: {"ram": n, "disk": m}; tiers that gave none are left out.
      miss_reason: why the prefix cache had less than it could have:
        "divergent" (the first token that is not known), "evicted", "no resume
        point" (all is known, but no position near to continue from) or
        "cheaper to compute"; None if it did not.
      drafted: tokens that were guessed, or forced by a grammar, and computed
        beside the next one, see `speculate`.
      accepted: of those, that were right, so that no step of their own was
        needed; at most completion_tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cached: dict[str, int] = dataclasses.field(default_factory=dict)
    miss_reason: str | None = None
    drafted: int = 0
    accepted: int = 0


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds and tokens per second of one call (0.0 where nothing ran).

    Prefill ends when the first token has been sampled; the rest is decode.
    """

    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The n most probable tokens of one place or of each, the likeliest first.

    Probabilities are those of the model, before any other option.

    Attributes:
      token_ids: int32 [n] of a Piece, [tokens, n] of a Generation; -1 where
        fewer tokens have a probability.
      logprobs: float32 of the same shape; -inf there.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, arrays: tuple[Any, Any] | None) -> TopLogprobs | None:
        """Makes one of the core's arrays."""
        return None if arrays is None else cls(*arrays)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a reply asks for.

    Attributes:
      id: what its result is to name as `tool_call_id`.
      name: of the tool.
      arguments: what JSON can say, as the tool's schema allows if a grammar
        held the reply to it.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Gives the call as a message's `tool_calls` have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def result(self, value: object) -> Message:
        """Makes the message that gives a result back.

        Text stays as it is; a dict, a dataclass and a pydantic model become
        fields, other values JSON text, and what JSON cannot say `str` of it.
        """
        return Message(
            "tool", result_content(value), name=self.name, tool_call_id=self.id
        )


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Result of `Gemma.prefill`: token counts, and seconds and rates."""

    usage: Usage
    timings: Timings


@dataclasses.dataclass(frozen=True)
class Piece:
    """One sampled token of a stream.

    The texts of all pieces joined are the `text` of the generation.

    Attributes:
      text: the characters that became complete with this token. A character
        of several tokens arrives with the last of them; text that may turn
        out to be a stop string waits until that is decided. If the stream is
        cancelled meanwhile, it comes in a last piece.
      token_id: the token; -1 in that last piece.
      logprob: its log-probability; None unless asked for.
      finish_reason: of the last piece, as in `Generation`; else None.
      top_logprobs: the likeliest tokens of its place; None unless asked for.
      reasoning: in a reply to messages, the same of what the model thinks
        before it replies; not in `text`.
    """

    text: str
    token_id: int
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """Result of `Gemma.generate`. `str(generation)` is its text.

    Attributes:
      text: the completion, without eos and the stop string.
      token_ids: every sampled token, the one that stopped it last.
      logprobs: float32 [len(token_ids)], natural logarithms of the tokens'
        probabilities before temperature and filters; None unless asked for.
      seed: the seed that repeats this call.
      finish_reason: "stop", "length", "deadline" or "cancelled".
      usage: token counts.
      timings: seconds and rates.
      top_logprobs: those of each token's place; None unless asked for.
      cache: the continuation's own cache if the call had `n`, else None.
      tool_calls: what a reply of `chat` with `tools` asks for; not in `text`.
      reasoning: what the model thought before it replied to messages, without
        white space around it; not in `text`.
    """

    text: str
    token_ids: list[int]
    logprobs: npt.NDArray[np.float32] | None
    seed: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    cache: KVCache | None = dataclasses.field(default=None, repr=False)
    top_logprobs: TopLogprobs | None = dataclasses.field(
        default=None, repr=False
    )
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> Message:
        """The reply as a message, with its calls and thoughts."""
        return reply_message(
            self.text,
            self.reasoning,
            self.tool_calls,
            self.finish_reason == "cancelled",
        )


def generation_of(
    result: _core.Result,
    cache: KVCache | None = None,
    prompt: _core.Result | None = None,
) -> Generation:
    """Python's view of a result of the core.

    `prompt`: the result of the call that computed the prompt, if that was
    another one.
    """
    prompt = result if prompt is None else prompt
    token_ids = [int(token) for token in result.token_ids]
    return Generation(
        text=result.text_bytes.decode("utf-8", "replace"),
        token_ids=token_ids,
        logprobs=result.logprobs,
        seed=result.seed,
        finish_reason=cast(FinishReason, result.finish_reason),
        usage=Usage(
            prompt_tokens=prompt.prompt_tokens,
            cached_tokens=prompt.cached_tokens,
            completion_tokens=len(token_ids),
            cached=prompt.prefix_tokens,
            miss_reason=result.miss_reason or None,
            drafted=result.drafted,
            accepted=result.accepted,
        ),
        timings=Timings(
            prefill_s=prompt.prefill_s,
            decode_s=result.decode_s,
            prefill_tokens_per_s=_rate(prompt.prompt_tokens, prompt.prefill_s),
            decode_tokens_per_s=_rate(len(token_ids) - 1, result.decode_s),
        ),
        cache=cache,
        top_logprobs=TopLogprobs.of(result.top_logprobs),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
