"""`generate`, `generate_batch` and `logits`: what the text and counts are."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache, Segment, create_kv_cache
from gemmakv.chat._transcript import Encoder
from gemmakv.generation._requests import requests_of
from gemmakv.tokenizers._tokenizer import with_bos
from support import family_models, tiny_gguf
from support.ctrl_c import ctrl_c_when
from support.family_models import FAMILIES
from support.waits import wait_for_child, wait_in_loop

BOS = 2
NO_END = {1: -np.inf, tiny_gguf.EOT: -np.inf}
PROMPT = [BOS, 300, 301, 302, 299, 310]


def caches_of(model: Gemma, count: int) -> list[KVCache]:
    return [create_kv_cache(model.config) for _ in range(count)]


def test_the_model_knows_its_capitals(gemma: Gemma) -> None:
    cache = create_kv_cache(gemma.model_type, capacity_tokens=128)
    prompt = "The capital of France is Paris. The capital of Italy is"
    g = gemma.generate(cache, prompt, max_tokens=8)
    assert g.text.startswith(" Rome.")
    assert str(g) == g.text
    assert g.finish_reason == "length"
    assert len(g.token_ids) == g.usage.completion_tokens == 8
    assert g.usage.prompt_tokens == 13  # BOS, eleven words, a full stop
    assert g.usage.cached_tokens == 0
    assert g.logprobs is None
    assert gemma.tokenizer.decode(g.token_ids) == g.text
    assert g.timings.prefill_s > 0 and g.timings.decode_s > 0
    assert g.timings.prefill_tokens_per_s > 0
    assert g.timings.decode_tokens_per_s > 0


def test_greedy_is_the_argmax_of_logits(tiny: Gemma) -> None:
    first, second = caches_of(tiny, 2)
    g = tiny.generate(first, PROMPT, max_tokens=5, logit_bias=NO_END)
    tokens = list(PROMPT)
    for token in g.token_ids:
        logits = tiny.logits(second, tokens)
        logits[list(NO_END)] = -np.inf
        assert token == int(np.argmax(logits))
        tokens = [token]


def test_bos_stands_only_at_position_0(tiny: Gemma, cache: KVCache) -> None:
    a, b = tiny.tokenizer.encode("a"), tiny.tokenizer.encode("b")
    tiny.generate(cache, "a", max_tokens=0)
    assert cache.tokens.tolist() == [BOS, *a]
    tiny.generate(cache, "b", max_tokens=0)
    assert cache.tokens.tolist() == [BOS, *a, *b]


def test_token_ids_are_taken_as_they_are(tiny: Gemma, cache: KVCache) -> None:
    tiny.generate(cache, [300, 301], max_tokens=0)
    tiny.generate(cache, np.array([302]), max_tokens=0)
    tiny.generate(cache, (303,), max_tokens=0)
    assert cache.tokens.tolist() == [300, 301, 302, 303]


def test_empty_str_means_bos_or_goes_on(tiny: Gemma) -> None:
    parted, whole = caches_of(tiny, 2)
    tiny.generate(parted, "", max_tokens=0)
    assert parted.tokens.tolist() == [BOS]
    parted.reset()
    first = tiny.generate(parted, "the", max_tokens=4)
    rest = tiny.generate(parted, "", max_tokens=4)
    all_of_it = tiny.generate(whole, "the", max_tokens=8)
    if all_of_it.finish_reason == "length":
        assert first.token_ids + rest.token_ids == all_of_it.token_ids
        assert rest.usage.prompt_tokens == 0


def test_prompt_only(tiny: Gemma, cache: KVCache) -> None:
    g = tiny.generate(cache, PROMPT, max_tokens=0)
    assert (g.text, g.token_ids, g.finish_reason) == ("", [], "length")
    assert len(cache) == len(PROMPT)


def test_eos_is_in_the_transcript_not_in_the_text(
    tiny: Gemma, cache: KVCache
) -> None:
    for stop_id in (1, tiny_gguf.EOT):
        cache.reset()
        g = tiny.generate(cache, "the", logit_bias={stop_id: 1e6})
        assert g.token_ids == [stop_id]
        assert g.text == ""
        assert g.finish_reason == "stop"
        assert cache.tokens[-1] == stop_id


def test_stop_string_is_cut(tiny: Gemma) -> None:
    plain, stopped = caches_of(tiny, 2)
    # Printable characters only, so that the text is easy to cut.
    low = tiny_gguf.BYTE_0
    ban = {i: -np.inf for i in range(low)}
    ban |= {low + byte: -np.inf for byte in range(256)}
    text = tiny.generate(plain, "the", max_tokens=20, logit_bias=ban).text
    stop = text[7:9]
    g = tiny.generate(
        stopped, "the", max_tokens=20, logit_bias=ban, stop=["\0", stop]
    )
    assert g.text == text[: text.index(stop)]
    assert g.finish_reason == "stop"
    # The transcript ends with the token that completed the stop string.
    assert stop in tiny.tokenizer.decode(g.token_ids)
    assert stop not in tiny.tokenizer.decode(g.token_ids[:-1])
    assert stopped.tokens[-1] == g.token_ids[-1]
    assert plain.tokens[: len(stopped)].tolist() == stopped.tokens.tolist()


def test_capacity_ends_with_length(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config, capacity_tokens=10)
    g = tiny.generate(cache, PROMPT, max_tokens=100, logit_bias=NO_END)
    assert g.finish_reason == "length"
    assert len(g.token_ids) == 4
    assert len(cache) == cache.capacity_tokens == 10


def test_same_seed_same_text(tiny: Gemma) -> None:
    texts = []
    for cache in caches_of(tiny, 2):
        g = tiny.generate(cache, PROMPT, temperature=1.0, seed=7, max_tokens=20)
        assert g.seed == 7
        texts.append(g.token_ids)
    assert texts[0] == texts[1]


def test_drawn_seed_repeats_the_call(tiny: Gemma) -> None:
    first, second, third = caches_of(tiny, 3)
    g = tiny.generate(first, PROMPT, temperature=2.0, max_tokens=20)
    again = tiny.generate(
        second, PROMPT, temperature=2.0, max_tokens=20, seed=g.seed
    )
    other = tiny.generate(third, PROMPT, temperature=2.0, max_tokens=20)
    assert g.token_ids == again.token_ids
    assert g.seed == again.seed != other.seed


def test_top_k_1_is_greedy(tiny: Gemma) -> None:
    first, second = caches_of(tiny, 2)
    greedy = tiny.generate(first, PROMPT, max_tokens=10)
    top = tiny.generate(second, PROMPT, max_tokens=10, temperature=1, top_k=1)
    assert greedy.token_ids == top.token_ids


def test_logit_bias_bans_and_forces(tiny: Gemma) -> None:
    first, second = caches_of(tiny, 2)
    greedy = tiny.generate(first, PROMPT, max_tokens=1).token_ids[0]
    banned = tiny.generate(
        second, PROMPT, max_tokens=1, logit_bias={greedy: float("-inf")}
    )
    assert banned.token_ids[0] != greedy


def test_logprobs_are_those_of_the_raw_logits(tiny: Gemma) -> None:
    first, second = caches_of(tiny, 2)
    g = tiny.generate(
        first, PROMPT, max_tokens=3, logprobs=True, temperature=0.7, seed=3
    )
    assert g.logprobs.dtype == np.float32
    tokens = list(PROMPT)
    for token, logprob in zip(g.token_ids, g.logprobs):
        logits = tiny.logits(second, tokens).astype(np.float64)
        top = logits.max()
        expected = logits[token] - top - np.log(np.exp(logits - top).sum())
        assert logprob == pytest.approx(expected, abs=1e-4)
        tokens = [token]


def test_parse_special(tiny: Gemma, cache: KVCache) -> None:
    tiny.generate(cache, "<end_of_turn>", max_tokens=0)
    assert tiny_gguf.EOT not in cache.tokens
    cache.reset()
    tiny.generate(cache, "<end_of_turn>", max_tokens=0, parse_special=True)
    assert cache.tokens.tolist() == [BOS, tiny_gguf.EOT]


def test_a_prompt_that_spells_bos_has_one(tiny: Gemma) -> None:
    """As rendered templates do, which people paste."""
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("Hi")
    special: Any = {"parse_special": True}
    for prompt, expected in (
        ("<bos>Hi", [BOS, *ids]), ("Hi", [BOS, *ids]), ("<bos>", [BOS]),
        ("<bos><bos>Hi", [BOS, BOS, *ids]), ("Hi<bos>", [BOS, *ids, BOS]),
    ):  # fmt: skip
        one, two, three, four = caches_of(tiny, 4)
        found = tiny.generate(one, prompt, max_tokens=3, **special)
        assert one.tokens.tolist()[: len(expected)] == expected
        assert found.usage.prompt_tokens == len(expected)
        streamed = tiny.stream(two, prompt, max_tokens=3, **special).result()
        assert streamed.token_ids == found.token_ids
        tiny.prefill(three, prompt, **special)
        assert three.tokens.tolist() == expected
        samples = tiny.generate(four, prompt, n=2, max_tokens=3, **special)
        assert [s.token_ids for s in samples] == [found.token_ids] * 2
    cache = create_kv_cache(tiny.config)
    tiny.generate(cache, "<bos>Hi", max_tokens=0)
    assert cache.tokens.tolist() == [BOS, *tiny.tokenizer.encode("<bos>Hi")]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "text", ["<bos>Hi", "Hi", "<bos>", "<bos><bos>", "<bos", "Hi<bos>"]
)
def test_one_rule_of_bos(tiny: Gemma, text: str, special: bool) -> None:
    """Whoever turns a text into tokens for an empty conversation."""
    tokenizer = tiny.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text, special)
    expected = ids if ids[0] == BOS else [BOS, *ids]
    assert with_bos(ids, BOS) == expected
    assert with_bos(ids, -1) == ids
    cache = create_kv_cache(tiny.config)
    tiny.prefill(cache, text, parse_special=special)
    assert cache.tokens.tolist() == expected
    options: Any = {"pooling": "mean", "parse_special": special}
    assert np.array_equal(
        tiny.embed([text], **options), tiny.embed([expected], pooling="mean")
    )
    assert np.array_equal(
        tiny.score(text, ["a", "b"], parse_special=special),
        tiny.score(expected, ["a", "b"]),
    )
    rendered = [Segment(part, id is not None) for part, id in (
        tokenizer.split_special(text) if special else [(text, None)]
    )]  # fmt: skip
    assert Encoder(tokenizer, BOS).encode(rendered).tolist() == expected


def test_bos_that_is_spelled_in_a_conversation_stays(tiny: Gemma) -> None:
    """It begins an empty one alone, unless somebody says it."""
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("Hi")
    cache = create_kv_cache(tiny.config)
    tiny.prefill(cache, "Hi")
    tiny.prefill(cache, "Hi")
    tiny.prefill(cache, "<bos>Hi", parse_special=True)
    assert cache.tokens.tolist() == [BOS, *ids, *ids, BOS, *ids]


def test_progress_reports_tokens(tiny: Gemma, cache: KVCache) -> None:
    calls: list[tuple[int, int]] = []
    tiny.generate(
        cache,
        PROMPT,
        max_tokens=30,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (36, 36)
    assert calls == sorted(calls)


def test_progress_may_use_the_model_and_the_cache(
    tiny: Gemma, cache: KVCache
) -> None:
    """It waits for the call that tells it."""
    said: list[str] = []

    def progress(done: int, total: int) -> None:
        said.append(tiny.generate("ab", max_tokens=2).text)
        said.append(tiny.generate(cache.fork(), "ab", max_tokens=2).text)
        if len(said) == 2:
            tiny.generate(cache, "ab", max_tokens=2)
            lengths.append(len(cache))

    lengths: list[int] = []
    alone = tiny.generate(cache.fork(), PROMPT, max_tokens=3)
    found = tiny.generate(cache, PROMPT, max_tokens=3, progress=progress)
    assert found.token_ids == alone.token_ids
    assert said[0] == tiny.generate("ab", max_tokens=2).text
    assert lengths == [len(cache)]
    assert lengths[0] > found.usage.prompt_tokens + len(found.token_ids)


def test_progress_errors_are_raised(tiny: Gemma, cache: KVCache) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        tiny.generate(cache, PROMPT, max_tokens=3, progress=fail)


def test_progress_that_raises_ends_the_call_at_once(
    endless: Gemma,
) -> None:
    caches = [create_kv_cache(endless.config) for _ in range(2)]
    for cache in caches:
        endless.generate(cache, "the", max_tokens=2)
    before = [cache.tokens.tolist() for cache in caches]

    def fail(done: int, total: int) -> None:
        raise RuntimeError("from the callback")

    def fail_at_the_end(done: int, total: int) -> None:
        if done == total:
            raise RuntimeError("from the callback")

    for report, count in ((fail, 100_000), (fail_at_the_end, 3)):
        steps = requests_of(endless).engine.steps
        with pytest.raises(RuntimeError, match="from the callback"):
            endless.generate_batch(
                caches, ["the", "a"], max_tokens=count, progress=report
            )
        assert requests_of(endless).engine.steps - steps < 1000
        assert [cache.tokens.tolist() for cache in caches] == before
    with pytest.raises(RuntimeError, match="from the callback"):
        endless.generate(
            caches[0], "the", n=2, max_tokens=100_000, progress=fail
        )
    assert caches[0].tokens.tolist() == before[0]


def test_n_continues_on_forks(tiny: Gemma, cache: KVCache) -> None:
    alone = caches_of(tiny, 3)
    samples = tiny.generate(
        cache, PROMPT, n=3, temperature=1.5, seed=11, max_tokens=12
    )
    assert cache.tokens.tolist() == PROMPT
    assert [s.seed for s in samples] == [11, 12, 13]
    for i, (sample, other) in enumerate(zip(samples, alone)):
        g = tiny.generate(
            other, PROMPT, temperature=1.5, seed=11 + i, max_tokens=12
        )
        assert sample.token_ids == g.token_ids
        assert sample.cache.tokens.tolist() == other.tokens.tolist()
        assert sample.usage.prompt_tokens == len(PROMPT)
    assert len({tuple(s.token_ids) for s in samples}) > 1


def test_n_1_is_a_list(tiny: Gemma, cache: KVCache) -> None:
    [g] = tiny.generate(cache, PROMPT, n=1, max_tokens=2)
    assert len(g.token_ids) == 2 or g.finish_reason == "stop"
    assert len(cache) == len(PROMPT)


def test_batch_equals_single_calls(tiny: Gemma) -> None:
    prompts = ["the", PROMPT, "in a the", [BOS] * 40]
    batch, single = caches_of(tiny, 4), caches_of(tiny, 4)
    together = tiny.generate_batch(
        batch,
        prompts,
        max_tokens=[3, 20, 9, 20],
        temperature=[0.0, 1.0, 0.5, 0.0],
        seed=[1, 2, 3, 4],
        stop=[None, ["q"], "zz", None],
        logprobs=True,
    )
    for i, cache in enumerate(single):
        g = tiny.generate(
            cache,
            prompts[i],
            max_tokens=[3, 20, 9, 20][i],
            temperature=[0.0, 1.0, 0.5, 0.0][i],
            seed=i + 1,
            stop=[None, ["q"], "zz", None][i],
            logprobs=True,
        )
        assert together[i].token_ids == g.token_ids
        assert together[i].text == g.text
        assert together[i].seed == i + 1
        assert np.array_equal(together[i].logprobs, g.logprobs)
        assert batch[i].tokens.tolist() == cache.tokens.tolist()


@pytest.mark.slow
def test_greedy_rows_of_a_batch_equal_single_calls(gemma: Gemma) -> None:
    """A step of many greedy rows leaves out what cannot win."""
    prompts = [f"Chapter {i}. It was a cold" for i in range(12)]
    together = gemma.generate_batch(
        caches_of(gemma, 12), prompts, max_tokens=8
    )
    for g, cache, prompt in zip(together, caches_of(gemma, 12), prompts):
        alone = gemma.generate(cache, prompt, max_tokens=8)
        assert g.token_ids == alone.token_ids
        logits = gemma.logits(cache, [alone.token_ids[-1]])
        again = gemma.generate(cache, "", max_tokens=1)
        assert again.token_ids == [int(logits.argmax())]


def test_batch_of_a_stop_list_for_all(tiny: Gemma) -> None:
    results = tiny.generate_batch(
        caches_of(tiny, 3), ["the", "in", "a"], max_tokens=4, stop=["x", "y"]
    )
    assert len(results) == 3



def test_calls_with_one_cache_wait_for_each_other(
    tiny: Gemma, cache: KVCache
) -> None:
    def work() -> None:
        tiny.generate(cache, [300], max_tokens=7, logit_bias={301: 1e6})

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cache.tokens.tolist() == ([300] + [301] * 7) * 5


@pytest.fixture(params=FAMILIES)
def endless(request: pytest.FixtureRequest, tiny: Gemma) -> Gemma:
    """A model with room for a call that takes minutes."""
    return family_models.model(
        request.param, context=1 << 20, tokenizer=tiny.tokenizer
    )


def has_run(model: Gemma) -> Callable[[], bool]:
    """Says whether the model has run some steps from now on."""
    before = requests_of(model).engine.steps
    return lambda: requests_of(model).engine.steps > before + 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["generate", "batch", "n", "progress"])
def test_ctrl_c_restores_the_caches(endless: Gemma, how: str) -> None:
    first, second = caches_of(endless, 2)
    for cache in (first, second):
        endless.generate(cache, PROMPT, max_tokens=3, logit_bias=NO_END)
    before = [first.tokens.tolist(), second.tokens.tolist()]
    keywords = {"max_tokens": 1_000_000, "logit_bias": NO_END}
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(has_run(endless)):
        if how == "batch":
            endless.generate_batch([first, second], ["a", "b"], **keywords)
        elif how == "n":
            endless.generate(first, "a", n=2, **keywords)
        elif how == "progress":
            endless.generate(
                first, "a", progress=lambda done, total: None, **keywords
            )
        else:
            endless.generate(first, "a", **keywords)
    assert [first.tokens.tolist(), second.tokens.tolist()] == before
    more = endless.generate(first, "", max_tokens=3, logit_bias=NO_END)
    same = endless.generate(second, "", max_tokens=3, logit_bias=NO_END)
    assert more.token_ids == same.token_ids


def test_ctrl_c_in_a_stream_keeps_what_was_returned(
    endless: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the stream, Ctrl-C would not end it."""
    cache = create_kv_cache(endless.config)
    runs, go = threading.Event(), threading.Event()

    def hold(ids: Any, logits: Any) -> None:
        if len(ids) == len(PROMPT) + 4:
            runs.set()
            go.wait(120)

    stream = endless.stream(
        cache, PROMPT, max_tokens=1_000_000, logit_bias=NO_END,
        logits_processor=hold,
    )  # fmt: skip
    read: list[int] = []
    asked: list[int] = []
    real = stream._read

    def reading(seconds: float) -> Any:
        asked.append(len(read))
        return real(seconds)

    def waits() -> bool:
        return runs.is_set() and asked[-1:] == [4]

    monkeypatch.setattr(stream, "_read", reading)
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(waits):
        for piece in stream:
            read.append(piece.token_id)
    go.set()
    # Bytes of half a character may be left, which are no token.
    assert [piece for piece in stream if piece.token_id >= 0] == []
    assert stream.result().finish_reason == "cancelled"
    assert len(read) == 4
    assert cache.tokens.tolist() == PROMPT + read


