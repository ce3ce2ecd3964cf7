"""Where the time of steps goes: every moment of a step is in one part."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import gemmakv
from gemmakv import Gemma, PhaseProfile
from gemmakv.generation._requests import requests_of
from support import tiny_gguf

ALWAYS = {
    "planning", "embedding", "norms", "qkv", "rope", "attention",
    "attention_output", "gate_up", "down", "head", "sampling",
}  # fmt: skip


@pytest.fixture
def timed(tiny_path: Path) -> Gemma:
    return Gemma.load(tiny_path, threads=2, prefix_cache=False, profile=True)


def used(phase: PhaseProfile) -> set[str]:
    return {part for part, seconds in phase.parts.items() if seconds > 0}


def check(phase: PhaseProfile) -> None:
    assert sum(phase.parts.values()) == pytest.approx(phase.seconds, abs=1e-6)
    for part, seconds in phase.serial.items():
        assert 0 <= seconds <= phase.parts[part] + 1e-9
    assert phase.serial["joins"] == 0


def test_each_phase_counts_its_own_steps(timed: Gemma) -> None:
    cache = gemmakv.create_kv_cache(timed.config)
    timed.generate(
        cache, [3] * 40, max_tokens=6, ignore_eos=True, speculate="off"
    )
    profile = timed.profile()
    assert [name for name, _ in profile.phases()] == ["prefill", "decode"]
    assert (profile.prefill.steps, profile.prefill.rows) == (1, 40)
    assert (profile.decode.steps, profile.decode.rows) == (5, 5)
    for phase in (profile.prefill, profile.decode):
        check(phase)
        assert used(phase) - {"drafting", "joins"} == ALWAYS
        assert phase.loops >= phase.steps * tiny_gguf.LAYERS
    assert profile.decode.loops == requests_of(timed).engine.parallel_loops - (
        profile.prefill.loops
    )


def test_a_difference_is_what_came_between(timed: Gemma) -> None:
    cache = gemmakv.create_kv_cache(timed.config)
    timed.logits(cache, [3] * 10)
    before = timed.profile()
    timed.logits(cache, [4] * 7)
    between = timed.profile() - before
    assert (between.prefill.steps, between.prefill.rows) == (1, 7)
    assert [name for name, _ in between.phases()] == ["prefill"]
    check(between.prefill)
    whole = before + between
    assert whole.prefill.rows == 17
    check(whole.prefill)


def test_conversations_that_read_and_write_at_once_are_mixed(
    timed: Gemma,
) -> None:
    """Steps of both kinds; none is in two phases."""
    reader = gemmakv.create_kv_cache(timed.config)
    writer = gemmakv.create_kv_cache(timed.config)
    mixed = threading.Event()

    def read() -> None:  # as long as it takes
        while not mixed.is_set():
            stream = timed.stream(writer, [5], max_tokens=200, ignore_eos=True)
            for _ in stream:
                pass
            writer.reset()

    other = threading.Thread(target=read)
    other.start()
    until = time.monotonic() + 60
    while timed.profile().mixed.steps == 0 and time.monotonic() < until:
        timed.logits(reader, [3] * 3)
        reader.reset()
    mixed.set()
    other.join()
    profile = timed.profile()
    assert profile.mixed.steps > 0
    check(profile.mixed)
    total = sum(phase.steps for _, phase in profile.phases())
    assert total == requests_of(timed).engine.steps


def test_one_thread_joins_nobody(tiny_path: Path) -> None:
    alone = Gemma.load(tiny_path, threads=1, profile=True)
    alone.logits(gemmakv.create_kv_cache(alone.config), [3] * 40)
    prefill = alone.profile().prefill
    assert prefill.loops == 0 and prefill.parts["joins"] == 0
    assert prefill.serial == prefill.parts


def test_results_do_not_depend_on_it(timed: Gemma, tiny_path: Path) -> None:
    plain = Gemma.load(tiny_path, threads=2, prefix_cache=False)
    texts = []
    for gemma in (timed, plain):
        cache = gemmakv.create_kv_cache(gemma.config)
        reply = gemma.generate(
            cache, [3, 4, 5], max_tokens=9, temperature=1.0, seed=1,
            logprobs=True,
        )  # fmt: skip
        assert reply.logprobs is not None
        texts.append((reply.token_ids, reply.logprobs.tolist()))
    assert texts[0] == texts[1]


def test_a_tenant_sees_the_same_steps(timed: Gemma) -> None:
    timed.logits(gemmakv.create_kv_cache(timed.config), [3] * 4)
    assert timed.with_salt("a").profile() == timed.profile()


def test_it_must_be_asked_for(tiny_path: Path) -> None:
    plain = Gemma.load(tiny_path)
    assert not plain.profiled
    with pytest.raises(ValueError, match="profile: .*profile=True"):
        plain.profile()
    with pytest.raises(ValueError, match="profile: expected True or False"):
        Gemma.load(tiny_path, profile="yes")  # type: ignore[arg-type]
