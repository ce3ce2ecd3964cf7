"""Calls of a model's own form are held to the schemas of their tools."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.chat._answers import Answer
from gemmakv.chat._native_calls import QUOTE_MARK, grammar_of, read_call
from gemmakv.chat._tools import MOST_CALLS, tool_use
from gemmakv.generation._constraints import Compiler
from support import gemma4_files
from support.extras import needs
from support.gemma4_files import IDS

pytestmark = needs("llguidance", "jsonschema")

CALL, END, QUOTE = IDS["<|tool_call>"], IDS["<tool_call|>"], IDS['<|"|>']
OPEN, CLOSE = IDS["<|channel>"], IDS["<channel|>"]
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"},
                                         "n": {"type": "integer"}}}
SCHEMAS: dict[str, Any] = {
    "nothing": {},
    "one": {"properties": {"city": {"type": "string"}}},
    "some required": {
        "properties": {
            "b": {"type": "integer"}, "A": {"type": "string"},
            "c": {"type": "boolean"}, "D": {"type": "null"},
            "e": {"type": ["number", "null"]},
        },
        "required": ["b", "D"],
    },
    "required alone": {"required": ["x"]},
    "open": {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "string"},
    },
    "a map": {"additionalProperties": {"type": "integer"}},
    "odd names": {
        "properties": {
            "a b": {"type": "integer"}, "x:y": {"type": "integer"},
            "": {"type": "integer"}, "[": {"type": "string"},
            "\u00e9": {"type": "string"}, ' "q': {"type": "string"},
        },
        "required": ["x:y", "", ' "q'],
    },
    "enums": {
        "properties": {
            "unit": {"enum": ["C", "F", ""]}, "n": {"enum": [1, -2.5, None]},
            "deep": {"enum": [{"b": [1, "x"], "a:": True}, []]},
            "fixed": {"const": "the"},
        },
        "required": ["unit", "n", "deep", "fixed"],
    },
    "numbers": {
        "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 11},
            "x": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "m": {"type": "integer", "multipleOf": 5},
        },
        "required": ["n", "x", "m"],
    },
    "texts": {
        "properties": {
            "short": {"type": "string", "maxLength": 3},
            "long": {"type": "string", "minLength": 4, "maxLength": 5},
            "id": {"type": "string", "pattern": "^[a-f]{2}/[0-9]$"},
            "has": {"type": "string", "pattern": "the", "maxLength": 8},
            "none": {"type": "string", "maxLength": 0},
        },
        "required": ["short", "long", "id", "has", "none"],
    },
    "arrays": {
        "properties": {
            "any": {"type": "array"},
            "two": {"type": "array", "items": {"type": "integer"},
                    "minItems": 2, "maxItems": 2},
            "few": {"type": "array", "items": {"type": "boolean"},
                    "maxItems": 3},
            "some": {"type": "array", "items": {"type": "string"},
                     "minItems": 1},
            "empty": {"type": "array", "maxItems": 0},
            "pair": {"type": "array", "minItems": 1, "items": False,
                     "prefixItems": [{"type": "integer"},
                                     {"type": "string"}]},
            "more": {"type": "array", "minItems": 3, "maxItems": 4,
                     "prefixItems": [{"type": "boolean"}],
                     "items": {"type": "integer"}},
        },
        "required": ["any", "two", "few", "some", "empty", "pair", "more"],
    },
    "choices": {
        "properties": {
            "v": {"anyOf": [{"type": "integer"}, {"type": "string"},
                            {"type": "array", "items": NODE}]},
            "w": {"allOf": [{"type": "string"}], "maxLength": 2},
            "x": {"properties": {"a": {"type": "integer"}}},
            "y": {"$ref": "#/properties/v"},
        },
        "required": ["v", "w", "x", "y"],
        "$defs": {"node": NODE},
    },
    "recursive": {**NODE, "$defs": {"node": NODE}},
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> gemmakv.Gemma:
    path = tmp_path_factory.mktemp("native") / "tiny-it.gguf"
    gemma4_files.write(path)
    return gemmakv.Gemma.load(path, packed_cache=False)


@pytest.fixture(scope="module")
def compiled(gemma: gemmakv.Gemma) -> Callable[..., Any]:
    assert gemma.tokenizer is not None
    compiler = Compiler(gemma.tokenizer, gemma.config)

    def compile(
        *schemas: Any, choice: Any = "required", parallel: bool = True,
        strict: bool = True, answer: Answer | None = None,
    ) -> Any:  # fmt: skip
        tools = [
            {"type": "function", "function": {
                "name": f"f{i}", "parameters": schema, "strict": strict}}
            for i, schema in enumerate(schemas)
        ]  # fmt: skip
        use = tool_use(tools, choice, parallel)
        assert use is not None and gemma.tokenizer is not None
        grammar = grammar_of("native", gemma.tokenizer, use, answer)
        return compiler.compile("tools", grammar)

    return compile


def ids_of(gemma: gemmakv.Gemma, text: str) -> list[int]:
    assert gemma.tokenizer is not None
    found: list[int] = []
    rest = text
    while rest:
        name = next((n for n in IDS if rest.startswith(n)), None)
        if name is not None:
            found.append(IDS[name])
            rest = rest[len(name) :]
            continue
        found += gemma.tokenizer.encode(rest[0])
        rest = rest[1:]
    return found


def takes(gemma: gemmakv.Gemma, matcher: Any, text: str) -> bool:
    """Whether it may be the whole reply."""
    matcher = matcher.clone()
    mask = np.zeros((len(gemma4_files.PIECES) + 31) // 32, np.uint32)
    may_end = matcher.compute_mask([], mask.ctypes.data, mask.nbytes)
    for token in ids_of(gemma, text):
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        may_end = matcher.compute_mask([token], mask.ctypes.data, mask.nbytes)
    return bool(may_end)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_said_validates(
    gemma: gemmakv.Gemma, compiled: Callable[..., Any], name: str
) -> None:
    """Random replies, as far as they come to an end."""
    import jsonschema

    assert gemma.tokenizer is not None
    schema = SCHEMAS[name]
    start = compiled(schema, parallel=False)
    mask = np.zeros((len(gemma4_files.PIECES) + 31) // 32, np.uint32)
    bits = mask.view(np.uint8)
    draw = random.Random(5)
    closing = [
        i for i, piece in enumerate(gemma4_files.PIECES)
        if piece in ("}", "]", ",", ":") or i in (QUOTE, END)
    ]  # fmt: skip
    whole = 0
    for _ in range(20):
        matcher, ids, last = start.clone(), [], []
        for _ in range(400):
            may_end = matcher.compute_mask(last, mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if len(allowed) == 0:
                assert may_end
                break
            likely = [i for i in closing if mask[i // 32] >> (i % 32) & 1]
            if likely and draw.random() < 0.6:
                last = [draw.choice(likely)]
            else:
                last = [int(draw.choice(allowed))]
            ids += last
        else:
            continue
        whole += 1
        if ids[0] == OPEN:
            ids = ids[ids.index(CLOSE) + 1 :]
        assert ids[0] == CALL and ids[-1] == END
        parts = np.array([-1, *ids[1:-1]])
        text, begin = "", 1
        for at in [*np.flatnonzero(parts == QUOTE).tolist(), len(parts)]:
            text += gemma.tokenizer.decode(parts[begin:at].tolist())
            text += QUOTE_MARK if at < len(parts) else ""
            begin = at + 1
        if "\ufffd" in text:  # bytes that are no text
            continue
        call = read_call(text)
        assert call is not None, text
        assert call.name == "f0"
        jsonschema.validate(
            call.arguments, {"type": "object", **schema},
            cls=jsonschema.Draft202012Validator,
        )  # fmt: skip
    assert whole > 5


Q = '<|"|>'
C, E = "<|tool_call>", "<tool_call|>"


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("nothing", "{}", True),
        ("nothing", "{a:[1,{b:null}]}", True),
        ("nothing", "[]", False),
        ("one", "{}", True),
        ("one", f"{{city:{Q}Rome, {{[:\n{Q}}}", True),
        ("one", f"{{city:{Q}{Q}}}", True),
        ("one", "{city:Rome}", False),
        ("one", "{town:1}", False),
        ("one", f"{{city:{Q}a{Q},town:1}}", False),
        ("some required", f"{{A:{Q}x{Q},b:1,c:true,D:null,e:1.5}}", True),
        ("some required", "{b:1,D:null}", True),
        ("some required", "{b:1,c:false,D:null,e:null}", True),
        ("some required", "{D:null,b:1}", False),
        ("some required", "{b:1}", False),
        ("some required", "{b:1.5,D:null}", False),
        ("required alone", f"{{x:{Q}{Q}}}", True),
        ("required alone", "{y:1}", False),
        ("open", f"{{a:1,b:{Q}x{Q},c:{Q}y{Q}}}", True),
        ("open", f"{{a:1,a:{Q}x{Q}}}", False),
        ("open", f"{{b:{Q}x{Q}}}", False),
        ("open", "{a:1,b:2}", False),
        ("a map", "{x:1,y:2}", True),
        ("a map", "{}", True),
        ("odd names", f"{{{Q}{Q}:3,{Q} \"q{Q}:{Q}{Q},{Q}x:y{Q}:1}}", True),
        ("odd names", f"{{:3,{Q} \"q{Q}:{Q}{Q},{Q}x:y{Q}:1}}", False),
        ("numbers", "{m:10,n:11,x:0.5}", True),
        ("numbers", "{m:10,n:12,x:0.5}", False),
        ("numbers", "{m:10,n:11,x:1.5}", False),
        ("numbers", "{m:11,n:11,x:0.5}", False),
        ("nothing", "{a:1e999}", False),
        ("nothing", "{a:-1.5e-99}", True),
        ("recursive", "{n:1,next:{next:{}}}", True),
        ("recursive", "{next:{n:null}}", False),
    ],
)  # fmt: skip
def test_what_fits(
    gemma: gemmakv.Gemma,
    compiled: Callable[..., Any],
    name: str,
    arguments: str,
    fits: bool,
) -> None:
    matcher = compiled(SCHEMAS[name])
    assert takes(gemma, matcher, f"{C}call:f0{arguments}{E}") == fits


ONE, TWO = f"{C}call:f0{{}}{E}", f"{C}call:f1{{}}{E}"
THOUGHT = "<|channel>thought\nthe in\n<channel|>"


@pytest.mark.parametrize(
    ("choice", "parallel", "reply", "fits"),
    [
        ("auto", True, "", True),
        ("auto", True, "the {call:f0", True),
        ("auto", True, THOUGHT + "the", True),
        ("auto", True, f"{THOUGHT}the{ONE}{TWO}", True),
        ("auto", True, "the<channel|>the" + ONE, True),
        ("auto", True, ONE + "the", False),
        ("auto", True, f"{C}the{E}", False),
        ("auto", True, f"{C}call:f2{{}}{E}", False),
        ("auto", False, ONE, True),
        ("auto", False, ONE + TWO, False),
        ("required", True, "", False),
        ("required", True, "the" + ONE, False),
        ("required", True, THOUGHT, False),
        ("required", True, THOUGHT + ONE + TWO, True),
        ("required", True, ONE, True),
        ("f1", True, ONE, False),
        ("f1", True, TWO, True),
        ("f1", True, TWO + TWO, False),
        ("f1", False, TWO + TWO, False),
    ],
)
def test_choices(
    gemma: gemmakv.Gemma,
    compiled: Callable[..., Any],
    choice: str,
    parallel: bool,
    reply: str,
    fits: bool,
) -> None:
    matcher = compiled({}, {}, choice=choice, parallel=parallel)
    assert takes(gemma, matcher, reply) == fits


JSON = Answer("response_format", gemmakv.Grammar.json_schema(
    {"type": "object", "properties": {"a": {"type": "string"}},
     "required": ["a"], "additionalProperties": False}))  # fmt: skip
WORDS = Answer("grammar", gemmakv.Grammar.regex("([{] )*[0-9]"))
RULES = Answer("grammar", gemmakv.Grammar.lark('start: "{" ("[" "]")* "}"'))


@pytest.mark.parametrize(
    ("answer", "choice", "reply", "fits"),
    [
        (JSON, "auto", '{"a": "the call:f0{}"}', True),
        (JSON, "auto", THOUGHT + '{"a": ""}', True),
        (JSON, "auto", THOUGHT + ONE + TWO, True),
        (JSON, "auto", ONE, True),
        (JSON, "auto", "", False),
        (JSON, "auto", "the", False),
        (JSON, "auto", "{}", False),
        (JSON, "auto", "the" + ONE, False),
        (JSON, "auto", '{"a": ""}' + ONE, False),
        (JSON, "auto", ONE + '{"a": ""}', False),
        (JSON, "auto", f'{{"a": "{C}"}}', False),
        (JSON, "required", '{"a": ""}', False),
        (JSON, "required", ONE, True),
        (WORDS, "auto", "{ { 3", True),
        (WORDS, "auto", "{ {", False),
        (WORDS, "auto", ONE, True),
        (RULES, "auto", "{[][]}", True),
        (RULES, "auto", "{[}", False),
        (RULES, "auto", ONE, True),
    ],
)
def test_a_reply_is_calls_or_an_answer(
    gemma: gemmakv.Gemma,
    compiled: Callable[..., Any],
    answer: Answer,
    choice: str,
    reply: str,
    fits: bool,
) -> None:
    matcher = compiled({}, {}, choice=choice, answer=answer)
    assert takes(gemma, matcher, reply) == fits


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_come_to_an_end(
    gemma: gemmakv.Gemma, compiled: Callable[..., Any], choice: str
) -> None:
    matcher = compiled({}, {}, choice=choice)
    assert takes(gemma, matcher, ONE * MOST_CALLS)
    assert not takes(gemma, matcher, ONE * (MOST_CALLS + 1))


BAD = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("schema", "where", "why"),
    [
        ({"minProperties": 1}, ".minProperties", "not supported in a strict"),
        ({"properties": {"a": {"type": "string", "format": "date"}}},
         ".properties.a.format", "not supported in a strict"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}},
         ".properties.a.uniqueItems", "not supported in a strict"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
         ".properties.a.pattern", "not supported in a strict"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not",
         "not supported in a strict"),
        ({"properties": {"a": {"oneOf": [{}, {}]}}}, ".properties.a.oneOf",
         "not supported in a strict"),
        ({"properties": {"a": {"type": "string", "maxLength": 10**30}}},
         ".properties.a.maxLength", "not supported in a strict"),
        ({"properties": {"a": {"type": "number", "minimum": 1e308}}},
         ".properties.a.minimum", "expected a number between -2^53 and"),
        ({"properties": {"a": {"type": "integer", "maximum": -(2**64)}}},
         ".properties.a.maximum", "expected a number between -2^53 and"),
        ({"properties": {"a": {"type": "integer", "maximum": 10**400}}},
         ".properties.a.maximum", "expected a number between -2^53 and"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced(
    compiled: Callable[..., Any], schema: Any, where: str, why: str
) -> None:
    with pytest.raises(ValueError) as found:
        compiled({}, schema)
    assert str(found.value).startswith(f"{BAD}{where}: {why}")
    compiled({}, schema, strict=False)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"properties": []}, ".properties: expected schemas by name"),
        ({"properties": {"a": 1}}, ".properties.a: expected a JSON schema"),
        ({"properties": {"a": {"type": "date"}}},
         ".properties.a.type: expected one of object, array"),
        ({"properties": {"a": {"type": []}}},
         ".properties.a.type: expected a type"),
        ({"required": "a"}, ".required: expected names"),
        ({"properties": {"a": {"enum": []}}},
         ".properties.a.enum: expected values"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}},
         ".properties.a.$ref: the schema has no '#/$defs/x'"),
        ({"properties": {"a": {"$ref": "http://x"}}},
         ".properties.a.$ref: expected a place in the schema"),
        ({"properties": {"a": {"type": "array", "minItems": -1}}},
         ".properties.a.minItems: expected a count, found -1"),
        ({"properties": {"a": {"type": "array", "minItems": 2,
                               "maxItems": 1}}},
         ".properties.a.maxItems: expected at least 2 items, found 1"),
        ({"properties": {"a": {"type": "string", "pattern": "a("}}},
         ".properties.a.pattern: unclosed group"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         ".$ref: expected a schema that a value satisfies"),
        ({"properties": {"a": {"type": "integer", "multipleOf": -3}}},
         ".properties.a.multipleOf: expected more than 0, found -3"),
        ({"properties": {"a": {"const": 1}}, "required": ["zz"],
          "additionalProperties": False},
         ".required: expected properties that there may be, found 'zz'"),
    ],
)  # fmt: skip
def test_what_is_no_schema(
    compiled: Callable[..., Any], schema: Any, error: str
) -> None:
    with pytest.raises(ValueError) as found:
        compiled({}, schema)
    assert str(found.value).startswith(BAD + error)
    # One that need not be enforced is enforced without it.
    [left] = compiled({}, schema, strict=False).left_out
    assert left.startswith(BAD)


def test_a_chat_calls(gemma: gemmakv.Gemma) -> None:
    tools = [
        {"type": "function", "function": {
            "name": f"f{i}", "parameters": {"properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["C", "F"]}}, "required": ["n", "unit"]}}}
        for i in range(2)
    ]  # fmt: skip
    for seed in range(5):
        said = gemma.chat(
            [{"role": "user", "content": "Hello"}], tools=tools,
            tool_choice="f1", parallel_tool_calls=False, seed=seed,
            temperature=1.0, max_tokens=60, logit_bias={OPEN: -50.0},
        )  # fmt: skip
        [call] = said.tool_calls
        assert call.name == "f1"
        assert 0 <= call.arguments["n"] <= 99
        assert call.arguments["unit"] in ("C", "F")
        assert said.text == "" and said.finish_reason == "stop"


def test_a_vocabulary_without_the_tokens(tiny_path: Path) -> None:
    other = gemmakv.Gemma.load(tiny_path)
    use = tool_use([{"function": {"name": "f"}}])
    assert use is not None and other.tokenizer is not None
    with pytest.raises(ValueError, match=r"'<\|tool_c"):
        grammar_of("native", other.tokenizer, use)


def test_numbers_that_no_float_is() -> None:
    call = read_call("call:f{x:1e999,y:-1e400,z:1e-999}")
    assert call is not None
    most = sys.float_info.max
    assert call.arguments == {"x": most, "y": -most, "z": 0.0}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ({"parameters": {"properties": {"a": {"const": float("nan")}}}},
         "tools[0]: expected what JSON can say"),
        ({"strict": "yes"}, "tools[0].function.strict: expected True or False"),
        ({"description": 5}, "tools[0].function.description: expected text"),
        ({"parameters": {"enum": ["x" * 90] * 8000}}, "tools: as a grammar, "),
    ],
)  # fmt: skip
def test_what_is_no_tool(
    gemma: gemmakv.Gemma, function: Any, words: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", **function}}
    for template in ("gemma4", "gemma"):
        with pytest.raises(ValueError) as found:
            gemma.chat(
                [{"role": "user", "content": "Hello"}], tools=[tool],
                template=template, max_tokens=1,
            )  # fmt: skip
        assert str(found.value).startswith(words)


@pytest.mark.parametrize("text", ['{"x": 1e999}', '{"x": NaN}', "[1]"])
def test_arguments_that_are_no_json(gemma: gemmakv.Gemma, text: str) -> None:
    call = {"id": "a", "type": "function",
            "function": {"name": "f", "arguments": text}}  # fmt: skip
    messages = [{"role": "user", "content": "Hello"},
                {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ValueError, match="arguments: .*dict"):
        gemma.count_tokens(messages)
