"""Every kind of tokenizer: a GGUF file's, and those of a directory with a
tokenizer.model or a tokenizer.json.

Token ids are compared with llama.cpp's (tests/golden/tokens.json).
"""

from __future__ import annotations

import gc
import json
import random

import pytest

import gemmakv
from gemmakv import SentencePieceTokenizer, Tokenizer, _core
from gemmakv.tokenizers._directory import tokenizer_of_folder
from gemmakv.tokenizers._gguf import pieces_of_gguf
from gemmakv.tokenizers._json_tokenizer import JsonTokenizer
from support import tiny_gguf, tokenizer_files
from support.folders import GOLDEN

CASES = json.loads((GOLDEN / "tokens.json").read_text())
RUN = " " * 32
BOS, EOS, UNK, END_OF_TURN = 2, 1, 3, 106


KINDS = ["gguf", "model", "json"]


def make(kind: str, path: str, factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a directory with the same rows."""
    if kind == "gguf":
        file = _core.GgufFile(path)
        found = pieces_of_gguf(file)
        assert found is not None
        return found
    if kind == "json":
        pytest.importorskip("tokenizers", reason="needs tokenizers")
    rows = tokenizer_files.rows_of_gguf(path)
    folder = tokenizer_files.write(factory.mktemp("t"), rows, kind)
    found = tokenizer_of_folder(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizers(
    model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    """Gemma 3's."""
    # Half a million merges, which the collector would walk again and again.
    gc.disable()
    try:
        return {
            kind: make(kind, model_path, tmp_path_factory) for kind in KINDS
        }
    finally:
        gc.enable()


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]
) -> Tokenizer:
    return tokenizers[request.param]


@pytest.fixture(params=KINDS)
def tiny_tokenizer(
    request: pytest.FixtureRequest,
    tiny_path: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tokenizer:
    return make(request.param, str(tiny_path), tmp_path_factory)


def test_goldens_are_many() -> None:
    assert len(CASES) >= 100


def skip_long_runs(tokenizer: Tokenizer, text: str) -> None:
    """Skips what a tokenizer.json cannot say: see the test of it below."""
    if isinstance(tokenizer, JsonTokenizer) and RUN in text:
        pytest.skip("a longer run of spaces than a token has")


@pytest.mark.slow
def test_long_runs_of_spaces(tokenizers: dict[str, Tokenizer]) -> None:
    # Longer ones than any token: SentencePiece takes the longest token first,
    # the merges of a tokenizer.json put halves together.
    for kind, lengths in (("gguf", [31, 1]), ("json", [16, 16])):
        ids = tokenizers[kind].encode(RUN)
        pieces = map(tokenizers[kind].piece_of, ids)
        assert [len(piece) for piece in pieces] == lengths


# The file calls these marks of images text, and llama.cpp makes them of it.
MARKS = {255999, 256000}
MARKED = [case for case in CASES if MARKS & {*case["ids"]}]
PLAIN = [case for case in CASES if case not in MARKED]


@pytest.mark.slow
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: ascii(case["text"]))
def test_ids_equal_llama_cpp(tokenizer: Tokenizer, case: dict) -> None:
    skip_long_runs(tokenizer, case["text"])
    assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", MARKED, ids=lambda case: ascii(case["text"]))
def test_marks_of_images_stay_text(tokenizer: Tokenizer, case: dict) -> None:
    ids = tokenizer.encode(case["text"])
    assert not MARKS & {*ids}
    assert tokenizer.decode(ids) == case["text"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"]))
def test_special_ids_equal_llama_cpp(tokenizer: Tokenizer, case: dict) -> None:
    skip_long_runs(tokenizer, case["text"])
    ids = tokenizer.encode(case["text"], parse_special=True)
    assert ids == case["special_ids"]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: ascii(case["text"]))
def test_text_survives(tokenizer: Tokenizer, case: dict) -> None:
    text = tokenizer.decode(case["ids"])
    assert text == case["text"].replace("\u2581", " ")


