"""The options table: values, rows, schema; and what each option does."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

import gemmakv
from gemmakv import (
    Gemma,
    GemmaKVError,
    Session,
    _core,
    create_kv_cache,
    options,
)
from gemmakv.cache._kv_cache import KV_DTYPES
from gemmakv.generation._option_kinds import Number
from gemmakv.generation._options import core_options, split_rows
from gemmakv.options import BatchOptions, GenerationOptions, Options
from support import family_models
from support.forks import run_program

PROMPT = [2, 17, 40, 33, 8]
INF = float("inf")
TABLE = GenerationOptions.table


def run(gemma: Gemma, **options: Any) -> gemmakv.Generation:
    cache = create_kv_cache(gemma.config)
    result = gemma.generate(cache, PROMPT, **options)
    assert isinstance(result, gemmakv.Generation)
    return result


# ---- The table ----


def test_types_and_table_have_the_same_names() -> None:
    apart = {"progress", "prompt_progress", "draft"}
    assert set(Options.__annotations__) == {*TABLE, *apart}
    assert set(BatchOptions.__annotations__) == {*TABLE, *apart}


def test_enumerated_names_are_those_of_the_core() -> None:
    assert set(get_args(options.QuantizeType)) == set(_core.quantize_types())
    assert get_args(options.KvDtype) == KV_DTYPES
    for name in get_args(options.PrefixMode):
        GenerationOptions.check({"prefix_cache": name})
    for name in get_args(options.Speculate):
        TABLE["speculate"].check("speculate", name)
    for name, kind in (("prefix_cache", options.PrefixMode),
                       ("speculate", options.Speculate)):  # fmt: skip
        schema = TABLE[name].kind.schema()
        assert schema is not None and schema["enum"] == list(get_args(kind))


@pytest.mark.parametrize("name", TABLE)
def test_defaults_pass_and_are_the_core_s(name: str) -> None:
    option = TABLE[name]
    GenerationOptions.check({name: option.default})
    assert option.help == option.help.strip() and len(option.help) < 50
    if not option.in_core or name == "logits_processor":
        return
    found = getattr(_core.GenerateOptions(), name)
    if name == "speculate":  # None is what the model was loaded with
        assert found == "lookup"
        return
    assert found == (option.default or type(found)()) or (
        found is None and option.default is None
    )


@pytest.mark.parametrize("name", [n for n in TABLE if TABLE[n].in_core])
def test_python_and_core_refuse_the_same_numbers(name: str) -> None:
    kind = TABLE[name].kind
    if not isinstance(kind, Number):
        return
    for value in (-INF, -1e30, -1.0, -1e-9, 0.0, 1e-9, 0.5, 1.0, 1.001, 1e30):
        core = _core.GenerateOptions()
        setattr(core, name, value)
        try:
            kind.check(name, value)
            core.validate(100)
        except ValueError:
            with pytest.raises(ValueError, match=name):
                kind.check(name, value)
            with pytest.raises(ValueError, match=name):
                core.validate(100)


BAD = [
    ("max_tokens", 2**70, "at most 2147483647, found 1180591620717411303424"),
    ("max_tokens", 99999999999, "at most 2147483647, found 99999999999"),
    ("max_tokens", 10**5000, "too long to print"),
    ("max_tokens", -1, "an integer of at least 0, found -1"),
    ("max_tokens", True, "expected an integer, found True"),
    ("max_tokens", np.True_, "expected an integer"),
    ("top_k", 1.5, "expected an integer, found 1.5"),
    ("temperature", True, "expected a number, found True"),
    ("temperature", "1", "expected a number, found '1'"),
    ("temperature", math.nan, "expected a number, found nan"),
    ("temperature", INF, "expected a finite number, found inf"),
    ("temperature", -0.5, "a number of at least 0, found -0.5"),
    ("top_p", 0, "a number above 0, found 0"),
    ("top_p", 1.5, "a number of at most 1, found 1.5"),
    ("top_p", 1e-300, "a number above 0 also as float32, found 1e-300"),
    ("repetition_penalty", 0.0, "a number above 0"),
    ("repetition_penalty", 5e-324, "above 0 also as float32, found 5e-324"),
    ("temperature", 1e39, "found 1e[+]39"),
    ("seed", 2**64, "at most 18446744073709551615"),
    ("seed", False, "expected an integer, found False"),
    ("stop", "", "a str that is not empty"),
    ("stop", ["a", 5], "a str that is not empty, or a list of them, found 5"),
    ("stop_token_ids", 5, "a list of token ids, found 5"),
    ("stop_token_ids", "5", "a list of token ids, found '5'"),
    ("stop_token_ids", np.array(5), "a list of token ids, found array"),
    ("stop_token_ids", [1, -1], r"stop_token_ids\[1\]: .* at least 0"),
    ("stop_token_ids", [True], r"stop_token_ids\[0\]: expected an integer"),
    ("ignore_eos", 1, "True or False, found 1"),
    ("min_tokens", -1, "at least 0"),
    ("top_logprobs", True, "an integer"),
    ("deadline", -1, "a number of at least 0"),
    ("deadline", True, "a number"),
    ("logits_processor", 5, r"a callable\(token_ids, logits\), found 5"),
    ("logit_bias", [5], "a mapping"),
    ("logit_bias", {True: 1.0}, r"logit_bias\[True\]: expected an integer"),
    ("logit_bias", {3: 1e39}, r"logit_bias\[3\]: .* or -inf, found 1e[+]39"),
    ("logprobs", None, "True or False"),
]


@pytest.mark.parametrize(
    "name, value, words",
    BAD,
    ids=[f"{i}-{bad[0]}" for i, bad in enumerate(BAD)],
)
def test_bad_values_are_named(
    tiny: Gemma, name: str, value: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        GenerationOptions.check({name: value}, 100)
    assert str(caught.value).startswith(name)
    cache = create_kv_cache(tiny.config)
    options: Any = {name: value}
    with pytest.raises(ValueError, match=words):
        tiny.generate(cache, PROMPT, **options)
    with pytest.raises(ValueError, match=words):
        gemmakv.Session(tiny, options=options)
    assert len(cache) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": [512]},
        {"logit_bias": {512: 1.0}},
        {"top_logprobs": 513},
    ],
)
def test_ids_are_checked_where_the_vocabulary_is_known(
    tiny: Gemma, options: dict[str, Any]
) -> None:
    GenerationOptions.check(options)
    vocab_size = tiny.config.vocab_size
    with pytest.raises(ValueError, match="expected"):
        GenerationOptions.check(options, vocab_size)
    with pytest.raises(ValueError, match="expected"):
        run(tiny, **options)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="'tempo'; known: max_tokens"):
        GenerationOptions.check({"tempo": 1})


def test_json_schema() -> None:
    schema = json.loads(json.dumps(GenerationOptions.json_schema()))
    properties = schema["properties"]
    assert set(properties) == set(TABLE) - {"logits_processor"}
    assert properties["top_p"]["exclusiveMinimum"] == 0
    assert properties["seed"]["anyOf"][1] == {"type": "null"}
    assert all(p["description"] for p in properties.values())
    assert not schema["additionalProperties"]


def processor(ids: object, logits: object) -> None:
    del ids, logits


def test_what_is_one_value_and_what_is_a_list_of_rows() -> None:
    def rows(**options: object) -> list[dict[str, Any]]:
        return split_rows(options, 2, batch=True)

    one, two = rows(stop=["a", "b"], stop_token_ids=[5, 6], top_k=3)
    assert one == two
    assert one["stop"] == [b"a", b"b"] and one["stop_token_ids"] == [5, 6]
    one, two = rows(
        stop=["a", ["b", "c"]],
        stop_token_ids=[[5], None],
        logits_processor=[processor, None],
        deadline=[None, 2],
        logit_bias=[{1: 2.0}, None],
        min_tokens=np.array([3, 4]),
        ignore_eos=[True, False],
    )
    assert one["stop"] == [b"a"] and two["stop"] == [b"b", b"c"]
    assert one["stop_token_ids"] == [5] and "stop_token_ids" not in two
    assert one["logits_processor"] is processor
    assert "logits_processor" not in two
    assert "deadline" not in one and two["deadline"] == 2.0
    assert (one["min_tokens"], two["min_tokens"]) == (3, 4)
    assert rows(top_p=np.array(0.5))[1]["top_p"] == 0.5
    assert rows(logits_processor=processor)[1]["logits_processor"] is processor
    assert rows(stop_token_ids=np.array([5, 6]))[0]["stop_token_ids"] == [5, 6]
    with pytest.raises(ValueError, match=r"min_tokens\[1\]: .*found 'x'"):
        rows(min_tokens=[1, "x"])
    with pytest.raises(ValueError, match="list of 2 .one per row., found 3"):
        rows(stop_token_ids=[[1], [2], [3]])


# ---- Stops ----


def test_stop_token_ids_end_the_reply(tiny: Gemma) -> None:
    free = run(tiny, max_tokens=8, ignore_eos=True)
    at = free.token_ids.index(free.token_ids[3])
    g = run(tiny, max_tokens=8, stop_token_ids=[free.token_ids[3]])
    assert g.token_ids == free.token_ids[: at + 1]
    assert g.finish_reason == "stop"
    assert free.text.startswith(g.text)


def forced_eos(gemma: Gemma) -> dict[int, float]:
    return dict.fromkeys(gemma.config.eos_ids, 1e6)


def test_ignore_eos(tiny: Gemma) -> None:
    bias = forced_eos(tiny)
    g = run(tiny, max_tokens=5, logit_bias=bias)
    assert len(g.token_ids) == 1 and g.finish_reason == "stop"
    g = run(tiny, max_tokens=5, logit_bias=bias, ignore_eos=True)
    assert len(g.token_ids) == 5 and g.finish_reason == "length"
    assert set(g.token_ids) <= set(tiny.config.eos_ids)
    # What the caller names still stops.
    own = [g.token_ids[0]]
    g = run(tiny, logit_bias=bias, ignore_eos=True, stop_token_ids=own)
    assert len(g.token_ids) == 1 and g.finish_reason == "stop"


def test_ignore_eos_ignores_the_end_tokens_of_a_template() -> None:
    row = {"ignore_eos": True, "stop_token_ids": [9]}
    assert core_options(row, [106]).stop_token_ids == [9]
    row["ignore_eos"] = False
    assert core_options(row, [106]).stop_token_ids == [9, 106]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_eos_until_then(
    tiny: Gemma, temperature: float
) -> None:
    common: Any = {"temperature": temperature, "seed": 3, "logprobs": True}
    bias = forced_eos(tiny)
    g = run(tiny, max_tokens=9, min_tokens=4, logit_bias=bias, **common)
    banned = run(
        tiny,
        max_tokens=4,
        logit_bias=dict.fromkeys(tiny.config.eos_ids, -INF),
        **common,
    )
    assert g.token_ids[:4] == banned.token_ids
    assert g.logprobs is not None and banned.logprobs is not None
    assert g.logprobs[:4].tobytes() == banned.logprobs.tobytes()
    assert g.token_ids[4] in tiny.config.eos_ids and len(g.token_ids) == 5


def test_min_tokens_with_stop_strings(tiny: Gemma) -> None:
    free = run(tiny, max_tokens=30, ignore_eos=True)
    options: Any = {"max_tokens": 30, "ignore_eos": True}
    stop = free.text[2:4]
    assert len(run(tiny, stop=stop, **options).token_ids) < 12
    late = run(tiny, stop=stop, min_tokens=12, **options)
    assert len(late.token_ids) > 12
    assert late.token_ids == free.token_ids[: len(late.token_ids)]
    assert free.text.startswith(late.text) and stop in late.text
    pieces = list(
        tiny.stream(
            create_kv_cache(tiny.config),
            PROMPT,
            stop=stop,
            min_tokens=12,
            **options,
        )
    )
    assert "".join(piece.text for piece in pieces) == late.text


# ---- Reports ----


def test_top_logprobs(tiny: Gemma) -> None:
    first = create_kv_cache(tiny.config)
    second = first.fork()
    g = tiny.generate(
        first, PROMPT, max_tokens=4, top_logprobs=5, temperature=1.0, seed=1
    )
    top = g.top_logprobs
    assert top is not None and g.logprobs is not None
    assert top.token_ids.shape == top.logprobs.shape == (4, 5)
    assert top.token_ids.dtype == np.int32
    assert top.logprobs.dtype == np.float32
    tokens = PROMPT
    for i, token in enumerate(g.token_ids):
        logits = tiny.logits(second, tokens).astype(np.float64)
        order = np.argsort(-logits, kind="stable")[:5]
        assert top.token_ids[i].tolist() == order.tolist()
        largest = logits.max()
        total = largest + np.log(np.exp(logits - largest).sum())
        assert top.logprobs[i] == pytest.approx(logits[order] - total, abs=1e-4)
        at = np.flatnonzero(top.token_ids[i] == token)
        assert (top.logprobs[i][at] == g.logprobs[i]).all()
        tokens = [token]


def test_top_logprobs_of_pieces_and_samples(tiny: Gemma) -> None:
    options: Any = {"max_tokens": 4, "top_logprobs": 2}
    whole = run(tiny, **options).top_logprobs
    assert whole is not None
    stream = tiny.stream(create_kv_cache(tiny.config), PROMPT, **options)
    for i, piece in enumerate(stream):
        assert piece.top_logprobs is not None
        assert piece.top_logprobs.token_ids.tolist() == (
            whole.token_ids[i].tolist()
        )
        assert piece.top_logprobs.logprobs.shape == (2,)
    cache = create_kv_cache(tiny.config)
    samples = tiny.generate(
        cache, PROMPT, n=3, temperature=1.0, seed=5, **options
    )
    for sample in samples:
        assert sample.top_logprobs is not None
        assert sample.top_logprobs.token_ids.shape == (4, 2)
        # The first place is the same for all.
        assert sample.top_logprobs.logprobs[0].tobytes() == (
            whole.logprobs[0].tobytes()
        )
    assert run(tiny, max_tokens=2).top_logprobs is None


ASKED: list[dict[str, Any]] = [
    {"top_logprobs": 3},
    {"logits_processor": processor},
    {"deadline": 1000},
    {"min_tokens": 0, "stop_token_ids": [], "ignore_eos": False},
]


@pytest.mark.parametrize("more", ASKED, ids=lambda more: next(iter(more)))
@pytest.mark.parametrize(
    "base",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.0, "seed": 4, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.5, "seed": 4, "min_p": 0.1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 0.4, "logit_bias": {7: 2.0}},
    ],
    ids=str,
)
def test_what_only_looks_changes_no_bit(
    tiny: Gemma, base: dict[str, Any], more: dict[str, Any]
) -> None:
    plain = run(tiny, max_tokens=12, logprobs=True, **base)
    looked = run(tiny, max_tokens=12, logprobs=True, **base, **more)
    assert plain.token_ids == looked.token_ids
    assert plain.logprobs is not None and looked.logprobs is not None
    assert plain.logprobs.tobytes() == looked.logprobs.tobytes()


# ---- Processors ----


def test_processor_sees_the_conversation_and_raw_logits(tiny: Gemma) -> None:
    rows: list[tuple[list[int], bytes]] = []

    def note(ids: Any, logits: Any) -> None:
        assert ids.dtype == np.int32 and logits.dtype == np.float32
        rows.append((ids.tolist(), logits.tobytes()))

    g = run(
        tiny,
        max_tokens=3,
        temperature=0.8,
        seed=2,
        logit_bias={9: 5.0},
        logits_processor=note,
    )
    cache = create_kv_cache(tiny.config)
    tokens = PROMPT
    for i, token in enumerate(g.token_ids):
        raw = tiny.logits(cache, tokens)
        assert rows[i] == (PROMPT + g.token_ids[:i], raw.tobytes())
        tokens = [token]


def favour(token: int, how: str) -> Any:
    def in_place(ids: Any, logits: Any) -> None:
        logits[token + len(ids) % 3] += 1000

    def returned(ids: Any, logits: Any) -> Any:
        bias = np.zeros(len(logits))
        bias[token + len(ids) % 3] = 1000
        return logits + bias  # float64

    return in_place if how == "in place" else returned


@pytest.mark.parametrize("how", ["in place", "returned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processor_decides(tiny: Gemma, how: str, temperature: float) -> None:
    expected = [20 + (len(PROMPT) + i) % 3 for i in range(5)]
    options: Any = {"max_tokens": 5, "temperature": temperature, "seed": 1}
    options["logits_processor"] = favour(20, how)
    assert run(tiny, **options).token_ids == expected
    stream = tiny.stream(create_kv_cache(tiny.config), PROMPT, **options)
    assert [piece.token_id for piece in stream] == expected
    cache = create_kv_cache(tiny.config)
    for g in tiny.generate(cache, PROMPT, n=2, **options):
        assert g.token_ids == expected
    caches = [create_kv_cache(tiny.config) for _ in range(3)]
    options["logits_processor"] = [favour(20, how), None, favour(40, how)]
    batch = tiny.generate_batch(caches, [PROMPT] * 3, **options)
    plain = run(tiny, **options | {"logits_processor": None})
    assert batch[0].token_ids == expected
    assert batch[1].token_ids == plain.token_ids
    assert batch[2].token_ids == [token + 20 for token in expected]


@pytest.mark.parametrize("which", ["own", "other", "truncate"])
def test_a_processor_that_calls_its_model_is_told_so(
    tiny: Gemma, which: str
) -> None:
    # It runs inside a step, which would wait for itself.
    own, other = create_kv_cache(tiny.config), create_kv_cache(tiny.config)

    def call(ids: Any, logits: Any) -> None:
        if which == "truncate":
            own.truncate(0)
        tiny.generate(own if which == "own" else other, PROMPT, max_tokens=1)

    with pytest.raises(GemmaKVError, match="inside (a step|one of its own)"):
        tiny.generate(own, PROMPT, max_tokens=2, logits_processor=call)
    assert len(own) == len(other) == 0
    assert len(tiny.generate(other, PROMPT, max_tokens=2).token_ids) == 2


def test_min_tokens_and_bias_come_behind_the_processor(tiny: Gemma) -> None:
    eos = tiny.config.eos_ids[0]

    def force(ids: Any, logits: Any) -> None:
        logits[eos] = 1e9

    g = run(tiny, max_tokens=9, min_tokens=3, logits_processor=force)
    assert len(g.token_ids) == 4 and g.token_ids[-1] == eos
    g = run(tiny, max_tokens=3, logit_bias={eos: -INF}, logits_processor=force)
    assert eos not in g.token_ids


class Refusal(Exception):
    pass


def raise_at(length: int) -> Any:
    def fail(ids: Any, logits: Any) -> None:
        if len(ids) == length:
            raise Refusal("not this")

    return fail


def test_an_error_of_the_processor_ends_the_request(tiny: Gemma) -> None:
    options: Any = {
        "max_tokens": 9,
        "logits_processor": raise_at(len(PROMPT) + 4),
    }
    cache = create_kv_cache(tiny.config)
    with pytest.raises(Refusal, match="not this") as caught:
        tiny.generate(cache, PROMPT, **options)
    assert caught.traceback[-1].name == "fail"
    assert len(cache) == 0
    with pytest.raises(Refusal):
        tiny.generate(cache, PROMPT, n=2, **options)
    assert len(cache) == 0
    other = create_kv_cache(tiny.config)
    with pytest.raises(Refusal):
        tiny.generate_batch([cache, other], [PROMPT, [2]], **options)
    assert len(cache) == len(other) == 0
    # A stream keeps what it delivered.
    stream = tiny.stream(cache, PROMPT, **options)
    given = []
    with pytest.raises(Refusal):
        for piece in stream:
            given.append(piece.token_id)
    assert cache.tokens.tolist() == PROMPT + given
    with pytest.raises(Refusal):
        stream.result()
    plain = run(tiny, max_tokens=9)
    assert given == plain.token_ids[: len(given)]


def run_out(*_: Any) -> None:
    next(iter(()))


@pytest.mark.parametrize(
    "name", ["logits_processor", "progress", "prompt_progress"]
)
def test_a_stop_iteration_is_no_end(tiny: Gemma, name: str) -> None:
    options: Any = {"max_tokens": 9, name: run_out}
    cache = create_kv_cache(tiny.config)
    with pytest.raises(StopIteration):
        tiny.generate(cache, PROMPT, **options)
    assert len(cache) == 0
    # As in any coroutine or generator.
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        asyncio.run(tiny.agenerate(cache, PROMPT, **options))
    assert len(cache) == 0
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(tiny.stream(cache, PROMPT, **options))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(Session(tiny).stream("Hi", **options))


@pytest.mark.parametrize(
    "result, words",
    [
        (np.zeros(3), "None or an array of 369 numbers, found another shape"),
        ("x", "found str"),
    ],
)
def test_a_processor_that_returns_something_else(
    tiny: Gemma, result: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run(tiny, logits_processor=lambda ids, logits: result)


def test_a_processor_may_keep_its_arrays(tiny: Gemma) -> None:
    kept: list[Any] = []
    run(
        tiny,
        max_tokens=3,
        logits_processor=lambda ids, logits: kept.append(logits),
    )
    assert len({row.tobytes() for row in kept}) == 3


def test_a_processor_lives_as_long_as_it_is_needed(tiny: Gemma) -> None:
    def start() -> Iterator[Any]:
        return tiny.stream(
            create_kv_cache(tiny.config),
            PROMPT,
            max_tokens=4,
            logits_processor=favour(20, "in place"),
        )

    assert len(list(start())) == 4


@pytest.mark.parametrize("how", ["close", "exit"])
def test_the_process_ends_while_a_processor_runs(
    tiny_path: object, how: str
) -> None:
    code = """
