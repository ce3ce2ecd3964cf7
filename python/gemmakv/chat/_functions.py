"""Python functions as tools: how they are described to a model, and called."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

from gemmakv.errors import unexpected

Function = Callable[..., object]

_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean",
    type(None): "null", dict: "object",
}  # fmt: skip
_UNIONS = (Union, types.UnionType)
# Sections of docstrings, as Google's and NumPy's styles have them.
_ARGUMENTS = r"(?:args|arguments|parameters|params)"
_SECTION = re.compile(
    rf"(?:{_ARGUMENTS}|returns?|yields?|raises|examples?|notes?|see also)\s*"
    r"(?P<colon>:?)\s*",
    re.IGNORECASE,
)
_FIELD = re.compile(
    r":(?P<kind>param|parameter|arg|argument|key|keyword|type|returns?|rtype|"
    r"raises?)(?:\s[^:]*?)??(?:\s+(?P<name>\w+))?\s*:\s*(?P<text>.*)"
)
_ENTRY = re.compile(r"(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")


def tool_schema(function: Function) -> dict[str, Any]:
    """Describes a Python function to a model, from its signature and docstring.

        def rain(city: str, days: int = 1) -> float:
            \"\"\"Gives the rain that is expected.

            Args:
              city: its name.
              days: how many.
            \"\"\"

        gemma.chat(messages, tools=[gemmakv.tool_schema(rain)])

    Wherever tools are taken, the function itself does as well.

    Args:
      function: of parameters that can be given by their names. Known types
        are str, int, float, bool, None, list, dict, tuple, set, Literal, Enum,
        Optional, unions, NamedTuple, TypedDict, dataclasses, models of
        pydantic, and Annotated with a description; a parameter of any other
        type, or of none, may be anything. The docstring may be in the style of
        Google, NumPy or reST.

    Returns the schema, as `tools` have it.

    Raises ArgumentError for what is no function with a name, or has `*args`,
    `**kwargs` or parameters without a name.
    """
    signature, hints = _parameters_of(function)
    description, notes = _read_doc(_doc_of(function))
    writer = _Writer()
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Any)
        schema = writer.schema(hint)
        note = schema.get("description") or notes.get(name)
        properties[name] = {**schema, "description": note} if note else schema
        if parameter.default is parameter.empty and not _takes_none(hint):
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    parameters["additionalProperties"] = False
    if writer.definitions:
        parameters["$defs"] = writer.definitions
    said = {"name": _name_of(function)}
    if description:
        said["description"] = description
    return {"type": "function", "function": {**said, "parameters": parameters}}


def call_function(function: Function, arguments: Mapping[str, Any]) -> object:
    """Calls a function with arguments as JSON has them: enums, dataclasses,
    tuples and the like become what the function's annotations say. Of a union
    they become the first type that they fit.
    """
    signature, hints = _parameters_of(function)
    given = {
        name: _made(hints.get(name, Any), value)
        for name, value in arguments.items()
    }
    for name, parameter in signature.parameters.items():
        needed = name not in given and parameter.default is parameter.empty
        if needed and _takes_none(hints.get(name, Any)):
            given[name] = None
    return function(**given)


def call_now(function: Function, arguments: Mapping[str, Any]) -> object:
    """Does `call_function`. Raises ArgumentError if the result is to be
    awaited.
    """
    result = call_function(function, arguments)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # it would warn that nobody awaited it
        raise unexpected("tools", "no async functions", function)
    return result


async def call_later(function: Function, arguments: Mapping[str, Any]) -> Any:
    """Does `call_function` without blocking the event loop: what is not async
    is called on a thread. A result that is to be awaited is awaited.
    """
    import asyncio  # who waits here has it: a start without it is quicker

    if is_async(function):
        result: Any = call_function(function, arguments)
    else:
        result = await asyncio.to_thread(_call_on_thread, function, arguments)
    return await result if inspect.isawaitable(result) else result


def _call_on_thread(function: Function, arguments: Mapping[str, Any]) -> object:
    try:
        return call_function(function, arguments)
    except StopIteration as error:
        # No future takes one: its task would wait for ever.
        name = _name_of(function)
        raise RuntimeError(f"{name} raised StopIteration") from error


def is_async(function: Function) -> bool:
    """Tells whether a call of a function is to be awaited."""
    if isinstance(function, functools.partial):
        function = function.func
    called = type(function).__call__
    return any(map(inspect.iscoroutinefunction, (function, called)))


def _name_of(function: Function) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    if not callable(function) or name == "<lambda>":
        raise unexpected("function", "a function with a name", function)
    return str(name)


def _doc_of(function: Function) -> str:
    """Gives a docstring; "" for none."""
    own = function
    while isinstance(own, functools.partial):
        # It has the docstring of its class, unless it was given another.
        if text := vars(own).get("__doc__"):
            return inspect.cleandoc(text)
        own = own.func
    text = inspect.getdoc(own)
    if not text and not inspect.isroutine(own) and not isinstance(own, type):
        text = inspect.getdoc(type(own).__call__)
    return text or ""


def _parameters_of(
    function: Function,
) -> tuple[inspect.Signature, dict[str, Any]]:
    """Gives a function's parameters and what their annotations are."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise unexpected(
            "function", "a function with a signature", function
        ) from None
    for parameter in signature.parameters.values():
        if parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise unexpected(
                "function",
                "parameters that can be given by their names",
                f"{_name_of(function)}({parameter})",
            )
    inner: Any = function
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        partial = isinstance(inner, functools.partial)
        inner = inner.func if partial else inner.__wrapped__
    if not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = type(inner).__call__
    elif isinstance(inner, type):
        inner = vars(inner).get("__init__", inner)
    return signature, _hints_of(inner, getattr(inner, "__globals__", {}))


