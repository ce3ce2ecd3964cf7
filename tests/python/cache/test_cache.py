"""KVCache in Python: arguments, content, checkpoints, files.

That whatever is done to a cache changes no bit is in test_families.py.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache, create_kv_cache
from support import tiny_gguf

WINDOW = tiny_gguf.WINDOW
TOKENS = [2, *(20 + (13 * i) % 250 for i in range(99))]


def logits_after(model: Gemma, tokens: list[int], dtype: str) -> np.ndarray:
    return model.logits(create_kv_cache(model.config, kv_dtype=dtype), tokens)


def test_needs_no_weights() -> None:
    for model in (
        gemmakv.ModelType.GEMMA3_270M,
        "gemma3-270m",
        "gemma-3-270m",  # the alias of Gemma.load
        gemmakv.ModelConfig.from_name("gemma3-270m"),
    ):
        cache = create_kv_cache(model, capacity_tokens=100)
        assert len(cache) == 0
        assert cache
        assert cache.capacity_tokens == 100
        assert cache.nbytes == cache.shared_nbytes == 0
        assert cache.model_type is gemmakv.ModelType.GEMMA3_270M
        assert cache.kv_dtype == "bf16"
        assert cache.tokens.dtype == np.int32
        assert len(cache.layers) == 18


def test_a_loaded_model_names_its_shape(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny)
    assert cache.capacity_tokens == tiny.config.context_length
    tiny.logits(cache, TOKENS)


def test_a_configuration_reads_as_its_call(tiny: Gemma) -> None:
    text = repr(tiny.config)
    same = eval(text, {"ModelConfig": gemmakv.ModelConfig})
    assert same.arguments() == tiny.config.arguments()
    assert text.startswith("ModelConfig(name=''")


def test_copies_are_forks(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    for made in (copy.copy(cache), copy.deepcopy(cache)):
        assert cache.shared_nbytes > 0  # no key or value was copied
        made.truncate(10)
        assert (len(made), len(cache)) == (10, len(TOKENS))


def test_pickling_keeps_content_and_checkpoints(
    tiny: Gemma, cache: KVCache
) -> None:
    tiny.logits(cache, TOKENS)
    cache.checkpoint()
    again = pickle.loads(pickle.dumps(cache))
    assert again.checkpoints == cache.checkpoints != []
    assert again.to_bytes(True) == cache.to_bytes(True)


def test_default_capacity_is_the_context() -> None:
    assert create_kv_cache("gemma3-270m").capacity_tokens == 32768


def test_custom_shape_has_no_type(cache: KVCache) -> None:
    assert cache.model_type is None
    assert "custom" in repr(cache)


@pytest.mark.parametrize(
    "keywords, name",
    [
        ({"capacity_tokens": 0}, "capacity_tokens"),
        ({"capacity_tokens": -5}, "capacity_tokens"),
        ({"capacity_tokens": 1 << 70}, "capacity_tokens"),
        ({"capacity_tokens": 1.5}, "capacity_tokens"),
        ({"capacity_tokens": 32769}, "capacity"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"kv_dtype": None}, "kv_dtype"),
        ({"block_tokens": 17}, "block_tokens"),
        ({"block_tokens": 256}, "block_tokens"),
    ],
)
def test_bad_arguments(keywords: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        create_kv_cache("gemma3-270m", **keywords)


@pytest.mark.parametrize("model", ["gemma9-1t", None, 3, b"gemma3-270m"])
def test_unknown_model(model: object) -> None:
    with pytest.raises(ValueError, match="model|gemma9"):
        create_kv_cache(model)  # type: ignore[arg-type]


def test_constructor_points_to_the_function() -> None:
    with pytest.raises(TypeError, match="create_kv_cache"):
        KVCache("gemma3-270m")  # type: ignore[arg-type]




def test_truncate_to_the_end_costs_nothing(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    assert cache.truncate(len(cache)).replay_tokens == 0


@pytest.mark.parametrize("length", [101, -1, 1 << 80, 1.0, None])
def test_truncate_out_of_range(
    tiny: Gemma, cache: KVCache, length: object
) -> None:
    tiny.logits(cache, TOKENS)
    with pytest.raises(ValueError, match="length"):
        cache.truncate(length)  # type: ignore[arg-type]
    assert len(cache) == 100


def test_reset_frees_and_unbinds(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    assert cache.nbytes > 0
    cache.reset()
    assert len(cache) == 0
    assert cache.nbytes == cache.shared_nbytes == 0
    other = Gemma.from_tensors(tiny.config, tiny_gguf.tensors(seed=1))
    other.logits(cache, TOKENS)


def test_layers(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    kinds = [layer.kind for layer in cache.layers]
    assert kinds == ["sliding"] * 5 + ["full", "sliding"]
    for layer in cache.layers:
        begin, end = layer.held_range
        assert end == len(TOKENS)
        assert begin == 0 if layer.kind == "full" else begin > 0
        shape = (end - begin, tiny_gguf.KV_HEADS, tiny_gguf.HEAD_DIM)
        assert layer.keys.shape == layer.values.shape == shape
        assert layer.keys.dtype == np.float32
        assert np.isfinite(layer.keys).all()
        assert not np.array_equal(layer.keys, layer.values)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_layers_say_what_they_hold(tiny: Gemma, dtype: str) -> None:
    cache = create_kv_cache(tiny.config, kv_dtype=dtype)
    for layer in cache.layers:
        assert layer.start == layer.length == layer.nbytes == 0
        assert layer.keys.shape == (0, tiny_gguf.KV_HEADS, tiny_gguf.HEAD_DIM)
    tiny.logits(cache, TOKENS)
    fork = cache.fork()
    for layer in cache.layers:
        full = layer.kind == "full"
        assert layer.window == (None if full else WINDOW)
        assert layer.dtype == dtype
        assert layer.start == layer.held_range[0]
        assert layer.start + layer.length == len(TOKENS)
        assert layer.length == len(TOKENS) if full else layer.length >= WINDOW
        assert len(layer.keys) == len(layer.values) == layer.length
    total = cache.nbytes + cache.shared_nbytes
    assert sum(layer.nbytes for layer in cache.layers) == total
    assert sum(layer.nbytes for layer in fork.layers) == total


def test_another_model_is_a_mismatch(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    other = Gemma.from_tensors(tiny.config, tiny_gguf.tensors(seed=1))
    with pytest.raises(gemmakv.MismatchError):
        other.logits(cache, [5])
    with pytest.raises(gemmakv.MismatchError):
        other.generate(cache, [5])
    foreign = create_kv_cache("gemma3-270m")
    with pytest.raises(gemmakv.MismatchError):
        tiny.logits(foreign, [5])
    assert cache.tokens.tolist() == TOKENS and len(foreign) == 0




@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_real_model_prefill_decode_and_restore_agree_bitwise(
    gemma: Gemma, dtype: str
) -> None:
    tokens = [2, *(1000 + (17 * i) % 5000 for i in range(20))]
    whole = create_kv_cache(gemma.config, 64, dtype)
    rows = gemma.logits(whole, tokens, True)
    cache = create_kv_cache(gemma.config, 64, dtype)
    for i, token in enumerate(tokens):
        assert np.array_equal(gemma.logits(cache, [token]), rows[i])
        if i % 8 == 0:
            cache = KVCache.from_bytes(cache.to_bytes(), gemma)
    assert cache.to_bytes() == whole.to_bytes()


def test_empty_snapshot(tiny: Gemma, cache: KVCache) -> None:
    restored = KVCache.from_bytes(cache.to_bytes(), gemma=tiny)
    assert len(restored) == 0


def test_empty_snapshot_of_another_shape(tiny: Gemma) -> None:
    data = create_kv_cache("gemma3-270m").to_bytes()
    with pytest.raises(gemmakv.MismatchError, match="gemma3-270m.*18 layers"):
        KVCache.from_bytes(data, tiny)


def test_what_is_no_model_is_refused(cache: KVCache) -> None:
    with pytest.raises(ValueError, match="gemma: expected a Gemma"):
        KVCache.from_bytes(cache.to_bytes(), "gemma3-270m")  # type: ignore


def test_snapshot_of_other_weights(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    data = cache.to_bytes()
    other = Gemma.from_tensors(tiny.config, tiny_gguf.tensors(seed=1))
    with pytest.raises(gemmakv.MismatchError):
        KVCache.from_bytes(data, other)
    late = KVCache.from_bytes(data)
    with pytest.raises(gemmakv.MismatchError):
        other.logits(late, [5])


def test_damaged_snapshots(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS[:20])
    data = cache.to_bytes()
    errors = (gemmakv.CorruptFile, gemmakv.MismatchError)
    for length in [*range(0, 200), *range(200, len(data), 997)]:
        with pytest.raises(errors):
            KVCache.from_bytes(data[:length])
    rng = np.random.default_rng(5)
    for at in [*range(0, 200), *rng.integers(0, len(data), 200)]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(errors):
            KVCache.from_bytes(flipped)
    with pytest.raises(errors):
        KVCache.from_bytes(data + b"\0")


def test_version_1_file_opens(tiny: Gemma, golden: Path) -> None:
    """A file that the first release wrote, of the tiny model."""
    old = KVCache.load(golden / "snapshot_v1_tiny.kv")
    assert old.capacity_tokens == 200
    tokens = old.tokens.tolist()
    assert len(tokens) == 64 and tokens[:60] == TOKENS[:60]
    fresh = create_kv_cache(tiny.config, capacity_tokens=200)
    tiny.logits(fresh, tokens[:63])  # the last one was pending
    for was, now in zip(old.layers, fresh.layers, strict=True):
        begin, end = was.held_range
        assert end == 63
        skip = begin - now.held_range[0]
        # The arithmetic may have changed since, by less than bf16 shows.
        for a, b in ((was.keys, now.keys), (was.values, now.values)):
            assert np.allclose(a, b[skip:], rtol=0.02, atol=0.02)



def test_truncate_replays_from_a_checkpoint(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config, block_tokens=16)
    tiny.logits(cache, TOKENS[:60])
    assert cache.checkpoint()
    tiny.logits(cache, TOKENS[60:])
    assert cache.truncate(75).replay_tokens == 15  # from 0 it were 75
    assert np.array_equal(
        tiny.logits(cache, [9]), logits_after(tiny, [*TOKENS[:75], 9], "bf16")
    )
    # Below it, it is gone, and 0 is nearest.
    assert cache.truncate(40).replay_tokens == 40
    assert cache.checkpoints == []


def test_checkpoint_bytes(tiny: Gemma) -> None:
    none = create_kv_cache(tiny.config, checkpoint_bytes=0)
    tiny.logits(none, TOKENS)
    assert not none.checkpoint() and none.checkpoints == []
    default = create_kv_cache(tiny.config)
    one = default.checkpoint_bytes // 4
    assert one > 0
    few = create_kv_cache(
        tiny.config, checkpoint_bytes=2 * one, block_tokens=16
    )
    for start in range(0, 100, 5):
        tiny.logits(few, TOKENS[start : start + 5])
        assert few.checkpoint()
    kept = few.checkpoints
    assert kept[0] == 5 and kept[-1] == 100, "the first and the last"
    gaps = np.diff(kept)
    assert len(kept) > 2 and gaps[0] == gaps.max(), "old ones thin out"
    before = few.nbytes
    few.truncate(0)
    assert few.nbytes == 0 < before


def test_checkpoint_costs_show(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS[:50])
    without = cache.fork()
    cache.checkpoint()
    for c in (cache, without):
        tiny.logits(c, [*TOKENS, *TOKENS])
    cost = cache.nbytes - without.nbytes
    assert 0 < cost <= cache.checkpoint_bytes // 4
    fork = cache.fork()  # carries the checkpoint, by reference
    assert fork.nbytes == cache.nbytes == 0
    assert fork.checkpoints == [50]
    cache.reset()
    assert cache.checkpoints == []
    assert fork.truncate(50).replay_tokens == 0


def test_checkpoint_while_a_replay_is_due(tiny: Gemma, cache: KVCache) -> None:
    assert cache.checkpoint(), "position 0 is free"
    tiny.logits(cache, TOKENS)
    assert cache.truncate(50).replay_tokens > 0
    assert not cache.checkpoint()
    tiny.logits(cache, [9])
    assert cache.checkpoint() and cache.checkpoints == [51]


@pytest.mark.parametrize("value", [-1, 1.5, "1", 1 << 70])
def test_bad_checkpoint_bytes(tiny: Gemma, value: object) -> None:
    with pytest.raises(ValueError, match="checkpoint_bytes"):
        create_kv_cache(
            tiny.config,
            checkpoint_bytes=value,  # type: ignore[arg-type]
        )


def test_snapshot_with_checkpoints(tiny: Gemma, tmp_path: Path) -> None:
    cache = create_kv_cache(tiny.config, checkpoint_bytes=1 << 20)
    ends = []
    for turn in (TOKENS[:30], TOKENS[30:50], TOKENS[50:]):
        tiny.generate(cache, turn, max_tokens=2)
        cache.checkpoint()
        ends.append(len(cache))
    small, large = cache.to_bytes(), cache.to_bytes(checkpoints=True)
    assert len(small) < len(large)
    assert KVCache.from_bytes(small).checkpoints == []
    cache.save(tmp_path / "a.kv", checkpoints=True)
    for restored in (
        KVCache.from_bytes(bytearray(large), tiny),
        KVCache.load(tmp_path / "a.kv"),
    ):
        assert restored.checkpoint_bytes == 1 << 20
        assert restored.checkpoints == ends
        assert restored.to_bytes(checkpoints=True) == large
        for end in reversed(ends):
            assert restored.truncate(end).replay_tokens == 0
            tokens = restored.tokens.tolist()
            assert np.array_equal(
                tiny.logits(restored.fork(), [9]),
                logits_after(tiny, [*tokens, 9], "bf16"),
            )


@pytest.mark.parametrize("data", [5, None, "text", [1, 2]])
def test_from_bytes_wants_bytes(data: object) -> None:
    with pytest.raises(ValueError, match="data"):
        KVCache.from_bytes(data)  # type: ignore[arg-type]


def test_save_and_load(tiny: Gemma, cache: KVCache, tmp_path: Path) -> None:
    tiny.logits(cache, TOKENS)
    for path in (tmp_path / "a.kv", str(tmp_path / "b.kv")):
        cache.save(path)
        cache.save(path)  # replaces
        assert KVCache.load(path, tiny).tokens.tolist() == TOKENS
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "b.kv"]
    file = io.BytesIO()
    cache.save(file)
    assert file.getvalue() == (tmp_path / "a.kv").read_bytes()
    file.seek(0)
    assert KVCache.load(file).tokens.tolist() == TOKENS


class _Pieces(io.RawIOBase):
    """Takes at most so many bytes a call, and fails at one of the calls."""

    def __init__(self, most: int = 1 << 62, fail_at: int = 0) -> None:
        self.most, self.fail_at = most, fail_at
        self.calls: list[int] = []
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.calls.append(len(data))
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        taken = bytes(data)[: self.most]
        self.data += taken
        return len(taken)


def test_save_writes_in_pieces(tiny: Gemma) -> None:
    cache = create_kv_cache(
        tiny.config, kv_dtype="f32", checkpoint_bytes=1 << 30
    )
    for _ in range(5):
        tiny.logits(cache, TOKENS)
        cache.checkpoint()
    whole = cache.to_bytes(checkpoints=True)
    file = _Pieces()
    cache.save(file, checkpoints=True)  # type: ignore[arg-type]
    assert file.data == whole
    assert max(file.calls) <= 1 << 18 < len(whole)
    short = _Pieces(most=50_000)
    cache.save(short, checkpoints=True)  # type: ignore[arg-type]
    assert short.data == whole
    with pytest.raises(OSError, match="took 0 of"):
        cache.save(_Pieces(most=0))  # type: ignore[arg-type]
    parts: list[bytes] = []

    class Silent:
        def write(self, data: bytes) -> None:
            parts.append(data)

    cache.save(Silent(), checkpoints=True)  # type: ignore[arg-type]
    assert b"".join(parts) == whole


def test_an_interrupted_save_changes_nothing(
    tiny: Gemma, cache: KVCache, tmp_path: Path, monkeypatch: Any
) -> None:
    tiny.logits(cache, TOKENS * 4)
    whole = cache.to_bytes()
    for call in (1, 2):
        file = _Pieces(fail_at=call)
        with pytest.raises(KeyboardInterrupt):
            cache.save(file)  # type: ignore[arg-type]
        assert len(file.calls) == call
        assert cache.to_bytes() == whole
    path = tmp_path / "a.kv"
    path.write_bytes(b"old")
    real = os.fdopen

    def full(descriptor: int, mode: str) -> Any:
        real(descriptor, mode).close()
        return real(os.open("/dev/full", os.O_WRONLY), mode)

    if os.path.exists("/dev/full"):
        monkeypatch.setattr(os, "fdopen", full)
        with pytest.raises(OSError, match="No space"):
            cache.save(path)
        monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.kv"]
    tiny.generate(cache, [5], max_tokens=2)


def test_failed_save_keeps_the_old_file(
    tiny: Gemma,
    cache: KVCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.kv"
    cache.save(path)
    before = path.read_bytes()
    tiny.logits(cache, TOKENS)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.kv"]


def test_save_follows_links_and_fills_pipes(
    tiny: Gemma, cache: KVCache, tmp_path: Path
) -> None:
    tiny.logits(cache, TOKENS)
    data = cache.to_bytes()
    (tmp_path / "link.kv").symlink_to(tmp_path / "real.kv")
    cache.save(tmp_path / "link.kv")
    assert (tmp_path / "link.kv").is_symlink()
    assert (tmp_path / "real.kv").read_bytes() == data
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        cache.save(pipe)
        assert read.result(timeout=60) == data
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link.kv", "pipe", "real.kv"]


def test_an_endless_file_is_no_snapshot() -> None:
    with pytest.raises(gemmakv.CorruptFile, match="snapshot"):
        KVCache.load("/dev/zero")


class ShortReads(io.BytesIO):
    """As pipes and sockets do, gives less than was asked for."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(100 if size is None or size < 0 else size // 2 + 1)


