"""JSON schemas of many kinds, each of which a grammar can enforce."""

from __future__ import annotations

from typing import Any

_S: Any = {"type": "string", "maxLength": 12}
_I: Any = {"type": "integer", "minimum": -999, "maximum": 999}
_NODE: Any = {
    "type": "object",
    "properties": {
        "v": _I,
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}


def _closed(required: list[str] | None = None, **properties: Any) -> Any:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "integer": {"type": "integer"},
    "integer range": {"type": "integer", "minimum": 7, "maximum": 1234},
    "integer negative": {"type": "integer", "maximum": -3, "minimum": -88},
    "integer exclusive": {
        "type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5,
    },
    "integer multiple": {
        "type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70,
    },
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "number above": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "string": {"type": "string"},
    "string empty": {"type": "string", "maxLength": 0},
    "string length": {"type": "string", "minLength": 3, "maxLength": 6},
    "string pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"},
    "string pattern open": {
        "type": "string", "pattern": "[0-9]", "maxLength": 9,
    },
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "enum strings": {"type": "string", "enum": ["a\"b", "\u00e9\u20ac", "\n"]},
    "const": {"const": {"k": [1, 2, {"z": None}]}},
    "types": {"type": ["integer", "null", "boolean"]},
    "anyOf": {"anyOf": [_I, {"type": "boolean"}, {"const": "x"}]},
    "oneOf apart": {"oneOf": [_I, _S]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 8}]},
    "array": {"type": "array", "items": _I, "maxItems": 5},
    "array lengths": {
        "type": "array", "items": {"type": "boolean"}, "minItems": 2,
        "maxItems": 3,
    },
    "array empty": {"type": "array", "items": _I, "maxItems": 0},
    "tuple": {
        "type": "array", "prefixItems": [_I, _S], "items": False,
        "minItems": 2,
    },
    "array of arrays": {
        "type": "array", "maxItems": 3,
        "items": {"type": "array", "maxItems": 2, "items": _I},
    },
    "array of enums": {
        "type": "array", "maxItems": 4, "items": {"enum": ["n", "e", "s"]},
    },
    "object": {"type": "object"},
    "object none": _closed(),
    "object closed": _closed(name=_S, age=_I),
    "object optional": _closed([], a=_I, b=_S, c={"type": "boolean"}),
    "object mixed": _closed(["b"], a=_I, b=_S, c={"type": "null"}),
    "object open": {
        "type": "object", "properties": {"id": _I}, "required": ["id"],
    },
    "object values": {"type": "object", "additionalProperties": _I},
    "object patterns": {
        "type": "object", "additionalProperties": False,
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "boolean"}},
    },
    "object undeclared": {
        "type": "object", "required": ["q"],
        "additionalProperties": {"type": "boolean"},
    },
    "object odd names": _closed(**{"a b": _I, "\u00fc": _I, "\"": _I}),
    "nested": _closed(a=_closed(b=_closed(c=_closed(d=_I)))),
    "list of objects": _closed(
        items={"type": "array", "maxItems": 2, "items": _closed(n=_S, k=_I)}
    ),
    "optional nested": _closed(["id"], id=_I, more=_closed([], x=_S, y=_S)),
    "nullable": _closed(a={"anyOf": [_S, {"type": "null"}]}),
    "nullable type": _closed(a={"type": ["string", "null"], "maxLength": 4}),
    "tagged union": {
        "anyOf": [
            _closed(kind={"const": "circle"}, r={"type": "number"}),
            _closed(kind={"const": "square"}, side=_I),
        ]
    },
    "definitions": {
        "$defs": {"id": _I, "pair": {"type": "array", "maxItems": 2,
                                     "items": {"$ref": "#/$defs/id"}}},
        **_closed(one={"$ref": "#/$defs/id"}, two={"$ref": "#/$defs/pair"}),
    },
    "definitions, older": {
        "definitions": {"flag": {"type": "boolean"}},
        **_closed(f={"$ref": "#/definitions/flag"}),
    },
    "recursion": {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    "recursion of root": _closed(
        ["v"], v={"type": "boolean"}, kids={"type": "array", "maxItems": 1,
                                            "items": {"$ref": "#"}}
    ),
    "pydantic": {
        "$defs": {"Color": {"enum": ["RED", "BLUE"], "title": "Color",
                            "type": "string"}},
        "title": "Thing", "description": "of a kind", "type": "object",
        "properties": {
            "color": {"$ref": "#/$defs/Color"},
            "size": {"default": 3, "title": "Size", "type": "integer"},
            "tags": {"items": {"type": "string", "maxLength": 5},
                     "title": "Tags", "type": "array", "maxItems": 3},
        },
        "required": ["color", "tags"], "additionalProperties": False,
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/x", "$comment": "c", "title": "t",
        "examples": [1], "default": 2, "readOnly": True, **_I,
    },
    "anything": {},
    "many": _closed([], **{f"key_{i}": {"type": "boolean"}
                           for i in range(40)}),
    "bare properties": {
        "type": "object", "properties": {"a": {"const": 1}},
        "additionalProperties": False,
    },
}  # fmt: skip

# A keyword, and a schema whose meaning depends on it.
UNSUPPORTED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "not": {"not": {"type": "string"}},
    "oneOf": {"oneOf": [{"type": "object"}, {"type": "object"}]},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {"pattern": "a"}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "unevaluatedProperties": {
        "type": "object", "unevaluatedProperties": False,
    },
    "format": {"type": "string", "format": "of my own"},
    "x-guidance": {"x-guidance": {"lenient": True}, "not": {}},
}  # fmt: skip
