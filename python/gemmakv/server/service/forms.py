"""The form of a reply in the words of other servers.

vLLM has `structured_outputs` (before, `guided_json` and others), SGLang has
`json_schema`, `regex` and `ebnf`, llama-server has `json_schema`. Each states
what `response_format` or `grammar` state here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gemmakv._support.json import loads
from gemmakv.errors import renamed
from gemmakv.generation._grammar import Grammar
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    unexpected,
    unsupported,
)

_OUTPUTS = "structured_outputs"
# What each field has; those of `structured_outputs` with its name before.
_KINDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "json_schema": "json", "regex": "regex",
    "ebnf": "grammar", f"{_OUTPUTS}.json": "json",
    f"{_OUTPUTS}.regex": "regex", f"{_OUTPUTS}.choice": "choice",
    f"{_OUTPUTS}.grammar": "grammar", f"{_OUTPUTS}.json_object": "object",
}  # fmt: skip
# Of `structured_outputs`, what holds of each reply here or says nothing.
_HARMLESS = (
    "disable_any_whitespace", "disable_fallback",
    "disable_additional_properties",
)  # fmt: skip
FORM_FIELDS = (
    _OUTPUTS, *(name for name in _KINDS if "." not in name)
)  # fmt: skip


def read_form(
    fields: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Makes the option for a form that `fields` state by `FORM_FIELDS`, and
    what errors about it call it, by the option's own names. Both are empty if
    there is none. Raises RequestError for one that is bad, and for two.
    """
    given = {name: fields[name] for name in FORM_FIELDS if name in fields}
    outputs = given.pop(_OUTPUTS, None)
    if outputs is not None:
        if not isinstance(outputs, Mapping):
            raise unexpected(_OUTPUTS, "an object", outputs)
        given |= {f"{_OUTPUTS}.{str(k)[:60]}": v for k, v in outputs.items()}
    stated = {
        name: value
        for name, value in given.items()
        if value not in (None, "", False)
        and name.removeprefix(f"{_OUTPUTS}.") not in _HARMLESS
    }
    if not stated:
        return {}, {}
    name, *others = stated
    if others:
        raise invalid(others[0], f"expected it or {name}, found both")
    if name not in _KINDS:
        raise unsupported(name)
    for option in ("response_format", "grammar"):
        if fields.get(option) not in (None, "", {"type": "text"}):
            raise invalid(name, f"expected it or {option}, found both")
    return _option(name, _KINDS[name], stated[name])


def _option(
    name: str, kind: str, value: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    if kind == "object":
        return {"response_format": {"type": "json_object"}}, {
            "response_format": name
        }
    if kind == "json":
        schema = _schema(name, value)
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        return {"response_format": form}, {
            "response_format": name, "response_format.json_schema.schema": name,
        }  # fmt: skip
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(
            isinstance(one, str) for one in value
        ):
            raise unexpected(name, "a list of texts", value)
        texts = (json.dumps(one, ensure_ascii=False) for one in value)
        kind, value = "grammar", f"start: {' | '.join(texts)}"
    if not isinstance(value, str):
        raise unexpected(name, "a text", value)
    make = Grammar.regex if kind == "regex" else Grammar.lark
    try:
        return {"grammar": make(value)}, {"grammar": name}
    except ValueError as error:
        error = renamed(error, lambda words: name + words[len("grammar") :])
        raise RequestError(400, str(error), param=name) from None


def _schema(name: str, value: Any) -> Any:
    """Gives a schema, read if it is a text. Raises RequestError."""
    if isinstance(value, str):
        try:
            value = loads(name, value, unique=False, finite=True)
        except ValueError as error:
            raise RequestError(400, str(error), param=name) from None
    if not isinstance(value, Mapping):
        raise unexpected(name, "a JSON schema", value)
    return value