import sys, time
import gemmakv

def slow(ids, logits):
    time.sleep(0.05)  # one runs at any time, as the process ends too

gemma = gemmakv.Gemma.load(sys.argv[1])
cache = gemmakv.create_kv_cache(gemma.config)
stream = gemma.stream(cache, [2, 5], max_tokens=50, logits_processor=slow)
next(stream)
if sys.argv[2] == "close":
    gemma.close()
    del stream, gemma
    print("closed", flush=True)
else:
    sys.kept = (stream, gemma)
"""
    result = run_program(code, tiny_path, how)
    assert (result.returncode, result.stderr) == (0, "")


# ---- Deadlines ----


def test_deadline(tiny: Gemma) -> None:
    endless = family_models.model(
        "gemma3", context=1 << 20, tokenizer=tiny.tokenizer
    )
    for how in ("generate", "stream", "n", "batch"):
        # The whole of it may pass while this process is frozen.
        for deadline in (0.02, 0.3, 5, 30):
            cache = create_kv_cache(endless.config)
            options: Any = {"max_tokens": 1 << 19, "deadline": deadline}
            options["ignore_eos"] = True
            if how == "n":
                results = endless.generate(cache, PROMPT, n=2, **options)
            elif how == "batch":
                results = endless.generate_batch([cache], [PROMPT], **options)
            elif how == "stream":
                results = [endless.stream(cache, PROMPT, **options).result()]
            else:
                results = [endless.generate(cache, PROMPT, **options)]
            for g in results:
                assert g.finish_reason == "deadline"
                kept = g.cache or cache
                assert kept.tokens.tolist() == PROMPT + g.token_ids
            if all(g.token_ids for g in results):
                break
        else:
            pytest.fail("nothing was said in half a minute")


def test_a_deadline_that_is_over_samples_nothing(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    g = tiny.generate(cache, PROMPT, deadline=0)
    assert g.finish_reason == "deadline" and g.token_ids == []
    assert cache.tokens.tolist() == PROMPT
    assert tiny.generate(cache, "", max_tokens=4).token_ids == (
        run(tiny, max_tokens=4).token_ids
    )


# ---- Ranges that nothing is in ----


def test_messages_state_no_empty_range(tiny: Gemma) -> None:
    cache = gemmakv.LayerCache(1, 8, 1, 32)
    with pytest.raises(ValueError, match="expected columns to be given first"):
        cache.compute_causal_mask(1)
    with pytest.raises(ValueError, match="threads: .* at least 1, found 0"):
        Gemma.load("nothing.gguf", threads=0)
    with pytest.raises(ValueError, match="threads: .* found True"):
        Gemma.load("nothing.gguf", threads=True)
    with pytest.raises(ValueError, match="capacity_tokens: .*found True"):
        create_kv_cache(tiny.config, True)


# ---- Sessions ----


def test_options_that_no_file_holds_are_not_saved(tiny: Gemma) -> None:
    session = gemmakv.Session(
        tiny,
        options={
            "max_tokens": 4,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "deadline": 100,
            "logits_processor": processor,
        },
    )
    session.send("hello")
    again = gemmakv.Session.from_bytes(session.to_bytes(), tiny)
    assert again.options == {
        "max_tokens": 4,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "deadline": 100,
    }
