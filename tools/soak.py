#!/usr/bin/env python3
"""Creates, forks, rewinds, saves, restores and drops conversations at random.

    python tools/soak.py [--model FILE] [--conversations 1000] [--minutes 3]
        [--threads 4] [--seed 1]

Many threads on one model; a conversation may begin as a fork of one that
another thread is generating into. Every few conversations, what is held is
compared bit for bit with a fresh computation of its tokens. In the end nothing
is left: no block of its pool is in use. Exits with 1 otherwise.

Runs until the number of conversations and the minutes are both reached. The
default model is a tiny random one, written for the occasion (needs `gguf`).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import gemmakv

DTYPES = ("bf16", "int8", "f32")


@dataclasses.dataclass
class Report:
    """What a run did."""

    conversations: int = 0
    operations: int = 0
    verified: int = 0
    full: int = 0  # refused for lack of capacity
    peak_bytes: int = 0
    seconds: float = 0.0
    blocks_left: int = -1


class Soak:
    """One run. All randomness of a conversation follows from its number."""

    def __init__(
        self, gemma: gemmakv.Gemma, folder: Path, seed: int,
        max_tokens: int = 200, verify_every: int = 5,
    ) -> None:  # fmt: skip
        self.gemma, self.folder, self.seed = gemma, folder, seed
        self.max_tokens, self.verify_every = max_tokens, verify_every
        self.pool = gemmakv.BlockPool()  # no limit: it counts
        self.report = Report()
        self.lock = threading.Lock()  # guards what follows
        self.live: dict[int, gemmakv.KVCache] = {}
        self.errors: list[BaseException] = []
        self.next_number = 0

    def run(self, conversations: int, threads: int, seconds: float) -> Report:
        """Raises the first error that a thread met."""
        start = time.monotonic()

        def more() -> int | None:
            with self.lock:
                late = time.monotonic() - start >= seconds
                if self.errors or (late and self.next_number >= conversations):
                    return None
                self.next_number += 1
                return self.next_number

        def work() -> None:
            try:
                while (number := more()) is not None:
                    self.converse(number)
            except BaseException as error:
                with self.lock:
                    self.errors.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self.errors:
            raise self.errors[0]
        self.report.seconds = time.monotonic() - start
        gc.collect()
        if self.gemma.prefix_cache is not None:  # it refers to blocks, too
            self.gemma.prefix_cache.cache.clear()
        self.report.blocks_left = self.pool.blocks_in_use
        return self.report

    def converse(self, number: int) -> None:
        """The life of one conversation."""
        rng = random.Random(self.seed << 32 | number)
        cache = self.begin(rng)
        with self.lock:
            self.live[number] = cache
        try:
            for _ in range(rng.randint(3, 12)):
                cache = self.operate(rng, cache, number)
                with self.lock:
                    self.live[number] = cache
                    self.report.operations += 1
                    self.report.peak_bytes = max(
                        self.report.peak_bytes, self.pool.used_bytes
                    )
            if number % self.verify_every == 0:
                self.verify(cache)
        finally:
            with self.lock:
                del self.live[number]
                self.report.conversations += 1

    def begin(self, rng: random.Random) -> gemmakv.KVCache:
        with self.lock:
            others = list(self.live.values())
        if others and rng.random() < 0.5:
            return rng.choice(others).fork()
        return gemmakv.create_kv_cache(
            self.gemma.config,
            capacity_tokens=self.max_tokens + rng.randint(0, 50),
            kv_dtype=rng.choice(DTYPES),
            block_tokens=rng.choice((16, 32, 64)),
            pool=self.pool,
        )

    def tokens(self, rng: random.Random, limit: int) -> list[int]:
        vocab = self.gemma.config.vocab_size
        return [rng.randrange(2, vocab) for _ in range(rng.randint(1, limit))]

    def operate(
        self, rng: random.Random, cache: gemmakv.KVCache, number: int
    ) -> gemmakv.KVCache:
        """One random thing; gives the conversation to go on with."""
        operation = rng.randrange(10)
        try:
            if operation == 0:
                self.gemma.logits(cache, self.tokens(rng, 80))
            elif operation in (1, 2):
                self.gemma.generate(
                    cache, self.tokens(rng, 40), max_tokens=rng.randint(1, 8),
                    temperature=rng.choice((0.0, 1.0)), seed=number,
                )  # fmt: skip
            elif operation == 3:
                stream = self.gemma.stream(
                    cache, self.tokens(rng, 20), max_tokens=12
                )
                for count, _ in enumerate(stream):
                    if count >= rng.randint(0, 12):
                        stream.cancel()
                stream.result()
            elif operation == 4:
                cache = cache.fork()
            elif operation == 5:
                lengths = [rng.randint(0, len(cache)), *cache.checkpoints]
                cache.truncate(rng.choice(lengths))
            elif operation == 6:
                cache = gemmakv.KVCache.from_bytes(
                    cache.to_bytes(rng.random() < 0.5), pool=self.pool
                )
            elif operation == 7:
                path = self.folder / f"{number}.kv"
                cache.save(path)
                cache = gemmakv.KVCache.load(path, self.gemma, pool=self.pool)
                path.unlink()
            elif operation == 8:
                cache.checkpoint()
            elif rng.random() < 0.2:
                cache.reset()
        except gemmakv.CacheFullError:
            cache.truncate(len(cache) // 3)
            with self.lock:
                self.report.full += 1
        return cache

    def verify(self, cache: gemmakv.KVCache) -> None:
        """What the cache goes on with is what its tokens alone give."""
        if len(cache) >= cache.capacity_tokens:
            cache.truncate(len(cache) - 1)
        fresh = gemmakv.create_kv_cache(
            self.gemma.config, cache.capacity_tokens, cache.kv_dtype
        )
        tokens = [*cache.tokens.tolist(), 5]
        expected = self.gemma.logits(fresh, tokens)
        if not np.array_equal(self.gemma.logits(cache, [5]), expected):
            raise AssertionError(f"other logits after the tokens {tokens}")
        with self.lock:
            self.report.verified += 1


def random_model(folder: Path) -> str:
    import make_random_gguf

    path = folder / "random.gguf"
    make_random_gguf.write_random_gguf(
        path, make_random_gguf.Shape(), ["Q8_0"], "Q8_0", 0
    )
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gemma = gemmakv.Gemma.load(args.model or random_model(folder))
        soak = Soak(gemma, folder, args.seed)
        report = soak.run(
            args.conversations, args.threads, 60 * args.minutes
        )
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key, value in dataclasses.asdict(report).items():
        print(f"{key}: {value:,}")
    print(f"peak resident memory: {peak_kib // 1024:,} MiB")
    return 1 if report.blocks_left else 0


if __name__ == "__main__":
    sys.exit(main())