def test_several_models_at_once() -> None:
    models = [family_models.model(f, seed=s) for f in FAMILIES for s in (0, 1)]
    expected = [m.logits(create_kv_cache(m.config), PROMPT) for m in models]
    for i, logits in enumerate(expected[1:]):
        assert not np.array_equal(logits, expected[i])
    found: dict[int, np.ndarray] = {}

    def work(i: int, model: Gemma) -> None:
        for _ in range(10):
            found[i] = model.logits(create_kv_cache(model.config), PROMPT)

    threads = [
        threading.Thread(target=work, args=(i, model))
        for i, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, logits in enumerate(expected):
        assert np.array_equal(found[i], logits)


def test_fork_of_the_process(tiny: Gemma, cache: KVCache) -> None:
    """After os.fork() the child goes on with the loaded model."""
    tiny.generate(cache, PROMPT, max_tokens=2)
    expected = tiny.generate(cache.fork(), "a", max_tokens=8).token_ids
    child = os.fork()
    if child == 0:
        try:
            found = tiny.generate(cache, "a", max_tokens=8).token_ids
            os._exit(0 if found == expected else 1)
        finally:
            os._exit(2)
    assert wait_for_child(child) == 0
    found = tiny.generate(cache, "a", max_tokens=8).token_ids
    assert found == expected


def test_logits_shapes(tiny: Gemma, cache: KVCache) -> None:
    other = create_kv_cache(tiny.config)
    last = tiny.logits(cache, PROMPT)
    assert last.shape == (tiny.config.vocab_size,)
    assert last.dtype == np.float32
    assert cache.tokens.tolist() == PROMPT
    rows = tiny.logits(other, PROMPT, all_positions=True)
    assert rows.shape == (len(PROMPT), tiny.config.vocab_size)
    assert np.array_equal(rows[-1], last)




def test_from_tensors_equals_the_file(tiny: Gemma) -> None:
    model = Gemma.from_tensors(
        tiny.config, tiny_gguf.tensors(), tokenizer=tiny.tokenizer
    )
    assert model.fingerprint == tiny.fingerprint
    assert model.model_type is None
    first = create_kv_cache(model.config)
    second = create_kv_cache(tiny.config)
    assert np.array_equal(
        model.logits(first, PROMPT), tiny.logits(second, PROMPT)
    )
    bare = Gemma.from_tensors(tiny.config, tiny_gguf.tensors())
    assert bare.tokenizer is None
    g = bare.generate(create_kv_cache(bare.config), PROMPT, max_tokens=3)
    assert len(g.token_ids) > 0
    assert g.text == ""
    # An empty str needs none: it goes on, or begins with BOS.
    whole = tiny.generate(create_kv_cache(bare.config), PROMPT, max_tokens=5)
    cache = create_kv_cache(bare.config)
    bare.generate(cache, PROMPT, max_tokens=2)
    before = cache.tokens.tolist()
    g = bare.generate(cache, "", max_tokens=3)
    assert cache.tokens.tolist() == before + g.token_ids
    assert before + g.token_ids == PROMPT + whole.token_ids
    begun = create_kv_cache(bare.config)
    bare.generate(begun, "", max_tokens=1)
    assert begun.tokens[0] == bare.config.bos_id
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate(create_kv_cache(bare.config), "text")
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate(create_kv_cache(bare.config), PROMPT, stop="x")


def test_file_without_tokenizer(tiny: Gemma, tmp_path: Path) -> None:
    meta = {
        key: value
        for key, value in tiny_gguf.metadata().items()
        if not key.startswith("tokenizer.")
    }
    model = Gemma.load(tiny_gguf.write(tmp_path / "bare.gguf", meta))
    assert model.tokenizer is None
    found = model.logits(create_kv_cache(model.config), PROMPT)
    expected = tiny.logits(create_kv_cache(tiny.config), PROMPT)
    assert np.array_equal(found, expected)


def test_properties(gemma: Gemma) -> None:
    assert gemma.model_type is gemmakv.ModelType.GEMMA3_270M
    assert gemma.model_type == "gemma3-270m"
    assert gemma.config.num_layers == 18
    assert gemma.config.vocab_size == gemma.tokenizer.vocab_size
    assert len(gemma.fingerprint) == 32
    assert int(gemma.fingerprint, 16) > 0
    assert gemma.threads >= 1
    assert "gemma3-270m" in repr(gemma)


def test_load_reports_progress(tiny_path: object) -> None:
    calls: list[tuple[int, int]] = []
    Gemma.load(tiny_path, progress=lambda d, t: calls.append((d, t)))
    assert calls and calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)


