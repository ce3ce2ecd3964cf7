"""Token ids against llama.cpp's (tests/golden/tokens.json)."""

from __future__ import annotations

import json
import random

import pytest

import gemmakv
import tiny_gguf
from conftest import GOLDEN
from gemmakv import _core
from gemmakv.tokenizer import Tokenizer

CASES = json.loads((GOLDEN / "tokens.json").read_text())
BOS, EOS, UNK, END_OF_TURN = 2, 1, 3, 106


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return Tokenizer(_core.sentencepiece_model(model_path))


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_path: object) -> Tokenizer:
    return Tokenizer(_core.sentencepiece_model(str(tiny_path)))


def test_goldens_are_many() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_ids_equal_llama_cpp(tokenizer: Tokenizer, case: dict) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_special_ids_equal_llama_cpp(tokenizer: Tokenizer, case: dict) -> None:
    ids = tokenizer.encode(case["text"], parse_special=True)
    assert ids == case["special_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_text_survives(tokenizer: Tokenizer, case: dict) -> None:
    text = tokenizer.decode(case["ids"])
    assert text == case["text"].replace("\u2581", " ")


def test_random_text_survives(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    alphabet = " \n\t\0abc.<>|\u00e9\u0301\u4e16\U0001f642\U0010fffd"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_takes_its_space_mark_for_a_space(
    tokenizer: Tokenizer,
) -> None:
    # llama.cpp gives [236743, 1123]: it looks for runs of spaces before it
    # replaces them. The library that made the vocabulary is right.
    assert tokenizer.encode("\u2581\u2581x") == tokenizer.encode("  x")


def test_control_strings_in_text_stay_text(tokenizer: Tokenizer) -> None:
    for text in ("<bos>", "<eos>", "<end_of_turn>", "<unused0>", "<unk>"):
        ids = tokenizer.encode(f"a{text}b")
        assert not set(ids) & {BOS, EOS, UNK, END_OF_TURN, 6}
        assert tokenizer.decode(ids) == f"a{text}b"
        assert len(tokenizer.encode(text, parse_special=True)) == 1


def test_encode_never_adds_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("", parse_special=True) == []
    assert BOS not in tokenizer.encode("Hello")


def test_decode_leaves_control_tokens_out(tokenizer: Tokenizer) -> None:
    ids = [BOS, *tokenizer.encode("Hi"), END_OF_TURN, EOS]
    assert tokenizer.decode(ids) == "Hi"


def test_decode_replaces_what_is_not_utf8(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.id_of("<0xE2>")
    assert first_byte is not None
    assert tokenizer.decode_bytes([first_byte]) == b"\xe2"
    assert tokenizer.decode([first_byte]) == "\ufffd"


def test_token_bytes_joined_are_the_text(tokenizer: Tokenizer) -> None:
    text = "na\u00efve \U0001fae8\U0010ffff  \n\n\0 end"
    table = tokenizer.token_bytes
    assert len(table) == tokenizer.vocab_size == 262144
    joined = b"".join(table[i] for i in tokenizer.encode(text))
    assert joined == text.encode("utf-8")


def test_id_of(tokenizer: Tokenizer) -> None:
    assert tokenizer.id_of("<end_of_turn>") == END_OF_TURN
    assert tokenizer.id_of("no such piece at all") is None


@pytest.mark.parametrize("token", [-1, 262144, 1 << 40])
def test_decode_rejects_what_is_no_token(
    tokenizer: Tokenizer, token: int
) -> None:
    with pytest.raises(ValueError, match=str(token)):
        tokenizer.decode([token])


def test_lone_surrogates_are_rejected(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="D83D"):
        tiny_tokenizer.encode("ab\ud83d")


def test_text_must_be_a_str(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="bytes"):
        tiny_tokenizer.encode(b"ab")  # type: ignore[arg-type]


def test_garbage_is_no_vocabulary() -> None:
    with pytest.raises(gemmakv.CorruptFile, match="tokenizer"):
        Tokenizer(b"\x01\x02 not a model")


def test_tiny_vocabulary(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.vocab_size == tiny_gguf.VOCAB
    pieces, _, _ = tiny_gguf.vocabulary()
    ids = tiny_tokenizer.encode("  the")
    assert [pieces[i] for i in ids] == ["  ", "the"]
    # A character that is no piece falls back to its bytes.
    assert tiny_tokenizer.encode("\U0001f642") == [
        tiny_gguf.BYTE_0 + byte for byte in "\U0001f642".encode()
    ]
