"""What vs_llama.py, vs_peers.py, embeddings_vs_llama.py and vs_build.py
measure.

One process, one work at a time.

Reads one JSON request a line from stdin and writes one JSON answer a line:
{"kind": "prefill", "tokens": 512} -> {"tokens_per_s": ...}. Times are wall
clock around the public Python calls, sampling and bookkeeping included. Only
"speculate" guesses: the others decode a token a step, as their peers do. The
driver stops this process (SIGSTOP) while the peer runs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
import warnings

import gemmakv

TEXT = (pathlib.Path(__file__).resolve().parents[1] / "quality" / "texts"
        / "english.txt")


class Bench:
    def __init__(self, model: str, threads: int):
        with warnings.catch_warnings():
            # What a file of embeddings lacks takes no time worth measuring.
            warnings.simplefilter("ignore", gemmakv.PartialModelWarning)
            self.gemma = gemmakv.Gemma.load(
                model, threads=threads, prefix_cache=False, speculate="off")
        ids = self.gemma.tokenizer.encode(TEXT.read_text("utf-8"))
        self.ids = ids * (1 + 16384 // len(ids))
        self.offset = 0  # of prompts; moved on when a model ends a text early
        self.parked: dict[tuple[int | str, int], gemmakv.KVCache] = {}

    def cache(self, capacity: int) -> gemmakv.KVCache:
        return gemmakv.create_kv_cache(
            self.gemma.config, capacity_tokens=capacity)

    def prefill(self, tokens: int) -> dict:
        prompt = [2, *self.ids[:tokens - 1]]
        cache = self.cache(tokens)
        begin = time.perf_counter()
        self.gemma.logits(cache, prompt)
        return {"tokens_per_s": tokens / (time.perf_counter() - begin)}

    def with_context(self, tokens: int, row: int) -> gemmakv.KVCache:
        """A conversation that holds `tokens` tokens; a fork of a kept one."""
        key = (tokens, row)
        if key not in self.parked:
            self.parked[key] = self.cache(self.gemma.config.context_length)
            if tokens:
                start = self.offset + 97 * row
                self.gemma.logits(
                    self.parked[key], [2, *self.ids[start:start + tokens - 1]])
        return self.parked[key].fork()

    def decode(self, tokens: int, context: int = 0, batch: int = 1,
               **sampling: float) -> dict:
        """Tokens a second of `batch` conversations, `tokens` steps each."""
        for _ in range(8):
            caches = [self.with_context(context, row)
                      for row in range(batch)]
            first = [[self.ids[self.offset + 97 * row + context]] if context
                     else [2] for row in range(batch)]
            begin = time.perf_counter()
            results = self.gemma.generate_batch(
                caches, first, max_tokens=tokens, **sampling)
            seconds = time.perf_counter() - begin
            if all(len(r.token_ids) == tokens for r in results):
                return {"tokens_per_s": batch * tokens / seconds}
            # An end-of-sequence token: another text, and measure again.
            self.offset += 11
            self.parked.clear()
        raise RuntimeError("the model ends every text early")

    def speculate(self, text: str, tokens: int) -> dict:
        """Tokens a second behind a text, with guesses by lookup."""
        key = (text, 0)
        if key not in self.parked:
            self.parked[key] = self.cache(self.gemma.config.context_length)
            self.gemma.prefill(self.parked[key], text)
        cache = self.parked[key].fork()
        begin = time.perf_counter()
        reply = self.gemma.generate(cache, "", max_tokens=tokens,
                                    ignore_eos=True, speculate="lookup")
        seconds = time.perf_counter() - begin
        return {"tokens_per_s": len(reply.token_ids) / seconds}

    def greedy(self, prompts: int, context: int, tokens: int) -> dict:
        """Prompts out of the text and greedy replies, as token ids."""
        cuts = [[2, *self.ids[i * context:(i + 1) * context - 1]]
                for i in range(prompts)]
        replies = self.gemma.generate_batch(
            [self.cache(context + tokens) for _ in cuts], cuts,
            max_tokens=tokens, ignore_eos=True)
        return {"prompts": cuts, "replies": [r.token_ids for r in replies]}

    def stream(self, tokens: int) -> dict:
        """Tokens a second that one reader gets one by one."""
        cache = self.with_context(32, 0)
        begin = time.perf_counter()
        with self.gemma.stream(cache, self.ids[32:34], max_tokens=tokens,
                               logit_bias=dict.fromkeys(
                                   self.gemma.config.eos_ids,
                                   float("-inf"))) as pieces:
            count = sum(piece.token_id >= 0 for piece in pieces)
        return {"tokens_per_s": count / (time.perf_counter() - begin)}

    def embed(self, tokens: int, texts: int) -> dict:
        """Vectors a second of texts of as many tokens, in one call."""
        ids = self.ids * (1 + tokens * texts // len(self.ids))
        step = tokens - 1
        batch = [[2, *ids[i * step:(i + 1) * step]] for i in range(texts)]
        begin = time.perf_counter()
        self.gemma.embed(batch)
        return {"texts_per_s": texts / (time.perf_counter() - begin)}

    def snapshot(self, tokens: int) -> dict:
        """Tokens a second that are saved to bytes and restored."""
        cache = self.with_context(tokens, 0)
        begin = time.perf_counter()
        gemmakv.KVCache.from_bytes(cache.to_bytes())
        return {"tokens_per_s": tokens / (time.perf_counter() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    bench = Bench(args.model, args.threads)
    print(json.dumps({"ready": True, "cpu": str(gemmakv.cpu_info())}),
          flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        answer = {
            "prefill": bench.prefill,
            "decode": bench.decode,
            "speculate": bench.speculate,
            "greedy": bench.greedy,
            "stream": bench.stream,
            "embed": bench.embed,
            "snapshot": bench.snapshot,
        }[kind](**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
