"""N threads that call generate against one generate_batch of N, interleaved.

    python tools/bench/threads_vs_batch.py [--model gemma-3-270m] \
        [--threads 2] [--conversations 8] [--tokens 96] [--rounds 9]

Both ways must give the same tokens; the script fails if they do not. Prints
tokens a second of each, and the median and range of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import gemmakv


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.gemma = gemmakv.Gemma.load(
            args.model, threads=args.threads, prefix_cache=False,
            speculate="off")
        self.tokens = args.tokens
        self.prompts = [f"Chapter {i}. It was a cold morning and"
                        for i in range(args.conversations)]

    def caches(self) -> list[gemmakv.KVCache]:
        return [gemmakv.create_kv_cache(self.gemma.config, 512)
                for _ in self.prompts]

    def batch(self) -> tuple[float, list[list[int]]]:
        """(tokens a second, token ids of each row)"""
        caches = self.caches()
        begin = time.perf_counter()
        results = self.gemma.generate_batch(
            caches, self.prompts, max_tokens=self.tokens)
        return self.rate(begin, results)

    def separate(self) -> tuple[float, list[list[int]]]:
        caches = self.caches()
        results: list = [None] * len(caches)
        start = threading.Barrier(len(caches) + 1)

        def call(i: int) -> None:
            start.wait()
            results[i] = self.gemma.generate(
                caches[i], self.prompts[i], max_tokens=self.tokens)

        threads = [threading.Thread(target=call, args=(i,))
                   for i in range(len(caches))]
        for thread in threads:
            thread.start()
        start.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        return self.rate(begin, results)

    @staticmethod
    def rate(begin: float, results: list) -> tuple[float, list[list[int]]]:
        seconds = time.perf_counter() - begin
        ids = [result.token_ids for result in results]
        return sum(map(len, ids)) / seconds, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    bench = Bench(args)
    bench.batch(), bench.separate()  # first touch of everything
    pairs = []
    for i in range(args.rounds):
        ways = [bench.separate, bench.batch]
        if i % 2:
            (batch, batch_ids), (alone, alone_ids) = [w() for w in ways[::-1]]
        else:
            (alone, alone_ids), (batch, batch_ids) = [w() for w in ways]
        if batch_ids != alone_ids:
            raise SystemExit("the two ways gave different tokens")
        pairs.append((alone, batch))
    ratios = [alone / batch for alone, batch in pairs]
    print(f"{args.conversations} conversations, tokens/s: threads "
          f"{statistics.median(p[0] for p in pairs):.0f}, batch "
          f"{statistics.median(p[1] for p in pairs):.0f}; ratio "
          f"{statistics.median(ratios):.3f} ({min(ratios):.3f}.."
          f"{max(ratios):.3f})")


if __name__ == "__main__":
    main()