def _hints_of(owner: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Gives what annotations are, but for those with a name that only a
    checker knows.
    """
    hints: dict[str, Any] = {}
    for name, annotation in getattr(owner, "__annotations__", {}).items():
        one = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(NameError, TypeError, AttributeError):
            hints |= typing.get_type_hints(one, names, include_extras=True)
    return hints


def _fields_of(kind: type) -> dict[str, Any]:
    """Gives the types of a dataclass's or a TypedDict's fields, as
    `_hints_of`.
    """
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints: dict[str, Any] = {}
        for owner in reversed(kind.__mro__):
            module = sys.modules.get(owner.__module__)
            hints |= _hints_of(owner, vars(module) if module else {})
        return hints


def _places_of(kind: type, arguments: tuple[Any, ...]) -> list[Any]:
    """Gives the types of the places of a tuple; none if it may have any number
    of them.
    """
    if not issubclass(kind, tuple):
        return []
    if hasattr(kind, "_fields"):  # a NamedTuple
        hints = _fields_of(kind)
        return [hints.get(name, Any) for name in kind._fields]
    return [] if ... in arguments else list(arguments)


def _takes_none(hint: Any) -> bool:
    hint = _bare(hint)
    return get_origin(hint) in _UNIONS and type(None) in get_args(hint)


def _bare(hint: Any) -> Any:
    """Gives a type without notes, and under its first name."""
    while True:
        if get_origin(hint) in (Annotated, Required, NotRequired):
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):  # a NewType
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        else:
            return hint


class _Writer:
    """Writes JSON schemas of types.

    Attributes:
      definitions: what schemas of pydantic's models refer to.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._open: list[Any] = []  # classes that are being written

    def schema(self, hint: Any) -> dict[str, Any]:
        """Gives the schema of a type; {} is that of anything."""
        if get_origin(hint) in (Required, NotRequired):
            hint = get_args(hint)[0]
        for note in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            text = getattr(note, "description", note)  # pydantic's Field
            if isinstance(text, str):
                return {**self.schema(_bare(hint)), "description": text}
        hint = _bare(hint)
        origin = get_origin(hint) or hint
        arguments = get_args(hint)
        if origin in _UNIONS:
            return self._union(arguments)
        if origin is Literal:
            return _choices(arguments)
        if not isinstance(origin, type):
            return {}
        if origin in _TYPES and not arguments:
            return {"type": _TYPES[origin]}
        if issubclass(origin, enum.Enum):
            return _choices([member.value for member in origin])
        if hasattr(origin, "model_json_schema"):
            return self._model(origin)
        if typing.is_typeddict(origin) or dataclasses.is_dataclass(origin):
            return self._fields(origin)
        if issubclass(origin, Mapping):
            found: dict[str, Any] = {"type": "object"}
            if len(arguments) == 2 and (value := self.schema(arguments[1])):
                found["additionalProperties"] = value
            return found
        if hint in self._open:  # a NamedTuple that holds itself
            return {"type": "array"}
        if kinds := _places_of(origin, arguments):
            self._open.append(hint)
            items = [self.schema(one) for one in kinds]
            self._open.pop()
            count = len(items)
            optional = len(getattr(origin, "_field_defaults", ()))
            return {
                "type": "array",
                "prefixItems": items,
                "minItems": count - optional,
                "maxItems": count,
            }
        if issubclass(origin, Iterable) and origin not in (str, bytes):
            found = {"type": "array"}
            if arguments and (item := self.schema(arguments[0])):
                found["items"] = item
            return found
        return {}

    def _union(self, arguments: Iterable[Any]) -> dict[str, Any]:
        others = [one for one in arguments if one is not type(None)]
        schemas = [self.schema(one) for one in others]
        if len(others) < len(list(arguments)):
            if len(schemas) == 1 and "type" in schemas[0]:
                # As transformers says it, and templates read it.
                return {**schemas[0], "nullable": True}
            schemas.append({"type": "null"})
        return {} if {} in schemas else {"anyOf": schemas}

    def _fields(self, kind: Any) -> dict[str, Any]:
        if kind in self._open:  # it holds itself
            return {"type": "object"}
        self._open.append(kind)
        try:
            hints = _fields_of(kind)
            if dataclasses.is_dataclass(kind):
                fields = [one for one in dataclasses.fields(kind) if one.init]
                required = [
                    one.name
                    for one in fields
                    if one.default is one.default_factory is dataclasses.MISSING
                ]
                names = [one.name for one in fields]
            else:
                names = list(kind.__annotations__)
                # The class does not see these in annotations that are text.
                marks = {n: get_origin(hints.get(n)) for n in names}
                required = [
                    name
                    for name in sorted(names)
                    if marks[name] is Required
                    or name in kind.__required_keys__
                    and marks[name] is not NotRequired
                ]
            properties = {n: self.schema(hints.get(n, Any)) for n in names}
        finally:
            self._open.pop()
        found = {"type": "object", "properties": properties}
        if required:
            found["required"] = required
        return {**found, "additionalProperties": False}

    def _model(self, kind: Any) -> dict[str, Any]:
        schema = dict(kind.model_json_schema())
        own = schema.pop("$defs", {})
        count = 1
        while any(self.definitions.get(k, v) != v for k, v in own.items()):
            count += 1  # another model has one of these names
            schema = dict(
                kind.model_json_schema(
                    ref_template=f"#/$defs/{{model}}_{count}"
                )
            )
            said = schema.pop("$defs")
            own = {f"{name}_{count}": one for name, one in said.items()}
        self.definitions |= own
        return schema


def _choices(values: Iterable[Any]) -> dict[str, Any]:
    listed = list(values)
    names = {_TYPES.get(type(value)) for value in listed}
    known = names.pop() if len(names) == 1 else None
    return {"type": known, "enum": listed} if known else {"enum": listed}


def _made(hint: Any, value: Any) -> Any:
    """Makes what a type says of a value of JSON; one that is none of the type
    stays as it is.
    """
    hint = _bare(hint)
    origin = get_origin(hint) or hint
    arguments = get_args(hint)
    if origin in _UNIONS:
        others = [one for one in arguments if one is not type(None)]
        if len(others) == 1:
            return None if value is None else _made(others[0], value)
        for one in arguments:
            if _fits(_Writer().schema(one), value):
                # What a class checks by itself is not in its schema.
                with contextlib.suppress(ValueError):
                    return _made(one, value)
        return value
    if not isinstance(origin, type):
        return value
    if issubclass(origin, enum.Enum):
        return origin(value)
    if hasattr(origin, "model_validate"):
        return origin.model_validate(value)
    if origin is float and type(value) is int:
        return float(value)
    if isinstance(value, Mapping):
        if dataclasses.is_dataclass(origin) or typing.is_typeddict(origin):
            hints = _fields_of(origin)
            value = {k: _made(hints.get(k, Any), v) for k, v in value.items()}
            return value if typing.is_typeddict(origin) else origin(**value)
        if issubclass(origin, Mapping) and len(arguments) == 2:
            return {k: _made(arguments[1], v) for k, v in value.items()}
        return value
    if isinstance(value, list) and issubclass(origin, Iterable):
        kinds = _places_of(origin, arguments)
        if hasattr(origin, "_fields"):
            if not _fits(_Writer().schema(origin), value):
                return value
            return origin(*map(_made, kinds, value))
        kinds = kinds or list(arguments[:1]) * len(value)
        if len(kinds) == len(value) and not issubclass(origin, Mapping):
            value = [_made(kind, one) for kind, one in zip(kinds, value)]
        return origin(value) if origin in (tuple, set, frozenset) else value
    return value


def _fits(schema: Any, value: Any) -> bool:
    """Tells whether a value of JSON is as a schema of `_Writer` has it."""
    if isinstance(schema, bool):
        return schema
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(one, value) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind, found = schema.get("type"), _TYPES.get(type(value), "array")
    if kind not in (None, found) and (kind, found) != ("number", "integer"):
        return False
    if kind == "object":
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and (
            all(_fits(known.get(k, other), one) for k, one in value.items())
        )
    if kind == "array":
        count = len(value)
        least, most = schema.get("minItems", 0), schema.get("maxItems", count)
        kinds = schema.get("prefixItems", [schema.get("items", True)] * count)
        return least <= count <= most and all(map(_fits, kinds, value))
    return True


def _read_doc(text: str) -> tuple[str, dict[str, str]]:
    """Gives a docstring's description, and what it says of parameters."""
    lines = text.splitlines()
    end = next(
        (i for i in range(len(lines)) if _begins_section(lines, i)), len(lines)
    )
    paragraphs = "\n".join(lines[:end]).strip().split("\n\n")
    description = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    notes: dict[str, list[str]] = {}
    inside = False  # a section of arguments
    numpy = False  # which has types where Google's has text
    last: list[str] = []  # what the line continues
    margin = -1  # of the section's entries
    for i, line in enumerate(lines[end:], end):
        words = line.strip()
        field = _FIELD.match(words)
        indent = len(line) - len(line.lstrip())
        if field:
            last = []
            if field["name"] and field["kind"][0] in "pak":
                last = notes.setdefault(field["name"], [field["text"]])
        elif _begins_section(lines, i):
            inside = bool(re.match(_ARGUMENTS, words, re.IGNORECASE))
            numpy = not words.endswith(":")
            margin, last = -1, []
        elif not words or set(words) == {"-"}:
            continue
        elif inside and (margin < 0 or indent <= margin):
            margin = indent
            entry = _ENTRY.match(words)
            last = []
            if entry:
                text = "" if numpy else entry["text"]
                last = notes.setdefault(entry["name"], [text])
            elif words.isidentifier():
                last = notes.setdefault(words, [])
        else:
            last.append(words)
    joined = {name: " ".join(said).strip() for name, said in notes.items()}
    return description, {name: said for name, said in joined.items() if said}


def _begins_section(lines: list[str], i: int) -> bool:
    words = lines[i].strip()
    if _FIELD.match(words):
        return True
    found = _SECTION.fullmatch(words)
    if found is None:
        return False
    under = lines[i + 1].strip() if i + 1 < len(lines) else ""
    return bool(found["colon"]) or set(under) == {"-"}
