"""Gemma 4's tokenizer, of GGUF files and of tokenizer.json: merges decide."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmakv import (
    CorruptFile,
    Gemma,
    GemmaKVError,
    MismatchError,
    Tokenizer,
    _core,
    create_kv_cache,
)
from gemmakv.tokenizers._directory import tokenizer_of_folder
from gemmakv.tokenizers._gguf import tokenizer_of_gguf
from support import gemma4_files, tiny_gguf
from support.gemma4_files import IDS, MERGES, PIECES
from support.lock import lets_others_run
from support.tiny_gguf import ARRAY, STR, U32

pytest.importorskip("tokenizers", reason="the extra `tokenizers`")

PARTS = [
    "the", " there", "thought", "\n", "\n\n\n", "\n" * 9, "   ", " " * 6, "Xx",
    "\u00e9", "\u20ac", "\U0001f999", "\u4f60", "\t", "\0", "er", "in", "<",
    "call", " and", "x", *IDS,
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4_files.write(tmp_path_factory.mktemp("gemma4") / "a.gguf")


def read_gguf(path: Path) -> Tokenizer:
    found = tokenizer_of_gguf(str(path), _core.GgufFile(str(path)))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def ours(path: Path) -> Tokenizer:
    return read_gguf(path)


RANKS = {tuple(merge.split(" ")): i for i, merge in enumerate(MERGES)}


def by_hand(text: str) -> list[int]:
    """Ids of a text without control tokens: merges as the format defines
    them, bytes of letters that have no token.
    """
    ids = []
    for i, part in enumerate(text.split(gemma4_files.USER_DEFINED)):
        if i:
            ids.append(PIECES.index(gemma4_files.USER_DEFINED))
        words = list(part.replace(" ", "\u2581"))
        while True:
            pairs = [RANKS.get(p, 1 << 30) for p in zip(words, words[1:])]
            if not pairs or min(pairs) == 1 << 30:
                break
            at = pairs.index(min(pairs))
            words[at : at + 2] = [words[at] + words[at + 1]]
        for word in words:
            if word in PIECES:
                ids.append(PIECES.index(word))
            else:
                ids += [PIECES.index(f"<0x{b:02X}>") for b in word.encode()]
    return ids


def test_merges_decide(ours: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices(PARTS, k=rng.randrange(8)))
        ids = ours.encode(text)
        assert ids == by_hand(text), ascii(text)
        assert all(ours.token_bytes[token] for token in ids)
        assert ours.decode(ids) == text
    # The longest run that is a token, not pairs of pairs.
    assert ours.encode("a" + "\n" * 5 + "b")[1] == PIECES.index("\n" * 5)
    assert ours.encode("   a")[0] == PIECES.index("\u2581" * 3)


def test_control_tokens_are_never_made_of_text(ours: Tokenizer) -> None:
    """Also those that converters call user-defined."""
    for name, token in IDS.items():
        assert token not in ours.encode(f"a{name}b")
        assert ours.encode(f"a{name}", parse_special=True)[-1] == token
        assert ours.token_bytes[token] == b""
        assert ours.id_of(name) == token and ours.piece_of(token) == name
    assert ours.encode("<unused3>", parse_special=True) == [
        PIECES.index("<unused3>")
    ]


def test_bytes(ours: Tokenizer) -> None:
    ids = ours.encode("\u4f60")
    assert [ours.token_bytes[i] for i in ids] == [b"\xe4", b"\xbd", b"\xa0"]
    assert ours.decode(ids[:2]) == "\ufffd"
    assert ours.token_bytes[PIECES.index("\u2581the")] == b" the"


def mistyped(folder: Path, kind: str) -> Path:
    """A file, or a directory, that calls the names of bytes added tokens."""
    if kind == "gguf":
        types = [4 if t == 6 else t for t in gemma4_files.TYPES]
        return gemma4_files.write(
            folder / "a.gguf", token_type=(ARRAY, (U32, types))
        )
    content = gemma4_files.tokenizer_json()
    plain = {**content["added_tokens"][-1], "special": False}
    content["added_tokens"] += [
        {**plain, "id": token, "content": PIECES[token]}
        for token, t in enumerate(gemma4_files.TYPES)
        if t == 6
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", ["gguf", "json"])
def test_the_name_of_a_byte_is_text(
    kind: str, ours: Tokenizer, tmp_path: Path
) -> None:
    path = mistyped(tmp_path, kind)
    other = (
        read_gguf(path)
        if kind == "gguf"
        else tokenizer_of_folder(path)
    )
    assert other is not None
    for text in ("<0x41>", "a<0xE4><0xBD>b", "\u4f60<0xA0>"):
        assert other.encode(text) == ours.encode(text)
        assert other.decode(other.encode(text)) == text


def test_an_empty_kind_of_text_is_none(
    ours: Tokenizer, tmp_path: Path
) -> None:
    file = gemma4_files.write(tmp_path / "a.gguf", pre=(STR, ""))
    other = read_gguf(file)
    assert other.encode("the in") == ours.encode("the in")


def test_long_texts(ours: Tokenizer) -> None:
    """The same ids, and other threads run meanwhile."""
    text = "".join(random.Random(7).choices(PARTS[:-1], k=8000))
    assert len(text) > 20_000
    assert ours.encode(text) == by_parts(ours, text)
    assert lets_others_run(lambda: ours.encode(text * 10))


def by_parts(ours: Tokenizer, text: str) -> list[int]:
    """Cut where no merge goes on."""
    parts = text.split("\0")
    ids = [ours.encode(part) for part in parts]
    zero = ours.encode("\0")
    return [one for part in ids for one in (*part, *zero)][: -len(zero)]


def test_at_least_is_never_too_many(ours: Tokenizer) -> None:
    rng = random.Random(8)
    for _ in range(300):
        text = "".join(rng.choices(PARTS, k=rng.randrange(30)))
        least = ours._at_least(text, rng.randrange(30))
        for special in (False, True):
            assert least <= len(ours.encode(text, special)), ascii(text)


def test_the_same_from_a_directory(ours: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(gemma4_files.tokenizer_json())
    )
    other = tokenizer_of_folder(tmp_path)
    assert other is not None and other.vocab_size == ours.vocab_size
    assert other.token_bytes == ours.token_bytes
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choices(PARTS, k=rng.randrange(12)))
        for special in (False, True):
            assert other.encode(text, special) == ours.encode(text, special)


def test_a_model_writes_text(path: Path) -> None:
    gemma = Gemma.load(path, packed_cache=False)
    tokenizer = gemma.tokenizer
    assert tokenizer is not None
    cache = create_kv_cache(gemma.config)
    options: dict[str, Any] = {"max_tokens": 24, "seed": 1, "temperature": 2}
    found = gemma.generate(cache, "the", **options)
    assert found.text == tokenizer.decode(
        [t for t in found.token_ids if t not in gemma.config.eos_ids]
    )
    assert len(found.text) > 5
    cache.reset()
    stream = gemma.stream(cache, "the", **options)
    assert "".join(piece.text for piece in stream) == found.text


def test_the_extra_is_named(path: Path) -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "import gemmakv\n"
        "try:\n"
        f"    gemmakv.Gemma.load({str(path)!r}, packed_cache=False)\n"
        "except gemmakv.GemmaKVError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert str(path) in done.stdout and done.stdout.count("\n") == 1
    assert "gemmakv[tokenizers]" in done.stdout


# Types of a vocabulary where merges make a control token.
WITHOUT_THE = [
    3 if piece == "the" else kind
    for piece, kind in zip(PIECES, gemma4_files.TYPES)
]


@pytest.mark.parametrize(
    "key, value, error, words",
    [
        ("merges", None, CorruptFile, ("merges", "a list")),
        ("merges", (ARRAY, (STR, [])), CorruptFile, ("merges",)),
        ("merges", (ARRAY, (STR, ["t h", "q"])), CorruptFile, ("merge", "q")),
        ("merges", (ARRAY, (STR, ["t q"])), CorruptFile, ("`tq`",)),
        ("merges", (ARRAY, (U32, [1])), CorruptFile, ("merges", "1")),
        ("token_type", (ARRAY, (U32, [1])), CorruptFile, ("token_type", "1")),
        ("token_type", None, CorruptFile, ("token_type",)),
        ("token_type", (ARRAY, (U32, WITHOUT_THE)), MismatchError,
         ("merges", "control token", "'the'")),
        ("tokens", (ARRAY, (STR, [*PIECES[:-1], "the"])), CorruptFile,
         ("tokens", "'the'")),
        ("tokens", (ARRAY, (STR, [*PIECES[:-1], "zz"])), CorruptFile,
         ("<0xFF>",)),
    ],
)  # fmt: skip
def test_damaged(
    tmp_path: Path,
    key: str,
    value: object,
    error: type,
    words: tuple[str, ...],
) -> None:
    bad = gemma4_files.write(tmp_path / "a.gguf", **{key: value})
    with pytest.raises(GemmaKVError) as caught:
        Gemma.load(bad, packed_cache=False)
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert str(bad) in text and "\n" not in text
    assert all(word in text for word in words), text


def test_a_merge_that_no_text_comes_to(ours: Tokenizer, tmp_path: Path) -> None:
    """It would make a control token, of a piece that nothing makes."""
    tokens = [*PIECES]
    tokens[5] = "<|turn"
    merges = ["<|turn >", *MERGES]
    file = gemma4_files.write(
        tmp_path / "a.gguf",
        tokens=(ARRAY, (STR, tokens)),
        merges=(ARRAY, (STR, merges)),
    )
    other = read_gguf(file)
    for text in ("<|turn>", "a<|turn><|turn", "<|turn>the"):
        assert other.encode(text) == ours.encode(text)


# As Ollama's files of Gemma 4: another name, and bytes of the usual type.
LLAMA: dict[str, Any] = {
    "model": (STR, "llama"),
    "pre": (STR, "gemma4"),
    "scores": (ARRAY, (tiny_gguf.F32, [float(i) for i in range(len(PIECES))])),
    "token_type": (
        ARRAY, (U32, [1 if t == 6 else t for t in gemma4_files.TYPES])
    ),
}  # fmt: skip


def test_all_keys_together_choose(ours: Tokenizer, tmp_path: Path) -> None:
    file = gemma4_files.write(tmp_path / "a.gguf", **LLAMA)
    other = Gemma.load(file, packed_cache=False).tokenizer
    assert other is not None
    assert other.token_bytes == ours.token_bytes
    rng = random.Random(9)
    for _ in range(100):
        text = "".join(rng.choices(PARTS, k=rng.randrange(12)))
        for special in (False, True):
            assert other.encode(text, special) == ours.encode(text, special)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (LLAMA | {"merges": None}, CorruptFile, ("merges", "pre", "gemma4")),
        ({"pre": (STR, "qwen2")}, MismatchError, ("pre", "qwen2", "gemma4")),
        ({"pre": (U32, 4)}, CorruptFile, ("pre", "a string")),
    ],
)
def test_keys_that_contradict_each_other(
    changes: dict[str, Any], error: type, words: tuple[str, ...], tmp_path: Path
) -> None:
    bad = gemma4_files.write(tmp_path / "a.gguf", **changes)
    with pytest.raises(GemmaKVError) as caught:
        Gemma.load(bad, packed_cache=False)
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert str(bad) in text and "\n" not in text
    assert all(word in text for word in words), text


def test_tokens_without_rows_are_not_made(tmp_path: Path) -> None:
    """A token that merges would make, and one that any text would."""
    tokens = [*PIECES, "<img>", "\u2581thethe"]
    rows = len(PIECES)
    file = gemma4_files.write(
        tmp_path / "a.gguf",
        tokens=(ARRAY, (STR, tokens)),
        token_type=(ARRAY, (U32, [*gemma4_files.TYPES, 4, 1])),
        merges=(ARRAY, (STR, ["\u2581the the", *MERGES])),
    )
    gemma = Gemma.load(file, packed_cache=False)
    tokenizer = gemma.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == rows + 2
    assert gemma.config.vocab_size == rows
    for text in ("a<img>b", "a thethe"):
        assert max(tokenizer.encode(text)) < rows
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.id_of("<img>") == rows
    cache = create_kv_cache(gemma.config)
    with pytest.raises(ValueError, match=f"found {rows}"):
        gemma.generate(cache, [2, rows], max_tokens=1)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    meta = tiny_gguf.metadata()
    meta["tokenizer.ggml.model"] = (STR, "gpt2")
    bad = tiny_gguf.write(tmp_path / "a.gguf", meta)
    with pytest.raises(MismatchError, match="'gpt2'.*'llama'"):
        Gemma.load(bad, packed_cache=False)
