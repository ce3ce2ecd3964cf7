"""llama-server's own completions: /completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from gemmakv.chat._messages import Segment
from gemmakv.server.apis.call import Call, CallDep
from gemmakv.server.apis.errors import llama_error
from gemmakv.server.apis.fields import Body, Salt, Whole
from gemmakv.server.apis.logprobs import Logprobs, has_logprob
from gemmakv.server.apis.openai import seed_of
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.sampling import LAST_TOKENS, SAMPLING
from gemmakv.server.apis.streams import COMMENT, SSE, Reply, answer, sse
from gemmakv.server.apis.timings import prompt_progress, timings
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    unexpected,
    unsupported,
)
from gemmakv.server.service.events import Event, Finished, Progress, Token
from gemmakv.server.service.requests import ChatRequest, limit_penalties

ROUTER = router()
_OPTIONS = {**SAMPLING, "n_predict": "max_tokens", "ignore_eos": "ignore_eos"}
_NAMES = {ours: theirs for theirs, ours in _OPTIONS.items()}
_NAMES |= {
    "top_logprobs": "n_probs",
    "response_format.json_schema.schema": "json_schema",
    "response_format": "json_schema",
}
_PAIRS = "pairs of a token id and a number"
_RANDOM = (-1, (1 << 32) - 1)


class LlamaCompletionBody(Body):
    prompt: str | list[str | Whole | list[str | Whole]]
    n_predict: Whole | None = None
    stream: bool | None = None
    seed: Whole | None = None
    logit_bias: (
        list[list[Whole | str | float | bool]]
        | dict[str, float | bool]
        | bool
        | None
    ) = None
    n_probs: Whole | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    return_tokens: bool | None = None
    json_schema: dict[str, Any] | None = None
    model: str | None = None
    cache_salt: Salt | None = None

    @property
    def taken(self) -> Sequence[str]:
        return (*_OPTIONS, "deadline", "repeat_last_n")


@ROUTER.post(
    "/completion",
    response_model=dict[str, Any] | list[dict[str, Any]],
    responses=streams(SSE),
    summary="llama-server's completions",
)
async def completion(call: CallDep, body: LlamaCompletionBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    service = call.service
    options = _options(body)
    several, given = _prompts(body.prompt)
    service.checks.check_rows(len(given), 1)
    prompts, texts = await service.threads.run_texts(_read, service, given)
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        prompts=prompts,
        options=options,
        progress=bool(body.return_progress),
        arrived=call.arrived,
    )
    shape = _Completion(call, body, options, texts, several)
    call.names = _NAMES
    return await answer(call, request, shape, body.stream)


def _options(body: LlamaCompletionBody) -> dict[str, Any]:
    document = body.said()
    options = {
        ours: document[theirs]
        for theirs, ours in _OPTIONS.items()
        if document.get(theirs) is not None
    }
    if document.get("deadline") is not None:
        options["deadline"] = document["deadline"]
    if body.n_predict == -2:  # as much as fits, as -1
        options["max_tokens"] = -1
    if body.seed is not None:
        options["seed"] = seed_of(body.seed)
        if body.seed in _RANDOM:
            del options["seed"]
    options = limit_penalties(
        options, document.get("repeat_last_n"), "repeat_last_n", LAST_TOKENS
    )
    if body.json_schema is not None:
        options["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": body.json_schema},
        }
    if body.n_probs:
        options |= {"logprobs": True, "top_logprobs": body.n_probs}
    if body.logit_bias:
        options["logit_bias"] = _bias(body.logit_bias)
    if body.cache_prompt is False:
        options["prefix_cache"] = "off"
    return options


def _bias(given: Any) -> dict[int, float]:
    """Reads [[id, bias], ...] or {id: bias}; false is minus infinity."""
    if given is True:
        raise unexpected("logit_bias", _PAIRS, given)
    pairs = list(given.items()) if isinstance(given, dict) else given
    found = {}
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[1], str) or pair[1] is True:
            raise unexpected("logit_bias", _PAIRS, pair)
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token[:20])
        if not isinstance(token, int) or isinstance(token, bool):
            raise unsupported("logit_bias", "texts in the place of token ids")
        if token in found:
            raise invalid(
                "logit_bias", f"expected each token once, found {token} twice"
            )
        found[token] = float("-inf") if bias is False else float(bias)
    return found


def _prompts(given: str | list[Any]) -> tuple[bool, list[Any]]:
    """Says whether there are several prompts, and gives each: a text, or a
    list of token ids and texts.
    """
    if isinstance(given, str):
        return False, [given]
    if not given:
        raise invalid("prompt", "expected at least one, found none")
    lists = any(isinstance(one, list) for one in given)
    if lists or all(isinstance(one, str) for one in given):
        return True, [[p] if isinstance(p, int) else p for p in given]
    return False, [given]


def _read(
    service: ChatService, given: list[Any]
) -> tuple[list[list[int]], list[str]]:
    """Gives the token ids of prompts, and their texts."""
    ids = [_ids(service, prompt) for prompt in given]
    decode = service.tokenizer.decode
    return ids, [
        prompt if isinstance(prompt, str) else decode(one)
        for prompt, one in zip(given, ids)
    ]


def _ids(service: ChatService, prompt: str | list[str | int]) -> list[int]:
    """Gives the token ids of a prompt. Names of control tokens in it are these
    tokens, as in the original.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, int):
            ids.append(part)
        elif i == 0:
            ids += service.prompts.text_ids(part, True, True).tolist()
        else:
            service.prompts.check_fits([Segment(part)], False)
            ids += service.tokenizer.encode(part, True)
    found: list[int] = service.prompts.text_ids(ids).tolist()
    return found


