"""Texts that follow a grammar, whatever the model wants to say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from typing import Any

import pytest

import gemmakv
from gemmakv import ArgumentError, GemmaKVError, Grammar
from gemmakv.generation import _constraints, _trial
from gemmakv.generation._options import GenerationOptions
from gemmakv.generation._requests import requests_of
from gemmakv.generation._schema_fit import Tried
from gemmakv.generation._trial import Trials
from support import tiny_gguf
from support.extras import needs
from support.schemas import SCHEMAS, UNSUPPORTED

pytestmark = needs("llguidance", "jsonschema")

PIECES = tiny_gguf.vocabulary()[0]
# A random model closes brackets and strings too seldom to come to an end.
CLOSING: Any = {PIECES.index(c): 6.0 for c in '"}],'}
CLOSING[PIECES.index(",")] = 2.0
PAIR = Grammar.json_schema(SCHEMAS["object closed"])
WORDS = Grammar.regex("[a-z]{3,5}( [a-z]{3,5}){2}")


def new(gemma: gemmakv.Gemma) -> gemmakv.KVCache:
    return gemmakv.create_kv_cache(gemma.config)


def validate(text: str, schema: Any) -> None:
    """Raises where a text is no value of the schema."""
    import jsonschema

    jsonschema.validate(
        json.loads(text),
        schema,
        cls=jsonschema.Draft202012Validator,
        format_checker=jsonschema.FormatChecker(
            ["date", "ipv4", "ipv6", "email"]
        ),
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_validate(tiny: gemmakv.Gemma, name: str) -> None:
    schema = SCHEMAS[name]
    grammar = Grammar.json_schema(schema)
    said = tiny.generate(
        new(tiny), "Go: ", n=4, grammar=grammar, temperature=1.5, seed=3,
        max_tokens=240, logit_bias=CLOSING,
    )  # fmt: skip
    said.append(
        tiny.generate(
            new(tiny), "Go: ", grammar=grammar, max_tokens=240,
            logit_bias=CLOSING,
        )
    )  # fmt: skip
    whole = [one for one in said if one.finish_reason == "stop"]
    assert whole, [one.text for one in said]
    for one in whole:
        validate(one.text, schema)
    for one in said:
        if one.finish_reason == "length":
            assert one.usage.completion_tokens == 240


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_is_named(
    tiny: gemmakv.Gemma, keyword: str
) -> None:
    expected = "not" if keyword == "x-guidance" else keyword
    cache = new(tiny)
    message = rf"^response_format\.\S+\b{expected}: "
    with pytest.raises(ValueError, match=message):
        tiny.generate(
            cache,
            "Go",
            response_format={
                "type": "json_schema",
                "json_schema": {"schema": UNSUPPORTED[keyword]},
            },
        )
    assert len(cache) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"grammar": 5}, "grammar: .*5"),
        ({"grammar": "start: nothing"}, "grammar: .*unknown name"),
        ({"grammar": ""}, "grammar: lark: "),
        ({"response_format": {"type": "xml"}}, "response_format: expected"),
        ({"response_format": {"type": "json_schema"}},
         r"response_format.json_schema.schema: expected"),
        # The schema itself in the place of what names it.
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"type": "object"}}},
         "response_format.json_schema.type: .*'schema'"),
        ({"response_format": {"type": "json_object", "properties": {}}},
         "response_format.properties: .*'schema'"),
        ({"response_format": {"type": "text", "schema": {}}},
         "response_format.schema: "),
        ({"grammar": 'root ::= "yes"'},
         "grammar: .*Lark.*GBNF"),
        ({"grammar": 'start: "a"', "response_format": {"type": "json_object"}},
         "response_format: .*grammar"),
    ],
)  # fmt: skip
def test_bad_options(
    tiny: gemmakv.Gemma, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny.generate(new(tiny), "Go", **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny.stream(new(tiny), "Go", **options)


_OPEN_ONE = {"oneOf": [{"type": "object"}, {"type": "object"}]}
_CLASHING = {
    "type": "object",
    "patternProperties": {"a*": {"type": "integer"}, "aa*": {"type": "null"}},
}


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"$ref": "#/components/schemas/Pet"},
         r".\$ref: .*'#/components/schemas/Pet'"),
        ({"$ref": "http://localhost/x.json#/a"},
         r".\$ref: .*'http://localhost/x"),
        ({"$schema": "http://localhost/mine#", "type": "null"},
         r".*\$schema: .*/mine'"),
        (_OPEN_ONE, ".oneOf: "),
        (_CLASHING, ".patternProperties: .*/a"),
    ],
)  # fmt: skip
def test_errors_name_the_keyword_and_no_option_of_llguidance(
    tiny: gemmakv.Gemma, schema: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^grammar{message}"):
        tiny.generate(new(tiny), "Go", grammar=Grammar.json_schema(schema))


ENDLESS = "^(a?){300}a{300}$"  # more states than there is room for


def test_a_pattern_that_cannot_be_followed(tiny: gemmakv.Gemma) -> None:
    """It ended a text in the middle, wherever it stood."""
    for one, path in (
        ({"properties": {"a": {"pattern": ENDLESS}}}, "properties.a.pattern"),
        ({"patternProperties": {ENDLESS: {}}}, f"patternProperties.{ENDLESS}"),
        ({"$defs": {"x": {"items": {"pattern": ENDLESS}}},
          "properties": {"a": {"$ref": "#/$defs/x"}}},
         "$defs.x.items.pattern"),
    ):  # fmt: skip
        form = {"type": "json_object", "schema": {"type": "object", **one}}
        with pytest.raises(ValueError) as found:
            tiny.generate(new(tiny), "Go", response_format=form)
        where = f"response_format.schema.{path}: "
        assert str(found.value).startswith(where)


def test_what_ends_a_text_names_the_option(tiny: gemmakv.Gemma) -> None:
    """One grammar may be of several options at once."""
    schema = {"type": "string", "pattern": "^.{9}" + ENDLESS[1:]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    where = "^response_format.json_schema.schema: "
    with pytest.raises(ValueError, match=where):
        tiny.generate(new(tiny), "Go", response_format=form)
    with pytest.raises(ValueError, match="^grammar: "):
        tiny.generate(new(tiny), "Go", grammar=Grammar.json_schema(schema))


def test_a_text_that_fails_leaves_the_grammar_to_others(
    tiny: gemmakv.Gemma,
) -> None:
    """What it had used up was missing in all texts after it."""
    deep = "^(b|c.{9}" + ENDLESS[1:-1] + ")$"
    grammar = Grammar.json_schema({"type": "string", "pattern": deep})

    def said(letter: str) -> str:
        assert tiny.tokenizer is not None
        [token] = tiny.tokenizer.encode(letter)
        return tiny.generate(
            new(tiny), "Go", grammar=grammar, logit_bias={token: 60.0}
        ).text

    assert said("b") == '"b"'
    with pytest.raises(ValueError, match="^grammar: "):
        said("c")
    assert said("b") == '"b"'


def test_parts_without_an_end_are_no_text(tiny: gemmakv.Gemma) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/a"},
            "b": {"anyOf": [{"$ref": "#/$defs/b"}, {"const": 1}]},
            "c": {"type": "array", "items": {"$ref": "#/$defs/b"}},
            "d": {"$ref": "#/$defs/d"},
        },
        "required": ["b", "c", "d"],
        "additionalProperties": False,
        "$defs": {
            "a": {"$ref": "#/$defs/a"},
            "b": {"type": "object", "required": ["b"],
                  "properties": {"b": {"$ref": "#/$defs/b"}}},
            "d": {"type": "object", "additionalProperties": False},
        },
    }  # fmt: skip
    said = tiny.generate(
        new(tiny), "Go", grammar=Grammar.json_schema(schema), max_tokens=60
    )
    assert json.loads(said.text) == {"b": 1, "c": [], "d": {}}


def test_bad_sources() -> None:
    with pytest.raises(ValueError, match="131072 bytes"):
        Grammar.regex("a" * 140_000)
    with pytest.raises(ValueError, match="brackets in each other"):
        Grammar.lark("start: " + "(" * 200 + '"a"' + ")" * 200)
    with pytest.raises(ValueError, match="lone surrogate"):
        Grammar.regex("\ud800")
    for text in "\ud800", "\udc00a", "\ud800\ud83d\ude00", "\U0001f600\ude00":
        with pytest.raises(ValueError, match="lone surrogate"):
            Grammar.json_schema({"const": text})
    for text in "\U0001f600", r"\ud800", r"\\ud800", "\ud7ff\ue000":
        assert Grammar.json_schema({"const": text}).kind == "json_schema"
    with pytest.raises(ValueError, match="expected a JSON schema"):
        Grammar.json_schema({"const": float("nan")})
    assert Grammar.json_schema({"const": "[[[[" * 50}).kind == "json_schema"


BRACKETS_THAT_ARE_TEXT = [
    Grammar.regex(r"\(" * 65),
    Grammar.regex("[(]" * 65),
    Grammar.regex("[](]" * 65),  # the first ] is a character
    Grammar.regex("[^](]" * 65),
    Grammar.regex(r"[\](]" * 65),
    Grammar.regex("a]" * 65),
    Grammar.regex("(a)" * 65),
    Grammar.regex(r"(?x) \( " + r"[ \( ]" * 65),
    Grammar.lark("start: " + '"(" ' * 65),
    Grammar.lark("start: " + r'"\"(" ' * 65),
    Grammar.lark("start: " + r"/\(\/[(]/ " * 65),
    Grammar.lark("// " + "( " * 65 + '\nstart: "a"'),
    Grammar.lark("# " + "( " * 65 + '\nstart: "a"'),
    Grammar.lark("start: " + "<(> " * 65),
    Grammar.lark('start: "' + r"\"(" * 20_000),  # a string without an end
]


def test_brackets_that_are_text_may_be_many() -> None:
    """They are made where the module is loaded."""
    for grammar in BRACKETS_THAT_ARE_TEXT:
        assert grammar == Grammar(grammar.kind, grammar.text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(" * 65 + "a" + ")" * 65),
        ("regex", "[" * 65 + "a" + "]" * 65),
        ("regex", "(]" * 65 + "a" + ")" * 65),
        ("regex", r"(\)" * 65 + "a" + ")" * 65),
        ("regex", "(?x)# [\n" + "(" * 65 + "a" + ")" * 65),
        ("lark", "start: " + "(" * 65 + '"a"' + ")" * 65),
        ("lark", "start: " + '("(" ' * 65 + ")" * 65),
        ("lark", 'start: <"> ' + "(" * 65 + '"a"' + ")" * 65),
        ("lark", "start: /" + "(" * 65 + "a" + ")" * 65 + "/"),
        ("tools", 'start: %json {"a": ' + "[" * 65 + "]" * 65 + "}"),
        ("json_schema", '{"enum": ' + "[" * 65 + "]" * 65 + "}"),
    ],
)
def test_brackets_in_each_other(kind: str, text: str) -> None:
    with pytest.raises(ArgumentError, match="most 64 brackets in each other"):
        Grammar(kind, text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("("),
        Grammar.regex("a{1000000}"),
        Grammar.regex("(a?){500}a{500}"),
        Grammar.regex("(.{1,50}){50}@(.{1,50}){50}"),
        Grammar.json_schema({"$ref": "http://localhost:1/x"}),
        Grammar.json_schema({"allOf": [
            {"anyOf": [{"properties": {f"a{i}": {"type": kind}}}
                       for kind in ("string", "integer", "null")]}
            for i in range(12)]}),
        Grammar.json_schema({"enum": []}),
    ],
)  # fmt: skip
def test_hostile_grammar_is_an_error(
    tiny: gemmakv.Gemma, grammar: Grammar
) -> None:
    with pytest.raises(ValueError, match=r"^grammar(\.\S+)?: "):
        tiny.generate(new(tiny), "Go", grammar=grammar)
    assert tiny.generate(new(tiny), "Go", grammar=WORDS, max_tokens=30).text


def referring(count: int, wrap: Any) -> Grammar:
    """A schema of so many definitions, each of which refers to the next."""
    places = {
        str(i): wrap({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)
    }
    places[str(count)] = {"type": "string"}
    return Grammar.json_schema({"$defs": places, "$ref": "#/$defs/0"})


@pytest.mark.parametrize(
    "grammar",
    [
        referring(3000, lambda one: one),
        referring(1200, lambda one: {"properties": {"x": one}}),
        referring(2000, lambda one: {"anyOf": [one, {"type": "null"}]}),
        Grammar.lark(
            "start: r0\n"
            + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(6000))
            + 'r6000: "b"\n'
        ),
        Grammar.lark(
            "start: T0\n"
            + "".join(f'T{i}: T{i + 1} "a"\n' for i in range(5000))
            + 'T5000: "b"\n'
        ),
    ],
    ids=["refs", "properties", "anyOf", "rules", "terminals"],
)
def test_long_chains_of_references_are_no_crash(
    tiny: gemmakv.Gemma, grammar: Grammar
) -> None:
    """They took the stack of the thread, and the process with it."""
    with contextlib.suppress(ValueError):  # one may be too large
        tiny.generate(new(tiny), "Go", grammar=grammar, max_tokens=3)


# Beyond what llguidance counts: hours, or gigabytes.
SLOW = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "integer", "multipleOf": 99_991 + 2 * i}
            for i in range(1500)
        },
    }
)


def passes(trials: Trials, grammar: Grammar, seconds: float) -> bool:
    """Tells whether a grammar compiles, or is refused, in that time."""
    tried = [Tried(grammar.kind, grammar.text)]
    return trials.refusals(tried, seconds) is not None


@pytest.mark.slow
def test_a_trial_bounds_what_compiling_takes(tiny: gemmakv.Gemma) -> None:
    trials = requests_of(tiny).compiler._trials
    assert not passes(trials, SLOW, 0.1)
    assert passes(trials, WORDS, 9)
    [process] = trials._idle
    assert passes(trials, PAIR, 9) and trials._idle == [process]
    # Refused is ended: the compiler says why.
    assert passes(trials, Grammar.json_schema({"not": {}}), 9)
    assert passes(trials, Grammar.regex("("), 9)
    # Somebody ends it while nobody needs it.
    process.kill()
    process.wait()
    assert passes(trials, WORDS, 9) and trials._idle != [process]
    with pytest.raises(ValueError, match="^x: "):
        requests_of(tiny).compiler.compile("x", SLOW, 0.1)


def test_a_trial_may_die_of_its_grammar(tiny: gemmakv.Gemma) -> None:
    """Each is tried in a process with less stack than a chain takes."""
    trials = Trials(_constraints._LIMITS, _constraints._JSON)
    long = referring(3000, lambda one: one)
    assert passes(trials, long, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_trial, "STACK_BYTES", 1 << 20)
        trials = Trials(_constraints._LIMITS, _constraints._JSON)
        assert not passes(trials, long, 9)
        assert passes(trials, WORDS, 9)


def test_trials_end_with_their_compiler() -> None:
    trials = Trials(_constraints._LIMITS, _constraints._JSON)
    assert passes(trials, WORDS, 9)
    [process] = trials._idle
    del trials
    gc.collect()
    assert process.poll() is not None


def test_no_process_for_a_trial(
    tiny: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", none)
    with pytest.raises(MemoryError, match="no process that compiles"):
        passes(Trials(_constraints._LIMITS, _constraints._JSON), WORDS, 4)


def test_a_large_schema_is_refused_before_it_is_written() -> None:
    with pytest.raises(ValueError, match="131072 bytes"):
        Grammar.json_schema({"enum": list(range(1_000_000))})
    endless: dict[str, Any] = {}
    endless["items"] = endless
    with pytest.raises(ValueError, match="^grammar: expected"):
        Grammar.json_schema(endless)


def test_regex_and_lark(tiny: gemmakv.Gemma) -> None:
    said = tiny.generate(new(tiny), "Go", grammar=WORDS, max_tokens=40)
    assert said.finish_reason == "stop"
    assert re.fullmatch(WORDS.text, said.text)
    lark = 'start: "<" ("a" | "b")~3 ">"'
    said = tiny.generate(new(tiny), "Go", grammar=lark, max_tokens=40)
    assert said.finish_reason == "stop"
    assert re.fullmatch("<[ab]{3}>", said.text)


def test_stream_says_the_same(tiny: gemmakv.Gemma) -> None:
    whole = tiny.generate(new(tiny), "Go", grammar=WORDS, max_tokens=40)
    stream = tiny.stream(new(tiny), "Go", grammar=WORDS, max_tokens=40)
    assert "".join(piece.text for piece in stream) == whole.text
    assert stream.result().token_ids == whole.token_ids
    assert stream.result().finish_reason == "stop"


def test_held_text_comes_at_the_end(tiny: gemmakv.Gemma) -> None:
    """The grammar ends within what could begin a stop string."""
    options: Any = {"grammar": 'start: "ab"', "stop": "b and more"}
    said = tiny.generate(new(tiny), "Go", **options)
    assert (said.text, said.finish_reason) == ("ab", "stop")
    stream = tiny.stream(new(tiny), "Go", **options)
    assert "".join(piece.text for piece in stream) == "ab"


def test_batch_is_as_alone(tiny: gemmakv.Gemma) -> None:
    grammars = [PAIR, None, WORDS, None]
    options: Any = {"temperature": 1.0, "seed": 4, "max_tokens": 30}
    alone = [
        tiny.generate(new(tiny), f"Go {i}", grammar=grammar, **options)
        for i, grammar in enumerate(grammars)
    ]
    together = tiny.generate_batch(
        [new(tiny) for _ in grammars],
        [f"Go {i}" for i in range(4)],
        grammar=grammars,
        **options,
    )
    assert [one.token_ids for one in together] == [
        one.token_ids for one in alone
    ]
    assert re.fullmatch(WORDS.text, together[2].text)


def test_samples_have_a_grammar_each(tiny: gemmakv.Gemma) -> None:
    said = tiny.generate(
        new(tiny), "Go", n=3, grammar=WORDS, temperature=1, seed=1,
        max_tokens=40,
    )  # fmt: skip
    assert len({one.text for one in said}) > 1
    for one in said:
        assert re.fullmatch(WORDS.text, one.text)


def test_forks_and_rewinds(tiny: gemmakv.Gemma) -> None:
    cache = new(tiny)
    tiny.prefill(cache, "Go")
    start = len(cache)
    fork = cache.fork()
    options: Any = {"temperature": 1, "seed": 9, "max_tokens": 40}
    first = tiny.generate(cache, "", grammar=WORDS, **options)
    cache.truncate(start)
    again = tiny.generate(cache, "", grammar=WORDS, **options)
    forked = tiny.generate(fork, "", grammar=WORDS, **options)
    assert first.token_ids == again.token_ids == forked.token_ids
    # Each call's text is one of the grammar, whatever stands before it.
    more = tiny.generate(cache, "", grammar=PAIR, max_tokens=80,
                         logit_bias=CLOSING)  # fmt: skip
    validate(more.text, SCHEMAS["object closed"])


def test_cancelled_in_the_middle(tiny: gemmakv.Gemma) -> None:
    cache = new(tiny)
    stream = tiny.stream(cache, "Go", grammar=WORDS, max_tokens=40)
    read = [next(stream), next(stream)]
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    assert len(stream.result().token_ids) == len(read)
    said = tiny.generate(cache, "", grammar=WORDS, max_tokens=40)
    assert re.fullmatch(WORDS.text, said.text)


def test_bias_against_all_that_may_come(tiny: gemmakv.Gemma) -> None:
    cache = new(tiny)
    ban = {PIECES.index(piece): float("-inf") for piece in ("a", "<0x61>")}
    with pytest.raises(ValueError, match="a grammar"):
        tiny.generate(cache, "Go", grammar='start: "aaaa"', logit_bias=ban)
    assert len(cache) == 0


def test_on_a_loop(tiny: gemmakv.Gemma) -> None:
    async def all_of_them() -> list[gemmakv.Generation]:
        return await asyncio.gather(
            *(
                tiny.agenerate(
                    new(tiny), f"Go {i}", grammar=WORDS, max_tokens=40
                )
                for i in range(4)
            )
        )

    for i, one in enumerate(asyncio.run(all_of_them())):
        alone = tiny.generate(
            new(tiny), f"Go {i}", grammar=WORDS, max_tokens=40
        )
        assert one.token_ids == alone.token_ids


def test_a_session_follows_it(tiny: gemmakv.Gemma) -> None:
    session = gemmakv.Session(tiny, options={"max_tokens": 60})
    for _ in range(2):
        said = session.send("Go", grammar=WORDS)
        assert re.fullmatch(WORDS.text, said.text)
    assert session.messages[-1].text == said.text


def test_without_llguidance(
    tiny: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GemmaKVError, match=r"gemmakv\[grammar\]"):
        tiny.generate(new(tiny), "Go", grammar=Grammar.regex("never seen"))


@pytest.mark.slow
def test_real_model(gemma: gemmakv.Gemma) -> None:
    for name in ("nested", "date"):
        said = gemma.generate(
            new(gemma), "As JSON: ", max_tokens=80,
            grammar=Grammar.json_schema(SCHEMAS[name]),
        )  # fmt: skip
        assert said.finish_reason == "stop", said.text
        validate(said.text, SCHEMAS[name])


REC = {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}
LOOP = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}


@pytest.mark.parametrize(
    ("schema", "path", "part"),
    [
        ({"minimum": -(2**63), "maximum": -(2**63)},
         "minimum", "-9223"),
        ({"properties": {"minimum": {"minimum": 2**53 + 1}}},
         "properties.minimum.minimum", "2^53"),
        ({"anyOf": [{}, {"exclusiveMaximum": -1e30}]},
         "anyOf[1].exclusiveMaximum", "2^53"),
        ({"type": "integer", "maximum": 10**400},
         "maximum", "1000"),
        ({"type": "integer", "multipleOf": 10**400},
         "multipleOf", "1000"),
        ({"items": {"multipleOf": 0}},
         "items.multipleOf", "found 0"),
        (REC, "$ref", "a value"),
        (LOOP, "$ref", "a value"),
        ({"$ref": "#"}, "$ref", "a value"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}},
         "$ref", "a value"),
    ],
)  # fmt: skip
def test_what_llguidance_does_not_check(
    schema: Any, path: str, part: str
) -> None:
    with pytest.raises(ValueError) as found:
        Grammar.json_schema(schema)
    assert str(found.value).startswith(f"grammar: json_schema.{path}: ")
    assert part in str(found.value)


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    "schema", ['{"maxLength": N}', '{"enum": [N]}', '{"const": -N}']
)
def test_a_number_that_no_double_holds(
    tiny: gemmakv.Gemma, schema: str, digits: int
) -> None:
    """llguidance's parser of JSON said so, with no word of whose number."""
    text = schema.replace("N", "9" * digits)
    words = ".*a double"
    with pytest.raises(ValueError, match=rf"^grammar(\.\w+)?: {words}"):
        tiny.generate(new(tiny), "a", grammar=Grammar("json_schema", text))
    if digits < 4300:  # Python reads no more of them
        asked = {"type": "json_schema",
                 "json_schema": {"schema": json.loads(text)}}  # fmt: skip
        words = rf"^response_format[.\w]+: {words}"
        with pytest.raises(ValueError, match=words):
            tiny.generate(new(tiny), "a", response_format=asked)


