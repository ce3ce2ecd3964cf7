"""A loaded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from gemmakv._support.arguments import boolean
from gemmakv.cache._kv_cache import KVCache
from gemmakv.chat._messages import Messages, Template, Tools, messages_of
from gemmakv.chat._native_calls import grammar_of
from gemmakv.chat._reply import ReplyReader, read_reply, with_parts
from gemmakv.chat._stream import ChatStream
from gemmakv.chat._templates import (
    call_form,
    check_reply_options,
    render,
    stop_ids,
    stop_texts,
    template_for,
    thinking,
)
from gemmakv.chat._tools import tool_use
from gemmakv.chat._transcript import Encoder, common_exact
from gemmakv.errors import unexpected
from gemmakv.generation._model import Model
from gemmakv.generation._options import Options
from gemmakv.generation._prompts import TokenArray, check_cache
from gemmakv.generation._result import Generation
from gemmakv.generation._stream import Stream
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ChatOptions(Options, total=False):
    """Keywords of `Gemma.chat`."""

    cache: KVCache | None
    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    think: bool | None
    template: Template | str | None
    template_kwargs: Mapping[str, Any] | None


@dataclasses.dataclass
class _Reply:
    """A reply of `chat` in the making.

    Attributes:
      request: cache, prompt, options and ends of what is to be generated.
      given: the caller's cache, which is to hold the same.
      tokenizer: of the model.
      form: of calls, see `ReplyReader`.
    """

    request: tuple[KVCache, TokenArray, dict[str, Any], list[int]]
    given: KVCache | None
    tokenizer: Tokenizer
    form: str | None

    def stream(self, inner: Stream) -> ChatStream:
        return ChatStream(inner, self, lambda: None)

    def reader(self) -> ReplyReader:
        return ReplyReader(self.tokenizer, self.form)

    def finish(self, generation: Generation) -> Generation:
        if generation.token_ids or generation.finish_reason != "cancelled":
            self._fill_given()
        return with_parts(generation, read_reply(self.reader(), generation))

    def keep(self, text: str, reasoning: str) -> str:
        del reasoning
        self._fill_given()
        return text

    def take_back(self) -> None:
        """Does nothing: the caller's cache was not touched."""

    def _fill_given(self) -> None:
        if self.given is not None:
            self.given._become(self.request[0])


