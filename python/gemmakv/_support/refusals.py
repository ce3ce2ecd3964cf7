"""The words for values that pydantic refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmakv.errors import ArgumentError, brief

# What a value can be, by the types of pydantic's errors.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "int_type": "an integer",
    "list_type": "a list",
    "missing": "a value",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "least"),
    "less_than_equal": ("le", "most"),
}
_LENGTHS = {
    "string_too_short": ("min_length", "least", "characters"),
    "string_too_long": ("max_length", "most", "characters"),
    "too_short": ("min_length", "least", "items"),
    "too_long": ("max_length", "most", "items"),
}


def expected_by(details: Mapping[str, Any]) -> str:
    """Says what a value is to be, by the details of pydantic's error."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        key, word = _BOUNDS[kind]
        noun = "an integer" if isinstance(context[key], int) else "a number"
        return f"{noun} of at {word} {context[key]:g}"
    if kind in _LENGTHS:
        key, word, noun = _LENGTHS[kind]
        return f"at {word} {context[key]} {noun}"
    if kind == "literal_error":
        return f"one of {context['expected']}".replace(" or ", ", ")
    return _EXPECTED.get(kind, str(details["msg"]))


def found_by(details: Mapping[str, Any]) -> str:
    """Says what a value is instead."""
    kind, found = details["type"], details["input"]
    if kind in _LENGTHS:
        return str(len(found))
    if kind == "missing":
        return "none"
    if kind in _BOUNDS or kind == "finite_number":
        return str(found)  # a number, though a variable has it as a text
    if found is None:
        return "null"
    shown = brief(found)
    return shown.lower() if isinstance(found, bool) else shown


def refusal(details: Mapping[str, Any]) -> str:
    """Says why pydantic refuses a value, of which it gives the details."""
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ArgumentError):  # of a check of ours
        return str(cause).removeprefix(f"{cause.argument}: ")
    return f"expected {expected_by(details)}, found {found_by(details)}"


__all__ = ["expected_by", "found_by", "refusal"]
