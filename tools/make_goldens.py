#!/usr/bin/env python3
"""Writes the logits of tests/golden/families: what transformers computes.

    python tools/make_goldens.py [NAME ...]

For each NAME.json there (all, unless some are named) builds the model that it
describes, with eager attention, since others leave out soft caps, and eager
experts, in float32, and stores the prompt and the logits of all its positions
as NAME.npz. Prints how far the logits are from flat. Needs torch and
transformers.

What is to be known about the reference (transformers 5):

- A window counts the token itself: position p sees p - window + 1 to p, in
  RecurrentGemma too. (Its authors' package sees one position more.)
- RecurrentGemma with a cache takes any step of several tokens for a whole
  prompt, and starts with a convolution of hidden_size, not lru_width, values:
  only one pass over everything without a cache is its definition.
- RecurrentGemma's factor of the embedding is rounded to bfloat16 in every
  dtype, that of the others to the dtype of the model: a model that is made in
  bfloat16 and then converted keeps rounded factors.
- Angles of rotary embeddings are float32 products: at position 2,500 that
  moved the logits of a sharp model by 1.5e-3 of their range against float64.
- Gemma 3 ignores attn_logit_softcapping, and its multimodal class
  final_logit_softcapping too. Published files have neither.
- Gemma 4's layer_scalar is a buffer, no parameter.
- Gemma 3n's class that holds images too needs timm; its language model is the
  class of text alone. altup_coef_clip counts in training only.
- RecurrentGemma's intermediate_size is twice the width of its feed-forward,
  and its head_dim is hidden_size / num_attention_heads whatever a file says.

A new golden is a NAME.json (tests/python/support/golden_models.py describes
it) and a run of this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

from support import golden_models


def build(golden: golden_models.Golden) -> Any:
    """The language model with the golden's weights."""
    stated, nested = dict(golden.config), golden.multimodal
    architecture = stated["architectures"][0]
    if architecture == "Gemma3nForConditionalGeneration":
        stated, nested = golden.text_config, False
        architecture = "Gemma3nForCausalLM"
    kind = getattr(transformers, architecture)
    config = kind.config_class(**stated)
    # Were it the dtype of the file, factors would be rounded to that as well.
    eager = {"attn_implementation": "eager"}
    if golden.text_config.get("enable_moe_block"):
        # In the order of their numbers; others add them in another.
        eager["experts_implementation"] = "eager"
    model = kind._from_config(config, dtype=torch.float32, **eager).eval()
    ours = golden.tensors()
    theirs = dict(model.named_parameters())
    theirs.update((n, b) for n, b in model.named_buffers() if "scalar" in n)
    for name, array in ours.items():
        parameter = theirs.pop(_parameter_name(name, nested))
        if tuple(parameter.shape) != array.shape:
            raise ValueError(f"{name}: {array.shape}, not {parameter.shape}")
        parameter.data = torch.from_numpy(array.copy())
    model.tie_weights()
    parts = ("vision", "audio", "projector")
    left = [n for n in theirs if not any(part in n for part in parts)]
    if left:
        raise ValueError(f"{golden.name}: without weights: {left}")
    return model


def _parameter_name(name: str, multimodal: bool) -> str:
    if name == "lm_head.weight":
        return name
    return f"model.{'language_model.' if multimodal else ''}{name}"


def logits_of(model: Any, tokens: list[int]) -> golden_models.Array:
    """[len(tokens), vocab_size], in one pass without any cache."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False)
    logits: golden_models.Array = out.logits[0].numpy()
    return logits


def describe(logits: golden_models.Array) -> str:
    """Spread, and how certain the model is on average."""
    x = logits - logits.max(-1, keepdims=True)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    entropy = -(p * np.log(p + 1e-30)).sum(-1).mean()
    return (f"{logits.min():.2f} to {logits.max():.2f}, deviation "
            f"{logits.std():.2f}, entropy {entropy:.2f} nats of "
            f"{np.log(logits.shape[-1]):.2f}")


def main() -> None:
    for name in sys.argv[1:] or golden_models.names():
        golden = golden_models.read(name)
        tokens = golden.tokens()
        logits = logits_of(build(golden), tokens)
        np.savez_compressed(
            golden_models.FOLDER / f"{name}.npz",
            tokens=np.array(tokens, np.int32),
            logits=logits,
        )
        print(f"{name}: {describe(logits)}")


if __name__ == "__main__":
    main()
