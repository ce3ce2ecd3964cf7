"""Writes tests/golden/greedy_270m.json and tests/golden/logits_270m.json.

    python tools/quality/make_goldens.py --gguf MODEL.gguf [--out tests/golden]

All numbers come from the float32 oracle (gguf_reference.py), none from
gemmakv. greedy: the oracle's own greedy continuation of varied prompts, with
the margin between its two best logits at each position. logits: the 64 best
log-probabilities at some positions of english.txt. Needs torch, transformers,
gguf and sentencepiece; takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np

import gguf_reference
import metrics
import prompts

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP = 64
# Early ones, both sides of the window's edge and of four windows, and more.
POSITIONS = sorted({
    0, 1, 2, 7, 31, 63, 64, 128, 255, 300, 400, 510, 511, 512, 513, 575, 640,
    767, 900, 1023, 1024, 1025, 1200, 1400, 1535, 1536, 1700, 1900, 2046, 2047,
    2048, 2049, 2111, 2300, 2500, 2559, 2560, 2700, 2900, 3050, 3099, 3200,
})


def greedy(model, ids: list[int], count: int, stop=(1, 106)) -> list[int]:
    """Up to `count` argmax tokens; an end token is kept and ends them."""
    import torch

    out: list[int] = []
    past, feed = None, list(ids)
    with torch.inference_mode():
        while len(out) < count and (not out or out[-1] not in stop):
            step = model(torch.tensor([feed]), past_key_values=past,
                         use_cache=True, logits_to_keep=1)
            past = step.past_key_values
            feed = [int(step.logits[0, -1].argmax())]
            out += feed
    return out


def greedy_case(model, name: str, ids: list[int], count: int) -> dict:
    tokens = greedy(model, ids, count)
    rows = np.concatenate([
        part[max(0, len(ids) - 1 - begin):]
        for begin, part in gguf_reference.logits_in_chunks(
            model, ids + tokens[:-1])
        if begin + len(part) > len(ids) - 1
    ])
    best = np.sort(rows, axis=-1)[:, -2:]
    margins = best[:, 1] - best[:, 0]
    agree = rows.argmax(-1) == tokens
    # With the cache and in one pass the oracle itself may round a near tie
    # either way; such a position says nothing.
    margins = np.where(agree, margins, 0.0)
    return {"name": name, "prompt_tokens": ids, "greedy_tokens": tokens,
            "margins": [round(float(m), 3) for m in margins]}


def logits_golden(model, ids: list[int]) -> dict:
    cases = []
    for begin, part in gguf_reference.logits_in_chunks(model, ids):
        for position in POSITIONS:
            if not begin <= position < begin + len(part):
                continue
            row = part[position - begin]
            log_probs = metrics.log_softmax(row[None])[0]
            order = np.argsort(-log_probs, kind="stable")[:TOP]
            cases.append({
                "position": position,
                "ids": [int(i) for i in order],
                "logprobs": [round(float(log_probs[i]), 5) for i in order],
                "logsumexp": round(float(row[order[0]] - log_probs[order[0]]),
                                   5),
            })
    return {"tokens": ids, "positions": cases}


def write(path: pathlib.Path, source: str, content: dict) -> None:
    head = {"made_by": "tools/quality/make_goldens.py", "model": source}
    text = json.dumps({**head, **content}, separators=(",", ":"))
    # One case a line: a change of one shows as one.
    path.write_text(text.replace('{"name"', '\n{"name"')
                    .replace('{"position"', '\n{"position"') + "\n")
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "tests" / "golden")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    metadata, tensors = gguf_reference.read_gguf(args.gguf)
    source = str(metadata.get("general.name", "unnamed"))
    model = gguf_reference.build_model(metadata, tensors)
    cases = []
    for name, ids in prompts.golden_prompts(metadata).items():
        cases.append(greedy_case(model, name, ids, args.count))
        clear = sum(m >= 0.5 for m in cases[-1]["margins"])
        print(f"{name}: prompt {len(ids)}, {clear} of "
              f"{len(cases[-1]['margins'])} clear", flush=True)
    write(args.out / "greedy_270m.json", source, {"cases": cases})
    english = gguf_reference.tokenize(
        metadata, gguf_reference.read_text("english")[1])
    write(args.out / "logits_270m.json", source, logits_golden(model, english))


if __name__ == "__main__":
    main()
