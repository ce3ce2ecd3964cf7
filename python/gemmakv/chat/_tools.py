"""Tools that a model may call: how they are said to it, and read from it.

A template that knows no tools has them said in text. Calls have one form,

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

which a grammar holds the model to: whatever it calls is a tool that there is,
with arguments that its schema allows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard, get_args

from gemmakv._support.json import loads_finite, plain_json
from gemmakv._support.text import overlap
from gemmakv.chat._answers import JSON_STYLE, Answer
from gemmakv.chat._functions import Function, tool_schema
from gemmakv.chat._messages import Message, Tools, items
from gemmakv.errors import ArgumentError, brief, unexpected
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._message import fields_of
from gemmakv.generation._result import ToolCall
from gemmakv.generation._schema_check import checked_schema, dotted, mapped
from gemmakv.generation._schema_fit import (
    Attempt,
    Fitting,
    Tried,
    Unfit,
    Written,
    pointer,
    type_of,
    with_usual_forms,
    without,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = '"arguments": '
_HEAD = re.compile(r'\s*\{"name": "(?P<name>[^"]*)", "arguments": ')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
ToolChoice = Literal["auto", "none", "required"]
_CHOICES = get_args(ToolChoice)
_CHOICE = ("type", "function")  # fields of one that names a tool
_NOTES = ("title", "description", "examples", "default", "$comment")
_SAID_NAMES = 5  # of tools, in a message
# A reply has at most so many: a model that repeats its call comes to an end.
MOST_CALLS = 32

_TEXT = """You may call these functions:
{tools}

To call one, write
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>
Its result comes between <tool_response> and </tool_response>."""


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools of one call.

    Attributes:
      tools: as they are said to the model.
      called: those that it may call, by their places in `tools`.
      free: its reply may be text, or have text before its calls.
      parallel: it may call several; never of a tool that the choice names.
    """

    tools: list[dict[str, Any]]
    called: Mapping[int, Mapping[str, Any]]
    free: bool
    parallel: bool

def tool_use(
    tools: Tools | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
) -> ToolUse | None:
    """None if there are no tools, or none is to be called. Raises ValueError
    that names the argument.
    """
    given = [
        _tool(f"tools[{i}]", _described(f"tools[{i}]", one))
        for i, one in enumerate(_listed(tools))
    ]
    names = [tool["function"]["name"] for tool in given]
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            raise ValueError(f"tools[{i}]: a second {name!r}, expected one")
        seen.add(name)
    if not isinstance(parallel_tool_calls, bool):
        raise unexpected(
            "parallel_tool_calls", "True or False", parallel_tool_calls
        )
    choice: Any = "auto" if tool_choice is None else tool_choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        more = {
            **{k: v for k, v in choice.items() if k not in _CHOICE},
            **{
                f"function.{k}": v
                for k, v in (
                    function.items() if isinstance(function, Mapping) else ()
                )
                if k != "name"
            },
        }
        for key, value in more.items():
            if value is not None:
                raise unexpected(
                    f"tool_choice.{key[:60]}",
                    "none beside the type and the function's name",
                    value,
                )
        choice = function.get("name") if isinstance(function, Mapping) else ""
    if choice not in (*names, "auto", "none") and (
        choice != "required" or not names
    ):
        expected = "'auto' or 'none' where there are no tools"
        if names:
            expected = "'auto', 'none', 'required' or the name of a tool"
            expected = f"{expected} ({_some(names)})"
        raise unexpected("tool_choice", expected, tool_choice)
    if not names or choice == "none":
        return None
    said = dict(enumerate(given))
    parallel = parallel_tool_calls
    if choice not in _CHOICES:
        said = {i: said[i] for i in said if names[i] == choice}
        parallel = False  # who names a tool wants one call of it
    return ToolUse(given, said, choice == "auto", parallel)


