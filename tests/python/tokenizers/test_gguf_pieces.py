"""The core's SentencePiece against that library, on any vocabulary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gemmakv import (
    CorruptFile,
    Gemma,
    SentencePieceTokenizer,
    Tokenizer,
    _core,
    create_kv_cache,
)
from gemmakv.tokenizers import _tokenizer
from gemmakv.tokenizers._gguf import pieces_of_gguf
from support import family_models, tiny_gguf
from support.lock import lets_others_run

Row = tuple[str, float, int]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIALS: list[Row] = [(p, 0.0, CONTROL) for p in tiny_gguf.SPECIALS]
BYTES: list[Row] = [(f"<0x{value:02X}>", 0.0, BYTE) for value in range(256)]


def file_of(path: Path, rows: list[Row], space: bool = False) -> Any:
    pieces, scores, types = map(list, zip(*rows))
    metadata = tiny_gguf.metadata() | {
        "tokenizer.ggml.tokens": (tiny_gguf.ARRAY, (tiny_gguf.STR, pieces)),
        "tokenizer.ggml.scores": (tiny_gguf.ARRAY, (tiny_gguf.F32, scores)),
        "tokenizer.ggml.token_type": (
            tiny_gguf.ARRAY, (tiny_gguf.U32, types)
        ),
        "tokenizer.ggml.add_space_prefix": (tiny_gguf.BOOL, space),
    }
    tiny_gguf.write(path, metadata)
    return _core.GgufFile(str(path))


def both(path: Path, rows: list[Row], space: bool = False) -> list[Tokenizer]:
    file = file_of(path, rows, space)
    ours = pieces_of_gguf(file)
    assert ours is not None
    return [ours, SentencePieceTokenizer(_core.sentencepiece_model(file))]


def random_rows(rng: random.Random) -> list[Row]:
    """Few letters, so that pieces overlap, and few scores, so that many are
    equal.
    """
    letters = "ab\u2581\u00e9\u4e16\U0001f642\n"
    pieces = {rng.choice(letters) for _ in range(5)}
    for _ in range(rng.randrange(5, 120)):
        pieces.add("".join(rng.choices(letters, k=rng.randrange(1, 7))))
    kinds = [NORMAL] * 8 + rng.choice(
        ([], [USER_DEFINED], [UNUSED] * 3, [USER_DEFINED, UNUSED, CONTROL],
         [0, 7, USER_DEFINED])
    )
    return SPECIALS + BYTES + [
        (piece, -float(rng.randrange(rng.choice((3, 100)))),
         rng.choice(kinds))
        for piece in sorted(pieces)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_ids_equal_the_library(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng)
    ours, library = both(tmp_path / "m.gguf", rows, space=rng.random() < 0.3)
    pieces = [piece for piece, _, _ in rows]
    letters = "ab \u2581\u00e9\u4e16\U0001f642\n\0x"
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(40)))
        if rng.random() < 0.3:
            text += "".join(rng.choices(pieces, k=4))
        assert ours.encode(text) == library.encode(text), ascii(text)
    assert ours.token_bytes == library.token_bytes
    for token, piece in enumerate(pieces):
        assert ours.id_of(piece) == library.id_of(piece)
        assert ours.piece_of(token) == library.piece_of(token)


@pytest.mark.parametrize("seed", range(20))
def test_at_least_is_never_too_many(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    rows = [*random_rows(rng), ("x\u2581\n\u2581y", -0.5, NORMAL)]
    for one in both(tmp_path / "m.gguf", rows, space=rng.random() < 0.3):
        for _ in range(200):
            monkeypatch.setattr(_tokenizer, "_SLICE", rng.randrange(1, 20))
            letters = rng.choice(("ab \u2581\u00e9\n\0x", "a \n", "ab"))
            text = "".join(rng.choices(letters, k=rng.randrange(60)))
            text += rng.choice(("", "<bos>" * 3, "x \n y" * 4))
            enough = rng.randrange(40)
            least = one._at_least(text, enough)
            for special in (False, True):
                assert least <= len(one.encode(text, special)), ascii(text)


def test_at_least_sees_length_and_words(tmp_path: Path) -> None:
    rows = [*SPECIALS, *BYTES, ("a" * 20, -1.0, NORMAL)]
    for one in both(tmp_path / "m.gguf", rows):
        assert one._at_least("a" * 2000, 100) == 100
        assert one._at_least("a b\n" * 40_000, 50_000) >= 50_000


def test_others_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """It kept the lock: a server stood still for it."""
    ours, _ = both(tmp_path / "m.gguf", SPECIALS + BYTES)
    text = "a" * 500_000
    assert lets_others_run(lambda: ours.encode(text))


def test_an_unused_piece_is_taken_apart_as_it_was_joined_last(
    tmp_path: Path,
) -> None:
    # "abc" is made as a + bc before the end of the line, as ab + c behind it.
    rows = SPECIALS + BYTES + [
        ("a", -9.0, NORMAL), ("b", -9.0, NORMAL), ("c", -9.0, NORMAL),
        ("ab", -2.0, NORMAL), ("bc", -1.0, NORMAL), ("abc", -3.0, UNUSED),
        ("\n", 0.0, USER_DEFINED), ("xa", -0.5, NORMAL), ("x", -9.0, NORMAL),
    ]
    ours, library = both(tmp_path / "m.gguf", rows)
    for text in ("abc", "abc\nxabc", "xabc\nabc", "abcabc\nabc"):
        assert ours.encode(text) == library.encode(text)


@pytest.mark.parametrize(
    "rows, words",
    [
        (SPECIALS + BYTES[:-1], ("<0xFF>", "256")),
        ([*SPECIALS, *BYTES, ("<0xff>", 0.0, BYTE)], ("257", "bytes")),
        ([*SPECIALS, *BYTES, ("", 0.0, NORMAL)], ("token 260",)),
        ([*SPECIALS, *BYTES, ("a", 0.0, NORMAL), ("a", 0.0, USER_DEFINED)],
         ("token 261", "token 260")),
        ([*SPECIALS, *BYTES, ("a", 0.0, UNKNOWN)], ("token 260", "token 3")),
    ],
)
def test_what_the_library_refuses_is_refused(
    tmp_path: Path, rows: list[Row], words: tuple[str, ...]
) -> None:
    file = file_of(tmp_path / "m.gguf", rows)
    with pytest.raises(CorruptFile) as caught:
        pieces_of_gguf(file)
    text = str(caught.value)
    assert all(word in text for word in words), text
    with pytest.raises(CorruptFile, match="SentencePiece"):
        SentencePieceTokenizer(_core.sentencepiece_model(file))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_texts_begin_without_a_space(family: str, tmp_path: Path) -> None:
    """Where the file says nothing of it, as Ollama's files."""
    config = family_models.config(family)
    meta = tiny_gguf.metadata(config)
    weights = tiny_gguf.tensors(0, config)
    stated = Gemma.load(tiny_gguf.write(tmp_path / "a.gguf", meta, weights))
    del meta["tokenizer.ggml.add_space_prefix"]
    omits = Gemma.load(tiny_gguf.write(tmp_path / "b.gguf", meta, weights))
    assert stated.tokenizer is not None and omits.tokenizer is not None
    for text in ("the", "a", " the", "in a"):
        ids = omits.tokenizer.encode(text)
        assert ids == stated.tokenizer.encode(text)
        assert omits.tokenizer.decode(ids) == text
    file = _core.GgufFile(str(tmp_path / "b.gguf"))
    library = SentencePieceTokenizer(_core.sentencepiece_model(file))
    assert library.encode("the") == omits.tokenizer.encode("the")


