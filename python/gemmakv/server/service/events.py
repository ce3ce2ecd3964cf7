"""The events of a request, which `ChatService` gives and each API writes in
its own form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from gemmakv.chat._tools import CallPart
from gemmakv.generation._result import Generation, TopLogprobs
from gemmakv.generation._scores import PromptLogprobs


@dataclasses.dataclass(frozen=True)
class Started:
    """The first event: the request runs. Errors that are the request's own
    were raised before.

    Attributes:
      prompt_tokens: of all prompts.
      dropped_messages: the oldest ones, that had no room (`truncate`).
      prompt_logprobs: of each prompt, if the request asks for them.
    """

    prompt_tokens: int
    dropped_messages: int = 0
    prompt_logprobs: Sequence[PromptLogprobs] = ()


@dataclasses.dataclass(frozen=True)
class Progress:
    """The part of a prompt that is computed so far, if the request asks for
    it. These events come before the first token; the last has all of it.

    Attributes:
      index: of the continuation.
      done: tokens of the prompt that are computed, or were cached.
      total: tokens of the prompt.
      cached: tokens of the prompt that a cache had.
      seconds: since the prompt began.
    """

    index: int
    done: int
    total: int
    cached: int
    seconds: float


@dataclasses.dataclass(slots=True)
class Token:
    """A token of a continuation.

    Attributes:
      index: of the continuation.
      text: what became complete with it; may be empty.
      reasoning: the same of thoughts, which are not in `text`.
      token_id: -1 for text that had been held back and belongs to earlier
        tokens, or if the token ended the text.
      logprob, top_logprobs: as in a `Piece`.
    """

    index: int
    text: str
    token_id: int
    logprob: float | None
    top_logprobs: TopLogprobs | None
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Called:
    """A part of a tool call.

    Attributes:
      index: of the continuation.
    """

    index: int
    part: CallPart


@dataclasses.dataclass(frozen=True)
class Finished:
    """The end of a continuation.

    Attributes:
      reason: "stop", "length" or "deadline".
      stop: which of the request's stop strings ended it; None if none did.
      generation: all of it; its `text` is not trimmed.
      calls: tool calls that it asks for.
      reasoning_tokens: tokens of thoughts.
      cache_write_tokens: of the prompt, that the prefix cache did not have
        and has now; 0 of several continuations of one prompt.
    """

    index: int
    reason: str
    stop: str | None
    generation: Generation
    calls: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Ended:
    """The last event.

    Attributes:
      prompt_tokens, cached_tokens, completion_tokens: of all prompts and
        continuations. A prompt of n continuations counts once.
      cached: cached tokens that came from the prefix cache, by tier.
      miss_reason: why that had less than it could have, if it did; of the
        first prompt.
      prefill_s, decode_s: the longest of each.
      queued_s: how long it waited for others.
      reasoning_tokens: of the completion's, those of thoughts.
      drafted, accepted: tokens that were guessed, and that guesses were right.
      cache_write_tokens: of the prompts, those that the prefix cache did not
        have and has now.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cached: dict[str, int]
    miss_reason: str | None
    prefill_s: float
    decode_s: float
    queued_s: float
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cache_write_tokens: int = 0


Event = Started | Progress | Token | Called | Finished | Ended
Emit = Callable[[Event], Awaitable[None]]