def plain_tools(tools: Tools | None) -> Tools | None:
    """Gives tools with schemas in the place of functions and of what other
    libraries have for them.
    """
    if tools is None or isinstance(tools, str | bytes | Mapping):
        return tools
    return [_described(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def functions_of(tools: Tools | None) -> dict[str, Function]:
    """Gives the Python functions among tools, by the names that the model
    calls them by.
    """
    return {
        _described(f"tools[{i}]", tool)["function"]["name"]: tool
        for i, tool in enumerate(tools or ())
        if _is_function(tool)
    }


def _is_function(tool: Any) -> TypeGuard[Function]:
    return callable(tool) and fields_of(tool) is None


def _described(name: str, tool: Any) -> Any:
    """Gives the schema of a function; anything else as it is, or as a dict.
    Raises ArgumentError with that name for a function that has none.
    """
    if _is_function(tool):
        try:
            return tool_schema(tool)
        except ArgumentError as error:
            raise unexpected(name, error.expected, error.found) from None
    fields = fields_of(tool)
    return tool if fields is None else fields


def _some(names: Sequence[str]) -> str:
    """Gives names for a message: the first of them, and how many more."""
    said = ", ".join(names[:_SAID_NAMES])
    more = len(names) - _SAID_NAMES
    return said if more <= 0 else f"{said} and {more} more"


def said_in_text(
    messages: Sequence[Message], tools: Tools | None
) -> list[Message]:
    """Makes the same conversation for a template that knows no tools: they are
    described at the end of the system message, calls are text, and results
    come from the user, those after each other and what follows as one message.
    """
    found: list[Message] = []
    names: dict[str, str] = {}
    joins = False  # the last is a result
    for message in messages:
        text = message.text
        if message.role == "tool":
            name = names.get(message.tool_call_id or "")
            message = Message("user", result_text(message, name))
            _append(found, message, joins)
            joins = True
            continue
        for call in message.tool_calls:
            function = call["function"]
            if isinstance(call.get("id"), str):
                names[call["id"]] = function["name"]
            body = {
                "name": function["name"],
                "arguments": function.get("arguments") or {},
            }
            text += f"\n{_OPEN}\n{_json(body)}\n{_CLOSE}"
        if message.tool_calls:
            message = Message(message.role, text.strip())
        joins = joins and message.role == "user"
        _append(found, message, joins)
        joins = False
    given = [_tool(f"tools[{i}]", t) for i, t in enumerate(_listed(tools))]
    if given:
        lines = "\n".join(_json(tool["function"]) for tool in given)
        text = _TEXT.format(tools=lines)
        if found[0].role in ("system", "developer"):
            system = found.pop(0)
            text = f"{system.text}\n\n{text}".lstrip()
        found.insert(0, Message("system", text))
    return found


def result_text(message: Message, called: str | None) -> str:
    """Renders the result of a tool as text. `called` is the name of the
    function that was called, for a result that has no name.
    """
    body = {"name": message.name or called, "content": _content(message)}
    return f"<tool_response>\n{_json(body)}\n</tool_response>"


def _append(found: list[Message], message: Message, joins: bool) -> None:
    if joins:
        text = f"{found[-1].text}\n{message.text}"
        found[-1] = Message("user", text)
    else:
        found.append(message)


@dataclasses.dataclass(frozen=True)
class CallPart:
    """A part of a call in a reply that comes in pieces.

    Attributes:
      call: which of the reply's.
      start: its id and name, in its first part.
      arguments: JSON text; all parts joined are the arguments.
      end: the whole call, in its last part.
    """

    call: int
    start: tuple[str, str] | None = None
    arguments: str = ""
    end: ToolCall | None = None


class CallReader:
    """Tells text and calls apart in a reply that comes in pieces, cut
    anywhere.
    """

    def __init__(self, begins: bool = False) -> None:
        """`begins`: a reply with calls begins with one. In any other, what
        looks like a call is text.
        """
        self._begins = begins
        self._held = ""  # not understood yet
        self._reads: Callable[[], Iterator[str | CallPart]] = self._text
        self._calls = 0
        self._id = self._name = self._arguments = ""
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def calls(self) -> int:
        """The number of whole calls so far."""
        return self._calls

    def push(self, text: str) -> list[str | CallPart]:
        """Gives what is certain with it: text to show, and parts of calls."""
        self._held += text
        found: list[str | CallPart] = []
        while True:
            before = self._reads
            found += self._reads()
            if self._reads == before:
                return found

    def end(self) -> list[str | CallPart]:
        """Gives what was held back, at the end of the reply. A call that was
        cut short has no end, and one of which not even the mark is whole is
        nothing where it comes after another: no text does.
        """
        is_text = self._reads == self._text and not self._calls
        shown = self._held if is_text else ""
        self._held = ""
        return [shown] if shown else []

    def _text(self) -> Iterator[str | CallPart]:
        if self._begins and not self._calls:
            begun = self._held.lstrip()[: len(_OPEN)]
            if not _OPEN.startswith(begun):
                self._reads = self._answer
                return
        text, mark, rest = self._held.partition(_OPEN)
        if mark:
            self._held, self._reads = rest, self._head
            text = text.rstrip()
        else:
            shown = text[: len(text) - overlap(text, _OPEN)].rstrip()
            self._held, text = text[len(shown) :], shown
        if text:
            yield text

    def _answer(self) -> Iterator[str | CallPart]:
        text, self._held = self._held, ""
        if text:
            yield text

    def _head(self) -> Iterator[str | CallPart]:
        found = _HEAD.match(self._held)
        if found:
            self._held = self._held[found.end() :]
            self._reads = self._read_arguments
            self._id = "call_" + secrets.token_hex(12)
            self._name, self._arguments = found["name"], ""
            yield CallPart(self._calls, start=(self._id, self._name))

    def _read_arguments(self) -> Iterator[str | CallPart]:
        for i, letter in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if not self._depth:
                    text = self._held[: i + 1]
                    self._held = self._held[i + 1 :]
                    self._reads = self._tail
                    self._arguments += text
                    call = ToolCall(
                        self._id, self._name, loads_finite(self._arguments)
                    )
                    yield CallPart(self._calls, arguments=text, end=call)
                    self._calls += 1
                    return
        text, self._held = self._held, ""
        self._arguments += text
        if text:
            yield CallPart(self._calls, arguments=text)

    def _tail(self) -> Iterator[str | CallPart]:
        _, mark, rest = self._held.partition(_CLOSE)
        if mark:
            self._held, self._reads = rest, self._text
        yield from ()


@dataclasses.dataclass(frozen=True)
class ToolSchema:
    """The schema of a tool's arguments, as far as a grammar holds a call to
    it.

    Attributes:
      field: its path in a request.
      tool: the name of the tool.
      strict: whether all that it says is to be enforced.
      schema: of an object.
      left: paths of what is left out of it.
    """

    field: str
    tool: str
    strict: bool
    schema: Mapping[str, Any]
    left: tuple[str, ...] = ()

    def without(
        self, schema: Mapping[str, Any], unfit: Iterable[Unfit]
    ) -> ToolSchema:
        """The tool with another schema, which lacks that. Raises ValueError
        where it is strict.
        """
        paths = []
        for one in unfit:
            if self.strict:
                raise one.error(
                    self.field,
                    f" (in the strict tool {self.tool!r} at "
                    f"{pointer(one.steps)})",
                )
            paths.append(dotted(self.field, one.steps))
        left = tuple(dict.fromkeys((*self.left, *paths)))
        return dataclasses.replace(self, schema=schema, left=left)


# Writes the grammar of tools by their places; `strict`: as if all of them were.
# The reply may be the answer in their place.
Write = Callable[[Mapping[int, ToolSchema], bool, Answer | None], str]


@dataclasses.dataclass(frozen=True)
class ToolGrammar(Grammar):
    """The grammar of a reply that may call tools.

    Attributes:
      source: what the schemas are; the same text may be of several, which
        leave out different things.
      left: paths of what the schemas say that is left out.
      schemas: of the tools, by their places.
      answer: the form of a reply without calls; None: it may be any text, or
        there is none.
      write: what made the text.
    """

    source: str = ""
    left: tuple[str, ...] = ()
    schemas: Mapping[int, ToolSchema] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    answer: Answer | None = None
    write: Write | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def _fitted(
        self, name: str, attempt: Attempt
    ) -> tuple[Grammar, tuple[str, ...]]:
        assert self.write is not None
        if self.answer is not None:
            self.answer.check(name, attempt)
        write, fitting = self.write, Fitting(attempt)
        patterns = fitting.patterns(
            {i: one.schema for i, one in self.schemas.items()}
        )
        fitted = self
        taken = not any(patterns.values())
        taken = taken and _is_taken(write, self.schemas, self.answer, attempt)
        if not taken:
            fitted = _made(
                write,
                {
                    i: _fitted(i, one, patterns[i], write, fitting)
                    for i, one in self.schemas.items()
                },
                self.answer,
            )
            [why] = attempt([Tried("tools", fitted.text)])
            if why is not None:
                raise ValueError(f"{name}: as a grammar, {why}")
        return fitted, fitted.left


def json_grammar(use: ToolUse, answer: Answer | None = None) -> ToolGrammar:
    """Writes the grammar of a reply whose calls have the form above."""

    def write(
        schemas: Mapping[int, ToolSchema], strict: bool, answer: Answer | None
    ) -> str:
        return _grammar(schemas, use.free, use.parallel, strict, answer)

    return tool_grammar(use, write, answer)


def tool_grammar(
    use: ToolUse, write: Write, answer: Answer | None = None
) -> ToolGrammar:
    """Writes the grammar of a reply that may call the tools of `use`, and that
    is an `answer` otherwise, if there is one and the reply need not call.

    Raises ValueError for a strict tool with a keyword that cannot be enforced,
    and names both; likewise for what is too large.
    """
    schemas = {
        i: _schema(i, tool["function"]) for i, tool in use.called.items()
    }
    answer = answer if use.free else None
    try:
        return _made(write, schemas, answer)
    except ValueError:
        fitting = Fitting(lambda tried: [None] * len(tried))
        return _made(
            write,
            {
                i: one
                if one.strict
                else one.without(
                    *fitting.repaired(one.schema, _written(i, one, write))
                )
                for i, one in schemas.items()
            },
            answer,
        )


def _made(
    write: Write, schemas: Mapping[int, ToolSchema], answer: Answer | None
) -> ToolGrammar:
    text = write(schemas, False, answer)
    left = tuple(path for one in schemas.values() for path in one.left)
    said = [(i, one.strict, one.schema) for i, one in schemas.items()]
    source = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    try:
        return ToolGrammar("tools", text, source, left, schemas, answer, write)
    except ValueError as error:
        words = str(error).removeprefix("grammar: ")
        raise ValueError(f"tools: as a grammar, {words}") from None


def _is_taken(
    write: Write,
    schemas: Mapping[int, ToolSchema],
    answer: Answer | None,
    attempt: Attempt,
) -> bool:
    """Tells whether a grammar enforces all that the schemas say."""
    try:
        text = write(schemas, True, answer)
    except ValueError:
        return False
    return attempt([Tried("tools", text)]) == [None]


def _fitted(
    i: int,
    one: ToolSchema,
    patterns: Sequence[Unfit],
    write: Write,
    fitting: Fitting,
) -> ToolSchema:
    """The tool with what a grammar can hold of its schema. What a compiler
    leaves out by itself stays in it, but is named, too.
    """
    found = one.without(
        without(one.schema, [unfit.steps for unfit in patterns]), patterns
    )
    strict = dataclasses.replace(found, strict=True)
    _, unfit = fitting.repaired(found.schema, _written(i, strict, write))
    if not unfit:
        return found
    found = found.without(found.schema, unfit)
    return found.without(
        *fitting.repaired(found.schema, _written(i, found, write))
    )


def _written(i: int, one: ToolSchema, write: Write) -> Written:
    """Returns what writes the grammar to try for another schema of a tool."""

    def written(schema: Mapping[str, Any]) -> Tried:
        tool = dataclasses.replace(one, schema=schema)
        return Tried("tools", write({i: tool}, one.strict, None))

    return written


def _schema(i: int, function: Mapping[str, Any]) -> ToolSchema:
    """The schema of a tool's arguments. Raises ValueError that names the tool
    and the keyword.
    """
    field = f"tools[{i}].function.parameters"
    strict = bool(function.get("strict"))
    schema = dict(function.get("parameters") or {})
    unfit: Sequence[Unfit] = ()
    bounds: list[tuple[str, str]] = []
    if not strict:
        try:
            schema, unfit = with_usual_forms(schema)
        except RecursionError:
            raise ValueError(
                f"{field}: expected fewer schemas in each other"
            ) from None
    schema = checked_schema(schema, field, strict=strict, left=bounds)
    left = [dotted(field, one.steps) for one in unfit]
    left += [field + place for place, _ in bounds]
    if "type" in schema:
        schema["type"] = "object"  # the arguments are one, whatever may be
    return ToolSchema(field, function["name"], strict, schema, tuple(left))


def _grammar(
    tools: Mapping[int, ToolSchema],
    free: bool,
    parallel: bool,
    strict: bool,
    answer: Answer | None,
) -> str:
    """Writes the grammar of calls; `tools` by their places. `free`: the reply
    may be text, or have text before its calls; with an `answer` it is that, or
    calls alone.
    """
    more = f'("\\n" again){{0,{MOST_CALLS - 1}}}' if parallel else ""
    lines = [f"start: first {more}"]
    if free and answer is not None:
        lines[0] += " | answer"
        lines += [*answer.rules(_OPEN), "first: again"]
    elif free:
        lines[0] += " | TEXT"
        lines += [
            "TEXT: /(.|\\n)*/",
            f'head[lazy]: TEXT "{_OPEN}"',
            "first: head call",
        ]
    else:
        lines.append("first: again")
    lines += [
        f'again: "{_OPEN}" call',
        f'call: "\\n" body "\\n{_CLOSE}"',
        "body: " + " | ".join(f"tool_{i}" for i in tools),
    ]
    for i, tool in tools.items():
        head = f'{{"name": "{tool.tool}", {_ARGUMENTS}'
        schema = {
            "type": "object",
            **_without_notes(tool.schema),
            # As the original's: only what is strict must be enforced.
            "x-guidance": {
                **JSON_STYLE,
                "lenient": not (strict or tool.strict),
            },
        }
        lines += [
            f'tool_{i}: {json.dumps(head)} args_{i} "}}"',
            f"args_{i}: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines)


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without what only a reader needs: descriptions may be most of
    it.
    """
    return mapped(
        {k: v for k, v in schema.items() if k not in _NOTES},
        lambda _, child: (
            _without_notes(child) if isinstance(child, Mapping) else child
        ),
    )


def _tool(name: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") not in (
        None,
        "function",
    ):
        raise unexpected(
            name,
            "a function, or {'type': 'function', 'function': {'name': ..., "
            "'parameters': ...}}",
            tool,
        )
    called = function.get("name")
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise unexpected(
            f"{name}.function.name",
            "up to 128 letters, digits, _, - and dots",
            called,
        )
    parameters = function.get("parameters")
    strict = bool(function.get("strict"))
    if not isinstance(parameters, Mapping | None) or (
        parameters and not _is_of_object(parameters, strict)
    ):
        raise ValueError(
            f"{name}.function.parameters: expected the JSON schema of an "
            f"object, found {brief(parameters)}"
        )
    for key, kind in (("strict", bool), ("description", str)):
        if not isinstance(function.get(key), kind | None):
            raise unexpected(
                f"{name}.function.{key}",
                "True or False" if kind is bool else "text",
                function[key],
            )
    found: dict[str, Any] = plain_json(name, tool)
    return found


def _is_of_object(schema: Mapping[str, Any], strict: bool) -> bool:
    """Tells whether a schema has objects among its values; one that need not
    be enforced may say so as other libraries do.
    """
    kind = schema.get("type", "object")
    if not strict:
        kind = type_of(kind)
        if not kind:  # it says nothing, or nothing known
            return True
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _listed(tools: Any) -> list[Any]:
    return [] if tools is None else items("tools", tools)


def _content(message: Message) -> Any:
    if isinstance(message.content, Mapping):
        return message.content
    return message.text


def _json(value: Any) -> str:
    return json.dumps(plain_json("messages", value), ensure_ascii=False)
