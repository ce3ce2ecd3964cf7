"""Work on threads whose stacks are small: a program of its own.

    python -m support.small_stacks FOLDER CALLER_KIB CORE_KIB JOBS...

Python's threads have stacks of CALLER_KIB, those that the core makes of
CORE_KIB, as where the system's default is small. The main thread, whose stack
is the shell's to choose, only waits. FOLDER is what `write` has filled; the
job "python" is work without the core. A stack that does not suffice ends the
process by a signal.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = list(range(7, 60))
BATCH = [PROMPT[i : i + 20 + i] for i in range(8)]


def set_default_stack(size: int) -> None:
    """That of threads for which nobody states one. Where the C library has no
    call for it, it is small by itself."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_setattr_default_np"):
        return
    attributes = ctypes.create_string_buffer(512)
    assert library.pthread_attr_init(attributes) == 0
    assert (
        library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size))
        == 0
    )
    assert library.pthread_setattr_default_np(attributes) == 0


def write(folder: Path) -> None:
    """Models of all types of weights, and one of embeddings."""
    from support import tiny_gguf, tiny_models

    tiny_models.write_tiny_gguf(
        folder / "all.gguf", tiny_models.ALL_TYPES, "Q6_K"
    )
    tiny_models.write_tiny_gguf(folder / "floats.gguf", "F32")
    tiny_gguf.write_embedding(folder / "embed.gguf")


def python(folder: Path) -> None:
    import numpy as np

    draws = np.random.default_rng(1).normal(size=(40, 50))
    assert np.argsort(draws, axis=1).shape == draws.shape
    assert f"{draws.sum():.3f}" and str(folder)
    try:
        open(folder / "gone").close()
    except FileNotFoundError as error:
        assert error.errno


def generate(folder: Path) -> None:
    import numpy as np

    import gemmakv

    gemma = gemmakv.Gemma.load(
        folder / "all.gguf", threads=3, packed_cache=folder / "packed",
        prefix_cache=False,
    )  # fmt: skip
    for kv_dtype in ("f32", "bf16", "int8"):
        cache = gemmakv.create_kv_cache(gemma.config, kv_dtype=kv_dtype)
        said = gemma.generate(cache, PROMPT, max_tokens=4, logprobs=True)
        assert said.token_ids
        cache.save(folder / f"{kv_dtype}.kv", checkpoints=True)
        again = gemmakv.KVCache.load(folder / f"{kv_dtype}.kv")
        assert np.array_equal(again.fork().tokens, cache.tokens)
        options: dict[str, Any] = {
            "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3,
            "repetition_penalty": 1.1, "max_tokens": 4,
        }  # fmt: skip
        with gemma.stream(again, PROMPT, **options) as stream:
            assert list(stream)
        assert gemma.logits(cache, PROMPT[:9], all_positions=True).any()

    def processor(ids: object, logits: Any) -> Any:
        return logits

    caches = [gemmakv.create_kv_cache(gemma.config) for _ in BATCH]
    for changes in ({}, {"logits_processor": processor, "temperature": 1.0}):
        assert gemma.generate_batch(caches, BATCH, max_tokens=3, **changes)
    assert gemma.embed([[7, 8, 9], [7] * 70], pooling="mean").any()


def quantize(folder: Path) -> None:
    import gemmakv

    for name in gemmakv._core.quantize_types():
        gemma = gemmakv.Gemma.load(
            folder / "floats.gguf", threads=2, quantize=name,
            packed_cache=folder / name, prefix_cache=False,
        )  # fmt: skip
        gemmakv._core.check_packed_file(str(gemma.packed_weights.path))
        cache = gemmakv.create_kv_cache(gemma.config)
        assert gemma.generate(cache, PROMPT, max_tokens=2).token_ids


def embed(folder: Path) -> None:
    import gemmakv

    for name in ("bf16", "q8_0", "q4_0"):
        gemma = gemmakv.Gemma.load(
            folder / "embed.gguf", threads=2, quantize=name,
            packed_cache=False,
        )  # fmt: skip
        texts = ["a the cat", "in the hat " * 9, "sat"]
        assert gemma.embed(texts).shape[0] == len(texts)


def draft(folder: Path) -> None:
    import gemmakv

    small, large = (
        gemmakv.Gemma.load(
            folder / "floats.gguf", threads=2, quantize=name,
            packed_cache=False, prefix_cache=False,
        )
        for name in ("q4_0", "q8_0")
    )  # fmt: skip
    for speculate in ("draft", "lookup"):
        cache = gemmakv.create_kv_cache(large.config)
        assert large.generate(
            cache, PROMPT * 2, max_tokens=20, draft=small, speculate=speculate,
            ignore_eos=True,
        ).token_ids  # fmt: skip


def prefix(folder: Path) -> None:
    import gemmakv

    for _ in range(2):
        with gemmakv.PrefixCache(
            ram=1 << 20, disk=folder / "disk", disk_bytes=1 << 22
        ) as store:
            gemma = gemmakv.Gemma.load(
                folder / "floats.gguf", threads=2, packed_cache=False,
                prefix_cache=store,
            )  # fmt: skip
            for _ in range(2):
                cache = gemmakv.create_kv_cache(gemma.config)
                said = gemma.generate(cache, PROMPT * 6, max_tokens=2)
            assert store.flush()
    assert sum(said.usage.cached.values()) > 0


def padded(folder: Path) -> None:
    import numpy as np

    import gemmakv

    draw = np.random.default_rng(3)
    for cache in (
        gemmakv.LayerCache(2, 300, 1, 64),
        gemmakv.CyclicCache(2, 300, 1, 64, "bf16", window=100),
    ):
        k, v = draw.normal(size=(2, 2, 200, 1, 64)).astype(np.float32)
        cache.prefill(k, v, np.ones((2, 200), np.int32))
        q = draw.normal(size=(2, 100, 4, 64)).astype(np.float32)
        assert gemmakv.attention(q, cache).shape == q.shape


def verify(folder: Path) -> None:
    """On every target that there is."""
    import gemmakv.verify

    for name in ("all", "floats"):
        assert gemmakv.verify.run(folder / f"{name}.gguf", tokens=96).equal


JOBS: dict[str, Callable[[Path], None]] = {
    job.__name__: job
    for job in (
        python, generate, quantize, embed, draft, prefix, padded, verify
    )
}  # fmt: skip


def main() -> None:
    folder, caller, core, *jobs = sys.argv[1:]
    set_default_stack(int(core) << 10)
    for job in jobs:
        failed: list[BaseException] = []

        def work(job: str = job, failed: Any = failed) -> None:
            try:
                JOBS[job](Path(folder))
            except BaseException as error:
                failed.append(error)
                raise

        threading.stack_size(int(caller) << 10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        threading.stack_size(0)
        if failed:
            sys.exit(f"{job} failed")
        print(job, flush=True)


if __name__ == "__main__":
    main()
