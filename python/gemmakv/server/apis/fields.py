"""The base of all bodies of requests, and the errors of bad ones.

A body is a pydantic model that derives from `Body`. Its types are strict: a
text is no number. Whole floats are integers, as JSON of some languages has
them, and null is as good as absent. Fields that a model does not declare are
kept: generation options by their names (`OptionsBody`), and others, which are
refused where they ask for something that is not there, or else ignored and
named in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import to_jsonable_python

from gemmakv._support.refusals import expected_by, found_by
from gemmakv.errors import ArgumentError
from gemmakv.options import GenerationOptions
from gemmakv.server.apis.unsupported import check_supported
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.requests import taken_schema, whole

Whole = Annotated[int, BeforeValidator(whole)]
# What narrows the part of the prefix cache that a request has.
Salt = Annotated[str, Field(min_length=1, max_length=256)]

# Generation options that JSON can say.
JSON_OPTIONS = tuple(
    name
    for name, option in GenerationOptions.table.items()
    if option.kind.schema() is not None
)


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Fields of this route, in the form of the table of all routes.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @property
    def others(self) -> dict[str, Any]:
        """The fields that the model does not declare, without nulls."""
        found = self.model_extra or {}
        return {k: v for k, v in found.items() if v is not None}

    @property
    def taken(self) -> Sequence[str]:
        """The names of `others` that the route reads."""
        return ()

    def ignored(self) -> list[str]:
        """Names the fields that mean nothing here. Raises RequestError for
        one that asks for something which is not there.
        """
        found = [name for name in self.others if name not in self.taken]
        check_supported(
            {name: self.others[name] for name in found}, self.unsupported
        )
        return found

    def said(self) -> dict[str, Any]:
        """The fields that have a value, undeclared ones too, as JSON has
        them.
        """
        return {
            name: to_jsonable_python(value)
            for name, value in self
            if value is not None
        }


def _with_options(schema: dict[str, Any]) -> None:
    """Adds the generation options to the schema of a body."""
    options = taken_schema()["properties"]
    schema["properties"] = {**options, **schema.get("properties", {})}


class Query(BaseModel):
    """The base of the fields after the question mark of a path."""


class OptionsBody(Body):
    """A body that may have generation options, by their names."""

    model_config = ConfigDict(json_schema_extra=_with_options)

    @property
    def taken(self) -> Sequence[str]:
        return JSON_OPTIONS

    def options(self) -> dict[str, Any]:
        """The generation options that the body has."""
        declared = type(self).model_fields
        found = {
            name: getattr(self, name) if name in declared
            else self.others.get(name)
            for name in JSON_OPTIONS
        }  # fmt: skip
        found = {k: v for k, v in found.items() if v is not None}
        bias = found.get("logit_bias")
        if isinstance(bias, Mapping):  # JSON has no other keys than texts
            found["logit_bias"] = _with_ids(bias)
        return found


def _with_ids(given: Mapping[str, Any]) -> dict[int, Any]:
    found = {}
    for key, value in given.items():
        plain = key.isascii() and key.isdigit() and len(key) <= 10
        if not plain or key != str(int(key)):  # "05" is no other token than "5"
            raise invalid(
                "logit_bias", f"expected token ids as keys, found {key[:40]!r}"
            )
        found[int(key)] = value
    return found


def invalid_field(
    errors: Sequence[Mapping[str, Any]], document: Any
) -> RequestError:
    """Makes the error of a request whose body, or query, pydantic refuses.

    Where a field may have several types, the error names all of them. Of
    several bad fields it names the deepest: where an item of a list is bad,
    it does not say that the list could have been a text.
    """
    cause = errors[0].get("ctx", {}).get("error")
    if isinstance(cause, ArgumentError):  # of a check of ours
        return RequestError(400, str(cause), param=cause.argument)
    found: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        found.setdefault(_place(error, document), []).append(error)
    place = max(found, key=len)
    there = found[place]
    path = path_of(place)
    expected = " or ".join(dict.fromkeys(map(expected_by, there)))
    words = f"{path or 'body'}: expected {expected}, found "
    return RequestError(400, words + found_by(there[0]), param=path or None)


def path_of(place: Sequence[str | int]) -> str:
    """Writes the place of a field as errors name it: messages[0].role."""
    return "".join(_steps(place)).lstrip(".")


def _steps(place: Sequence[str | int]) -> Iterator[str]:
    for step in place:
        yield f"[{step}]" if isinstance(step, int) else f".{step}"


def _place(error: Mapping[str, Any], document: Any) -> tuple[str | int, ...]:
    """Gives the place of an error in a document. Where a field may have
    several types, pydantic's place has their names, too: they are left out.
    """
    steps = list(error["loc"][1:])
    last = len(steps) - 1
    found: list[str | int] = []
    for i, step in enumerate(steps):
        if isinstance(document, dict) and step in document or (
            isinstance(document, list | tuple)
            and isinstance(step, int)
            and step < len(document)
        ):
            document = document[step]
        elif not (i == last and error["type"] == "missing"):
            continue
        found.append(step)
    return tuple(found)
