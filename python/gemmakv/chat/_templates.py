"""How a conversation becomes the text that a model reads.

A template renders messages to segments, each either plain text or the name
of one control token. Text that people or models wrote always is plain text:
a "<end_of_turn>" in it stays a string of characters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemmakv.chat._file_template import FileTemplate
from gemmakv.chat._gemma4_template import Gemma4Template
from gemmakv.chat._messages import (
    Message,
    Messages,
    Segment,
    Template,
    Tools,
    check_turns,
    messages_of,
)
from gemmakv.chat._tools import plain_tools, said_in_text
from gemmakv.chat._turns import (
    ALTERNATING,
    ANY_ORDER,
    TurnRules,
    arrange,
    place_error,
    probe_rules,
)
from gemmakv.errors import GemmaKVError, MismatchError, brief, unexpected
from gemmakv.generation._option_kinds import ReplyStop
from gemmakv.generation._options import split_rows
from gemmakv.generation._requests import requests_of
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma

NAMES = ("file", "gemma", "gemma4", "plain")


class _TextTemplate:
    """A template for text alone: no tools, and no variables of its own."""

    name = ""
    stop: tuple[str, ...] = ()
    stop_tokens = ("<end_of_turn>",)
    turn_rules = dataclasses.replace(ANY_ORDER, results=False)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Segment]:
        checked = _plain_messages(self.name, messages, tools, kwargs)
        body = self._body(checked, add_generation_prompt)
        return [Segment("<bos>", special=True), *body]

    def _body(self, messages: list[Message], opens: bool) -> list[Segment]:
        """Gives what follows BOS; `opens`: the model's turn at the end."""
        raise NotImplementedError


class PlainTemplate(_TextTemplate):
    """A dialogue in plain text, for models that were not tuned for chat.

    A base model continues what looks like a conversation written down, and
    what it writes for the other side ends the reply. Any order of system,
    user and assistant is possible. Not for tools.
    """

    name = "plain"
    stop = ("\nUser:", "\nAssistant:")

    def _body(self, messages: list[Message], opens: bool) -> list[Segment]:
        segments = []
        roles = [message.role for message in messages[1:]]
        roles.append("assistant" if opens else "")
        gap = ""  # between what stands there and what follows
        opened = False  # a reply, at the end of the user's turn
        for message, following in zip(messages, roles):
            text = message.text.strip()
            if message.role == "assistant":
                if not opened:
                    segments.append(Segment(f"{gap}Assistant:"))
                if text:
                    # A segment of its own: the tokens of a turn that is over
                    # do not depend on what follows.
                    segments.append(Segment(f" {text}"))
                opened = False
            elif message.role == "user":
                opened = following == "assistant"
                end = "\n\nAssistant:" if opened else ""
                segments.append(Segment(f"{gap}User: {text}{end}"))
            else:
                segments.append(Segment(gap + text))
                opened = False
            gap = "\n\n"
        if opens and not opened:
            segments.append(Segment("\n\nAssistant:"))
        return segments


class GemmaTemplate(_TextTemplate):
    """The turns of instruction-tuned Gemma models.

    A system message stands at the beginning of the first user turn, and the
    white space around messages and parts is left out, as the models were
    trained. User and assistant take turns. Not for tools.
    """

    name = "gemma"
    turn_rules = ALTERNATING

    def _body(self, messages: list[Message], opens: bool) -> list[Segment]:
        check_turns(messages)
        segments = []
        opening = ""
        for message in messages:
            if message.role in ("system", "developer"):
                opening = message.text + "\n\n"
                continue
            role = "model" if message.role == "assistant" else message.role
            text = "".join(part.strip() for part in message.parts)
            segments += [
                Segment("<start_of_turn>", special=True),
                Segment(f"{role}\n{opening}{text}"),
                Segment("<end_of_turn>", special=True),
                Segment("\n"),
            ]
            opening = ""
        if opens:
            segments += [
                Segment("<start_of_turn>", special=True),
                Segment("model\n"),
            ]
        return segments


def _plain_messages(
    name: str, messages: Any, tools: Any, keywords: Mapping[str, Any]
) -> list[Message]:
    """Checked messages for a template that knows no tools and no variables."""
    checked = messages_of(messages)
    for key, value in keywords.items():
        if value is not None:
            raise ValueError(
                f"{key}: the template {name!r} has no such variable; expected "
                f"none, found {brief(value)}"
            )
    if tools:
        raise ValueError(
            f"tools: the template {name!r} does not say them to the model; "
            f"expected none, found {brief(tools)}"
        )
    for i, message in enumerate(checked):
        if message.role == "tool" or message.tool_calls:
            found = "tool_calls" if message.tool_calls else "role 'tool'"
            raise ValueError(
                f"messages[{i}]: the template {name!r} knows no tools; "
                f"expected text, found {found}"
            )
    return checked


