#!/usr/bin/env python3
"""Writes the logits of tests/golden/drafters: what transformers computes.

    python tools/make_drafter_goldens.py [NAME ...]

For each NAME.json there (all, unless some are named) builds the target and the
drafter that it describes, with eager attention in float32. Of each length of
tests/python/support/drafter_models.py the target runs over all tokens but the
last, and the drafter guesses behind the last one, each time from the token that
it thought likeliest, as SinglePositionMultiTokenCandidateGenerator does. Stores
the prompt and the drafter's logits as NAME.npz. Needs torch and transformers.

What is to be known about the reference (transformers 5):

- Keys and values are those of the target's last layer of each type before the
  ones that share, the hidden state is that behind its last norm, and the
  position is that of the last token for all guesses.
- The mask of sliding layers admits W + 1 keys of those that are passed, and
  generate passes the last W - 1 and as many as the step before had rows. Here
  those less than W from the last token are passed, W - 1 of them.
- Tokens in clusters that are not chosen have the least logit of the others,
  less one. They are stored as minus infinity.
- masked_embedding.token_ordering is a buffer, no parameter.
- The drafter's logits are not capped.
- The configuration of layers (5.23.0) refuses one all of whose layers share, as
  those of every drafter do, and has a model none of whose layers share keep no
  keys for a drafter; share_modes() says what each layer does instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_goldens
from support import drafter_models


def build(drafter: drafter_models.Drafter) -> Any:
    stated = dict(drafter.config)
    kind = getattr(transformers, stated["architectures"][0])
    config = kind.config_class(**stated)
    share_modes(type(config.text_config))
    model = kind._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    theirs = dict(model.named_parameters())
    theirs.update(
        (n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar"))
    ours = {f"model.{n}": w for n, w in drafter.layers().items()}
    for name, array in {**ours, **drafter.beside()}.items():
        parameter = theirs.pop(name)
        if tuple(parameter.shape) != array.shape:
            raise ValueError(f"{name}: {array.shape}, not {parameter.shape}")
        parameter.data = torch.from_numpy(array.copy())
    model.tie_weights()
    if drafter.clusters:
        model.masked_embedding.token_ordering.data = torch.from_numpy(
            drafter.ordering())
    theirs.pop("lm_head.weight", None)
    if theirs:
        raise ValueError(f"without weights: {list(theirs)}")
    return model


def share_modes(kind: Any) -> None:
    """Has configurations of this class say which layers keep their keys."""

    def modes(config: Any) -> list[str | None]:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        said: list[str | None] = [None] * first
        said += ["reuse"] * config.num_kv_shared_layers
        own = config.layer_types[:first]
        for layer_type in set(own):
            said[first - 1 - own[::-1].index(layer_type)] = "store"
        return said

    kind.kv_sharing_modes = property(modes)


def guess(
    target: Any, drafter: Any, tokens: list[int], guesses: int
) -> drafter_models.Array:
    """[guesses, vocab_size]"""
    window = target.config.get_text_config().sliding_window
    with torch.no_grad():
        # With hidden states: layers that share would run for the last row
        # alone, which a model without per-layer embeddings cannot.
        out = target.model(
            torch.tensor([tokens[:-1]]), use_cache=False,
            output_hidden_states=True, return_shared_kv_states=True)
        state = out.last_hidden_state[:, -1:]
        shared = dict(out.shared_kv_states)
        name = "sliding_attention"
        if name in shared:
            shared[name] = tuple(x[:, :, -(window - 1):] for x in shared[name])
        position = torch.tensor([[len(tokens) - 1]])
        token = torch.tensor([[tokens[-1]]])
        rows = []
        for _ in range(guesses):
            embedding = target.get_input_embeddings()(token)
            said = drafter(
                inputs_embeds=torch.cat([embedding, state], dim=-1),
                position_ids=position, shared_kv_states=shared,
                use_cache=False)
            state = said.last_hidden_state
            token = said.logits.argmax(dim=-1)
            row = said.logits[0, 0].numpy().copy()
            if drafter.masked_embedding is not None:
                row[row <= row.min()] = -np.inf
            rows.append(row)
    return np.stack(rows)


def main() -> None:
    for name in sys.argv[1:] or drafter_models.names():
        pair = drafter_models.read(name)
        stated = pair.target.config
        kind = getattr(transformers, stated["architectures"][0])
        share_modes(kind.config_class)
        target, drafter = make_goldens.build(pair.target), build(pair.drafter)
        tokens = pair.tokens()
        logits = np.stack([
            guess(target, drafter, tokens[:length], pair.guesses)
            for length in drafter_models.LENGTHS
        ])
        np.savez_compressed(
            drafter_models.FOLDER / f"{name}.npz",
            tokens=np.array(tokens, np.int32), logits=logits)
        finite = logits[np.isfinite(logits)]
        print(f"{name}: {make_goldens.describe(logits[0])}; "
              f"{finite.min():.2f} to {finite.max():.2f}, "
              f"{len(finite) / logits.size:.2f} of the tokens; guesses "
              f"{logits.argmax(-1).tolist()}")


if __name__ == "__main__":
    main()
