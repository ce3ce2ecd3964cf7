"""What storing keys and values in fewer bits costs, and what it saves.

    python tools/quality/kv_dtypes.py --gguf MODEL.gguf [--json OUT]

The reference is gemmakv itself with an f32 KV cache on the same weights, so
that nothing but the KV dtype differs. One token stream (the texts of texts/,
then the repository's pages and headers, as many tokens as are asked for) is
fed into one cache per dtype; at each length, the last 512 positions are
compared: mean and largest KL(f32 || dtype) in nats, the share of positions
with the same most likely token, and the bytes that the cache holds then.

--float32 dequantizes the weights first, so that activations are float32 too:
quantized weights come with quantized activations, whose rounding turns any
small difference into a larger one.

Prints the table of docs/cache.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np

import backends
import gguf_reference
import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPAN = 512  # positions that are compared at each length
CHUNK = 128
DTYPES = ("f32", "bf16", "int8")


def token_stream(gemma, count: int) -> list[int]:
    """The first `count` tokens of the texts, pages and headers."""
    names = ["english", "technical"]
    parts = [gguf_reference.read_text(name)[1] for name in names]
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("cpp/*/*.h"))]
    parts += [path.read_text(encoding="utf-8") for path in files]
    ids = [gemma.config.bos_id]
    for part in parts:
        if len(ids) < count:
            ids += gemma.tokenizer.encode(part)
    if len(ids) < count:
        raise ValueError(f"expected {count} tokens, found only {len(ids)}")
    return ids[:count]


def compare(gemma, ids: list[int], lengths: list[int]) -> list[dict]:
    """One row for each length and dtype."""
    import gemmakv

    caches = {
        dtype: gemmakv.create_kv_cache(gemma.config, len(ids), dtype)
        for dtype in DTYPES
    }
    rows = []
    for length in lengths:
        found: dict[str, list[np.ndarray]] = {d: [] for d in DTYPES}
        while (begin := len(caches["f32"])) < length:
            compared = begin >= length - SPAN
            limit = length if compared else length - SPAN
            tokens = ids[begin : min(begin + CHUNK, max(limit, 0))]
            if not compared:
                for cache in caches.values():
                    gemma.logits(cache, tokens)
                continue
            reference = gemma.logits(caches["f32"], tokens, True)
            targets = np.full(len(tokens), -1)
            for dtype in DTYPES[1:]:
                logits = gemma.logits(caches[dtype], tokens, True)
                found[dtype] += [
                    metrics.position_metrics(
                        reference[i : i + 64], logits[i : i + 64],
                        targets[i : i + 64])
                    for i in range(0, len(tokens), 64)
                ]
        for dtype in DTYPES:
            row = {"tokens": length, "kv_dtype": dtype,
                   "bytes": caches[dtype].nbytes}
            if found[dtype]:
                measured = np.concatenate(found[dtype])
                row |= {"positions": len(measured),
                        "mean_kl": float(measured[:, 0].mean()),
                        "max_kl": float(measured[:, 0].max()),
                        "same_top": float(measured[:, 3].mean())}
            rows.append(row)
            print_row(row, rows)
    return rows


def print_row(row: dict, rows: list[dict]) -> None:
    [whole] = [r["bytes"] for r in rows if r["kv_dtype"] == "f32"
               and r["tokens"] == row["tokens"]]
    cells = ["0", "0", "100.0 %"]
    if "mean_kl" in row:
        cells = [f"{row['mean_kl']:.1e}", f"{row['max_kl']:.1e}",
                 f"{100 * row['same_top']:.1f} %"]
    print(f"| {row['tokens']:,} | {row['kv_dtype']} | {' | '.join(cells)} | "
          f"{row['bytes'] / 2**20:.1f} MiB | "
          f"{100 * row['bytes'] / whole:.0f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--lengths", nargs="+", type=int,
                        default=[512, 3000, 16000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    import gemmakv

    gemma = gemmakv.Gemma.load(
        args.gguf, threads=args.threads, prefix_cache=False)
    ids = token_stream(gemma, max(args.lengths))
    if args.float32:
        gemma = backends.gemmakv_float32(gemma, args.gguf)
    lengths = sorted(args.lengths)
    print("| tokens | KV dtype | mean KL | max KL | same top | bytes "
          "| of f32 |")
    print("|---|---|---|---|---|---|---|")
    rows = compare(gemma, ids, lengths)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
