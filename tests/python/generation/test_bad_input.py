"""Bad input: a typed error with one clear line, and caches as they were."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache, create_kv_cache
from gemmakv.generation._requests import requests_of
from support import tiny_gguf
from support.bad_files import Edit, forget, one_line, put

LOAD_ERRORS = (ValueError, OSError, MemoryError, gemmakv.GemmaKVError)
NAN = float("nan")
INF = float("inf")


# ---- Files ----


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Gemma.load(tmp_path / "none.gguf")
    assert "none.gguf" in one_line(caught.value)
    assert caught.value.filename == str(tmp_path / "none.gguf")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        Gemma.load(tmp_path)
    one_line(caught.value)


@pytest.mark.parametrize(
    "here, lacks",
    [
        ([], r"config\.json and \*\.safetensors"),
        (["config.json"], r"\*\.safetensors"),
        (["model.safetensors"], r"config\.json"),
    ],
)
def test_folder_with_part_of_a_model(
    tmp_path: Path, here: list[str], lacks: str
) -> None:
    for name in here:
        (tmp_path / name).write_text("{}")
    # The error has the folder's name after its words.
    with pytest.raises(IsADirectoryError, match=f"without {lacks}: '"):
        Gemma.load(tmp_path)


def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)
    with pytest.raises(OSError):
        Gemma.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"G", b"GGUF", b"GGML" + b"\0" * 100, b"\0" * 4096, b"GGUF" * 999],
    ids=["empty", "1 byte", "magic only", "other magic", "zeros", "repeated"],
)
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(gemmakv.CorruptFile) as caught:
        Gemma.load(path)
    assert "bad.gguf" in one_line(caught.value)


def header_bytes(path: str) -> int:
    """Where the tensor data of a file begins, rounded down to 4 KiB."""
    tensors = gemmakv._core.GgufFile(path).tensors()
    data = sum(size for *_, size in tensors)
    return (Path(path).stat().st_size - data) // 4096 * 4096


def test_header_cut_in_many_places(model_path: str, tmp_path: Path) -> None:
    end = header_bytes(model_path)
    assert end > 1 << 20
    path = tmp_path / "cut.gguf"
    with open(model_path, "rb") as file:
        path.write_bytes(file.read(end))
    with open(path, "r+b") as file:
        for length in range(end, 0, -end // 60):
            file.truncate(length)
            with pytest.raises(gemmakv.CorruptFile) as caught:
                Gemma.load(path)
            one_line(caught.value)


def test_tiny_file_cut_anywhere(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(tiny_path, path)
    size = path.stat().st_size
    places = [*range(1, 200), *range(200, 600, 7), *range(600, size - 31, 5003)]
    with open(path, "r+b") as file:
        for length in reversed(places):
            file.truncate(length)
            with pytest.raises(gemmakv.CorruptFile) as caught:
                Gemma.load(path)
            one_line(caught.value)


@pytest.mark.slow
def test_flipped_header_bytes(tiny_path: Path, tmp_path: Path) -> None:
    header = header_bytes(str(tiny_path)) + 4096
    rng = random.Random(3)
    places = [*range(0, 400, 2), *rng.choices(range(400, header), k=150)]
    path = tmp_path / "flipped.gguf"
    shutil.copyfile(tiny_path, path)
    failed = 0
    with open(path, "r+b", buffering=0) as file:
        for at in places:
            [byte] = os.pread(file.fileno(), 1, at)
            flipped = byte ^ 1 << rng.randrange(8)
            os.pwrite(file.fileno(), bytes([flipped]), at)
            try:
                model = Gemma.load(path, threads=1, prefix_cache=False)
                cache = create_kv_cache(model.config)
                model.generate(cache, "a", max_tokens=1)
            except LOAD_ERRORS as error:
                one_line(error)
                failed += 1
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert failed > 50


def drop(name: str) -> Edit:
    return lambda meta, weights: weights.pop(name)


def reshape(name: str, *shape: int) -> Edit:
    def edit(meta: dict[str, Any], weights: dict[str, Any]) -> None:
        weights[name] = np.zeros(shape, np.float32)

    return edit


Q = "blk.3.attn_q.weight"
U32, F32, STR, ARRAY = 4, 6, 8, 9


@pytest.mark.parametrize(
    "edit, expected",
    [
        (drop(Q), Q),
        (drop("token_embd.weight"), "token_embd.weight"),
        (drop("output_norm.weight"), "output_norm.weight"),
        (drop("blk.6.ffn_norm.weight"), "blk.6.ffn_norm.weight"),
        (reshape(Q, 64, 32), Q),
        (reshape(Q, 63, 64), Q),
        (reshape(Q, 64), Q),
        (reshape("output_norm.weight", 65), "output_norm.weight"),
        (reshape("output_norm.weight", 1, 1, 64), "output_norm.weight"),
        (put("general.architecture", STR, "llama"), "llama"),
        (put("general.architecture", STR, ""), "architecture"),
        (put("general.architecture", U32, 3), "general.architecture"),
        (forget("general.architecture"), "general.architecture"),
        (forget("gemma3.block_count"), "gemma3.block_count"),
        (put("gemma3.block_count", U32, 9), "blk.7"),
        (put("gemma3.block_count", U32, 0), "block_count"),
        (put("gemma3.block_count", U32, 0xFFFFFFFF), "block_count"),
        (put("gemma3.block_count", STR, "7"), "block_count"),
        (put("gemma3.embedding_length", U32, 0), "embedding_length"),
        (put("gemma3.embedding_length", U32, 96), "96"),
        (put("gemma3.attention.head_count", U32, 0), "heads"),
        (put("gemma3.attention.head_count", U32, 3), "attn_q"),
        (put("gemma3.attention.key_length", U32, 31), "31"),
        (put("gemma3.attention.sliding_window", U32, 1 << 25), "window"),
        (put("gemma3.attention.layer_norm_rms_epsilon", F32, NAN), "epsilon"),
        (put("gemma3.rope.freq_base", F32, INF), "rope"),
        (put("gemma3.context_length", U32, 0), "context_length"),
        (put("tokenizer.ggml.model", STR, "gpt2"), "gpt2"),
        (forget("tokenizer.ggml.tokens"), "tokens"),
        (put("tokenizer.ggml.scores", ARRAY, (F32, [0.0])), "scores"),
        (put("tokenizer.ggml.tokens", ARRAY, (U32, [1, 2])), "tokens"),
        (put("tokenizer.ggml.bos_token_id", U32, 1 << 20), "bos_token_id"),
    ],
)
def test_broken_model(tmp_path: Path, edit: Edit, expected: str) -> None:
    meta, weights = tiny_gguf.metadata(), tiny_gguf.tensors()
    edit(meta, weights)
    path = tiny_gguf.write(tmp_path / "broken.gguf", meta, weights)
    with pytest.raises(LOAD_ERRORS) as caught:
        Gemma.load(path)
    assert expected in one_line(caught.value)
    assert "expected" in str(caught.value) or "missing" in str(caught.value)


@pytest.mark.parametrize("type_id", [3, 4, 7, 16, 24, 99, 0xFFFFFFFF])
def test_unknown_tensor_type(tmp_path: Path, type_id: int) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", type_ids={Q: type_id})
    with pytest.raises(gemmakv.CorruptFile) as caught:
        Gemma.load(path)
    assert Q in one_line(caught.value)
    assert str(type_id) in str(caught.value)


def test_weights_with_nan_do_not_crash(tmp_path: Path) -> None:
    weights = tiny_gguf.tensors()
    weights[Q][:] = np.nan
    model = Gemma.load(tiny_gguf.write(tmp_path / "n.gguf", weights=weights))
    cache = create_kv_cache(model.config)
    with pytest.raises(ValueError, match="expected"):
        model.generate(cache, [5, 6, 7])
    assert len(cache) == 0


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", 100000])
def test_bad_threads(tiny_path: Path, threads: object) -> None:
    with pytest.raises(ValueError, match="threads"):
        Gemma.load(tiny_path, threads=threads)  # type: ignore[arg-type]


def test_the_range_of_threads_is_possible(tiny_path: Path) -> None:
    # Not "0..256": 0 is refused.
    with pytest.raises(ValueError, match="threads: expected at most 256"):
        Gemma.load(tiny_path, threads=1000)


def test_bad_progress(tiny_path: Path) -> None:
    with pytest.raises(ValueError, match="progress"):
        Gemma.load(tiny_path, progress="yes")  # type: ignore[arg-type]


def test_progress_that_raises_ends_the_load(tiny_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Gemma.load(tiny_path, progress=fail)


def test_from_tensors_errors(tiny: Gemma) -> None:
    for source, error in (
        (None, "mapping"),
        (3, "mapping"),
        ({}, "token_embd.weight"),
        ({**tiny_gguf.tensors(), 1: 0}, "key 1, expected names"),
        ({**tiny_gguf.tensors(), "\udc80": 0}, "udc80', expected names"),
        ({**tiny_gguf.tensors(), Q: "text"}, Q),
        ({**tiny_gguf.tensors(), Q: np.zeros((2, 2))}, Q),
        ({**tiny_gguf.tensors(), Q: np.zeros((2, 2), np.float32)}, Q),
        ({**tiny_gguf.tensors(), Q: np.zeros((2, 2, 2), np.float32)}, Q),
    ):
        with pytest.raises((ValueError, gemmakv.CorruptFile), match=error):
            Gemma.from_tensors(tiny.config, source)
    with pytest.raises(ValueError, match="config"):
        Gemma.from_tensors("gemma3-270m", {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer"):
        Gemma.from_tensors(
            tiny.config,
            {},
            tokenizer="t",  # type: ignore[arg-type]
        )


# ---- Generation ----


@pytest.fixture
def used(tiny: Gemma) -> KVCache:
    """A conversation with something to lose."""
    cache = create_kv_cache(tiny.config, capacity_tokens=64)
    tiny.generate(cache, "the", max_tokens=5, logit_bias={1: -INF})
    return cache


OPTIONS = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": None}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 1 << 80}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"presence_penalty": INF}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": "a"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [3]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"logit_bias": {1 << 20: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"logit_bias": {5: INF}}, "logit_bias"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias"),
    ({"logit_bias": [(1, 1.0)]}, "logit_bias"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"parse_special": 1}, "parse_special"),
    ({"progress": 3}, "progress"),
]


@pytest.mark.parametrize("options, name", OPTIONS)
@pytest.mark.parametrize("how", ["generate", "stream", "n", "batch"])
def test_bad_option(
    tiny: Gemma, used: KVCache, options: dict, name: str, how: str
) -> None:
    before = used.to_bytes()
    with pytest.raises(ValueError) as caught:
        if how == "generate":
            tiny.generate(used, "a", **options)
        elif how == "stream":
            tiny.stream(used, "a", **options)
        elif how == "n":
            tiny.generate(used, "a", n=2, **options)
        else:
            other = create_kv_cache(tiny.config)
            tiny.generate_batch([other, used], ["a", "a"], **options)
    assert name in one_line(caught.value)
    assert used.to_bytes() == before


def test_unknown_option_is_a_type_error(tiny: Gemma, used: KVCache) -> None:
    with pytest.raises(TypeError, match="temprature.*known: max_tokens"):
        tiny.generate(used, "a", temprature=1.0)  # type: ignore[call-arg]


VOCAB = tiny_gguf.VOCAB
TOKENS = [
    [],
    (),
    np.array([], np.int64),
    [-1],
    [5, VOCAB],
    [1 << 80],
    [1.5],
    [None],
    ["a"],
    [[1, 2]],
    np.zeros((2, 2), np.int32),
    np.array([1.0]),
    [True],
    5,
    None,
    b"bytes",
    {1, 2},
]


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda t: repr(t)[:30])
@pytest.mark.parametrize("how", ["generate", "stream", "batch", "logits"])
def test_bad_tokens(
    tiny: Gemma, used: KVCache, tokens: Any, how: str
) -> None:
    before = used.to_bytes()
    with pytest.raises(ValueError, match="token ids|prompt|tokens") as caught:
        if how == "generate":
            tiny.generate(used, tokens)
        elif how == "stream":
            tiny.stream(used, tokens)
        elif how == "batch":
            tiny.generate_batch([used], [tokens])
        else:
            tiny.logits(used, tokens)
    one_line(caught.value)
    assert used.to_bytes() == before


@pytest.mark.parametrize("cache", [None, "cache", 3, object()])
def test_not_a_cache(tiny: Gemma, cache: Any) -> None:
    # None is a new one, where a prompt may stand alone.
    for call in (tiny.generate, tiny.stream, tiny.logits):
        if cache is None and call != tiny.logits:
            continue
        with pytest.raises(ValueError, match="cache: expected a KVCache"):
            call(cache, [5])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected a KVCache"):
        tiny.generate_batch([cache], [[5]])


def test_a_session_is_no_model(tiny: Gemma) -> None:
    session: Any = gemmakv.Session(tiny)
    uses: dict[str, Any] = {
        "gemma": lambda: gemmakv.Session(session),
        "draft": lambda: tiny.generate([2], draft=session),
    }
    for name, use in uses.items():
        words = f"{name}: expected a Gemma, found <Session of 0 turns"
        with pytest.raises(gemmakv.ArgumentError, match=words):
            use()


@pytest.mark.parametrize("how", ["generate", "stream", "batch", "logits", "n"])
def test_prompt_at_the_capacity_and_past_it(
    tiny: Gemma, used: KVCache, how: str
) -> None:
    room = used.capacity_tokens - len(used)
    before = used.to_bytes()
    steps = requests_of(tiny).engine.steps
    with pytest.raises(gemmakv.CacheFullError) as caught:
        if how == "generate":
            tiny.generate(used, [5] * (room + 1))
        elif how == "stream":
            tiny.stream(used, [5] * (room + 1))
        elif how == "batch":
            other = create_kv_cache(tiny.config)
            tiny.generate_batch([other, used], ["a", [5] * (room + 1)])
        elif how == "n":
            tiny.generate(used, [5] * (room + 1), n=2)
        else:
            tiny.logits(used, [5] * (room + 1))
    assert str(used.capacity_tokens) in one_line(caught.value)
    assert used.to_bytes() == before
    assert requests_of(tiny).engine.steps == steps  # before any work
    tiny.logits(used, [5] * room)  # exactly the limit
    with pytest.raises(gemmakv.CacheFullError):
        tiny.logits(used, [5])


def test_full_cache_generates_nothing(tiny: Gemma, used: KVCache) -> None:
    tiny.logits(used, [5] * (used.capacity_tokens - len(used)))
    g = tiny.generate(used, "")
    assert (g.token_ids, g.finish_reason) == ([], "length")


def test_same_cache_twice(tiny: Gemma, used: KVCache) -> None:
    before = used.to_bytes()
    with pytest.raises(ValueError, match="same cache") as caught:
        tiny.generate_batch([used, used], ["a", "b"])
    one_line(caught.value)
    assert used.to_bytes() == before


def test_batch_shapes(tiny: Gemma, used: KVCache) -> None:
    fork = used.fork()
    before = used.to_bytes()
    with pytest.raises(ValueError, match="prompts"):
        tiny.generate_batch([used, fork], ["a"])
    with pytest.raises(ValueError, match="caches"):
        tiny.generate_batch([], [])
    with pytest.raises(ValueError, match="max_tokens.*list of 2"):
        tiny.generate_batch([used, fork], ["a", "b"], max_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match=r"top_k\[1\]"):
        tiny.generate_batch([used, fork], ["a", "b"], top_k=[1, -1])
    assert used.to_bytes() == before == fork.to_bytes()


def test_one_bad_row_changes_no_cache(tiny: Gemma, used: KVCache) -> None:
    other = create_kv_cache(tiny.config)
    with pytest.raises(gemmakv.CacheFullError):
        tiny.generate_batch([other, used], ["a", [5] * 100])
    assert len(other) == 0
    tiny.generate(other, "a", max_tokens=1)  # and none stays locked


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_bad_n(tiny: Gemma, used: KVCache, n: Any) -> None:
    before = used.to_bytes()
    with pytest.raises(ValueError, match="n: expected"):
        tiny.generate(used, "a", n=n)
    assert used.to_bytes() == before


def test_everything_banned(tiny: Gemma, used: KVCache) -> None:
    before = used.tokens.tolist()
    ban = {i: -INF for i in range(VOCAB)}
    for keywords in ({}, {"temperature": 1.0}, {"n": 2}):
        with pytest.raises(ValueError, match="masked"):
            tiny.generate(used, "a", logit_bias=ban, **keywords)
        assert used.tokens.tolist() == before


def test_lone_surrogate_prompt(tiny: Gemma, used: KVCache) -> None:
    with pytest.raises(ValueError, match="^prompt: .* a lone surrogate"):
        tiny.generate(used, "a\ud800b")
    with pytest.raises(ValueError, match=r"^prompts\[1\]: .* a lone surrogate"):
        tiny.generate_batch([used, used.fork()], ["a", "\ud800b"])


@pytest.mark.parametrize("bad", ["abc", b"abc", None, 5])
def test_a_batch_is_of_lists(tiny: Gemma, used: KVCache, bad: Any) -> None:
    before = used.tokens.tolist()
    with pytest.raises(ValueError, match="prompts: expected a list"):
        tiny.generate_batch([used], bad)
    with pytest.raises(ValueError, match="caches: expected a list"):
        tiny.generate_batch(bad, ["a"])
    assert used.tokens.tolist() == before


@pytest.mark.parametrize(
    "bad", [None, 1.0, 1.5, "5", -1, 10**30, True, np.bool_(1), np.float32(1)]
)
def test_what_is_no_token_id(tiny: Gemma, bad: Any) -> None:
    assert tiny.tokenizer is not None
    with pytest.raises(
        ValueError, match=f"ids: expected .*, found {re.escape(repr(bad))}$"
    ):
        tiny.tokenizer.decode([bad])
    with pytest.raises(ValueError, match="token: expected"):
        tiny.tokenizer.piece_of(bad)
    with pytest.raises(ValueError, match="ids: expected"):
        tiny.tokenizer.decode(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [True, np.bool_(0)])
def test_a_bool_among_token_ids(tiny: Gemma, used: KVCache, bad: Any) -> None:
    before = used.to_bytes()
    found = f"found {re.escape(repr(bad))} at index 1$"
    for prompt in ([2, bad], (2, bad)):
        with pytest.raises(ValueError, match=f"prompt: expected .*, {found}"):
            tiny.generate(used, prompt)
        with pytest.raises(ValueError, match=f"tokens: expected .*, {found}"):
            tiny.logits(used, prompt)
    assert used.to_bytes() == before
