"""What quantizing on load costs in quality, and what it saves.

    python tools/requantize_gguf.py MODEL.gguf FLOAT.gguf --type BF16
    python tools/quality/quantize.py --gguf FLOAT.gguf [--json OUT] \
        [--also NAME=OTHER.gguf ...]

The reference is gemmakv itself with the weights of the file as they are. Each
`quantize` of it, and each other file, is given the same tokens (of the texts of
texts/): mean and largest KL(reference || quantized) in nats, the difference of
the negative log-likelihood per token, the share of positions with the same most
likely token, bytes of all matrices, and the speed of greedy decoding: the best
of rounds in which all take turns. All caches are f32. Prints the table of
docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np

import backends
import gguf_reference
import metrics

# Few, so that some round has the machine to itself.
ROUND_TOKENS = 6
TARGETS = (None, "bf16", "q8_0", "q5_0", "q4_0")


def tokens_of(gemma, count: int) -> np.ndarray:
    """The first `count` tokens of both texts, half of them of each."""
    ids = [gemma.config.bos_id]
    for name, end in (("english", count // 2), ("technical", count)):
        text = gguf_reference.read_text(name)[1]
        ids = (ids + gemma.tokenizer.encode(text))[:end]
    if len(ids) < count:
        raise ValueError(f"expected {count} tokens, found only {len(ids)}")
    return np.asarray(ids)


def decode_speed(gemma, tokens: int) -> float:
    """Tokens a second behind a short prompt."""
    import gemmakv

    cache = gemmakv.create_kv_cache(gemma.config, 2 * tokens)
    # A ban of the end keeps all going on equally long.
    bans = {eos: -np.inf for eos in gemma.config.eos_ids}
    result = gemma.generate(cache, "The", max_tokens=tokens, logit_bias=bans)
    return len(result.token_ids) / result.timings.decode_s


def row_of(name: str, gemma, ids: np.ndarray, reference: np.ndarray) -> dict:
    from gemmakv.generation._requests import requests_of

    logits = backends.gemmakv_logits(gemma, [int(i) for i in ids], "f32")
    measured = metrics.compare_stream(reference, ids, logits)
    matrices = requests_of(gemma).engine.matrices()
    sizes = [nbytes for *_, nbytes in matrices]
    return {"name": name, "bytes": sum(sizes), **metrics.summarize(measured)}


def print_row(row: dict, whole: int) -> None:
    print(f"| {row['name']} | {row['bytes'] / 1e6:,.0f} MB | "
          f"{100 * row['bytes'] / whole:.0f} % | {row['mean_kl']:.1e} | "
          f"{row['max_kl']:.1e} | {row['nll_difference']:+.4f} | "
          f"{100 * row['top1_agreement']:.1f} % | "
          f"{row['decode_tokens_per_s']:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=GGUF")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    import gemmakv

    models = {
        target or "none": gemmakv.Gemma.load(
            args.gguf, threads=args.threads, quantize=target)
        for target in TARGETS
    }
    for also in args.also:
        name, _, path = also.partition("=")
        models[name] = gemmakv.Gemma.load(path, threads=args.threads)
    floats = models["none"]
    ids = tokens_of(floats, args.tokens)
    reference = np.concatenate([
        logits for _, logits in
        backends.gemmakv_logits(floats, [int(i) for i in ids], "f32")])
    rows = [row_of(name, gemma, ids, reference)
            for name, gemma in models.items()]
    speeds = [[decode_speed(gemma, ROUND_TOKENS) for gemma in models.values()]
              for _ in range(args.rounds)]
    print("| quantize | bytes | | mean KL | max KL | NLL | same top "
          "| tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for row, speed in zip(rows, np.max(speeds, axis=0)):
        row["decode_tokens_per_s"] = float(speed)
        print_row(row, rows[0]["bytes"])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
