"""One BOS stands before a text, whoever encodes it."""

from __future__ import annotations

import pytest

from gemmakv import Gemma, create_kv_cache


@pytest.mark.parametrize(
    ("text", "special"),
    [("<bos>ab", True), ("<bos>ab", False), ("ab", True), ("", False),
     ("<bos><bos>ab", True), ("ab<bos>", True)],
)  # fmt: skip
def test_one_rule_of_bos(tiny: Gemma, text: str, special: bool) -> None:
    assert tiny.tokenizer is not None
    bos = tiny.config.bos_id
    plain = tiny.tokenizer.encode(text, special)
    expected = plain if plain[:1] == [bos] else [bos, *plain]
    assert tiny.tokenizer.encode(text, special, add_bos=True) == expected

    cache = create_kv_cache(tiny)
    tiny.generate(cache, text, parse_special=special, max_tokens=0)
    assert cache.tokens.tolist() == expected


def test_a_conversation_goes_on_without_another(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny)
    tiny.prefill(cache, "ab")
    before = len(cache)
    tiny.prefill(cache, "ab")
    tiny.prefill(cache, "<bos>ab", parse_special=True)
    bos = tiny.config.bos_id
    assert cache.tokens.tolist().count(bos) == 2  # what the text spells, stays
    assert len(cache) == 3 * before - 1


def test_a_tokenizer_knows_its_ends(tiny: Gemma) -> None:
    assert tiny.tokenizer is not None
    assert tiny.tokenizer.bos_id == tiny.config.bos_id
    assert tiny.tokenizer.eos_ids == tuple(tiny.config.eos_ids)