def test_cpu_info() -> None:
    info = gemmakv.cpu_info()
    assert info["target"] in info["targets"]
    rank = {name: at for at, name in enumerate(info["compiled"])}
    order = [rank[name] for name in info["targets"]]
    assert order == sorted(order)
    assert info["threads"] >= 1
    for key in ("l1_bytes", "l2_bytes", "l3_bytes"):
        assert info[key] >= 0
    assert isinstance(info["cpu"], str)


@pytest.mark.parametrize("family", FAMILIES)
def test_progress_that_raises_in_the_end_changes_nothing(family: str) -> None:
    gemma = family_models.model(family)
    cache = create_kv_cache(gemma.config)
    gemma.logits(cache, [BOS, *(3 + i % 200 for i in range(150))])
    before = cache.to_bytes()

    def fail_at_the_end(done: int, total: int) -> None:
        if done == total:
            raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        gemma.generate(cache, [7], max_tokens=90, progress=fail_at_the_end)
    assert cache.to_bytes() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_may_be_longer_than_the_file_s_context(family: str) -> None:
    """Positions go on as if the file stated the larger context."""
    wide = family_models.model(family, context=1024)
    narrow = family_models.model(family, context=32)
    prompt = [BOS, *(3 + i % 200 for i in range(700))]
    # Whatever stated the capacity: the configuration of another file, or a
    # snapshot. More positions than any table starts with.
    shape = family_models.config(family, context_length=1 << 24)
    expected = create_kv_cache(shape)
    g = wide.generate(expected, prompt, max_tokens=40)
    caches = [create_kv_cache(shape)]
    caches.append(KVCache.from_bytes(caches[0].to_bytes(), narrow))
    for cache in caches:
        assert cache.capacity_tokens == 1 << 24
        assert narrow.generate(cache, prompt, max_tokens=40).token_ids == (
            g.token_ids)
        follow_up = [300, 301]
        np.testing.assert_array_equal(
            narrow.logits(cache, follow_up, all_positions=True),
            wide.logits(expected.fork(), follow_up, all_positions=True))
    # The model's own configuration still limits what it makes.
    with pytest.raises(ValueError, match="the model's context of 32"):
        create_kv_cache(narrow.config, capacity_tokens=33)


