"""The layouts in which each size of each family was published, or is saved
anew: names in front of the text part, and parts beside it. Weights are made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from support import golden_models
from support.golden_models import Golden
from support.logits import our_logits

BARE, OUTER, INNER = "model.", "language_model.model.", "model.language_model."

SIGLIP = (
    "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.bias",
    "multi_modal_projector.mm_input_projection_weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
)
MOBILENET = (
    "model.vision_tower.timm_model.blocks.0.0.conv_exp.weight",
    "model.embed_vision.embedding.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.audio_tower.conformer.0.attention.attn.per_dim_scale",
    "model.audio_tower.subsample_conv_projection.conv_0.conv.weight",
    "model.embed_audio.hard_embedding_norm.weight",
)
TOWER = (
    "model.vision_tower.patch_embedder.input_proj.weight",
    "model.vision_tower.patch_embedder.position_embedding_table",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.input_min",
    "model.vision_tower.std_bias",
    "model.embed_vision.embedding_projection.weight",
)
CONFORMER = (
    "model.audio_tower.layers.0.self_attn.relative_k_proj.weight",
    "model.audio_tower.output_proj.bias",
    "model.embed_audio.embedding_projection.weight",
)
PATCHES = (
    "model.vision_embedder.patch_ln1.weight",
    "model.vision_embedder.patch_dense.weight",
    "model.vision_embedder.patch_dense.bias",
    "model.vision_embedder.patch_ln2.bias",
    "model.vision_embedder.pos_embedding",
    "model.vision_embedder.pos_norm.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.embed_audio.embedding_projection.weight",
)
PATCHES_ANEW = (
    "model.embed_vision.patch_dense.weight",
    "model.embed_vision.multimodal_embedder.embedding_projection.weight",
    "model.embed_audio.embedding_projection.weight",
)


def inner(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.{name}" for name in names)


# What it is, the model whose weights serve, model_type of the whole, prefix of
# the text part, other parts.
LAYOUTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("gemma 2B, 7B", "gemma-mqa", "", BARE, ()),
    ("gemma 2 2B, 9B, 27B", "gemma2-gqa", "", BARE, ()),
    ("gemma 3 270M, 1B", "gemma3-mqa", "", BARE, ()),
    ("gemma 3 4B, 12B, 27B", "gemma3-gqa", "gemma3", OUTER, SIGLIP),
    ("the same, saved anew", "gemma3-gqa", "gemma3", INNER, inner(SIGLIP)),
    ("a text part with towers", "gemma3-gqa", "", BARE, SIGLIP),
    ("the same, saved anew", "gemma3-gqa", "", BARE, inner(SIGLIP)),
    ("gemma 3n E2B, E4B", "gemma3n-gqa", "gemma3n", INNER, MOBILENET),
    ("gemma 3n, the text part", "gemma3n-gqa", "", BARE, ()),
    ("gemma 4 E2B, E4B", "gemma4-ple", "gemma4", INNER, TOWER + CONFORMER),
    ("gemma 4 26B-A4B", "gemma4-moe", "gemma4", INNER, TOWER),
    ("gemma 4 31B", "gemma4-gqa", "gemma4", INNER, TOWER),
    ("gemma 4 12B", "gemma4-gqa", "gemma4_unified", INNER, PATCHES),
    ("the same, saved anew", "gemma4-gqa", "gemma4_unified", INNER,
     PATCHES_ANEW),
    ("gemma 4, the text part", "gemma4-gqa", "", BARE, ()),
    ("recurrent gemma 2B, 9B", "recurrentgemma-mqa", "", BARE, ()),
    ("vault gemma 1B", "gemma2-vault", "", BARE, ()),
]  # fmt: skip


def write(folder: Path, golden: Golden, parts: tuple[str, ...]) -> Path:
    folder.mkdir()
    golden_models.write_config(folder, golden.config)
    outer = OUTER.removesuffix("model.") if golden.prefix == OUTER else ""
    tensors = {
        (outer if name == "lm_head.weight" else golden.prefix) + name: array
        for name, array in golden.tensors().items()
    }
    for size, name in enumerate(parts, 1):
        tensors[name] = np.zeros(size, np.float32)
    golden_models.write_safetensors(
        folder / "model.safetensors", tensors, "F32"
    )
    return folder


def whole(golden: Golden, model_type: str, prefix: str) -> Golden:
    """The model of which the golden is the text part."""
    text: dict[str, Any] = dict(golden.text_config)
    text.pop("architectures", None)
    if model_type == "gemma4_unified":
        text["model_type"] = "gemma4_unified_text"
    config = {"model_type": model_type, "text_config": text}
    if "tie_word_embeddings" in text:
        config["tie_word_embeddings"] = text["tie_word_embeddings"]
    return dataclasses.replace(golden, config=config, prefix=prefix)


@pytest.mark.parametrize(
    "name, model_type, prefix, parts",
    [layout[1:] for layout in LAYOUTS],
    ids=[f"{i} {layout[0]}" for i, layout in enumerate(LAYOUTS)],
)
def test_the_text_part_is_read(
    name: str,
    model_type: str,
    prefix: str,
    parts: tuple[str, ...],
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    golden = dataclasses.replace(golden_models.read(name), shards=1)
    alone = gemmakv.Gemma.load(write(tmp_path / "alone", golden, ()))
    assert not recwarn.list
    if model_type:
        golden = whole(golden, model_type, prefix)
    model = gemmakv.Gemma.load(write(tmp_path / "whole", golden, parts))
    assert model.fingerprint == alone.fingerprint
    ids = golden.tokens()[:20]
    assert np.array_equal(our_logits(model, ids), our_logits(alone, ids))
    warned = [str(one.message) for one in recwarn.list]
    assert [one.category for one in recwarn.list] == [
        gemmakv.PartialModelWarning
    ] * bool(parts)
    for text in warned:
        assert f"({len(parts)} tensors: " in text
        for part in parts:
            assert part.removeprefix("model.").split(".")[0] in text
        assert ("sound" in text) == any("audio" in part for part in parts)


@pytest.mark.parametrize(
    "name", ["model.zz.weight", "model.dense.weight", "vision.x", "v_x"]
)
def test_any_other_part_is_refused(name: str, tmp_path: Path) -> None:
    golden = golden_models.read("gemma3-mqa")
    with pytest.raises(gemmakv.CorruptFile, match="unexpected tensor") as e:
        gemmakv.Gemma.load(write(tmp_path / "model", golden, (name,)))
    assert name in str(e.value) and "\n" not in str(e.value)