def test_errors_of_a_format_have_its_argument() -> None:
    for form, place in (
        ({"type": "json_object", "schema": {"minimum": 1e999}}, ".schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"x": {1}}}},
         ".json_schema.schema"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            GenerationOptions.check({"response_format": form})
        argument = f"response_format{place}"
        assert caught.value.argument == argument
        assert str(caught.value).startswith(f"{argument}: expected a JSON sch")


def test_text_that_is_no_schema(tiny: gemmakv.Gemma) -> None:
    for text in ("[", '"x"'):
        with pytest.raises(ValueError, match=r"^grammar: E\w+"):
            tiny.generate(new(tiny), "a", grammar=Grammar("json_schema", text))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
        {"type": ["array", "null"], "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"},
         "prefixItems": [{"type": "integer"}]},
        {"enum": [2**60], "properties": {"x": {"$ref": "#"}}},
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "integer"}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
    ],
)  # fmt: skip
def test_schemas_whose_values_end(schema: Any) -> None:
    Grammar.json_schema(schema)


def test_chains_of_references_take_no_time() -> None:
    """Long ones, and such as share all that is behind them."""
    for count, ends in ((900, True), (900, False)):
        defs = {
            f"d{i}": {"properties": {name: {"$ref": f"#/$defs/d{i + 1}"}
                                     for name in "ab"},
                      "required": ["a", "b"]}
            for i in range(count)
        }  # fmt: skip
        last = {} if ends else {"$ref": "#/$defs/d0"}
        schema = {"$ref": "#/$defs/d0",
                  "$defs": {**defs, f"d{count}": last}}  # fmt: skip
        if ends:
            Grammar.json_schema(schema)
        else:
            with pytest.raises(ValueError, match="without an end"):
                Grammar.json_schema(schema)