def test_load_goes_on_after_short_reads(tiny: Gemma, cache: KVCache) -> None:
    tiny.logits(cache, TOKENS)
    data = cache.to_bytes()
    assert KVCache.load(ShortReads(data)).to_bytes() == data


@pytest.mark.parametrize("wrong", [5, None, True, io.StringIO("text")])
def test_save_and_load_of_what_is_no_file(
    cache: KVCache, wrong: Any
) -> None:
    for call in (cache.save, KVCache.load):
        with pytest.raises(ValueError, match="binary file object, found"):
            call(wrong)


def test_save_and_load_errors(cache: KVCache, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "none.kv")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "folder.kv")
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path)
    (tmp_path / "empty.kv").write_bytes(b"")
    with pytest.raises(gemmakv.CorruptFile):
        KVCache.load(tmp_path / "empty.kv")


def test_saved_file_has_usual_permissions(
    cache: KVCache, tmp_path: Path
) -> None:
    path = tmp_path / "a.kv"
    mask = os.umask(0o027)
    try:
        cache.save(path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.slow
def test_real_model_window(gemma: Gemma) -> None:
    """Past the window: sliding layers keep it, truncation stays exact."""
    tokens = [2, *(1000 + (17 * i) % 5000 for i in range(699))]
    cache = create_kv_cache(gemma.model_type)
    rows = gemma.logits(cache, tokens)
    held = {layer.kind: layer.held_range for layer in cache.layers}
    assert held["full"] == (0, 700)
    assert 0 < held["sliding"][0] <= 700 - 512 + 1
    assert cache.truncate(600).replay_tokens > 0
    assert np.array_equal(gemma.logits(cache, tokens[600:]), rows)