def test_samples_continue_the_prompt_of_their_own_call(talker: Gemma) -> None:
    def alone(before: list[int], prompt: list[int]) -> list[list[int]]:
        cache = create_kv_cache(talker.config)
        talker.logits(cache, before)
        return [
            g.token_ids
            for g in talker.generate(
                cache, prompt, n=2, max_tokens=3, temperature=1.0, seed=4)
        ]

    prompts = [[300 + i] * (i + 2) for i in range(4)]
    for _ in range(10):
        cache = create_kv_cache(talker.config)
        talker.logits(cache, [BOS])
        found: dict[int, list[gemmakv.Generation]] = {}

        def ask(i: int, cache: KVCache = cache,
                found: dict[int, list[gemmakv.Generation]] = found) -> None:
            found[i] = talker.generate(
                cache, prompts[i], n=2, max_tokens=3, temperature=1.0, seed=4)

        threads = [threading.Thread(target=ask, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, prompt in enumerate(prompts):
            for g in found[i]:
                assert g.cache is not None
                said = g.cache.tokens.tolist()[: -len(g.token_ids)]
                assert said[-len(prompt):] == prompt
            assert [g.token_ids for g in found[i]] == alone(
                said[: -len(prompt)], prompt)


def test_one_bos_whoever_comes_first(talker: Gemma) -> None:
    for turn in range(10):
        cache = create_kv_cache(talker.config)
        threads = [
            threading.Thread(
                target=talker.generate, args=(cache, "ab"),
                kwargs={"max_tokens": 3, "n": 2 if turn % 2 else None},
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.tokens.tolist().count(BOS) == 1
        assert cache.tokens[0] == BOS


def test_bos_is_there_if_the_call_before_was_undone(talker: Gemma) -> None:
    runs, go = threading.Event(), threading.Event()

    def hold(ids: Any, logits: Any) -> None:
        runs.set()
        go.wait(120)

    async def talk() -> None:
        first = asyncio.create_task(
            talker.agenerate(
                cache, "ab", max_tokens=9, logits_processor=hold))
        await wait_in_loop(runs.is_set)
        second = asyncio.create_task(
            talker.agenerate(cache, "c", max_tokens=3))
        await asyncio.sleep(0)  # it waits for the first
        first.cancel()
        await asyncio.sleep(0)  # the first is told, in the middle of its step
        go.set()
        await asyncio.wait([first, second])
        assert first.cancelled() and not second.exception()

    cache, alone = caches_of(talker, 2)
    asyncio.run(talk())
    talker.generate(alone, "c", max_tokens=3)
    assert cache.to_bytes() == alone.to_bytes()
