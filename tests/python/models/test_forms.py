"""What stands beside a model on disk: adapters, and parts that are left out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import gemmakv
from gemmakv.models import _catalog as models
from gemmakv.models._forms import describe_parts, parts_beside
from support import golden_models, tiny_gguf

ADAPTER_FILES = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
]


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_a_folder_with_an_adapter_is_not_its_base(
    name: str, tmp_path: Path
) -> None:
    folder = golden_models.write(tmp_path, golden_models.read("gemma3-mqa"))
    gemmakv.Gemma.load(folder)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(gemmakv.MismatchError, match="merge it into") as caught:
        gemmakv.Gemma.load(folder)
    text = str(caught.value)
    assert name in text and str(folder) in text and "\n" not in text


@pytest.mark.parametrize("config", [True, False])
def test_a_folder_of_an_adapter_alone_says_so(
    config: bool, tmp_path: Path
) -> None:
    for name in ADAPTER_FILES[:2]:
        (tmp_path / name).write_bytes(b"{}")
    if config:
        golden = golden_models.read("gemma3-mqa")
        golden_models.write_config(tmp_path, golden.config)
    with pytest.raises(
        (gemmakv.MismatchError, IsADirectoryError), match="adapter_config.json"
    ):
        gemmakv.Gemma.load(tmp_path)


def test_a_file_beside_an_adapter_is_what_it_says(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    assert models.resolve(path) == str(path)
    assert gemmakv.Gemma.load(path).tokenizer is not None


def test_a_file_of_an_adapter_is_no_model(tmp_path: Path) -> None:
    meta = tiny_gguf.metadata() | {"general.type": (tiny_gguf.STR, "adapter")}
    path = tiny_gguf.write(tmp_path / "lora.gguf", meta)
    with pytest.raises(gemmakv.MismatchError, match="merge it into") as caught:
        gemmakv.Gemma.load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(gemmakv.MismatchError, match="merge it into"):
        gemmakv.ModelConfig.from_gguf(path)


IMAGES = {
    "v.patch_embd.weight": "v",
    "mm.input_projection.weight": "mm",
    "vision_tower.vision_model.post_layernorm.weight": "vision_tower",
    "model.multi_modal_projector.mm_soft_emb_norm.weight":
        "multi_modal_projector",
    "model.embed_vision.embedding_projection.weight": "embed_vision",
    "model.vision_embedder.pos_embedding": "vision_embedder",
}
SOUND = {
    "a.conv1d.0.weight": "a",
    "mm.a.input_projection.weight": "mm",
    "model.audio_tower.output_proj.bias": "audio_tower",
    "embed_audio.hard_embedding_norm.weight": "embed_audio",
}
NEITHER = [
    "zz.weight", "norm.weight", "dense.0.weight", "model.norm.weight",
    "lm_head.weight", "blk.0.attn_q.weight", "vocab", "a", "v",
    "language_model.vision_tower.x",
]  # fmt: skip


def test_parts_beside_a_language_model() -> None:
    parts = [*IMAGES, *SOUND]
    assert parts_beside(itertools.chain(NEITHER, parts)) == parts
    for name, part in IMAGES.items():
        assert describe_parts([name]) == (
            f"its image encoder (1 tensor: {part}): images are not supported "
            "yet"
        )
    for name, part in SOUND.items():
        assert describe_parts([name]) == (
            f"its sound encoder (1 tensor: {part}): sound is not supported yet"
        )
    text = describe_parts([*IMAGES, *SOUND])
    assert text.startswith("its image and sound encoders (10 tensors: a, ")


def test_memory_may_hold_parts_beside_the_model() -> None:
    tensors = tiny_gguf.tensors()
    alone = gemmakv.Gemma.from_tensors(tiny_gguf.CONFIG, tensors)
    tensors["v.patch_embd.weight"] = tensors["output_norm.weight"]
    with pytest.warns(gemmakv.PartialModelWarning, match="image encoder"):
        model = gemmakv.Gemma.from_tensors(tiny_gguf.CONFIG, tensors)
    assert model.fingerprint == alone.fingerprint


@pytest.mark.parametrize(
    "name", ["zz.weight", "dense.0.weight", "dense_2.weight", "norm.weight"]
)
def test_memory_holds_nothing_that_the_model_does_not_have(name: str) -> None:
    tensors = tiny_gguf.tensors()
    tensors[name] = tensors["output_norm.weight"]
    with pytest.raises(gemmakv.CorruptFile, match=f"found tensor {name}, exp"):
        gemmakv.Gemma.from_tensors(tiny_gguf.CONFIG, tensors)
