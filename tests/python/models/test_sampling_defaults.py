"""What a model's files recommend for sampling, used on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.models._info import sampling_of_json
from support import tiny_gguf

U32, F32 = tiny_gguf.U32, tiny_gguf.F32


def load(tmp_path: Path, keys: dict[str, Any]) -> gemmakv.Gemma:
    meta = tiny_gguf.metadata() | {
        f"general.sampling.{key}": value for key, value in keys.items()
    }
    return gemmakv.Gemma.load(tiny_gguf.write(tmp_path / "m.gguf", meta))


def test_of_a_gguf_file(tmp_path: Path, tiny: gemmakv.Gemma) -> None:
    assert tiny.sampling_defaults == {}
    gemma = load(
        tmp_path, {"top_k": (U32, 64), "top_p": (F32, 0.5), "temp": (F32, 0.25)}
    )
    defaults = gemma.sampling_defaults
    assert defaults == {"top_k": 64, "top_p": 0.5, "temperature": 0.25}
    results = []
    given = {"top_k": 64, "top_p": 0.5, "temperature": 0.25}
    for keywords in (defaults, given):
        cache = gemmakv.create_kv_cache(gemma.config)
        results.append(gemma.generate(cache, [2, 9], seed=3, **keywords))
    assert results[0].token_ids == results[1].token_ids
    session = gemmakv.Session(gemma, options=defaults)
    assert session.options == defaults


def test_the_temperature_of_who_samples_is_1(tmp_path: Path) -> None:
    gemma = load(tmp_path, {"top_k": (U32, 64)})
    assert gemma.sampling_defaults == {"top_k": 64, "temperature": 1.0}


def test_bad_values_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    gemma = load(tmp_path, {"top_p": (F32, 7.0)})
    with pytest.raises(ValueError, match="top_p: .* at most 1, found 7"):
        _ = gemma.sampling_defaults


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, {}),
        ({"top_k": 64}, {}),  # greedy
        ({"do_sample": False, "temperature": 0.5}, {}),
        (
            {"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": 1},
            {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ),
        (
            {"do_sample": True, "temperature": 0.7, "min_p": None},
            {"temperature": 0.7},
        ),
    ],
)
def test_of_generation_config(
    config: dict[str, object], expected: dict[str, object]
) -> None:
    assert sampling_of_json(config) == expected