@pytest.mark.slow
def test_the_real_vocabulary_without_the_key(
    model_path: str, tmp_path: Path
) -> None:
    real = _core.GgufFile(model_path)
    kinds = {
        "tokens": tiny_gguf.STR,
        "scores": tiny_gguf.F32,
        "token_type": tiny_gguf.U32,
    }
    meta: dict[str, tuple[int, Any]] = {
        f"tokenizer.ggml.{key}": (
            tiny_gguf.ARRAY, (kind, real.get(f"tokenizer.ggml.{key}"))
        )
        for key, kind in kinds.items()
    }  # fmt: skip
    meta["tokenizer.ggml.model"] = (tiny_gguf.STR, "llama")
    path = tiny_gguf.write(tmp_path / "m.gguf", meta, {})
    ours = pieces_of_gguf(_core.GgufFile(str(path)))
    assert ours is not None
    assert ours.encode("Hello") == [9259]
    turn = ours.encode("<start_of_turn>user", parse_special=True)
    assert [ours.piece_of(token) for token in turn] == [
        "<start_of_turn>", "user"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
def test_tokens_without_rows_are_not_made(kind: int, tmp_path: Path) -> None:
    """As Gemma 3's 262,145th in Ollama's files of the smaller models."""
    meta = tiny_gguf.metadata()
    for key, value in (
        ("tokens", "<img>"), ("scores", -1000.0), ("token_type", kind)
    ):  # fmt: skip
        array, (element, values) = meta[f"tokenizer.ggml.{key}"]
        meta[f"tokenizer.ggml.{key}"] = array, (element, [*values, value])
    rows = tiny_gguf.VOCAB
    gemma = Gemma.load(tiny_gguf.write(tmp_path / "m.gguf", meta))
    assert gemma.config.vocab_size == rows
    tokenizer = gemma.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == rows + 1
    usual = Gemma.load(tiny_gguf.write(tmp_path / "u.gguf")).tokenizer
    assert usual is not None
    for text in ("<img>", "a<img> the", " <img>"):
        assert tokenizer.encode(text) == usual.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.id_of("<img>") == rows
    assert tokenizer.token_bytes[rows] == b""
    cache = create_kv_cache(gemma.config)
    gemma.generate(cache, "a <img>", max_tokens=20, temperature=5.0, seed=1)
    assert max(cache.tokens) < rows
    length = len(cache)
    with pytest.raises(ValueError, match=f"found {rows}"):
        gemma.generate(cache, [5, rows], max_tokens=1)
    with pytest.raises(ValueError, match="<img>"):
        gemma.generate(cache, "<img>", max_tokens=1, parse_special=True)
    assert len(cache) == length
