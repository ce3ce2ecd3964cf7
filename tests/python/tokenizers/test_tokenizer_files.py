"""Tokenizer files of directories: what they say counts, or is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import CorruptFile, Gemma, GemmaKVError, MismatchError, Tokenizer
from gemmakv.chat._transcript import Encoder
from gemmakv.tokenizers._directory import tokenizer_of_folder
from support import tiny_gguf, tokenizer_files
from support.tokenizer_files import added_token, write_json
from support.tokenizer_folders import KINDS, ROWS, directory

TURN, NEWLINE = ROWS[0].index("<start_of_turn>"), ROWS[0].index("\n")
NAMES = {"model": "tokenizer.model", "json": "tokenizer.json"}

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "json":
        pytest.importorskip("tokenizers", reason="needs tokenizers")
    return str(request.param)


def tokenizer_with(folder: Path, kind: str, **files: Any) -> Tokenizer:
    """The tokenizer of a directory; `files` (name: content) replaces what
    such a directory has, None leaves a file out.
    """
    tokenizer_files.write(folder, ROWS, kind)
    for stem, content in files.items():
        name = "tokenizer.model" if stem == "model" else f"{stem}.json"
        path = folder / name
        if content is None:
            path.unlink()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_json(path, content)
    found = tokenizer_of_folder(folder)
    assert found is not None
    return found


def config(edit: Edit | None = None) -> dict[str, Any]:
    made = tokenizer_files.config(ROWS)
    if edit is not None:
        edit(made)
    return made


def fails(
    error: type[Exception], folder: Path, kind: str, **files: Any
) -> str:
    with pytest.raises(error) as caught:
        tokenizer_with(folder, kind, **files)
    assert type(caught.value) is error
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


def test_no_files(tmp_path: Path) -> None:
    assert tokenizer_of_folder(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", config())
    assert tokenizer_of_folder(tmp_path) is None


def test_the_model_wins_over_the_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("never read")
    found = tokenizer_with(tmp_path, "model")
    assert isinstance(found, gemmakv.SentencePieceTokenizer)


@pytest.mark.parametrize(
    "source",
    ["tokenizer_config", "roles", "special_tokens_map", "tokenizer", "none"],
)
def test_control_tokens_are_those_that_any_file_calls_special(
    tmp_path: Path, source: str, kind: str
) -> None:
    """"the" is a word of the vocabulary; the file makes it a control token."""
    word = ROWS[0].index("the")
    files: dict[str, Any] = {"tokenizer_config": None}
    if source == "tokenizer_config":
        files["tokenizer_config"] = config(
            lambda c: c["added_tokens_decoder"].update(
                {str(word): added_token("the", True)}
            )
        )
    elif source == "roles":
        files["tokenizer_config"] = {
            "sep_token": {"content": "the"}, "cls_token": None
        }
    elif source == "special_tokens_map":
        files["special_tokens_map"] = {
            "additional_special_tokens": ["the", {"content": "<bos>"}]
        }
    elif source == "tokenizer":
        content = tokenizer_files.tokenizer_json(ROWS)
        entry = {"id": word, **added_token("the", True)}
        content["added_tokens"].append(entry)
        content["model"]["merges"] = [
            m for m in content["model"]["merges"] if m[0] + m[1] != "the"
        ]
        files["tokenizer"] = content
    if source in ("tokenizer_config", "roles", "special_tokens_map") and (
        kind == "json"
    ):
        # Merges would make it of plain text all the same.
        text = fails(MismatchError, tmp_path, kind, **files)
        assert "control token" in text and "'the'" in text
        return
    tokenizer = tokenizer_with(tmp_path, kind, **files)
    marked = source != "none"
    assert (word in tokenizer.encode("the in")) == (not marked)
    assert word in tokenizer.encode("the in", parse_special=True)
    assert (tokenizer.token_bytes[word] == b"") == marked
    # Turns are control tokens by their names.
    text = "<start_of_turn>"
    assert TURN not in tokenizer.encode(text)
    assert tokenizer.encode(text, parse_special=True) == [TURN]
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Marks of images, sound, tools and thoughts of all families.
CONTROL_NAMES = [
    "<mask>", "[@BOS@]", "<unused7>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<start_of_audio>", "<end_of_audio>",
    "<audio_soft_token>", "<start_function_call>", "<escape>",
    "<|fim_prefix|>", "<|turn>", "<turn|>", "<|image|>", '<|"|>', "<|audio>",
]  # fmt: skip
TEXT_NAMES = ["<b>", "<table>", "</table>"]


def rows_with(kind: int) -> tuple[list[str], list[float], list[int]]:
    """The vocabulary, and pieces that the files call of this kind."""
    pieces, scores, kinds = ROWS
    names = [*CONTROL_NAMES, *TEXT_NAMES]
    more = len(names)
    return pieces + names, scores + [0.0] * more, kinds + [kind] * more


def assert_marks_are_text(tokenizer: Tokenizer) -> None:
    for name in CONTROL_NAMES:
        token = tokenizer.id_of(name)
        assert token is not None
        for text in (name, f"a {name}the", f"{name}{name}"):
            ids = tokenizer.encode(text)
            assert token not in ids, name
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode(name, parse_special=True) == [token]
        assert tokenizer.token_bytes[token] == b""


@pytest.mark.parametrize("listed", [True, False])
def test_no_directory_makes_a_mark_of_text(
    tmp_path: Path, kind: str, listed: bool
) -> None:
    """Files call them user-defined, and not special or nothing."""
    rows = rows_with(tokenizer_files.USER_DEFINED)
    folder = tokenizer_files.write(tmp_path, rows, kind)
    if not listed:
        path = folder / "tokenizer_config.json"
        content = json.loads(path.read_text("utf-8"))
        content["added_tokens_decoder"] = {}
        write_json(path, content)
    tokenizer = tokenizer_of_folder(folder)
    assert tokenizer is not None
    assert_marks_are_text(tokenizer)
    if listed or kind == "model":
        for name in TEXT_NAMES:
            assert tokenizer.encode(name) == [tokenizer.id_of(name)]


@pytest.mark.parametrize("kind", [1, tokenizer_files.USER_DEFINED])
def test_no_file_makes_a_mark_of_text(tmp_path: Path, kind: int) -> None:
    """Types of a GGUF file are wrong, or let marks be shown."""
    pieces, scores, kinds = rows_with(kind)
    meta = tiny_gguf.metadata()
    for key, element, values in (
        ("tokens", tiny_gguf.STR, pieces),
        ("scores", tiny_gguf.F32, scores),
        ("token_type", tiny_gguf.U32, kinds),
    ):
        meta[f"tokenizer.ggml.{key}"] = (tiny_gguf.ARRAY, (element, values))
    config = gemmakv.ModelConfig(
        **tiny_gguf.CONFIG.arguments() | {"vocab_size": len(pieces)}
    )
    path = tiny_gguf.write(
        tmp_path / "m.gguf", meta, tiny_gguf.tensors(0, config)
    )
    gemma = Gemma.load(path)
    assert gemma.tokenizer is not None
    assert_marks_are_text(gemma.tokenizer)
    # A template may say them.
    said = [
        gemmakv.Segment("<start_of_image>", special=True),
        gemmakv.Segment("<start_of_image>"),
    ]
    ids = Encoder(gemma.tokenizer, gemma.config.bos_id).encode(said)
    mark = gemma.tokenizer.id_of("<start_of_image>")
    assert list(ids).count(mark) == 1


def test_tokens_that_the_vocabulary_lacks(tmp_path: Path, kind: str) -> None:
    count = tiny_gguf.VOCAB

    def add(made: dict[str, Any]) -> None:
        made["added_tokens_decoder"][str(count)] = added_token("<img>", True)
        made["added_tokens_decoder"][str(count + 1)] = added_token(
            "new  word", False
        )
        made["image_token"] = "<img>"

    added = {"<img>": count}
    tokenizer = tokenizer_with(
        tmp_path, kind, tokenizer_config=config(add), added_tokens=added,
    )
    assert tokenizer.vocab_size == count + 2
    assert tokenizer.encode("a new  word.")[-2:] == [
        count + 1, tokenizer.id_of(".")
    ]
    assert tokenizer.decode([count + 1]) == "new  word"
    assert count not in tokenizer.encode("<img>")
    assert tokenizer.encode("<img>", parse_special=True) == [count]
    assert tokenizer.piece_of(count) == "<img>"
    assert tokenizer.token_bytes[count] == b""


@pytest.mark.parametrize(
    "key, value",
    [
        ("add_bos_token", False),
        ("add_eos_token", True),
        ("add_prefix_space", True),
        ("sp_model_kwargs", {"enable_sampling": True}),
    ],
)
def test_settings_that_are_not_gemmas(
    tmp_path: Path, kind: str, key: str, value: object
) -> None:
    files = {"tokenizer_config": config(lambda c: c.update({key: value}))}
    text = fails(MismatchError, tmp_path, kind, **files)
    assert f"tokenizer_config.json: {key} is " in text
    files = {"tokenizer_config": config(lambda c: c.update({key: None}))}
    assert tokenizer_with(tmp_path, kind, **files).encode("the")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_flags_of_tokens_that_are_not_gemmas(
    tmp_path: Path, kind: str, flag: str
) -> None:
    entry = added_token("<start_of_turn>", True, **{flag: True})
    files = {"tokenizer_config": {"added_tokens_decoder": {str(TURN): entry}}}
    text = fails(MismatchError, tmp_path, kind, **files)
    assert f"{flag} of '<start_of_turn>'" in text


@pytest.mark.parametrize(
    "content, found",
    [
        (b"{", "tokenizer_config.json: "),
        (b"[]", "tokenizer_config.json: "),
        (b"\xff{}", "tokenizer_config.json: "),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {}}}, "'x'"),
        ({"added_tokens_decoder": {"4": "<s>"}}, "'<s>'"),
        ({"added_tokens_decoder": {"4": {"content": ""}}}, "content"),
        (
            {"added_tokens_decoder": {"4": {"content": "a", "special": 1}}},
            "special of 'a'",
        ),
        (
            {"added_tokens_decoder": {str(TURN): added_token("<x>", True)}},
            "'<x>'",
        ),
        (
            {"added_tokens_decoder": {"99999": added_token("<x>", True)}},
            "99999",
        ),
        (
            {"added_tokens_decoder": {
                "4": added_token("<start_of_turn>", True),
                "9999": added_token("<start_of_turn>", True)}},
            "9999",
        ),
        (
            {"added_tokens_decoder": {
                str(tiny_gguf.VOCAB): added_token("<bos>", True)}},
            "'<bos>'",
        ),
        ({"bos_token": "<unheard>"}, "'<unheard>'"),
        ({"bos_token": 2}, "bos_token"),
        ({"additional_special_tokens": "x"}, "additional_special_tokens"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens"),
    ],
)
def test_damaged_configuration(
    tmp_path: Path, kind: str, content: Any, found: str | None
) -> None:
    if found is None:
        assert tokenizer_with(tmp_path, kind, tokenizer_config=content)
        return
    text = fails(CorruptFile, tmp_path, kind, tokenizer_config=content)
    assert "tokenizer_config.json" in text and found in text


def test_files_that_contradict_each_other(tmp_path: Path, kind: str) -> None:
    text = fails(CorruptFile, tmp_path, kind, added_tokens={"<x>": TURN})
    assert "added_tokens.json" in text and "tokenizer_config.json" in text
    for ids in ({"<x>": "7"}, {"<x>": -1}, {"<x>": True}):
        text = fails(CorruptFile, tmp_path, kind, added_tokens=ids)
        assert "added_tokens.json" in text
    text = fails(
        CorruptFile, tmp_path / "b", kind, special_tokens_map={"x_token": "XX"}
    )
    assert "special_tokens_map.json" in text and "'XX'" in text


MODEL = tokenizer_files.sentencepiece(ROWS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x02 not a model",
        MODEL[:-3],
        MODEL[: len(MODEL) // 2],
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        MODEL + b"\x0a\x05",
        MODEL + b"\x08\x01",
        MODEL + tokenizer_files.message(1, b""),
        MODEL + tokenizer_files.message(1, b"\x0a\x01\xff"),
        MODEL + b"\x0b",
        MODEL + b"\xff" * 12,
    ],
)
def test_damaged_model(tmp_path: Path, data: bytes) -> None:
    text = fails(CorruptFile, tmp_path, "model", model=data)
    assert "tokenizer.model: " in text


@pytest.mark.slow
def test_every_damage_of_a_model_is_seen_or_harmless(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokenizer_files.write(tmp_path, ROWS, "model")
    seen = 0
    for _ in range(300):
        data = bytearray(MODEL)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "tokenizer.model").write_bytes(data)
        try:
            tokenizer = tokenizer_of_folder(tmp_path)
        except GemmaKVError as error:
            assert str(tmp_path) in str(error)
            seen += 1
            continue
        assert tokenizer is not None
        text = "the <b> in\n\n  \u20ac"
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert seen > 100


@pytest.mark.parametrize(
    "trainer, normalizer, name",
    [
        ({35: 0}, {}, "byte_fallback"),
        ({}, {3: 1}, "add_dummy_prefix"),
        ({}, {4: 1}, "remove_extra_whitespaces"),
        ({}, {5: 0}, "escape_whitespaces"),
    ],
)
def test_models_of_another_kind(
    tmp_path: Path,
    trainer: dict[int, int],
    normalizer: dict[int, int],
    name: str,
) -> None:
    data = tokenizer_files.sentencepiece(ROWS, trainer, normalizer)
    text = fails(MismatchError, tmp_path, "model", model=data)
    assert f"tokenizer.model: {name} is " in text


def model_edit(**values: Any) -> Edit:
    return lambda content: content["model"].update(values)


@pytest.mark.parametrize(
    "edit, error, found",
    [
        (model_edit(type="Unigram"), MismatchError, "type of the model"),
        (model_edit(byte_fallback=False), MismatchError, "byte_fallback"),
        (model_edit(ignore_merges=True), MismatchError, "ignore_merges"),
        (model_edit(dropout=0.1), MismatchError, "dropout"),
        (model_edit(end_of_word_suffix="@"), MismatchError, "end_of_word"),
        (lambda c: c.update(normalizer=None), MismatchError, "normalizer"),
        (
            lambda c: c.update(normalizer={"type": "NFC"}),
            MismatchError,
            "normalizer",
        ),
        (
            lambda c: c.update(pre_tokenizer={"type": "ByteLevel"}),
            MismatchError,
            "pre_tokenizer",
        ),
        (lambda c: c.pop("model"), CorruptFile, "model"),
        (model_edit(vocab={}), CorruptFile, "vocab"),
        (model_edit(vocab={"a": "b"}), CorruptFile, "vocab"),
        (model_edit(merges={}), CorruptFile, "merges"),
        (model_edit(merges=[]), CorruptFile, "merges"),
        (model_edit(merges=[["t"]]), CorruptFile, "Merge"),
        (model_edit(merges=[["t", 1]]), CorruptFile, "Merge"),
        (model_edit(merges=[["q", "qz"]]), CorruptFile, "`qz`"),
        (
            lambda c: c["model"]["vocab"].update({"the": 0}),
            CorruptFile,
            "each once",
        ),
        (
            lambda c: c["model"]["vocab"].pop("<0x41>"),
            CorruptFile,
            "each once",
        ),
        (
            lambda c: c["model"]["vocab"].update(
                {"x41": c["model"]["vocab"].pop("<0xC3>")}
            ),
            CorruptFile,
            "<0xC3>",
        ),
        (lambda c: c.update(added_tokens={}), None, ""),
        (lambda c: c.update(added_tokens={"a": 1}), CorruptFile, "added"),
        (lambda c: c.update(added_tokens=[{"id": 1}]), CorruptFile, "added"),
        (
            lambda c: c.update(
                added_tokens=[{"id": "1", "content": "<eos>"}]
            ),
            CorruptFile,
            "'1'",
        ),
    ],
)
def test_json_of_another_kind(
    tmp_path: Path, edit: Edit, error: type[Exception] | None, found: str
) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    content = tokenizer_files.tokenizer_json(ROWS)
    edit(content)
    if error is None:
        assert tokenizer_with(tmp_path, "json", tokenizer=content)
        return
    text = fails(error, tmp_path, "json", tokenizer=content)
    assert "tokenizer.json" in text and found in text


def test_json_in_other_words(tmp_path: Path) -> None:
    """What other versions write for the same tokenizer."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    content = tokenizer_files.tokenizer_json(ROWS)
    expected = tokenizer_with(tmp_path / "a", "json", tokenizer=content)
    content["model"]["merges"] = [
        " ".join(pair) for pair in content["model"]["merges"]
    ]
    step = content["normalizer"]
    content["normalizer"] = {"type": "Sequence", "normalizers": [step]}
    content["pre_tokenizer"] = None
    # The tab itself instead of its byte, and a limit that is for training.
    vocab = content["model"]["vocab"]
    vocab["\t"] = vocab.pop("<0x09>")
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst",
        "stride": 0,
    }
    found = tokenizer_with(tmp_path / "b", "json", tokenizer=content)
    text = "the  in\n\nthe\ta<bos>\u20ac\U0001f642"
    assert found.encode(text) == expected.encode(text)
    assert found.decode(found.encode(text)) == text
    assert found.token_bytes == expected.token_bytes


