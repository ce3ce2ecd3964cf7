"""Tiny models of embeddings in Hugging Face's form, without torch.

A golden is two files of tests/golden/embeddings: NAME.json, which states what
golden_models.py describes, and

    dense_dim   values between the products behind the mean; 0: none
    lengths     tokens of each text

and NAME.npz with `tokens` (all texts, one after the other) and the reference's
`vectors` [texts, vector_size] of length 1, which
tools/make_embedding_goldens.py writes. Weights are drawn as in
golden_models.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

from support import golden_models
from support.golden_models import Array, Golden

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "embeddings"
PROMPTS = {"query": "q: ", "document": "title: none | text: "}


@dataclasses.dataclass(frozen=True)
class EmbeddingGolden:
    """What NAME.json states."""

    model: Golden
    dense_dim: int
    lengths: list[int]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def hidden_size(self) -> int:
        size: int = self.model.text_config["hidden_size"]
        return size

    @property
    def vector_size(self) -> int:
        size: int = self.model.text_config.get(
            "embedding_dim", self.hidden_size)
        return size

    def texts(self) -> list[list[int]]:
        """Token ids of each text."""
        vocab = self.model.text_config["vocab_size"]
        bits = np.random.PCG64([self.model.seed, 1]).random_raw(
            sum(self.lengths))
        ids = [int(x) for x in bits % np.uint64(vocab)]
        ends = np.cumsum(self.lengths).tolist()
        return [
            ids[end - length:end]
            for length, end in zip(self.lengths, ends, strict=True)
        ]

    def dense(self) -> dict[str, Array]:
        """The products' weights by the core's names."""
        if not self.dense_dim:
            return {}
        outer, inner = self.hidden_size, self.dense_dim
        shapes = {
            "dense_2.weight": (inner, outer), "dense_3.weight": (outer, inner)}
        return {
            name: golden_models.draw(name, shape, self.model.seed, {})
            for name, shape in shapes.items()
        }

    def core_tensors(self) -> dict[str, Array]:
        return {**golden_models.core_tensors(self.model), **self.dense()}

    def reference(self) -> Array:
        """[texts, vector_size], what transformers computes in float32."""
        with np.load(FOLDER / f"{self.name}.npz") as stored:
            if stored["tokens"].tolist() != sum(self.texts(), []):
                raise ValueError(f"{self.name}: not the texts of its vectors")
            vectors: Array = stored["vectors"]
        return vectors


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@functools.cache
def read(name: str) -> EmbeddingGolden:
    stated = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    dense_dim, lengths = stated.pop("dense_dim"), stated.pop("lengths")
    return EmbeddingGolden(Golden(name, **stated), dense_dim, lengths)


def write(folder: Path, golden: EmbeddingGolden) -> Path:
    """Writes a directory as sentence-transformers does."""
    golden_models.write(folder, golden.model)
    modules = [
        ("", "models.Transformer", None),
        ("1_Pooling", "models.Pooling", {
            "word_embedding_dimension": golden.vector_size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "include_prompt": True,
        }),
    ]  # fmt: skip
    for number, (name, weights) in enumerate(golden.dense().items(), 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        golden_models.write_safetensors(
            place / "model.safetensors", {"linear.weight": weights}, "F32")
        assert name == f"dense_{number}.weight"
        modules.append((place.name, "models.Dense", {
            "in_features": weights.shape[1],
            "out_features": weights.shape[0],
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }))
    modules.append((f"{len(modules)}_Normalize", "models.Normalize", None))
    listed = []
    for index, (name, kind, config) in enumerate(modules):
        listed.append({
            "idx": index, "name": str(index), "path": name,
            "type": f"sentence_transformers.{kind}",
        })
        if config is not None:
            (folder / name).mkdir(exist_ok=True)
            golden_models.write_config(folder / name, config)
    write_json(folder / "modules.json", listed)
    write_json(folder / "config_sentence_transformers.json", {
        "prompts": PROMPTS, "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    })
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), "utf-8")
