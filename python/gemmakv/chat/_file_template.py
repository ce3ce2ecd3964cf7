"""The chat template that a model's file carries, in Jinja."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from gemmakv._support.json import plain_json
from gemmakv.chat._messages import (
    Message,
    Messages,
    Segment,
    Tools,
    is_parts,
    items,
    messages_of,
)
from gemmakv.chat._tools import plain_tools
from gemmakv.chat._turns import TurnRules, probe_rules
from gemmakv.errors import GemmaKVError, brief, unexpected
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2.nodes

# Marks stand for control tokens. They are surrogates, which no text holds.
_MARKS = range(0xD800, 0xE000)
# Methods of texts that look for their arguments in it.
_SEEKING = frozenset(
    ("split", "rsplit", "partition", "rpartition", "startswith", "endswith",
     "find", "rfind", "count")
)  # fmt: skip
# What only a template reads that knows calls of tools, or their results.
_TOOL_FIELDS = frozenset(("tool", "tool_calls", "tool_responses"))
_ANY_MARK = re.compile("([\ud800-\udfff])")


class FileTemplate:
    """Renders a Jinja chat template in a sandbox.

    The template sees what it sees in transformers: `messages` and `tools` as
    dicts, `add_generation_prompt`, `bos_token`, `eos_token`,
    `raise_exception`, `strftime_now`, and the keywords of `render`.

    Control tokens are those that the template itself writes, whole, in its
    text or its constants. To tell them from the same characters in a message,
    the template is rendered with a mark in the place of each. One whose output
    depends on such characters in messages shows by rendering otherwise
    without marks, and is refused.

    Attributes:
      knows_tools: whether it reads the tools that a model may call.
      knows_results: whether it reads calls, or results of tools.
      knows_thinking: whether it reads that the model is to think.
      call_form: of the calls that it writes; None for one of its own.
    """

    name = "file"
    stop: tuple[str, ...] = ()
    stop_tokens = (
        "<end_of_turn>", "<turn|>", "<|tool_response>",
        "<start_function_response>",
    )  # fmt: skip

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        bos_id: int,
        eos_ids: Sequence[int],
    ) -> None:
        """Raises GemmaKVError if `source` is not sound, or puts control tokens
        together from pieces.
        """
        self.source = source
        self._marks: dict[str, str] = {}  # of control tokens
        self._tokenizer = tokenizer
        self._tokens = {
            "bos_token": tokenizer.piece_of(bos_id) if bos_id >= 0 else "",
            "eos_token": tokenizer.piece_of(eos_ids[0]) if eos_ids else "",
        }
        self._marked_tokens = {
            name: self._mark(token) for name, token in self._tokens.items()
        }
        self._plain, self._marked, uses = self._compile(source)
        self.knows_tools = "tools" in uses.variables
        self.knows_results = not uses.fields.isdisjoint(_TOOL_FIELDS)
        self.knows_thinking = "enable_thinking" in uses.variables
        self.call_form = _call_form(uses.text)
        # Gemma 4's first one: results are part of the message that called.
        self._joins_results = (
            "tool_responses" in uses.fields
            and "tool_call_id" not in uses.fields
        )
        # By role, and whether there are several.
        self._knows_parts: dict[tuple[str, bool], bool] = {}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._check_whole()

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Segment]:
        """Renders as transformers' `apply_chat_template` does; but a template
        that does not know parts gets text.

        Raises ValueError if the template rejects the messages or makes
        nothing of tools, GemmaKVError if it fails.
        """
        checked = messages_of(messages)
        variables = {
            "documents": None,
            **plain_json("keywords", kwargs),
            **_variables(add_generation_prompt),
            "tools": self._checked_tools(tools),
        }
        try:
            return self._render(checked, variables)
        except _Rejected as error:
            raise ValueError(
                f"messages: the file's chat template rejects them: {error}"
            ) from None

    @cached_property
    def turn_rules(self) -> TurnRules:
        """The orders of roles that the template takes, found by trying."""
        variables = self._tokens | _variables(False)

        def text(messages: list[Message]) -> str:
            said = [message.to_dict() for message in messages]
            return _run(self._plain, variables | {"messages": said})

        return probe_rules(text)

    def _render(
        self, messages: Sequence[Message], variables: dict[str, Any]
    ) -> list[Segment]:
        """Renders; a template that fails at what tools returned as data gets it
        as JSON, and a list without any parts as an empty text.
        """
        try:
            return self._rendered(messages, variables)
        except GemmaKVError as error:
            texts = [
                dataclasses.replace(one, content=one.text)
                if _is_data(one.content) or one.content in ([], ())
                else one
                for one in messages
            ]
            if texts == list(messages):
                raise
            failure = error
        try:
            return self._rendered(texts, variables)
        except GemmaKVError:
            raise failure from None

    def _rendered(
        self, messages: Sequence[Message], variables: dict[str, Any]
    ) -> list[Segment]:
        chat = []
        for i, message in enumerate(messages):
            fields = plain_json(f"messages[{i}]", message.to_dict())
            fields.pop("incomplete", None)
            if is_parts(message.content) and not self._takes_parts(
                message.role, fields["content"]
            ):
                fields["content"] = message.text
            chat.append(fields)
        if self.call_form == "functions":
            _name_results(chat)
        if self._joins_results:
            chat = _joined_results(chat)
        variables = {**variables, "messages": chat}
        expected = _run(self._plain, self._tokens | variables)
        for template in self._marked:
            found = _run(template, self._marked_tokens | variables)
            segments = [
                Segment(self._names.get(part, part), part in self._names)
                for part in _ANY_MARK.split(found)
                if part
            ]
            if "".join(segment.text for segment in segments) == expected:
                return segments
        raise GemmaKVError(
            "template: what the file's chat template makes depends on "
            "names of control tokens in the messages, so they cannot be "
            "told apart from text; choose template='gemma' or 'plain'"
        )

    def _check_whole(self) -> None:
        """Raises if what the template writes has control tokens as text."""
        try:
            segments = self.render([Message("user", "")])
        except (ValueError, GemmaKVError):
            return  # needs more, or does not work: `render` says so
        for segment in segments:
            for name, token in self._tokenizer.split_special(segment.text):
                if token is not None and not segment.special:
                    raise GemmaKVError(
                        "template: the file's chat template puts the control "
                        f"token {brief(name)} together from pieces, so it "
                        "cannot be told apart from text; choose "
                        "template='gemma' or 'plain'"
                    )

    def _takes_parts(
        self, role: str, content: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Tells whether the template renders parts of a role, and not Python's
        list.
        """
        several = len(content) > 1
        known = self._knows_parts.get((role, several))
        if known is None:
            known = self._tries_parts(role, [{}, {}] if several else [{}])
            self._knows_parts[role, several] = known
        # TranslateGemma's wants languages in each part.
        more = any(part.keys() - {"type", "text"} for part in content)
        return known or more and self._tries_parts(role, content)

    def _tries_parts(
        self, role: str, fields: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Tells whether texts of parts with these fields are all rendered."""
        texts = [chr(0xE000 + i % 0x1000) for i in range(len(fields))]
        parts = [
            {**more, "type": "text", "text": text}
            for more, text in zip(fields, texts)
        ]
        tried: dict[str, Any] = {"role": role, "content": parts}
        other = {"role": "user", "content": "A"}
        chat: list[dict[str, Any]] = [tried]
        if role in ("system", "developer"):
            chat = [tried, other]
        elif role == "assistant":
            chat = [other, tried]
        elif role == "tool":
            call = {"name": "f", "arguments": {}}
            calls = [{"id": "a", "type": "function", "function": call}]
            asked = {"role": "assistant", "content": "", "tool_calls": calls}
            tried |= {"name": "f", "tool_call_id": "a"}
            chat = [other, asked, tried]
        try:
            text = _run(self._plain, self._tokens | {"messages": chat})
        except (_Rejected, GemmaKVError):
            return False
        return all(one in text for one in texts) and str(parts) not in text

    def _checked_tools(self, tools: Any) -> list[dict[str, Any]] | None:
        if tools is None:
            return None
        given = list(plain_tools(items("tools", tools)) or ())
        for i, tool in enumerate(given):
            if not isinstance(tool, Mapping):
                raise unexpected(
                    f"tools[{i}]", "the JSON schema of a function, a dict", tool
                )
        if given and not self.knows_tools:
            raise ValueError(
                "tools: the file's chat template does not say them to the "
                f"model; expected none, found {len(given)}"
            )
        checked: list[dict[str, Any]] = plain_json("tools", given)
        return checked

    def _mark(self, text: str) -> str:
        """Puts marks in the place of control tokens."""
        marked = ""
        for part, token in self._tokenizer.split_special(text):
            if token is not None and part not in self._marks:
                if len(self._marks) == len(_MARKS):
                    raise GemmaKVError(
                        "template: the file's chat template names more than "
                        f"{len(_MARKS)} control tokens"
                    )
                self._marks[part] = chr(_MARKS[len(self._marks)])
            marked += part if token is None else self._marks[part]
        return marked

    def _compile(
        self, source: str
    ) -> tuple[jinja2.Template, list[jinja2.Template], _Uses]:
        """Gives the template, the templates with marks, and what it uses.

        Of those with marks the second one has none in what it looks for in
        its messages: a thought that somebody kept in a reply, say, stands
        there as text.
        """
        import jinja2.nodes

        environment = _environment()
        try:
            plain = environment.from_string(source)
            marked = []
            for whole in (True, False):
                tree = environment.parse(source)
                sought = set() if whole else _sought(tree)
                for text in tree.find_all(jinja2.nodes.TemplateData):
                    text.data = self._mark(text.data)
                for constant in tree.find_all(jinja2.nodes.Const):
                    if isinstance(constant.value, str) and (
                        id(constant) not in sought
                    ):
                        constant.value = self._mark(constant.value)
                marked.append(environment.from_string(tree))
            return plain, marked, _uses(environment.parse(source))
        except (
            jinja2.TemplateError,
            RecursionError,
            SyntaxError,
            ValueError,
        ) as error:  # the last two are of Python's compiler
            raise GemmaKVError(
                "template: the file's chat template is not sound: "
                f"{_line(error)}; choose template='gemma' or 'plain'"
            ) from None


@dataclasses.dataclass(frozen=True)
class _Uses:
    """The names and texts that a template uses; its comments, and what stands
    under a constant that is false, do not count.

    Attributes:
      variables: names that it is to be given: it reads them, and does not set
        them before.
      fields: names of attributes, and texts that may name them.
      text: all that it may write, and the fields.
    """

    variables: frozenset[str]
    fields: frozenset[str]
    text: str


def _uses(tree: jinja2.nodes.Template) -> _Uses:
    import jinja2.meta
    import jinja2.nodes

    for branch in tree.find_all(jinja2.nodes.If):
        if isinstance(branch.test, jinja2.nodes.Const) and (
            not branch.test.value
        ):
            branch.body = []  # never rendered
    constants = [
        constant.value
        for constant in tree.find_all(jinja2.nodes.Const)
        if isinstance(constant.value, str)
    ]
    attributes = [one.attr for one in tree.find_all(jinja2.nodes.Getattr)]
    written = [one.data for one in tree.find_all(jinja2.nodes.TemplateData)]
    return _Uses(
        frozenset(jinja2.meta.find_undeclared_variables(tree)),
        frozenset([*constants, *attributes]),
        "\n".join([*written, *constants, *attributes]),
    )


def _call_form(text: str) -> str | None:
    """Gives the form of the calls that a template writes; None: another."""
    if "<|tool_call>" in text and "call:" in text:
        return "native"
    if "<start_function_call>" in text and "call:" in text:
        return "functions"
    if "<tool_call>" in text and "arguments" in text:
        return "json"
    return None


def _sought(tree: jinja2.nodes.Template) -> set[int]:
    """Finds the constants that are compared with texts, or looked for."""
    import jinja2.nodes

    places: list[jinja2.nodes.Node] = []
    for compare in tree.find_all(jinja2.nodes.Compare):
        places += [compare.expr, *(one.expr for one in compare.ops)]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and (
            call.node.attr in _SEEKING
        ):
            places += call.args
    return {id(one) for one in places if isinstance(one, jinja2.nodes.Const)}


def _name_results(chat: Sequence[dict[str, Any]]) -> None:
    """Has results of tools say the function's name, which most clients leave
    to the id of the call. Where no call has it, calls have results in turn.
    """
    names: dict[str, str] = {}
    in_turn: list[str] = []
    place = 0
    for fields in chat:
        calls = fields.get("tool_calls", ())
        for call in calls:
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if calls:
            in_turn, place = [one["function"]["name"] for one in calls], 0
        if fields["role"] != "tool":
            continue
        known = names.get(fields.get("tool_call_id") or "")
        if not known and in_turn:
            known = in_turn[min(place, len(in_turn) - 1)]
        if "name" not in fields and known:
            fields["name"] = known
        place += 1


def _joined_results(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts results of tools into `tool_responses` of the message that called
    them, and the text that follows them into its content.
    """
    found: list[dict[str, Any]] = []
    for fields in chat:
        last = found[-1] if found else {}
        results = last.get("tool_responses", [])
        if fields["role"] == "tool" and last.get("tool_calls"):
            calls = last["tool_calls"]
            by_id = {call["id"]: call for call in calls if "id" in call}
            call = by_id.get(fields.get("tool_call_id"))
            if call is None and not fields.get("name"):
                call = calls[min(len(results), len(calls) - 1)]
            name = call["function"]["name"] if call else fields["name"]
            content = fields["content"]
            if is_parts(content):
                content = "".join(part["text"] for part in content)
            result = {"name": name, "response": content}
            last["tool_responses"] = [*results, result]
        elif (
            fields["role"] == "assistant"
            and results
            and not last.get("content")
            and not fields.get("tool_calls")
        ):
            last["content"] = fields["content"]
        else:
            found.append(fields)
    return found


def _is_data(content: Any) -> bool:
    """Tells whether a message's content is what a tool returned, no text."""
    return not isinstance(content, str | None) and not is_parts(content)


class _Rejected(Exception):
    """The template called `raise_exception`."""


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    import jinja2

    try:
        return template.render(variables)
    except (
        jinja2.TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise GemmaKVError(
            f"template: the file's chat template fails: {_line(error)}; "
            "choose template='gemma' or 'plain'"
        ) from None


def _variables(add_generation_prompt: bool) -> dict[str, Any]:
    """Gives the variables that every conversation has."""
    return {
        "add_generation_prompt": add_generation_prompt,
        # Once for all runs, which must not differ by the clock.
        "strftime_now": datetime.datetime.now().strftime,
    }


def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox  # 50 ms that most programs need not spend

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which says what of a text to train on."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )

    # The settings that templates of this kind are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise _Rejected(_line(message))


def _line(value: object) -> str:
    return " ".join(str(value).split())[:300]
