#!/usr/bin/env python3
"""Random models against transformers, as many as one likes.

    python tools/random_models.py [--count 150] [--first 1000] [--json OUT]
        [--family gemma4 ...]

Each is a small model of a family, with what its configuration may say drawn at
random (tests/python/support/random_models.py): transformers writes it as a
directory in float32, the directory is loaded here, and the logits of a prompt
of 40 to 300 tokens, or the vectors of texts, are compared. The table has the
median and the largest difference of each family, in shares of the range of the
reference's values. Where one exceeds 5e-5 the model runs once more in double
there, and a line says how far float32 of transformers and the logits here are
from that: some models that are drawn magnify what rounding does. Ends with
status 1 if the logits of any model are further from double than 5e-5 and than
twice what those of transformers in float32 are.

Models of Gemma 4 are counted by what they have: experts, embeddings for each
layer, values that are keys, or nothing of these. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

import gemmakv
from support import golden_checks, random_models

TOLERANCE = 5e-5
# Half of the models of the first are of one kind, and half of another.
FAMILIES = ["gemma4", "experts", "gemma4", "gemma3n", "vaultgemma",
            "embedding", "embedding2"]


def kind_of(family: str, model: Any) -> str:
    """The line of the table that a model counts for."""
    config = model.config
    if family == "experts":
        return "Gemma 4, experts"
    if family != "gemma4":
        return {"gemma3n": "Gemma 3n", "vaultgemma": "VaultGemma",
                "embedding": "EmbeddingGemma",
                "embedding2": "EmbeddingGemma 2"}[family]
    if config.hidden_size_per_layer_input:
        return "Gemma 4, embeddings for each layer"
    if config.attention_k_eq_v:
        return "Gemma 4, values that are keys"
    return "Gemma 4, dense"


def in_double(model: Any, tokens: list[int]) -> Any:
    """The logits in double: norms and softmaxes, too, which go by way of
    float32 otherwise.
    """
    wide = model.double()
    for name, buffer in list(wide.named_buffers()):
        if name.endswith("inv_freq"):
            buffer.data = buffer.data.double()
    narrow, softmax = torch.Tensor.float, torch.nn.functional.softmax
    torch.Tensor.float = torch.Tensor.double
    torch.nn.functional.softmax = (
        lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim))
    try:
        with torch.no_grad():
            out = wide(torch.tensor([tokens]), use_cache=False)
        return out.logits[0].numpy()
    finally:
        torch.Tensor.float = narrow
        torch.nn.functional.softmax = softmax


def compare(family: str, seed: int, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng([seed, 9])
    length = int(rng.integers(40, 301))
    embeds = family in random_models.EMBEDDING_FAMILIES
    make = (random_models.random_embedding_model if embeds
            else random_models.random_model)
    model = make(family, seed)
    random_models.save(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gemmakv.PartialModelWarning)
        gemma = gemmakv.Gemma.load(folder)
    row = {"family": kind_of(family, model), "seed": seed, "length": length}
    tokens = random_models.prompt_of(model, seed, length)
    if embeds:
        texts = [tokens, tokens[:1], tokens[3:20]]
        expected = np.stack(
            [random_models.reference_vector(model, text) for text in texts])
        found = gemma.embed(texts)
    else:
        expected = random_models.reference_logits(model, tokens)
        found = golden_checks.logits_of(gemma, tokens)
    row["difference"] = golden_checks.difference(expected, found)
    row["good"] = row["difference"] <= TOLERANCE
    if not row["good"] and not embeds:
        exact = in_double(model, tokens)
        row["reference from double"] = golden_checks.difference(exact, expected)
        row["here from double"] = golden_checks.difference(exact, found)
        row["good"] = row["here from double"] <= max(
            TOLERANCE, 2 * row["reference from double"])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| family | models | median | largest |", "|---|---|---|---|"]
    for family in dict.fromkeys(row["family"] for row in rows):
        found = [r["difference"] for r in rows if r["family"] == family]
        lines.append(f"| {family} | {len(found)} | "
                     f"{statistics.median(found):.1e} | {max(found):.1e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--first", type=int, default=1000, help="seed")
    parser.add_argument("--family", nargs="+", choices=FAMILIES,
                        default=FAMILIES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows, begin = [], time.monotonic()
    for i in range(args.count):
        family = args.family[i % len(args.family)]
        with tempfile.TemporaryDirectory() as folder:
            row = compare(family, args.first + i, Path(folder))
        rows.append(row)
        if not row["difference"] <= TOLERANCE:
            print(json.dumps(row), flush=True)
    print(f"{len(rows)} models in {time.monotonic() - begin:.0f} s, "
          f"transformers {transformers.__version__}\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()
