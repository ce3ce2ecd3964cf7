"""Writes the float32 reference logits of texts, for compare.py.

    python tools/quality/reference.py --gguf MODEL.gguf --out DIR [TEXT ...]

TEXT is a name in texts/ (default: english technical) or any file. Each gives
DIR/NAME.ids.npy (int32 [n], beginning-of-sequence id first) and
DIR/NAME.logits.npy (float32 [n, vocab], about 1 MB a position).
Needs torch, transformers, gguf and sentencepiece.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

import gguf_reference


def write_logits(model, ids, path: pathlib.Path) -> None:
    out = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32,
        shape=(len(ids), model.config.vocab_size),
    )
    for begin, logits in gguf_reference.logits_in_chunks(model, ids):
        out[begin:begin + len(logits)] = logits
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=None,
                        help="use only the first N tokens of each text")
    parser.add_argument("texts", nargs="*", default=["english", "technical"])
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    metadata, tensors = gguf_reference.read_gguf(args.gguf)
    gguf_reference.check_window(
        gguf_reference.build_model(metadata, tensors, "eager"))
    print("the oracle's sliding window is exact")
    model = gguf_reference.build_model(metadata, tensors)
    for text in args.texts:
        name, content = gguf_reference.read_text(text)
        ids = gguf_reference.tokenize(metadata, content)[:args.tokens]
        np.save(args.out / f"{name}.ids.npy", np.array(ids, np.int32))
        write_logits(model, ids, args.out / f"{name}.logits.npy")
        print(f"{name}: {len(ids)} tokens")


if __name__ == "__main__":
    main()
