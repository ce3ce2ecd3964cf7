#!/usr/bin/env python3
"""Writes the vectors of tests/golden/embeddings: what transformers computes.

    python tools/make_embedding_goldens.py [NAME ...]

For each NAME.json there (all, unless some are named) builds the model that it
describes, with eager attention in float32, and stores its texts and their
vectors as NAME.npz: the mean of the last hidden states, multiplied by both
matrices behind it if there are such, and made one of length 1. That is what
sentence-transformers does with EmbeddingGemma's modules. Texts run one by one,
without padding. Needs torch and transformers.

What is to be known about the reference (transformers 5):

- Gemma3TextConfig makes a sliding_window of W, as files state it, into
  W // 2 + 1 where attention is bidirectional, and writes it back as W. Its mask
  admits distances below that: W / 2 to either side.
- EmbeddingGemma2TextModel multiplies every position by its last matrix, which
  is the same as multiplying the mean. Its sliding_window is a distance that is
  seen.
- llama.cpp leaves W as it is and admits distances up to W / 2: the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

from support import embedding_models


def build(golden: embedding_models.EmbeddingGolden) -> Any:
    stated = dict(golden.model.config)
    kind = getattr(transformers, stated["architectures"][0])
    config = kind.config_class(**stated)
    model = kind._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    theirs = dict(model.named_parameters())
    theirs.update(
        (n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar"))
    for name, array in golden.model.tensors().items():
        parameter = theirs.pop(name)
        if tuple(parameter.shape) != array.shape:
            raise ValueError(f"{name}: {array.shape}, not {parameter.shape}")
        parameter.data = torch.from_numpy(array.copy())
    if theirs:
        raise ValueError(f"{golden.name}: without weights: {list(theirs)}")
    return model


def main() -> None:
    for name in sys.argv[1:] or embedding_models.names():
        golden = embedding_models.read(name)
        model = build(golden)
        dense = [torch.from_numpy(w.copy()) for w in golden.dense().values()]
        vectors = []
        for text in golden.texts():
            with torch.no_grad():
                states = model(torch.tensor([text]))
                vector = states.last_hidden_state[0].mean(0)
                for weights in dense:
                    vector = weights @ vector
                vector = vector / vector.norm()
            vectors.append(vector.numpy())
        found = np.stack(vectors)
        np.savez_compressed(
            embedding_models.FOLDER / f"{name}.npz",
            tokens=np.array(sum(golden.texts(), []), np.int32),
            vectors=found,
        )
        cosines = (found @ found.T)[~np.eye(len(found), dtype=bool)]
        print(f"{name}: {found.min():.3f} to {found.max():.3f}, cosines "
              f"{cosines.min():.3f} to {cosines.max():.3f}")


if __name__ == "__main__":
    main()
