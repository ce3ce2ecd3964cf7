"""Draft models: another model guesses, and nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import Gemma, ModelConfig
from gemmakv.generation._requests import requests_of
from support import guesses, tiny_gguf
from support.command import RunCli

TEXT = "the cat sat on the mat and the cat sat on the hat and "
SAME: Any = {**guesses.SAME, "max_tokens": 150}


def config_of(layers: int = 1, **changes: Any) -> ModelConfig:
    known = tiny_gguf.CONFIG.arguments()
    return ModelConfig(
        **{
            **known,
            "num_layers": layers,
            "layer_kinds": ["full"] * layers,
            "sliding_window": 0,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    config = config_of()
    return tiny_gguf.write(
        folder / "draft.gguf",
        tiny_gguf.metadata(config),
        tiny_gguf.tensors(3, config),
    )


@pytest.fixture(scope="module")
def small(small_path: Path) -> Gemma:
    return Gemma.load(small_path, prefix_cache=False)


@pytest.fixture(scope="module")
def drafting(tiny_path: Path, small: Gemma) -> Gemma:
    return Gemma.load(tiny_path, prefix_cache=False, draft=small)


@pytest.fixture(scope="module")
def large(tiny: Gemma) -> Gemma:
    """One whose steps take many times those of `small`."""
    return large_one(tiny)


def large_one(tiny: Gemma, **keywords: Any) -> Gemma:
    config = config_of(6, hidden_size=256, ffn_dim=1024)
    weights = tiny_gguf.tensors(4, config)
    return Gemma.from_tensors(config, weights, tiny.tokenizer, **keywords)


def new(gemma: Gemma) -> gemmakv.KVCache:
    return gemmakv.create_kv_cache(gemma.config)


def drafted(gemma: Gemma, **options: Any) -> int:
    """Guesses for a text whose every token is known. They are made where they
    pay, which a busy machine may hide for a while.
    """
    end = time.monotonic() + 60
    while time.monotonic() < end:
        said = gemma.generate(new(gemma), TEXT, **SAME, **options)
        assert said.token_ids == [30] * 150
        assert said.usage.drafted >= said.usage.accepted
        if said.usage.accepted:
            return said.usage.drafted
    return 0


@pytest.mark.parametrize("options", guesses.OPTIONS)
def test_nothing_else_changes(
    drafting: Gemma, options: dict[str, Any]
) -> None:
    options = {"max_tokens": 60, "top_logprobs": 3, **options}
    plain, guessed = new(drafting), new(drafting)
    for _ in range(3):  # the conversation goes on
        expected = drafting.generate(plain, TEXT, speculate="off", **options)
        found = drafting.generate(guessed, TEXT, **options)
        guesses.check_same(found, guessed, expected, plain)
        plain.truncate(len(plain) // 2)
        guessed.truncate(len(guessed) // 2)


@pytest.mark.slow
def test_it_drafts_where_it_pays(tiny: Gemma, small: Gemma) -> None:
    drafting = large_one(tiny, draft=small)
    assert drafted(drafting) > 0
    assert drafted(drafting, speculate="draft") > 0
    said = drafting.generate(new(drafting), TEXT, speculate="off", **SAME)
    assert said.usage.drafted == 0
    assert requests_of(drafting).engine.draft_rows > 0
    tenant = drafting.with_salt("tenant")
    assert drafted(tenant) > 0


@pytest.mark.slow
def test_a_call_may_bring_its_own(large: Gemma, small: Gemma) -> None:
    assert drafted(large, draft=small) > 0
    said = large.generate(new(large), TEXT, speculate="off", **SAME)
    assert said.usage.drafted == 0
    rows = large.generate_batch(
        [new(large), new(large)], [TEXT] * 2, draft=small,
        speculate=["off", None], **SAME,
    )  # fmt: skip
    assert rows[0].usage.drafted == 0
    assert rows[0].token_ids == rows[1].token_ids
    samples = large.generate(new(large), TEXT, n=2, draft=small, **SAME)
    assert [one.token_ids for one in samples] == [rows[0].token_ids] * 2
    said = asyncio.run(large.agenerate(new(large), TEXT, draft=small, **SAME))
    assert said.token_ids == rows[0].token_ids
    with large.stream(new(large), TEXT, draft=small, **SAME) as stream:
        assert [piece.token_id for piece in stream] == rows[0].token_ids


def test_many_at_once(drafting: Gemma) -> None:
    def say(seed: int, speculate: str) -> list[int]:
        cache = new(drafting)
        found = []
        for turn in range(3):
            found += drafting.generate(
                cache, TEXT[turn:], speculate=speculate, temperature=0.7,
                seed=seed, max_tokens=40,
            ).token_ids  # fmt: skip
        return found

    guesses.check_many_at_once(say, "draft")


@pytest.mark.slow
def test_it_lives_as_long_as_the_model(tiny: Gemma, small_path: Path) -> None:
    draft = Gemma.load(small_path, prefix_cache=False)
    gemma = large_one(tiny, draft=draft)
    draft.close()
    del draft
    gc.collect()
    assert drafted(gemma) > 0


def test_closed_while_it_is_used(tiny: Gemma, small_path: Path) -> None:
    draft = Gemma.load(small_path, prefix_cache=False)
    with tiny.stream(new(tiny), TEXT, draft=draft, **SAME) as stream:
        pieces = [next(stream)]
        draft.close()
        del draft
        gc.collect()
        pieces += stream
    assert [piece.token_id for piece in pieces] == [30] * 150


def test_what_it_cannot_be(
    tiny: Gemma, tiny_path: Path, small_path: Path, tmp_path: Path
) -> None:
    closed = Gemma.load(small_path, prefix_cache=False)
    closed.close()
    config = config_of(vocab_size=384)
    other = Gemma.from_tensors(config, tiny_gguf.tensors(3, config))
    cases: list[tuple[Any, type[Exception], str]] = [
        ("gemma-3-270m", ValueError, "draft: .*gemma-3-270m"),
        (closed, ValueError, "draft: .*closed"),
        (tiny, ValueError, "draft"),
        (tiny.with_salt("x"), ValueError, "draft"),
        (other, gemmakv.MismatchError, "vocabulary of 384"),
    ]
    for draft, error, words in cases:
        cache = new(tiny)
        with pytest.raises(error, match=words):
            tiny.generate(cache, TEXT, draft=draft)
        assert len(cache) == 0
    for draft, error, words in cases[:2] + cases[4:]:
        with pytest.raises(error, match=words):
            Gemma.load(tiny_path, draft=draft)
    words = "speculate: .*draft="
    with pytest.raises(ValueError, match=words):
        Gemma.load(tiny_path, speculate="draft")
    with pytest.raises(ValueError, match=words):
        tiny.generate(new(tiny), TEXT, speculate="draft")


def test_command(cli: RunCli, tiny_path: Path, small_path: Path) -> None:
    def run(*flags: Any) -> Any:
        ended = cli(
            "generate", "-m", tiny_path, TEXT, "--json", "--max-tokens", "200",
            "--ignore-eos", "--logit-bias", "30=1000", *flags,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    plain = run("--speculate", "off")
    guessed = run("--draft", small_path)
    assert guessed["token_ids"] == plain["token_ids"]
    assert plain["usage"]["drafted"] == 0
    refused = cli("generate", "-m", tiny_path, TEXT, "--speculate", "draft")
    assert refused.returncode != 0
    assert b"--draft" in refused.stderr
    for command in ("generate", "bench"):  # it was loaded twice, and taken
        words = (TEXT,) if command == "generate" else ()
        same = cli(command, "-m", tiny_path, *words, "--draft", tiny_path)
        assert same.returncode != 0
        assert b"draft: " in same.stderr


def test_what_a_draft_model_computes_is_drafting(
    tiny: Gemma, small: Gemma
) -> None:
    timed = large_one(tiny, draft=small, threads=2, profile=True)
    before = timed.profile()
    for _ in range(20):
        assert drafted(timed) > 0
        decode = (timed.profile() - before).decode
        assert sum(decode.parts.values()) == pytest.approx(decode.seconds)
        # Not products of the model that it guesses for. Another process may
        # have had the processor for once while a step was planned.
        if decode.parts["drafting"] > 2 * decode.parts["planning"]:
            break
        before = timed.profile()
    else:
        pytest.fail(f"drafting takes no time: {decode.parts}")
