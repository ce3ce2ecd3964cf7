"""The prompts of a service: templates, token ids, and whether these fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Segment, Template, messages_of
from gemmakv.chat._templates import (
    PlainTemplate,
    knows_thinking,
    render,
    template_for,
    thinking,
    turn_rules,
)
from gemmakv.chat._transcript import Encoder, at_least
from gemmakv.chat._turns import SYSTEM_ROLES
from gemmakv.generation._prompts import TokenArray
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.requests import ChatRequest, Messages, split_reply
from gemmakv.server.service.threads import Threads
from gemmakv.server.settings import Settings
from gemmakv.tokenizers._tokenizer import with_bos

TOO_LONG = "context_length_exceeded"
_ASKING = (*SYSTEM_ROLES, "user")  # roles whose messages are one turn


class Prompts:
    """The prompts that a model reads, made of messages or texts.

    Attributes:
      tokenizer, template: those of the model.
      context: the most tokens of a prompt and its reply.
      threads: where prompts are made.
    """

    def __init__(
        self,
        gemma: Gemma,
        settings: Settings,
        threads: Threads,
        template: Template | str | None = None,
    ) -> None:
        """Raises ValueError for a model without a tokenizer, and for a
        `max_model_len` beyond the model's context.
        """
        if gemma.tokenizer is None:
            raise ValueError(
                "model: it has no tokenizer (a folder needs a tokenizer.model "
                "or tokenizer.json), and a server needs one"
            )
        self.tokenizer = gemma.tokenizer
        self.template = template_for(gemma, template)
        self.context = gemma.config.context_length
        if settings.max_model_len is not None:
            if settings.max_model_len > self.context:
                raise ValueError(
                    f"max_model_len: expected at most {self.context}, the "
                    f"model's context, found {settings.max_model_len}"
                )
            self.context = settings.max_model_len
        self.threads = threads
        self._config = gemma.config
        self._most_messages = settings.limits.messages
        # Made here, not in a request.
        len(self.tokenizer.token_bytes)
        self.tokenizer._at_least("", 0)

    @property
    def can_think(self) -> bool:
        """True if requests may say that the model is to think."""
        return knows_thinking(self.template)

    async def prompt_ids(
        self, request: ChatRequest, options: dict[str, Any]
    ) -> tuple[list[TokenArray], int]:
        """Gives the token ids of a request's prompts, and the number of
        messages that are left out of them. Raises RequestError.
        """
        self.check_writes()
        dropped = request.dropped
        special = bool(options.pop("parse_special", False))
        if request.messages is not None:
            if special:
                raise invalid("parse_special", "messages are text")
            check_count(request.messages, self._most_messages)
            if request.ids is not None:
                found = [request.ids]
            else:
                ids, dropped = await self.message_ids(request, options)
                found = [ids]
        else:
            found = await self.threads.run_texts(
                self._text_ids, request.prompts, special, request.add_bos
            )
        for ids in found:
            self.check_length(len(ids), request.messages is not None)
        return found, dropped

    async def message_ids(
        self, request: ChatRequest, options: Mapping[str, Any]
    ) -> tuple[TokenArray, int]:
        """Gives the token ids of a conversation that is cut to fit if the
        request says so, and the number of messages that are left out then.
        """
        assert request.messages is not None
        said = request.messages, request.tools, request.think
        try:
            ids = await self.chat_ids(*said, fits=True)
            if not request.truncate or len(ids) < self.context:
                return ids, 0
        except RequestError as error:
            if not request.truncate or error.code != TOO_LONG:
                raise
        return await self.threads.run(
            self.fit_messages, *said, options.get("max_tokens")
        )

    async def chat_ids(
        self,
        messages: Messages,
        tools: Messages | None = None,
        think: bool | None = None,
        fits: bool = False,
    ) -> TokenArray:
        """Gives the token ids of a conversation, with the opening of the reply.
        `fits`: as in `render`. Raises RequestError.
        """
        self.check_writes()
        check_count(messages, self._most_messages)
        return await self.threads.run_texts(
            self.render, messages, tools, think, fits
        )

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        think: bool | None = None,
        fits: bool = False,
    ) -> TokenArray:
        """Makes `chat_ids` on the caller's thread. With `fits`, raises
        RequestError at once for much more than the context has room for.
        """
        segments = self._segments(messages, tools, think)
        if fits:
            self.check_fits(segments)
        return self._encoded(segments)

    def _segments(
        self, messages: Messages, tools: Messages | None, think: bool | None
    ) -> list[Segment]:
        """Gives the text that `render` makes tokens of."""
        said, begun = split_reply(messages, self.template)
        segments = render(
            self.template,
            messages_of(said),
            tools=tools,
            add_generation_prompt=True,
            **thinking(self.template, think),
        )
        return [*segments, Segment(self.begun_text(begun))]

    def _encoded(self, segments: Sequence[Segment]) -> TokenArray:
        bos = self._config.bos_id
        return Encoder(self.tokenizer, bos).encode(segments)

    def begun_text(self, begun: str) -> str:
        """Gives the beginning of a reply as it stands after the text that opens
        the reply.
        """
        plain = isinstance(self.template, PlainTemplate)
        return f" {begun}" if begun and plain else begun

    def begun_ids(self, begun: str) -> TokenArray:
        """Gives the token ids of that text."""
        text = self.begun_text(begun)
        return np.array(self.tokenizer.encode(text) if text else [], np.int32)

    def fit_messages(
        self,
        messages: Messages,
        tools: Messages | None,
        think: bool | None,
        wanted: int | None,
    ) -> tuple[TokenArray, int]:
        """Gives the token ids of a conversation without as many of its oldest
        turns as needed to fit, and the number of messages that are left out.

        Room is left for a reply of `wanted` tokens, or of a quarter of the
        context, and for one of half of it at most. The system's first messages
        and the last turn stay. A turn of the template stays whole.
        """
        room = self.context // 4 if wanted is None else wanted
        most = self.context - min(max(room, 1), self.context // 2)
        first = 0
        while first < len(messages) and (
            messages[first]["role"] in SYSTEM_ROLES
        ):
            first += 1
        alone = ("user",) if turn_rules(self.template).users else ()
        turns = [
            i
            for i in range(first + 1, len(messages))
            if messages[i]["role"] in alone
            or messages[i]["role"] in _ASKING
            and messages[i - 1]["role"] not in _ASKING
        ]

        def without(count: int) -> Messages:
            return [*messages[:first], *messages[turns[count - 1] :]]

        def too_long(count: int) -> bool:
            segments = self._segments(without(count), tools, think)
            least = at_least(segments, self.tokenizer, most + 1)
            return least > most or len(self._encoded(segments)) > most

        least, enough = 1, len(turns)
        while least < enough:
            middle = (least + enough) // 2
            if too_long(middle):
                least = middle + 1
            else:
                enough = middle
        if not turns:
            return self.render(messages, tools, think, True), 0
        ids = self.render(without(least), tools, think, True)
        return ids, turns[least - 1] - first

    def text_ids(
        self,
        prompt: str | Sequence[int],
        special: bool = False,
        fits: bool = False,
        add_bos: bool = True,
    ) -> TokenArray:
        """Gives the token ids of a prompt; a text has a BOS in front, if
        `add_bos`.

        With `special`, names of control tokens mean them; `fits`: as in
        `render`. Raises ValueError for ids that are none.
        """
        config = self._config
        bad = f"prompt: expected token ids in [0, {config.vocab_size}), found "
        if isinstance(prompt, str):
            if fits:
                self.check_fits([Segment(prompt)], False)
            ids = self.tokenizer.encode(prompt, special)
            if add_bos:
                ids = with_bos(ids, config.bos_id)
            found = np.array(ids, np.int32)
        else:
            try:
                found = np.asarray(prompt, np.int64)
            except OverflowError:
                raise ValueError(f"{bad}{max(prompt, key=abs)}") from None
        if not len(found):
            raise ValueError("prompt: expected at least one token, found none")
        others = (found < 0) | (found >= config.vocab_size)
        if others.any():
            raise ValueError(f"{bad}{int(found[others][0])}")
        return found.astype(np.int32)

    def _text_ids(
        self,
        prompts: Sequence[str | Sequence[int]],
        special: bool,
        add_bos: bool,
    ) -> list[TokenArray]:
        return [self.text_ids(one, special, True, add_bos) for one in prompts]

    def check_writes(self) -> None:
        """Raises RequestError for a model that writes no text by itself."""
        if self._config.target_hidden:
            raise RequestError(
                400,
                "model: expected one that writes text, found a drafter, which "
                "only guesses for another model (--draft)",
                param="model",
                code="model_not_supported",
            )
        if self._config.bidirectional:
            raise RequestError(
                400,
                "model: expected one that writes text, found one that makes "
                "embeddings of texts; these are at /v1/embeddings",
                param="model",
                code="model_not_supported",
            )

    def check_fits(
        self, segments: Sequence[Segment], messages: bool = True
    ) -> None:
        """Checks the length of a text before it has tokens. Raises RequestError
        where it is too long whatever they are, which takes no time.
        """
        least = at_least(segments, self.tokenizer, self.context)
        self.check_length(least, messages, "at least ")

    def check_length(
        self, length: int, messages: bool, exactly: str = ""
    ) -> None:
        """Raises RequestError if a prompt of that many tokens, or `messages`
        that come to them, leave no room in the context.
        """
        if length >= self.context:
            raise RequestError(
                400,
                f"the prompt has {exactly}{length} tokens, expected at most "
                f"{self.context - 1}: the context is {self.context} "
                "tokens, and one is to be sampled",
                param="messages" if messages else "prompt",
                code=TOO_LONG,
                more={"n_prompt_tokens": length, "n_ctx": self.context},
            )


def check_count(messages: Messages, most: int) -> None:
    """Raises RequestError for more messages than a conversation may have."""
    if len(messages) > most:
        raise invalid(
            "messages", f"expected at most {most}, found {len(messages)}"
        )