class Gemma(Model):
    """Weights of a model, their tokenizer and the engine that runs them.

    Made by `load` or `from_tensors`. Weights never change: any number of
    conversations and threads may use one Gemma at the same time, each with
    exactly the result that it would have alone; calls with the same cache
    wait for each other.
    """

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> ChatStream: ...

    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        cache: KVCache | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        think: bool | None = None,
        template: Template | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation | ChatStream:
        """Replies to a whole conversation, which the caller keeps.

            gemma.chat(messages).text
            for piece in gemma.chat(messages, stream=True):
                print(piece.text, end="", flush=True)

        Args:
          messages: each a `Message` or a dict of role and content; see
            `apply_chat_template`.
          stream: whether to return a stream of pieces at once, whose `result`
            is the reply.
          cache: what it already holds of the conversation is not computed
            again, what else it holds is removed; on return it holds the
            conversation and the reply. The result is the same as without, bit
            for bit. None for a new one, which is dropped.
          tools: JSON schemas of functions that the model may call; the result
            has `tool_calls`. Needs the extra `grammar`.
          tool_choice: "auto" (the default), "none", "required" (at least one
            call) or the name of the tool that is to be called.
          parallel_tool_calls: whether there may be several calls.
          think: whether the model is to think before it replies, if its
            template knows how; the result has `reasoning`. None: as the
            template has it.
          template: as for `apply_chat_template`.
          template_kwargs: keywords of `apply_chat_template` for the template.
          **options: those of `generate`; `stop` adds to what ends a reply
            anyway.

        The result's `text` is without white space around it. Thoughts of a
        reply that stands among the messages are said again only if the
        template says them, as long as the turn goes on. Calls with one
        cache at the same time do not wait for each other: it holds what the
        last of them leaves. A call that raises leaves it as it was. A stream
        leaves it so until its end, and if it is cancelled before its first
        piece.

        Raises what `apply_chat_template` and `generate` raise.
        """
        reply = self._begin_reply(
            messages, cache, tools, tool_choice, parallel_tool_calls, think,
            template, template_kwargs, options,
        )  # fmt: skip
        if boolean("stream", stream):
            return reply.stream(self._done(self._streamed(*reply.request)))
        return reply.finish(self._done(self._reply(*reply.request)))

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    @overload
    async def achat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> ChatStream: ...

    async def achat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        cache: KVCache | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        think: bool | None = None,
        template: Template | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation | ChatStream:
        """Replies as `chat` does without blocking the event loop.

            async for piece in await gemma.achat(messages, stream=True):
                print(piece.text, end="", flush=True)

        A task that is cancelled leaves the cache as it was.
        """
        reply = self._begin_reply(
            messages, cache, tools, tool_choice, parallel_tool_calls, think,
            template, template_kwargs, options,
        )  # fmt: skip
        if boolean("stream", stream):
            work = self._streamed(*reply.request)
            return reply.stream(await self._adone(work))
        return reply.finish(await self._adone(self._reply(*reply.request)))

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template: Template | str | None = None,
        **kwargs: Any,
    ) -> TokenArray:
        """Token ids of a conversation, int32 [n], BOS first.

        Control tokens are those of the template. Text of messages, tools and
        keywords never becomes one.

        Args:
          messages: each a `Message` or a dict of role and content.
          tools: JSON schemas of functions that the model may call. To a
            template that knows no tools they are said in text, and so are
            calls and results among the messages.
          add_generation_prompt: whether the reply's turn is opened.
          template: "file", "gemma", "gemma4", "plain" or a Template; None
            chooses what fits the model, see `gemmakv.templates.template_for`.
          **kwargs: variables of the file's template.

        Raises ValueError naming the message or tool that the template cannot
        express, GemmaKVError if the template cannot be used.
        """
        encoder = Encoder(self._needed_tokenizer(), self.config.bos_id)
        return encoder.encode(
            render(
                self._template(template),
                messages_of(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        )

    def count_tokens(
        self,
        messages: Messages | str,
        *,
        tools: Tools | None = None,
        template: Template | str | None = None,
        **kwargs: Any,
    ) -> int:
        """Tokens of a text, without BOS, or of a conversation as `chat`
        computes it, with the opening of the reply.

        Raises ValueError for a text with anything else: that is for messages.
        """
        if isinstance(messages, str):
            keywords = {"tools": tools, "template": template, **kwargs}
            for key, value in keywords.items():
                if value is not None:
                    raise ValueError(
                        f"{key}: a text is counted without a template; "
                        "expected messages with it, found a str"
                    )
            return len(self._needed_tokenizer().encode(messages))
        return len(
            self.apply_chat_template(
                messages, tools=tools, template=template, **kwargs
            )
        )

    def _begin_reply(
        self,
        messages: Messages,
        cache: KVCache | None,
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool,
        think: bool | None,
        template: Template | str | None,
        template_kwargs: Mapping[str, Any] | None,
        options: Options,
    ) -> _Reply:
        """Checks the arguments of `chat`, and encodes what is to be computed:
        in a cache of its own, which begins with what `cache` holds of it.
        """
        chosen = self._template(template)
        listed, form, more = self._tools_of(
            chosen, tools, tool_choice, parallel_tool_calls, options
        )
        check_reply_options(more)
        if not isinstance(template_kwargs, Mapping | None):
            raise unexpected(
                "template_kwargs", "a mapping or None", template_kwargs
            )
        variables = thinking(chosen, think) | dict(template_kwargs or {})
        ids = self.apply_chat_template(
            messages, tools=listed, template=chosen, **variables
        )
        if cache is None:
            work = self.new_cache()
        else:
            check_cache("cache", cache)
            work = cache.fork()
            # The last token is computed anew: its logits are not kept.
            work.truncate(min(common_exact(work.tokens, ids), len(ids) - 1))
        more["stop"] = stop_texts(chosen, more)
        tokenizer = self._needed_tokenizer()
        ends = stop_ids(chosen, tokenizer)
        request = work, ids[len(work) :], more, ends
        return _Reply(request, cache, tokenizer, form)

    def _template(self, template: Template | str | None) -> Template:
        if template is None:
            return self._own_template
        return template_for(self, template)

    @cached_property
    def _own_template(self) -> Template:
        return template_for(self)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "gemma: this model has no tokenizer (a folder needs a "
                "tokenizer.model or tokenizer.json), and messages need one"
            )
        return self.tokenizer

    def _tools_of(
        self,
        template: Template,
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel: bool,
        options: Mapping[str, Any],
    ) -> tuple[Tools | None, str | None, dict[str, Any]]:
        """Tools as they are said, the form of calls, and options with what
        the reply follows.
        """
        if tools is None and tool_choice is None:
            return None, None, dict(options)
        form = call_form(template)
        if form is None:
            if tool_choice not in (None, "auto"):
                raise ValueError(
                    f"tool_choice: calls of the template {template.name!r} "
                    "have a form of their own, which is not read here; "
                    f"expected 'auto', found {tool_choice!r}"
                )
            return tools, None, dict(options)
        use = tool_use(tools, tool_choice, parallel)
        if use is None:
            return None, None, dict(options)
        for name in ("grammar", "response_format"):
            if options.get(name) is not None:
                raise ValueError(f"{name}: expected none together with tools")
        grammar = grammar_of(form, self._needed_tokenizer(), use)
        return use.tools, form, {**options, "grammar": grammar}
