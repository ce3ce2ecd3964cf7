"""Guesses of what comes next: they change the time alone."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import Gemma
from gemmakv.options import GenerationOptions
from support import guesses
from support.command import RunCli
from support.waits import wait_until

TEXT = "the cat sat on the mat and the cat sat on the hat and " * 3
SAME: Any = {**guesses.SAME, "max_tokens": 150}


@pytest.fixture
def looks_up(tiny_path: Path) -> Gemma:
    return Gemma.load(tiny_path, prefix_cache=False, speculate="lookup")


def new(gemma: Gemma) -> gemmakv.KVCache:
    return gemmakv.create_kv_cache(gemma.config)


@pytest.mark.parametrize("options", guesses.OPTIONS)
def test_nothing_else_changes(tiny: Gemma, options: dict[str, Any]) -> None:
    options = {"max_tokens": 60, "top_logprobs": 3, **options}
    plain, guessed = new(tiny), new(tiny)
    expected = tiny.generate(plain, TEXT, speculate="off", **options)
    found = tiny.generate(guessed, TEXT, speculate="lookup", **options)
    guesses.check_same(found, guessed, expected, plain)
    streamed = new(tiny)
    with tiny.stream(streamed, TEXT, speculate="lookup", **options) as stream:
        assert [piece.token_id for piece in stream] == expected.token_ids
    assert streamed.tokens.tolist() == plain.tokens.tolist()


def test_a_grammar_holds(tiny: Gemma) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    grammar = gemmakv.Grammar.regex("(ab){5,40}c")
    options: Any = {"grammar": grammar, "max_tokens": 90, "seed": 5}
    for temperature in (0.0, 1.0):
        said = [
            tiny.generate(
                new(tiny), TEXT, speculate=how, temperature=temperature,
                **options,
            )
            for how in ("off", "lookup")
        ]  # fmt: skip
        assert said[0].token_ids == said[1].token_ids


# Text that never repeats itself: what is guessed, another one said.
NEW: Any = {
    "temperature": 2.0, "seed": 11, "max_tokens": 120, "ignore_eos": True,
    "logprobs": True,
}  # fmt: skip
PROMPT = list(range(40, 70))


def accepted(gemma: Gemma, **options: Any) -> int:
    """Of a new conversation that says what all of these do."""
    said = gemma.generate(new(gemma), PROMPT, **NEW, **options)
    expected = gemma.generate(new(gemma), PROMPT, speculate="off", **NEW)
    assert said.token_ids == expected.token_ids
    assert said.logprobs is not None and expected.logprobs is not None
    assert said.logprobs.tolist() == expected.logprobs.tolist()
    return said.usage.accepted


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_a_sibling_said_is_guessed_and_no_other_tenant(
    tiny_path: Path, prefix_cache: bool
) -> None:
    gemma = Gemma.load(tiny_path, prefix_cache=prefix_cache)
    first = accepted(gemma)
    assert first < 20
    # Whether guesses pay is measured: seldom they do not seem to.
    wait_until(lambda: accepted(gemma) > 60)
    assert accepted(gemma, prefix_cache="off") < 20
    assert accepted(gemma, prefix_cache="write") < 20
    wait_until(lambda: accepted(gemma, prefix_cache="read") > 60)
    tenant = gemma.with_salt("another")
    assert accepted(tenant) < 20
    wait_until(lambda: accepted(tenant) > 60)


def test_what_a_fork_said_is_guessed(tiny_path: Path) -> None:
    gemma = Gemma.load(tiny_path, prefix_cache=False)
    parent = new(gemma)
    gemma.prefill(parent, PROMPT)

    def fork() -> int:
        said = gemma.generate(parent.fork(), [5], **NEW)
        return said.usage.accepted

    assert fork() < 20
    wait_until(lambda: fork() > 60)


def test_usage_counts_guesses(tiny: Gemma) -> None:
    until = time.monotonic() + 60
    accepted = 0
    while not accepted and time.monotonic() < until:  # as they seem to pay
        said = tiny.generate(new(tiny), TEXT, speculate="lookup", **SAME)
        usage = said.usage
        accepted = usage.accepted
    assert usage.drafted >= usage.accepted > 0
    assert usage.accepted < usage.completion_tokens == 150


def test_lookup_is_the_default(tiny: Gemma, tiny_path: Path) -> None:
    for gemma in (tiny, Gemma.load(tiny_path)):

        def right(gemma: Gemma = gemma) -> int:
            said = gemma.generate(new(gemma), TEXT, **SAME)
            return said.usage.accepted

        wait_until(right)
    off = Gemma.load(tiny_path, prefix_cache=False, speculate="off")
    assert off.generate(new(off), TEXT, **SAME).usage.drafted == 0


def test_the_model_says_what_calls_do_not(looks_up: Gemma) -> None:
    def drafted(gemma: Gemma = looks_up, **options: Any) -> int:
        said = gemma.generate(new(gemma), TEXT, **SAME, **options)
        return said.usage.drafted

    # Guesses are made where they seem to pay, which is measured.
    wait_until(lambda: drafted() > 0)
    wait_until(lambda: drafted(speculate=None) > 0)
    assert drafted(speculate="off") == 0
    tenant = looks_up.with_salt("tenant")
    wait_until(lambda: drafted(tenant) > 0)
    off, on = looks_up.generate_batch(
        [new(looks_up), new(looks_up)], [TEXT] * 2,
        speculate=["off", None], **SAME,
    )  # fmt: skip
    assert off.usage.drafted == 0
    assert on.token_ids == off.token_ids
    wait_until(
        lambda: asyncio.run(
            looks_up.agenerate(new(looks_up), TEXT, **SAME)
        ).usage.drafted
    )
    samples = looks_up.generate(new(looks_up), TEXT, n=2, **SAME)
    assert [one.token_ids for one in samples] == [off.token_ids] * 2


@pytest.mark.parametrize("bad", ["ngram", "", True, 3, ["lookup"]])
def test_what_it_cannot_be(tiny_path: Path, tiny: Gemma, bad: Any) -> None:
    words = "speculate: .*'off', 'lookup' .*'draft'"
    with pytest.raises(ValueError, match=words):
        Gemma.load(tiny_path, speculate=bad)
    with pytest.raises(ValueError, match=words):
        tiny.generate(new(tiny), TEXT, speculate=bad)
    with pytest.raises(ValueError, match=words):
        GenerationOptions.check({"speculate": bad})


def test_the_command_names_its_own_flags(cli: RunCli, tiny_path: Path) -> None:
    for command in (["generate", "-m", tiny_path, "x"], ["chat"]):
        said = cli(*command, "--speculate", "draft")
        assert said.returncode == 2
        assert b"--draft" in said.stderr
    help = cli("generate", "--help").stdout
    assert b"--speculate off|lookup|draft" in help
    assert b"--prefix-cache off|read|write|on" in help


def test_command(cli: RunCli, tiny_path: Path) -> None:
    def run(*flags: str) -> Any:
        ended = cli(
            "generate", "-m", tiny_path, TEXT, "--json", "--max-tokens", "150",
            "--ignore-eos", "--logit-bias", "30=1000", *flags,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    plain = run("--speculate", "off")
    assert plain["usage"]["drafted"] == 0
    for _ in range(10):  # until they seem to pay
        guessed = run()
        assert guessed["token_ids"] == plain["token_ids"]
        if guessed["usage"]["accepted"] > 0:
            break
    assert guessed["usage"]["accepted"] > 0
