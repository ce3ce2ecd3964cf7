"""The checks of a request before it has tokens: its options and tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gemmakv.chat._answers import answer_of
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._native_calls import grammar_of
from gemmakv.chat._templates import call_form
from gemmakv.chat._tools import tool_use
from gemmakv.errors import within
from gemmakv.options import GenerationOptions
from gemmakv.server.service.errors import (
    invalid,
    library_errors,
    unexpected,
    unsupported,
)
from gemmakv.server.service.prompts import Prompts
from gemmakv.server.service.requests import (
    ChatRequest,
    split_reply,
    take_options,
)
from gemmakv.server.settings import Settings


class Checks:
    """The checks of requests to one model.

    Attributes:
      defaults: the options of requests that say nothing: the operator's, else
        the model's.
    """

    def __init__(
        self, gemma: Gemma, settings: Settings, prompts: Prompts
    ) -> None:
        """Raises ValueError for defaults that are no options."""
        self._gemma = gemma
        self._settings = settings
        self._prompts = prompts
        self.defaults = self._default_options()

    def _default_options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"temperature": 1.0}
        found |= self._gemma.sampling_defaults
        if self._settings.default_temperature is not None:
            found["temperature"] = self._settings.default_temperature
        if self._settings.default_seed is not None:
            found["seed"] = self._settings.default_seed
        try:
            GenerationOptions.check(found, self._gemma.config.vocab_size)
        except ValueError as error:
            raise within("default_", error) from None
        return found

    def check_rows(self, prompts: int, n: int) -> None:
        """Raises RequestError for more continuations than one may have."""
        settings = self._settings
        most = min(settings.limits.rows, settings.max_running)
        if prompts * n > most:
            raise invalid(
                "n",
                f"expected at most {most} continuations, found {prompts * n}",
            )

    async def check(
        self, request: ChatRequest
    ) -> tuple[ChatRequest, dict[str, Any]]:
        """Gives a request with the tools that are said to the model, and all
        of its options. Raises RequestError.
        """
        given = take_options(request.options, self._prompts.context)
        request = dataclasses.replace(request, options=given)
        options = {**self.defaults, **given}

        def check(*_: object) -> ChatRequest:
            found = self._with_tools(request, options)
            self._check_options(options, request.prompt_logprobs)
            return found

        # Schemas may be long.
        found = await self._prompts.threads.run_texts(
            check, options, request.tools
        )
        return found, options

    def _with_begun(self, request: ChatRequest) -> ChatRequest:
        said, begun = split_reply(
            request.messages or (), self._prompts.template
        )
        return dataclasses.replace(request, said=said, begun=begun)

    def _with_tools(
        self, request: ChatRequest, options: dict[str, Any]
    ) -> ChatRequest:
        """Gives the request with the tools that are said to the model, and
        puts what the reply is to follow among the options.
        """
        with library_errors():
            use = tool_use(
                request.tools, request.tool_choice, request.parallel_tool_calls
            )
        request = self._with_begun(request)
        if request.begun:
            _check_begun(request, options)
        if use is None:
            return dataclasses.replace(request, tools=None)
        form = call_form(self._prompts.template)
        if form is None:
            raise unsupported(
                "tools", "calls in the form of this model's template"
            )
        with library_errors():
            rest, answer = answer_of(options)
            grammar = grammar_of(form, self._prompts.tokenizer, use, answer)
        options.clear()
        options.update(rest, grammar=grammar)
        return dataclasses.replace(request, tools=use.tools)

    def _check_options(
        self, options: Mapping[str, Any], prompt_logprobs: int | None
    ) -> None:
        stop = options.get("stop")
        most = self._settings.limits.stop
        if isinstance(stop, list | tuple) and len(stop) > most:
            raise invalid(
                "stop", f"expected at most {most} texts, found {len(stop)}"
            )
        most = self._settings.limits.top_logprobs
        for name, top in (
            ("top_logprobs", options.get("top_logprobs")),
            ("prompt_logprobs", prompt_logprobs),
        ):
            if isinstance(top, int) and top > most:
                raise invalid(name, f"expected at most {most}, found {top}")
        if prompt_logprobs is not None and prompt_logprobs < 0:
            raise unexpected(
                "prompt_logprobs", f"0 to {most}", prompt_logprobs
            )
        with library_errors():
            GenerationOptions.check(options, self._gemma.config.vocab_size)


def _check_begun(request: ChatRequest, options: Mapping[str, Any]) -> None:
    """Raises RequestError for what a reply cannot be held to, or come after,
    that the client has begun.
    """
    if options.get("response_format") not in (None, {"type": "text"}):
        raise invalid(
            "response_format",
            "expected none where the last message begins the reply",
        )
    if request.think:
        raise invalid(
            "think",
            "expected no thoughts where the last message begins the reply: "
            "they come before it",
        )