class _Completion:
    """The shape of an answer; each prompt has one continuation."""

    media_type = SSE
    ping = COMMENT

    def __init__(
        self,
        call: Call,
        body: LlamaCompletionBody,
        options: Mapping[str, Any],
        prompts: list[str],
        several: bool,
    ) -> None:
        self._name = body.model or call.model
        self._prompts = prompts
        self._several = several
        self._sent: Counter[int] = Counter()  # tokens of a stream
        self._returns_tokens = bool(body.return_tokens)
        self._logprobs = None
        if body.n_probs:
            self._logprobs = Logprobs(call.service.tokenizer, ids=True)
        known = {**call.service.defaults, **options}
        self._settings = {
            theirs: known[ours]
            for theirs, ours in _OPTIONS.items()
            if ours in known
        }

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Finished):
            # What ended the reply had no event of its own.
            sent = self._sent[event.index]
            rest = list(event.generation.token_ids)[sent:]
            return sse(self._end(event, "", rest))
        if isinstance(event, Progress):
            said = {"content": "", "tokens": [], "stop": False}
            index = {"index": event.index, "id_slot": event.index}
            return sse({**index, **said, **prompt_progress(event)})
        if not isinstance(event, Token):
            return b""
        tokens = [event.token_id] if event.token_id >= 0 else []
        if not event.text and not tokens:
            return b""
        self._sent[event.index] += len(tokens)
        return sse(
            {
                "index": event.index,
                "content": event.text,
                "tokens": tokens,
                "stop": False,
                "id_slot": event.index,
                **self._probabilities([event]),
            }
        )

    def whole(self, reply: Reply) -> object:
        found = []
        for i in sorted(reply.finished):
            finished = reply.finished[i]
            ids = finished.generation.token_ids if self._returns_tokens else []
            end = self._end(finished, reply.texts.get(i, ""), list(ids))
            found.append(end | self._probabilities(reply.tokens.get(i, [])))
        return found if self._several else found[0]

    def failure(self, error: RequestError) -> bytes:
        return sse(llama_error(error))

    def _probabilities(self, tokens: list[Token]) -> dict[str, Any]:
        if self._logprobs is None:
            return {}
        entry = self._logprobs.entry
        return {
            "completion_probabilities": [
                entry(token) for token in tokens if has_logprob(token)
            ]
        }

    def _end(
        self, finished: Finished, text: str, tokens: list[int]
    ) -> dict[str, Any]:
        generation = finished.generation
        usage, took = generation.usage, generation.timings
        kind = "limit"
        if finished.reason == "stop":
            kind = "eos" if finished.stop is None else "word"
        return {
            "index": finished.index,
            "content": text,
            "tokens": tokens,
            "id_slot": finished.index,
            "stop": True,
            "model": self._name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": self._settings,
            "prompt": self._prompts[finished.index],
            "has_new_line": "\n" in generation.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": finished.stop or "",
            "timings": timings(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                took.prefill_s,
                took.decode_s,
                usage.drafted,
                usage.accepted,
            ),
        }
