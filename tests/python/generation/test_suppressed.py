"""Tokens that a model's files say are never to be sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support import golden_models, tiny_gguf
from support.tiny_gguf import ARRAY, STR, U32

KEY = "tokenizer.ggml.suppress_tokens"
PROMPT = [2, 9, 40, 7]


def of_gguf(folder: Path, *stated: Any) -> gemmakv.Gemma:
    meta = tiny_gguf.metadata()
    if stated:
        meta[KEY] = stated
    return gemmakv.Gemma.load(tiny_gguf.write(folder / "m.gguf", meta))


def reply(gemma: gemmakv.Gemma, **options: Any) -> list[int]:
    cache = gemmakv.create_kv_cache(gemma.config)
    found = gemma.generate(
        cache, PROMPT, max_tokens=12, ignore_eos=True, **options)
    return list(found.token_ids)


def test_of_a_gguf_file(tmp_path: Path) -> None:
    plain = of_gguf(tmp_path)
    assert plain.suppressed_tokens == ()
    usual = reply(plain)
    never = sorted(set(usual[:3]))
    gemma = of_gguf(tmp_path, ARRAY, (U32, [*never, never[0]]))
    assert gemma.suppressed_tokens == tuple(never)
    found = reply(gemma)
    assert not set(found) & set(never)
    # The same as a bias of every call.
    bias = dict.fromkeys(never, float("-inf"))
    assert found == reply(plain, logit_bias=bias)
    # In every form of a call, and sampled as well as greedy.
    sampled = reply(gemma, temperature=1.0, seed=4)
    assert sampled == reply(plain, temperature=1.0, seed=4, logit_bias=bias)
    caches = [gemmakv.create_kv_cache(gemma.config) for _ in range(2)]
    batch = gemma.generate_batch(
        caches, [PROMPT, PROMPT], max_tokens=12, ignore_eos=True)
    assert [list(r.token_ids) for r in batch] == [found] * 2
    cache = gemmakv.create_kv_cache(gemma.config)
    with gemma.stream(
        cache, PROMPT, max_tokens=12, ignore_eos=True
    ) as pieces:
        streamed = [p.token_id for p in pieces if p.token_id >= 0]
    assert streamed == found


def test_a_call_s_own_bias_takes_its_place(tmp_path: Path) -> None:
    plain = of_gguf(tmp_path)
    usual = reply(plain)
    gemma = of_gguf(tmp_path, ARRAY, (U32, [usual[0]]))
    assert reply(gemma, logit_bias={usual[0]: 0.0}) == usual
    # That of another token does not.
    other = reply(gemma, logit_bias={usual[0] + 1: 0.0})
    assert usual[0] not in other


def test_logits_are_what_they_are(tmp_path: Path) -> None:
    plain = of_gguf(tmp_path)
    gemma = of_gguf(tmp_path, ARRAY, (U32, list(range(50))))
    found = [
        model.logits(gemmakv.create_kv_cache(model.config), PROMPT)
        for model in (plain, gemma)
    ]
    assert (found[0] == found[1]).all()


def folder_of(path: Path, generation: dict[str, Any]) -> Path:
    folder = golden_models.write(path, golden_models.read("gemma4-mqa"))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_of_a_directory(tmp_path: Path) -> None:
    plain = gemmakv.Gemma.load(folder_of(tmp_path / "a", {}))
    usual = reply(plain)
    stated = {"suppress_tokens": [usual[0]], "begin_suppress_tokens": None}
    gemma = gemmakv.Gemma.load(folder_of(tmp_path / "b", stated))
    assert gemma.suppressed_tokens == (usual[0],)
    assert reply(gemma) == reply(
        plain, logit_bias={usual[0]: float("-inf")})
    assert usual[0] not in reply(gemma)


@pytest.mark.parametrize(
    "stated, message",
    [
        ({"suppress_tokens": [160]},
         "suppress_tokens has 160, expected ids below 160"),
        ({"suppress_tokens": ["<x>"]},
         "suppress_tokens is ['<x>'], expected a token id or a list of them"),
        ({"suppress_tokens": [-1]},
         "suppress_tokens is [-1], expected a token id or a list of them"),
        ({"begin_suppress_tokens": [4]},
         "begin_suppress_tokens is [4], expected null or none"),
    ],
)  # fmt: skip
def test_what_a_directory_cannot_mean(
    tmp_path: Path, stated: dict[str, Any], message: str
) -> None:
    with pytest.raises(gemmakv.GemmaKVError) as caught:
        gemmakv.Gemma.load(folder_of(tmp_path / "model", stated))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "stated, message",
    [
        ((ARRAY, (U32, [5, 1 << 30])),
         f"suppress_tokens has {1 << 30}, expected ids below "),
        ((U32, 5), f"{KEY} is 5, expected a list of token ids"),
        ((ARRAY, (STR, ["a"])), f"{KEY} is ['a'], expected a list of token"),
    ],
)  # fmt: skip
def test_what_a_gguf_file_cannot_mean(
    tmp_path: Path, stated: tuple[int, Any], message: str
) -> None:
    with pytest.raises(gemmakv.CorruptFile) as caught:
        of_gguf(tmp_path, *stated)
    assert message in str(caught.value) and "\n" not in str(caught.value)
