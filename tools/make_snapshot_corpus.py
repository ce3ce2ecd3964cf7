#!/usr/bin/env python3
"""Writes the seeds of the snapshot fuzzer: small ones, each another state.

    python tools/make_snapshot_corpus.py tests/fuzz/corpus/snapshot

Same bytes every time, for a given version of the snapshot format. Needs
gemmakv.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import gemmakv

HIDDEN, HEAD_DIM, FFN, VOCAB, WINDOW = 32, 32, 32, 50, 5


def model(kinds: list[str]) -> gemmakv.Gemma:
    """One head a layer, random weights."""
    rng = np.random.default_rng(1)
    config = gemmakv.ModelConfig(
        architecture="gemma3", hidden_size=HIDDEN, num_layers=len(kinds),
        num_heads=1, kv_heads=1, head_dim=HEAD_DIM, ffn_dim=FFN,
        vocab_size=VOCAB, context_length=128,
        sliding_window=WINDOW if "sliding" in kinds else 0,
        layer_kinds=kinds, query_scale=0.2, rope_base_full=1e6,
        qk_norm=False, post_norms=False, eos_ids=[1])

    def tensor(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    tensors = {"token_embd.weight": tensor(VOCAB, HIDDEN),
               "output_norm.weight": tensor(HIDDEN)}
    for i in range(len(kinds)):
        shapes = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
            "attn_q": (HEAD_DIM, HIDDEN), "attn_k": (HEAD_DIM, HIDDEN),
            "attn_v": (HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEAD_DIM),
            "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN)}
        for name, shape in shapes.items():
            tensors[f"blk.{i}.{name}.weight"] = tensor(*shape)
    return gemmakv.Gemma.from_tensors(config, tensors, threads=1)


def seeds() -> dict[str, bytes]:
    hybrid = model(["sliding", "full"])
    full, sliding = model(["full"]), model(["sliding"])
    tokens = [2, *(3 + 7 * i % 40 for i in range(59))]

    def cache(gemma: gemmakv.Gemma, count: int, dtype: str = "bf16",
              ) -> gemmakv.KVCache:
        made = gemmakv.create_kv_cache(
            gemma.config, capacity_tokens=100, kv_dtype=dtype,
            block_tokens=16)
        if count:
            gemma.logits(made, tokens[:count])
        return made

    result = {
        "empty": cache(hybrid, 0),
        "one": cache(hybrid, 1),
        "f32": cache(hybrid, 9, "f32"),
        "bf16": cache(hybrid, 33),
        "int8": cache(hybrid, 40, "int8"),
        "full": cache(full, 30),
        "sliding": cache(sliding, 60),
    }
    pending = cache(hybrid, 17)
    hybrid.generate(pending, [9], max_tokens=2)
    lost = cache(hybrid, 60)
    lost.truncate(24)  # past the window
    named = gemmakv.create_kv_cache("gemma3-270m", capacity_tokens=9)
    result |= {"pending": pending, "lost": lost, "named": named}
    return {name: one.to_bytes() for name, one in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        path = args.folder / f"{name}.kv"
        path.write_bytes(data)
        print(f"{path}: {len(data)} bytes")


if __name__ == "__main__":
    main()