def render(
    template: Template, messages: Sequence[Message], **keywords: Any
) -> list[Segment]:
    """Renders messages in turns that the template takes.

    To a template that knows no tools they are said in text. One that was
    written for `render(messages, add_generation_prompt)` gets what it was
    written for: no tools, and "model" for "assistant".
    """

    def rules() -> TurnRules:
        return turn_rules(template)

    opens = bool(keywords.get("add_generation_prompt", True))
    if keywords.get("tools"):
        keywords["tools"] = plain_tools(keywords["tools"])
    messages, places = arrange(messages, rules, opens)
    tooled = any(one.tool_calls or one.role == "tool" for one in messages)
    if isinstance(template, FileTemplate) and template.knows_results:
        tooled = False  # it says them itself
    if not knows_tools(template) and (keywords.get("tools") or tooled):
        messages = said_in_text(messages, keywords.pop("tools", None))
        messages, _ = arrange(messages, rules, opens)
        places = ()
    try:
        return _render_arranged(template, messages, keywords)
    except ValueError as error:
        placed = place_error(
            error, lambda i: places[i] if i < len(places) else i
        )
        if str(placed) == str(error):
            raise
        raise placed from None


def turn_rules(template: Template) -> TurnRules:
    """Finds the orders of roles that a template takes."""
    known = getattr(template, "turn_rules", None)
    if isinstance(known, TurnRules):
        return known

    def text(messages: list[Message]) -> str:
        keywords = {"add_generation_prompt": False}
        segments = _render_arranged(template, messages, keywords)
        return "".join(segment.text for segment in segments)

    return probe_rules(text)


def _render_arranged(
    template: Template, messages: Sequence[Message], keywords: dict[str, Any]
) -> list[Segment]:
    said: Any = _call_render(template, messages, keywords)
    segments = list(said) if isinstance(said, Iterable) else [said]
    if not all(isinstance(one, Segment) for one in segments):
        raise GemmaKVError(
            f"template {brief(template.name)}: expected its render to give a "
            f"list of Segments, found {brief(said)}"
        )
    return segments


def _call_render(
    template: Template, messages: Sequence[Message], keywords: dict[str, Any]
) -> list[Segment]:
    if _takes_keywords(template.render):
        return template.render(messages, **keywords)
    opens = keywords.pop("add_generation_prompt", True)
    unknown = [key for key, value in keywords.items() if value is not None]
    if unknown:
        raise ValueError(
            f"{unknown[0]}: the template {brief(template.name)} does not take "
            "it; expected render(messages, *, tools=None, "
            "add_generation_prompt=True, **kwargs)"
        )
    former = [copy.copy(message) for message in messages]
    for message in former:
        if message.role == "assistant":
            object.__setattr__(message, "role", "model")
    positional: Any = template.render
    segments: list[Segment] = positional(former, opens)
    return segments


def _takes_keywords(render: Callable[..., Any]) -> bool:
    """Tells a template's `render` with tools from the former one."""
    if isinstance(render, types.MethodType):
        return _names_tools(render.__func__)
    return _names_tools.__wrapped__(render)  # it may have no hash