def test_damaged_json(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    for data in (b"", b"{", b"7", b'{"a": 1, "a": 2}', b"[" * 100000):
        text = fails(CorruptFile, tmp_path, "json", tokenizer=data)
        assert "tokenizer.json: " in text


@pytest.mark.slow
def test_every_damage_of_json_is_seen_or_harmless(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    tokenizer_files.write(tmp_path, ROWS, "json")
    rng = random.Random(0)
    values = [None, True, -1, 1.5, "", "x", [], {}, ["a"], 10**20, "\ud800"]
    seen = harmless = 0
    for name in ("tokenizer.json", "tokenizer_config.json") * 150:
        path = tmp_path / name
        sound = path.read_bytes()
        content = json.loads(sound)
        place = content
        key = rng.choice(list(place))
        while place[key] and isinstance(place[key], (dict, list)):
            if rng.random() < 0.3:
                break
            place = place[key]
            keys = range(len(place)) if isinstance(place, list) else place
            key = rng.choice(list(keys))
        place[key] = rng.choice(values)
        write_json(path, content)
        try:
            tokenizer = tokenizer_of_folder(tmp_path)
        except GemmaKVError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)
            seen += 1
        else:
            assert tokenizer is not None
            text = "the <b> in\n\n  \u20ac<bos>"
            assert tokenizer.decode(tokenizer.encode(text)) == text
            harmless += 1
        path.write_bytes(sound)
    assert seen > 100 and harmless > 20


def test_missing_package(tmp_path: Path) -> None:
    tokenizer_files.write(tmp_path, ROWS, "json")
    code = (
        "import sys, pathlib; sys.modules['tokenizers'] = None\n"
        "from gemmakv.tokenizers._directory import tokenizer_of_folder\n"
        "tokenizer_of_folder(pathlib.Path(sys.argv[1]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )
    line = result.stderr.splitlines()[-1]
    assert line.startswith("gemmakv.GemmaKVError: ")
    assert "tokenizer.json" in line and "gemmakv[tokenizers]" in line


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, gemmakv;"
        "sys.exit('tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Whole directories.


def test_directory(tmp_path: Path, kind: str) -> None:
    gemma = Gemma.load(directory(tmp_path, kind))
    cache = gemmakv.create_kv_cache(gemma.config)
    result = gemma.generate(cache, "the <bos>", max_tokens=4, stop="never")
    assert gemma.tokenizer is not None
    assert cache.tokens[0] == gemma.config.bos_id
    prompt = gemma.tokenizer.encode("the <bos>")
    assert cache.tokens[1 : 1 + len(prompt)].tolist() == prompt
    assert result.text == gemma.tokenizer.decode(result.token_ids)


def test_a_prompt_that_spells_bos_has_one(tmp_path: Path, kind: str) -> None:
    gemma = Gemma.load(directory(tmp_path, kind))
    assert gemma.tokenizer is not None
    bos, ids = gemma.config.bos_id, gemma.tokenizer.encode("the")
    for prompt, expected in (
        ("<bos>the", [bos, *ids]), ("the<bos>", [bos, *ids, bos]),
    ):  # fmt: skip
        cache = gemmakv.create_kv_cache(gemma.config)
        gemma.generate(cache, prompt, max_tokens=0, parse_special=True)
        assert cache.tokens.tolist() == expected


def test_embedding_of_more_rows(tmp_path: Path, kind: str) -> None:
    gemma = Gemma.load(directory(tmp_path, kind, tiny_gguf.VOCAB + 7))
    assert gemma.tokenizer is not None
    assert gemma.tokenizer.vocab_size == tiny_gguf.VOCAB
    assert gemma.config.vocab_size == tiny_gguf.VOCAB + 7


def test_embedding_of_fewer_rows(tmp_path: Path, kind: str) -> None:
    """Whatever they are, tokens without rows are never made of text."""
    rows = tiny_gguf.VOCAB - 1
    last = ROWS[0][rows]
    gemma = Gemma.load(directory(tmp_path, kind, rows))
    tokenizer = gemma.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == rows + 1
    assert tokenizer.id_of(last) == rows and tokenizer.piece_of(rows) == last
    ids = tokenizer.encode(f"a{last} the")
    assert max(ids) < rows and tokenizer.decode(ids) == f"a{last} the"
    assert tokenizer.token_bytes[rows] == b""
    cache = gemmakv.create_kv_cache(gemma.config)
    with pytest.raises(ValueError, match=f"found {rows}"):
        gemma.generate(cache, [2, rows], max_tokens=1)
    assert len(cache) == 0


def test_tokenizer_of_another_model(tmp_path: Path, kind: str) -> None:
    """More tokens are without rows than any model's images need."""
    with pytest.raises(MismatchError, match="tokenizer"):
        Gemma.load(directory(tmp_path, kind, tiny_gguf.VOCAB - 257))


@pytest.mark.parametrize("special", [True, False])
def test_added_token_without_a_row(
    special: bool, tmp_path: Path, kind: str
) -> None:
    """As <image_soft_token> in Gemma 3's text models; control or not."""
    folder = directory(tmp_path, kind)
    write_json(folder / "added_tokens.json", {"<img>": tiny_gguf.VOCAB})
    if special:
        write_json(
            folder / "special_tokens_map.json", {"image_token": "<img>"}
        )
    gemma = Gemma.load(folder)
    assert gemma.tokenizer is not None
    assert gemma.tokenizer.vocab_size == gemma.config.vocab_size + 1
    cache = gemmakv.create_kv_cache(gemma.config)
    gemma.generate(cache, "an <img>", max_tokens=2)
    assert tiny_gguf.VOCAB not in cache.tokens
    length = len(cache)
    with pytest.raises(ValueError, match="'<img>'"):
        gemma.generate(cache, "an <img>", max_tokens=2, parse_special=True)
    assert len(cache) == length
