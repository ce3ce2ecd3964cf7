"""Tiny drafters of Gemma 4 in Hugging Face's form, without torch.

A golden is two files of tests/golden/drafters: NAME.json, which states

    about     what the pair is there for
    target    the model that is guessed for: config, seed and gains as
              golden_models.py describes them
    drafter   the same of the drafter
    guesses   how many follow each other

and NAME.npz with `tokens` [n] and the reference's `logits` [lengths, guesses,
vocab_size] behind the first tokens, as many as LENGTHS says, which
tools/make_drafter_goldens.py writes. Weights are drawn as in golden_models.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support import golden_models
from support.golden_models import Array, Config, Golden

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "drafters"
# Tokens before the guesses: within the window, and behind several.
LENGTHS = (2, 9, 17, 45, 72)
_ORDERING = "masked_embedding.token_ordering"


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter's config.json and weights."""

    config: Config
    seed: int
    gains: dict[str, float]

    @property
    def text_config(self) -> Config:
        text: Config = self.config["text_config"]
        return text

    def ordering(self) -> npt.NDArray[np.int64]:
        """The tokens of the first cluster, then of the second, and so on."""
        vocab = self.text_config["vocab_size"]
        bits = np.random.PCG64([self.seed, 3]).random_raw(vocab)
        return np.argsort(bits, kind="stable").astype(np.int64)

    def layers(self) -> dict[str, Array]:
        """The weights below "model." in a checkpoint, without that."""
        unread = (".k_proj.", ".v_proj.", ".k_norm.")
        return {
            name: golden_models.draw(name, shape, self.seed, self.gains)
            for name, shape in golden_models.tensor_shapes(
                self.text_config
            ).items()
            if not any(part in name for part in unread)
        }

    def beside(self) -> dict[str, Array]:
        """The float weights beside them."""
        hidden = self.text_config["hidden_size"]
        target = self.config["backbone_hidden_size"]
        shapes = {
            "pre_projection.weight": (hidden, 2 * target),
            "post_projection.weight": (target, hidden),
        }
        if self.clusters:
            shapes["masked_embedding.centroids.weight"] = (
                self.config["num_centroids"], hidden)
        return {
            name: golden_models.draw(name, shape, self.seed, self.gains)
            for name, shape in shapes.items()
        }

    @property
    def clusters(self) -> bool:
        return bool(self.config.get("use_ordered_embeddings"))

    def core_tensors(self) -> dict[str, Array]:
        """As the core names them, for `Gemma.from_tensors`."""
        tensors = {
            golden_models.core_name(name, "gemma4_text"): w
            for name, w in self.layers().items()
        }
        for name, w in self.beside().items():
            tensors[CORE_NAMES[name]] = w
        if self.clusters:
            order = self.ordering().astype(np.float32)
            tensors["masked_embd_ordering"] = order
        return tensors


CORE_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "masked_embedding.centroids.weight": "masked_embd_centroids.weight",
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """What NAME.json states."""

    name: str
    target: Golden
    drafter: Drafter
    guesses: int

    def tokens(self) -> list[int]:
        return self.target.tokens()

    def reference(self) -> Array:
        """[lengths, guesses, vocab_size]; minus infinity where the reference
        has no logit.
        """
        with np.load(FOLDER / f"{self.name}.npz") as stored:
            if stored["tokens"].tolist() != self.tokens():
                raise ValueError(f"{self.name}: not the prompt of its logits")
            logits: Array = stored["logits"]
        return logits


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@functools.cache
def read(name: str) -> Pair:
    stated: dict[str, Any] = json.loads(
        (FOLDER / f"{name}.json").read_text("utf-8"))
    target = Golden(f"{name}-target", stated["about"], **stated["target"])
    return Pair(name, target, Drafter(**stated["drafter"]), stated["guesses"])


def write(folder: Path, drafter: Drafter, dtype: str = "F32") -> Path:
    """Writes the drafter's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    golden_models.write_config(folder, drafter.config)
    tensors = {f"model.{n}": w for n, w in drafter.layers().items()}
    write_tensors(folder, {**tensors, **drafter.beside()}, drafter, dtype)
    return folder


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Array],
    drafter: Drafter,
    dtype: str = "F32",
    ordering: npt.NDArray[np.int64] | None = None,
) -> None:
    """model.safetensors: the float tensors, then the ordering if it has one."""
    path = folder / "model.safetensors"
    golden_models.write_safetensors(path, tensors, dtype)
    if not drafter.clusters:
        return
    if ordering is None:
        ordering = drafter.ordering()
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header[_ORDERING] = {
        "dtype": "I64", "shape": [len(ordering)],
        "data_offsets": [len(data), len(data) + 8 * len(ordering)],
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + data
        + ordering.astype("<i8").tobytes())
