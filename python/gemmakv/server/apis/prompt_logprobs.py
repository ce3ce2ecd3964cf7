"""Log-probabilities of prompts, as OpenAI's completions and vLLM list them."""

from __future__ import annotations

from typing_extensions import TypedDict

from gemmakv.generation._result import Generation, TopLogprobs
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.server.apis.logprobs import Logprobs, finite
from gemmakv.server.service.events import Token


class LogprobLists(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PlaceLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptPlace = dict[str, PlaceLogprob]  # by token id


def echoed(
    found: PromptLogprobs, top: int, names: Logprobs
) -> LogprobLists:
    """Lists a prompt's tokens as OpenAI's completions list those of a text, of
    which the prompt is the beginning: the first has no log-probability. `top`
    are the likeliest of each place; 0: none are listed.
    """
    offsets: list[int] = []
    offset = 0
    for token in found.token_ids:
        offsets.append(offset)
        offset += names.length(int(token))
    places: list[dict[str, float] | None] = [None]
    for i in range(len(found.logprobs)):
        places.append(names.top_texts(_place(found, i, top)))
    return {
        "tokens": [names.text(int(token)) for token in found.token_ids],
        "token_logprobs": [None, *(finite(float(p)) for p in found.logprobs)],
        "top_logprobs": places if top else None,
        "text_offset": offsets,
    }


def joined(lists: LogprobLists, *more: LogprobLists) -> LogprobLists:
    """Puts lists of a text's tokens after each other; all have the likeliest
    of each place, or the first has none.
    """
    found: LogprobLists = {
        "tokens": [*lists["tokens"]],
        "token_logprobs": [*lists["token_logprobs"]],
        "top_logprobs": None,
        "text_offset": [*lists["text_offset"]],
    }
    if lists["top_logprobs"] is not None:
        found["top_logprobs"] = [*lists["top_logprobs"]]
    for one in more:
        found["tokens"] += one["tokens"]
        found["token_logprobs"] += one["token_logprobs"]
        found["text_offset"] += one["text_offset"]
        if found["top_logprobs"] is not None:
            found["top_logprobs"] += one["top_logprobs"] or []
    return found


def by_token(
    found: PromptLogprobs, top: int, names: Logprobs
) -> list[PromptPlace | None]:
    """Lists a prompt's tokens as vLLM's `prompt_logprobs` do: of each place the
    token that stands there and the `top` likeliest, by their ids; of the first
    nothing.
    """
    places: list[PromptPlace | None] = [None]
    for i, token in enumerate(found.token_ids[1:]):
        likeliest = _place(found, i, top)
        ranked = [(int(token), found.logprobs[i], int(found.ranks[i]))]
        for rank, (one, logprob) in enumerate(
            zip(likeliest.token_ids, likeliest.logprobs), 1
        ):
            if one != token:
                ranked.append((int(one), logprob, rank))
        places.append(
            {
                str(one): {
                    "logprob": finite(float(logprob)),
                    "rank": rank,
                    "decoded_token": names.text(one),
                }
                for one, logprob, rank in ranked
            }
        )
    return places


def unlisted(generation: Generation, listed: int, index: int) -> list[Token]:
    """Gives the tokens of a continuation after the first `listed` ones: what
    ended it, which is no part of its text. With the prompt's tokens before
    them all tokens are listed, so that they can be counted.
    """
    logprobs, top = generation.logprobs, generation.top_logprobs
    if logprobs is None:
        return []
    return [
        Token(
            index,
            "",
            token,
            float(logprobs[i]),
            top and TopLogprobs(top.token_ids[i], top.logprobs[i]),
        )
        for i, token in list(enumerate(generation.token_ids))[listed:]
    ]


def _place(found: PromptLogprobs, i: int, top: int) -> TopLogprobs:
    return TopLogprobs(
        found.top.token_ids[i, :top], found.top.logprobs[i, :top]
    )
