"""Objects have the properties alone that their schema names."""

from __future__ import annotations

from typing import Any

import pytest

from gemmakv.generation._schema_check import checked_schema

TEXT = {"type": "string"}
TRIP: dict[str, Any] = {
    "type": "object", "properties": {"city": TEXT}, "required": ["city"],
}  # fmt: skip


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return checked_schema(schema, "schema", strict=True)


def test_an_object_that_names_its_properties_is_closed() -> None:
    assert closed(TRIP) == {**TRIP, "additionalProperties": False}
    nested = {"type": "object", "properties": {"trips": {
        "type": "array", "items": {"$ref": "#/$defs/Trip"}}},
        "$defs": {"Trip": TRIP}}  # fmt: skip
    found = closed(nested)
    assert found["additionalProperties"] is False
    assert found["$defs"]["Trip"]["additionalProperties"] is False
    # An optional model, as pydantic writes it.
    either = {"anyOf": [{"$ref": "#/$defs/Trip"}, {"type": "null"}],
              "$defs": {"Trip": TRIP}}  # fmt: skip
    assert closed(either)["$defs"]["Trip"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {**TRIP, "additionalProperties": True},
        {**TRIP, "additionalProperties": TEXT},
        {**TRIP, "patternProperties": {"^x": TEXT}},
        {**TRIP, "minProperties": 2},
        {**TRIP, "required": ["city", "other"]},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": {"city": TEXT}},
        {"allOf": [TRIP, {"type": "object", "properties": {"x": TEXT}}]},
        {**TRIP, "anyOf": [{"type": "object", "properties": {"x": TEXT}}]},
        {"$defs": {"A": TRIP}, "$ref": "#/$defs/A",
         "properties": {"x": TEXT}, "type": "object"},
        {"anyOf": [TRIP, {"type": "object", "properties": {"x": TEXT}}]},
    ],
)  # fmt: skip
def test_what_may_have_others_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