@functools.lru_cache(maxsize=64)
def _names_tools(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "tools" in parameters or any(
        one.kind is one.VAR_KEYWORD for one in parameters.values()
    )


def knows_tools(template: Template) -> bool:
    """Tells whether it has a form of its own for tools, calls and results."""
    if isinstance(template, FileTemplate):
        return template.knows_tools
    return not isinstance(template, _TextTemplate)


def call_form(template: Template) -> str | None:
    """Gives the form in which calls come: "json" as `ToolUse` has it, one of
    `NATIVE`, or None if in another one.
    """
    if isinstance(template, Gemma4Template) or (
        isinstance(template, FileTemplate) and template.knows_tools
    ):
        return template.call_form
    return None if knows_tools(template) else "json"


def thinking(template: Template, think: bool | None) -> dict[str, Any]:
    """The keyword of `render` that says whether the model is to think; None:
    as the template has it. Raises ValueError if it cannot be said.
    """
    if think is None:
        return {}
    if not isinstance(think, bool):
        raise unexpected("think", "True, False or None", think)
    if knows_thinking(template):
        return {"enable_thinking": think}
    if think:
        raise ValueError(
            f"think: the template {brief(template.name)} cannot ask the model "
            "to think; expected False or None, found True"
        )
    return {}


def knows_thinking(template: Template) -> bool:
    """Tells whether it can say that the model is to think."""
    known: bool = getattr(
        template, "knows_thinking", not isinstance(template, _TextTemplate)
    )
    return known


def stop_ids(template: Template, tokenizer: Tokenizer) -> list[int]:
    """Gives the template's control tokens that end a reply."""
    named = map(tokenizer.id_of, template.stop_tokens)
    return [token for token in named if token is not None]


def stop_texts(
    template: Template, *options: Mapping[str, Any], begun: bool = False
) -> list[str]:
    """Gives the stop strings of a reply: the template's, and `stop` of options.

    The latter are looked for in the reply as it is given, without the white
    space that it begins with, which counts only where text of the reply stands
    before it (`begun`). Those of the template are looked for in all of it.
    """
    texts = list(template.stop)
    for keywords in options:
        stop = keywords.get("stop") or []
        given = [stop] if isinstance(stop, str) else stop
        texts += given if begun else map(_of_reply, given)
    return list(dict.fromkeys(texts))


def _of_reply(stop: Any) -> Any:
    """The stop string marked; anything else is refused by the option."""
    return ReplyStop(stop) if isinstance(stop, str) else stop


def check_reply_options(options: Mapping[str, Any]) -> None:
    """Raises for a generation keyword that is bad, or is not for messages, and
    for `options` that are no keywords.
    """
    if not isinstance(options, Mapping):
        raise unexpected("options", "a mapping", options)
    split_rows(options, 1, batch=False)
    if options.get("parse_special"):
        raise ValueError(
            "parse_special: expected False (messages are text, the template "
            "sets the control tokens), found True"
        )


def template_for(
    gemma: Gemma, template: Template | str | None = None
) -> Template:
    """The template of a name, or the one that fits the model.

    Without a name: the chat template that the model's file carries, else
    Gemma's turns if the model is called instruction-tuned, else the plain
    dialogue; the first time with a warning if the model's files do not say
    what it is called, as it may then have been tuned for turns.

    Raises ValueError for a name that is none, MismatchError if the file's
    template is asked for and there is none, GemmaKVError if it does not work.
    """
    if template is None:
        if gemma.chat_template is not None:
            template = "file"
        elif not gemma.instruction_tuned:
            _warn_of_anonymous(gemma)
            template = "plain"
        else:
            known = gemma.tokenizer and gemma.tokenizer.id_of("<|turn>")
            template = "gemma" if known is None else "gemma4"
    if not isinstance(template, str):
        _check_template(template)
        return template
    if template == "plain":
        return PlainTemplate()
    if template == "gemma":
        return GemmaTemplate()
    if template == "gemma4":
        # E2B and E4B alone have embeddings for each layer.
        return Gemma4Template(empty_thought=gemma.config.ple_dim == 0)
    if template == "file":
        if gemma.chat_template is None or gemma.tokenizer is None:
            raise MismatchError(
                "template: the model carries no chat template of its own; "
                "use 'gemma', 'gemma4' or 'plain'"
            )
        return FileTemplate(
            gemma.chat_template,
            gemma.tokenizer,
            bos_id=gemma.config.bos_id,
            eos_ids=gemma.config.eos_ids,
        )
    names = ", ".join(map(repr, NAMES))
    raise unexpected("template", f"{names}, a Template or None", template)


def is_pretrained(gemma: Gemma) -> bool:
    """Tells whether the model's files say what it is called, and neither a
    name nor a chat template that it was tuned for chat.
    """
    tuned = gemma.chat_template is not None or gemma.instruction_tuned
    return not tuned and not requests_of(gemma).info.is_anonymous


def _warn_of_anonymous(gemma: Gemma) -> None:
    """Warns, once for each model, that the plain dialogue is but a guess."""
    requests = requests_of(gemma)
    if "template" in requests.warned or not requests.info.is_anonymous:
        return
    requests.warned.add("template")
    warnings.warn(
        f"{requests.info.names[-1]}: neither a name nor a chat template says "
        "whether this model was instruction-tuned; chats use the template "
        "'plain', pass template='gemma' (or 'gemma4') if it was",
        UserWarning,
        stacklevel=4,
    )


def _check_template(template: object) -> None:
    for attribute in ("name", "stop", "stop_tokens", "render"):
        if not hasattr(template, attribute):
            raise ValueError(
                f"template: expected {', '.join(map(repr, NAMES))}, a Template "
                f"or None, found {brief(template)}, which has no {attribute!r}"
            )
