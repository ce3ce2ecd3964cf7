"""What the prefix cache saves and costs, as ratios of medians in one run.

    prefix_cache.py [MODEL] [--threads N] [--repeats N] [--long TOKENS]

- first token behind a known prefix and 16 new tokens, against computing all
- taking over a known prefix alone, milliseconds
- prefill of prompts that nobody knows, and decode, with against without
- 32 identical prompts at once against one prefill and 32 rows that decode

Pairs are taken by turns, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import gemmakv

NEW = 16


def seconds(call: Callable[..., object], *args: object) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


class Bench:
    def __init__(self, model: str, threads: int | None) -> None:
        self.on = gemmakv.Gemma.load(model, threads=threads)
        self.off = gemmakv.Gemma.load(
            model, threads=threads, prefix_cache=False
        )
        self.rng = np.random.default_rng(1)

    def ids(self, count: int) -> list[int]:
        # Above the control tokens of Gemma 3.
        return self.rng.integers(300, 200_000, count).tolist()

    def first(self, gemma: gemmakv.Gemma, ids: list[int]) -> None:
        cache = gemmakv.create_kv_cache(gemma.config)
        gemma.logits(cache, ids)

    def known(self, count: int, repeats: int) -> str:
        """A conversation ended at `count`; others go on from there."""
        prefix = self.ids(count)
        cache = gemmakv.create_kv_cache(self.on.config)
        self.on.logits(cache, prefix)
        hits, cold, match = [], [], []
        for i in range(max(repeats, 3)):
            ids = prefix + self.ids(NEW)
            hits.append(seconds(self.first, self.on, ids))
            view = self.on.prefix_cache
            match.append(seconds(view.match, ids))
            if i < repeats:
                cold.append(seconds(self.first, self.off, ids))
        hit, all_ = statistics.median(hits), statistics.median(cold)
        return (
            f"known {count} + {NEW}: {all_ / hit:.1f}x "
            f"({1e3 * hit:.1f} ms against {1e3 * all_:.0f}); "
            f"match and take over {1e3 * statistics.median(match):.2f} ms "
            f"({1e3 * min(match):.2f} to {1e3 * max(match):.2f})"
        )

    def unknown(self, count: int, repeats: int) -> str:
        ratios = []
        for i in range(repeats):
            ids = self.ids(count)
            pair = [self.on, self.off]
            times = {}
            for gemma in pair if i % 2 else pair[::-1]:
                times[gemma] = seconds(self.first, gemma, ids)
            ratios.append(times[self.on] / times[self.off])
        return f"prefill of {count} that nobody knows: {_spread(ratios)}"

    def decode(self, repeats: int, tokens: int = 64) -> str:
        ratios = []
        for i in range(repeats):
            prompt = self.ids(32)
            pair = [self.on, self.off]
            times = {}
            for gemma in pair if i % 2 else pair[::-1]:
                cache = gemmakv.create_kv_cache(gemma.config)
                result = gemma.generate(
                    cache, prompt, max_tokens=tokens, logit_bias={1: -1e9}
                )
                times[gemma] = result.timings.decode_s
            ratios.append(times[self.on] / times[self.off])
        return f"decode of {tokens}: {_spread(ratios)}"

    def at_once(self, rows: int, count: int, repeats: int) -> str:
        """All together, against a prefill and forks that decode."""
        ratios = []
        for _ in range(repeats):
            prompt = self.ids(count)

            def together(prompt: list[int] = prompt) -> None:
                caches = [
                    gemmakv.create_kv_cache(self.on.config)
                    for _ in range(rows)
                ]
                self.on.generate_batch(caches, [prompt] * rows, max_tokens=8)

            def by_fork(prompt: list[int] = prompt) -> None:
                cache = gemmakv.create_kv_cache(self.off.config)
                self.off.generate(cache, prompt, max_tokens=8, n=rows)

            ratios.append(seconds(together) / seconds(by_fork))
        return f"{rows} identical prompts of {count}: {_spread(ratios)}"


def _spread(ratios: list[float]) -> str:
    return (
        f"{statistics.median(ratios):.3f}x "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", type=int, default=24_000)
    args = parser.parse_args()
    bench = Bench(args.model, args.threads)
    bench.unknown(128, 1)  # both are warm
    print(bench.known(2_048, args.repeats), flush=True)
    if args.long:
        print(bench.known(args.long, 1), flush=True)
    for count in (128, 512):
        print(bench.unknown(count, 4 * args.repeats), flush=True)
    print(bench.decode(2 * args.repeats), flush=True)
    print(bench.at_once(32, 2_000, args.repeats), flush=True)


if __name__ == "__main__":
    main()
