"""Quality of gemmakv and llama.cpp against the float32 reference.

    python tools/quality/compare.py --gguf MODEL.gguf --reference DIR \
        [--engines gemmakv gemmakv-f32 llama.cpp] [--json OUT] [TEXT ...]

DIR is what reference.py wrote. Engines:
  gemmakv       the file's own weights, bf16 KV (and -kv-f32, -kv-int8)
  gemmakv-f32   the same weights dequantized to float32, f32 KV: must be the
                reference itself but for rounding (KL <= 1e-6)
  llama.cpp     flash attention on; llama.cpp-nofa: off
Prints mean KL(reference || engine) in nats, the difference of the negative
log-likelihood per token and the agreement of the most likely token, over all
positions and over those before and past 512 and 2,048.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np

import backends
import gguf_reference
import metrics

SPANS = ((0, 512), (512, 2048), (2048, None))


def engine_stream(engine: str, args, state: dict):
    """A function from token ids to a stream of logits."""
    if engine.startswith("llama.cpp"):
        llama = backends.Llama(
            args.gguf, threads=args.threads,
            flash_attention=not engine.endswith("-nofa"))
        return llama.logits
    import gemmakv

    if "gemma" not in state:
        state["gemma"] = gemmakv.Gemma.load(
            args.gguf, threads=args.threads, prefix_cache=False)
    gemma = state["gemma"]
    kv_dtype = "bf16"
    if engine == "gemmakv-f32":
        if "float32" not in state:
            state["float32"] = backends.gemmakv_float32(gemma, args.gguf)
        gemma, kv_dtype = state["float32"], "f32"
    elif "-kv-" in engine:
        kv_dtype = engine.rsplit("-", 1)[1]
    elif engine != "gemmakv":
        raise SystemExit(f"unknown engine {engine!r}")
    return lambda ids: backends.gemmakv_logits(gemma, ids, kv_dtype)


def rows_of(measured: np.ndarray) -> dict[str, dict]:
    rows = {"all": metrics.summarize(measured)}
    for begin, end in SPANS:
        part = measured[begin:end]
        # The last position has no next token, hence no likelihood alone.
        if len(part) > 1:
            rows[f"{begin}..{min(end or len(measured), len(measured))}"] = (
                metrics.summarize(part))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--reference", required=True, type=pathlib.Path)
    parser.add_argument("--engines", nargs="+",
                        default=["gemmakv", "gemmakv-f32", "llama.cpp"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("texts", nargs="*", default=["english", "technical"])
    args = parser.parse_args()

    result: dict[str, dict] = {}
    state: dict = {}
    print("| text | engine | positions | mean KL | NLL | NLL diff | top-1 |")
    print("|---|---|---|---|---|---|---|")
    for engine in args.engines:
        stream = engine_stream(engine, args, state)
        for text in args.texts:
            name = gguf_reference.read_text(text)[0]
            ids = np.load(args.reference / f"{name}.ids.npy")
            logits = np.load(
                args.reference / f"{name}.logits.npy", mmap_mode="r")
            rows = rows_of(metrics.compare_stream(logits, ids, stream(ids)))
            result.setdefault(name, {})[engine] = rows
            for span, row in rows.items():
                print(f"| {name} | {engine} | {span} | {row['mean_kl']:.3e} "
                      f"| {row['nll']:.4f} | {row['nll_difference']:+.5f} "
                      f"| {100 * row['top1_agreement']:.2f} % |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
