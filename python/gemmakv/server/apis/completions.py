"""OpenAI's completions, of prompts without a template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.generation._scores import PromptLogprobs
from gemmakv.server.apis.call import Call, CallDep
from gemmakv.server.apis.fields import Whole
from gemmakv.server.apis.logprobs import finite, has_logprob
from gemmakv.server.apis.openai import (
    Completion,
    CompletionFields,
    CompletionShape,
    FinishReason,
    finish_reason,
    spent,
)
from gemmakv.server.apis.prompt_logprobs import (
    LogprobLists,
    PromptPlace,
    echoed,
    joined,
    unlisted,
)
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.streams import SSE, Reply, answer
from gemmakv.server.service.errors import invalid, unexpected, unsupported
from gemmakv.server.service.events import (
    Called,
    Event,
    Finished,
    Progress,
    Started,
    Token,
)
from gemmakv.server.service.requests import ChatRequest

ROUTER = router()
_DEFAULT_TOKENS = 16  # the original's


class CompletionBody(CompletionFields):
    prompt: str | list[str | Whole | list[Whole]]
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    add_special_tokens: bool | None = None

    def options(self) -> dict[str, Any]:
        found = super().options()
        found.pop("logprobs", None)
        if self.logprobs is not None:
            found |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "a choice among more than n")
        return found


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[list[PromptPlace | None]]


class TextCompletion(Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


@ROUTER.post(
    "/v1/completions",
    response_model=TextCompletion,
    responses=streams(SSE),
    summary="OpenAI's completions",
)
async def completions(call: CallDep, body: CompletionBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    body.check_stream_options()
    options, n = body.options(), body.n or 1
    call.names = body.names()
    prompts = _prompts(body.prompt)
    call.service.checks.check_rows(len(prompts), n)
    tops = (body.prompt_top(), body.logprobs if body.echo else None)
    request = ChatRequest(
        tenant=call.owner_of(body.cache_salt),
        prompts=prompts,
        add_bos=body.add_special_tokens is not False,
        options=options,
        prompt_logprobs=max(
            (one for one in tops if one is not None), default=None
        ),
        n=n,
        default_max_tokens=_DEFAULT_TOKENS,
        arrived=call.arrived,
    )
    shape = _Completion(call, body, prompts, n)
    return await answer(call, request, shape, body.stream)


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


class _Completion(CompletionShape):
    prefix = "cmpl-"
    kind = "text_completion"

    def __init__(
        self, call: Call, body: CompletionBody, prompts: list[Any], n: int
    ) -> None:
        super().__init__(call, body)
        self.wants_logprobs = body.logprobs is not None
        self.echoes: list[str] = []
        if body.echo:
            decode = call.service.tokenizer.decode
            for prompt in prompts:
                text = prompt
                if not isinstance(prompt, str):
                    text = _decoded(decode, prompt)
                self.echoes += [text] * n
        self.n = n
        # Likeliest tokens of each place of an echo; None: it has no lists.
        self.echo_top = body.logprobs if body.echo else None
        self.listed: dict[int, int] = {}  # tokens, by index
        self.offsets: dict[int, int] = {}

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            return b"".join(
                self._text(i, text, self._echoed(i, event.prompt_logprobs))
                for i, text in enumerate(self.echoes)
            )
        if isinstance(event, Token):
            logprobs = None
            if self.wants_logprobs and has_logprob(event):
                logprobs = self._lists([event], event.index)
            if not event.text and logprobs is None:
                return b""
            if logprobs is None:
                return self.say(event.index, event.text)
            return self._text(event.index, event.text, logprobs)
        if isinstance(event, Called | Progress):
            return b""  # prompts have no tools
        if isinstance(event, Finished):
            last = self._unlisted(event)
            logprobs = self._lists(last, event.index) if last else None
            return self._text(event.index, "", logprobs, finish_reason(event))
        return self.end(event)

    def text_chunk(self, index: int, text: str) -> bytes:
        return self._text(index, text)

    def whole(self, reply: Reply) -> object:
        choices = [self._choice(i, reply) for i in sorted(reply.finished)]
        return {
            **self.head,
            "object": "text_completion",
            "choices": choices,
            **spent(reply.usage),
        }

    def _choice(self, i: int, reply: Reply) -> TextChoice:
        echo = self.echoes[i] if self.echoes else ""
        choice: TextChoice = {
            "index": i,
            "text": echo + reply.texts.get(i, ""),
            "logprobs": self._all_lists(i, reply),
            "finish_reason": finish_reason(reply.finished[i]),
        }
        places = self.prompt_places(reply, i // self.n)
        if places is not None:
            choice["prompt_logprobs"] = places
        return choice

    def _echoed(
        self, index: int, found: Sequence[PromptLogprobs]
    ) -> LogprobLists | None:
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

    def _all_lists(self, index: int, reply: Reply) -> LogprobLists | None:
        """Lists the log-probabilities of a choice, with those of an echo."""
        if not self.wants_logprobs:
            return None
        tokens = [t for t in reply.tokens.get(index, []) if has_logprob(t)]
        lists = self._echoed(index, reply.prompt_logprobs)
        said = self._lists(tokens, index)
        if lists is None:
            return said
        last = self._lists(self._unlisted(reply.finished[index]), index)
        return joined(lists, said, last)

    def _lists(self, tokens: list[Token], index: int) -> LogprobLists:
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

    def _text(
        self,
        index: int,
        text: str,
        logprobs: LogprobLists | None = None,
        reason: FinishReason | None = None,
    ) -> bytes:
        return self.chunk(
            {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": reason,
            }
        )


def _decoded(decode: Any, ids: list[int]) -> str:
    try:
        text: str = decode(ids)
    except ValueError as error:
        raise invalid("prompt", str(error)) from None
    return text