def test_random_text_survives(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    alphabet = " \n\t\0abc.<>|\u00e9\u0301\u4e16\U0001f642\U0010fffd"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_kinds_give_the_same_ids(
    tokenizers: dict[str, Tokenizer],
) -> None:
    rng = random.Random(2)
    letters = " \n\t\0abcdef.<>|0123456789\u00e9\u0301\u4e16\U0001f642\u200d\r"
    words = ["the", " quick", "\n\n", "   ", "<table>", "</b>", "1234", "\t\t",
             "\U0001f469\u200d\U0001f467", "\u0928\u092e\u0938\u094d\u0924",
             "def f(x):\n    return", "\u4f60\u597d", "\ufeff", "<bos>",
             "<start_of_turn>", "<end_of_turn>", "<unused7>", "<mask>"]

    def any_character() -> str:
        ranges = (0x20, 0x7F), (0xA0, 0xD7FF), (0xE000, 0x10FFFF)
        return chr(rng.randint(*rng.choice(ranges)))

    texts = ["".join(rng.choices(letters, k=rng.randrange(40)))
             for _ in range(2000)]
    texts += ["".join(rng.choices(words, k=rng.randrange(10)))
              for _ in range(1500)]
    texts += ["".join(any_character() for _ in range(rng.randrange(30)))
              for _ in range(1500)]
    first, *others = tokenizers.values()
    for text in texts:
        # The mark of spaces is the one character they disagree about.
        text = text.replace("\u2581", "")
        for parse in (False, True):
            ids = first.encode(text, parse)
            for other in others:
                assert other.encode(text, parse) == ids, ascii(text)
        assert first.decode(first.encode(text)) == text
    assert len(others) == 2
    assert all(t.token_bytes == first.token_bytes for t in others)


@pytest.mark.parametrize("kind", ["gguf", "model"])
def test_sentencepiece_takes_its_space_mark_for_a_space(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    # llama.cpp gives [236743, 1123]: it looks for runs of spaces before it
    # replaces them. The library that made the vocabulary is right.
    assert tokenizer.encode("\u2581\u2581x") == tokenizer.encode("  x")


def test_control_strings_in_text_stay_text(tokenizer: Tokenizer) -> None:
    for text in ("<bos>", "<eos>", "<end_of_turn>", "<unused0>", "<unk>"):
        ids = tokenizer.encode(f"a{text}b")
        assert not set(ids) & {BOS, EOS, UNK, END_OF_TURN, 6}
        assert tokenizer.decode(ids) == f"a{text}b"
        assert len(tokenizer.encode(text, parse_special=True)) == 1


def test_bos_and_eos_are_found_by_name(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.bos_id == BOS
    assert tiny_tokenizer.eos_ids == (EOS,)
    ids = tiny_tokenizer.encode("ab", add_bos=True)
    assert ids == [BOS, *tiny_tokenizer.encode("ab")]
    assert tiny_tokenizer.encode("<bos>ab", True, add_bos=True) == ids


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
    assert tokenizer.id_of("\ud800") is None
    assert tokenizer.piece_of(END_OF_TURN) == "<end_of_turn>"
    assert tokenizer.piece_of(262143) == "<unused6241>"


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
    with pytest.raises(ValueError, match="text: expected a str, found b'ab'"):
        tiny_tokenizer.encode(b"ab")  # type: ignore[arg-type]


def test_garbage_is_no_vocabulary() -> None:
    with pytest.raises(gemmakv.CorruptFile, match="tokenizer"):
        SentencePieceTokenizer(b"\x01\x02 not a model")
    with pytest.raises(gemmakv.ArgumentError, match="^model: .*'/a.model'"):
        SentencePieceTokenizer("/a.model")  # type: ignore[arg-type]


def test_tiny_vocabulary(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.vocab_size == tiny_gguf.VOCAB
    pieces, _, _ = tiny_gguf.vocabulary()
    ids = tiny_tokenizer.encode("  the")
    assert [pieces[i] for i in ids] == ["  ", "the"]
    # A character that is no piece falls back to its bytes.
    assert tiny_tokenizer.encode("\U0001f642") == [
        tiny_gguf.BYTE_0 + byte for byte in "\U0001f642".encode()
    ]
