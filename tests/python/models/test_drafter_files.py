"""Files of Gemma 4's drafters: directories and GGUF, and what is wrong in them:
one line, which names the field or the tensor and its value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._requests import requests_of
from support import (
    drafter_models,
    golden_configs,
    golden_gguf,
    golden_models,
    tiny_gguf,
)
from support.command import RunCli, assert_fails
from support.drafter_models import Drafter
from support.golden_models import Array, core_tensors

Config = dict[str, Any]


def load(path: Path) -> gemmakv.Gemma:
    return gemmakv.Gemma.load(path, packed_cache=False)


def changed(drafter: Drafter, change: Callable[[Config], object]) -> Drafter:
    config = copy.deepcopy(drafter.config)
    change(config)
    return Drafter(config, drafter.seed, drafter.gains)


def top(**values: Any) -> Callable[[Config], object]:
    return lambda config: config.update(values)


def text(**values: Any) -> Callable[[Config], object]:
    return lambda config: config["text_config"].update(values)


def test_what_a_directory_states(tmp_path: Path) -> None:
    drafter = drafter_models.read("clusters").drafter
    found = load(drafter_models.write(tmp_path / "a", drafter)).config
    assert (found.architecture, found.name) == ("gemma4-assistant", "")
    assert (found.target_hidden, found.hidden_size) == (80, 48)
    assert (found.num_centroids, found.centroids_used) == (16, 3)
    assert found.final_soft_cap == 0  # whatever the file says
    assert found.shares_kv is None
    assert found.layer_kinds == ["sliding"] * 3 + ["full"]
    assert found.arguments()["head_dim"] == [64, 64, 64, 128]
    drafter = drafter_models.read("dense").drafter
    found = load(drafter_models.write(tmp_path / "b", drafter)).config
    assert (found.target_hidden, found.num_centroids) == (96, 0)
    assert found.arguments()["kv_heads"] == [2, 1, 1]
    # All sizes of layers may be left out that transformers knows.
    again = gemmakv.ModelConfig(**found.arguments())
    assert again.arguments() == found.arguments()


@pytest.mark.parametrize("change, error, expected", [
    (top(backbone_hidden_size=0), gemmakv.CorruptFile,
     "backbone_hidden_size is 0, expected"),
    (top(backbone_hidden_size=88), gemmakv.CorruptFile,
     "pre_projection.weight has shape [48, 160], expected [48, 176] by "
     "config.json"),
    (top(num_centroids=10), gemmakv.MismatchError,
     "num_centroids is 10, expected clusters of a multiple of 16 tokens, of "
     "vocab_size 256"),
    (top(centroid_intermediate_top_k=17), gemmakv.CorruptFile,
     "centroid_intermediate_top_k is 17, expected at most num_centroids 16"),
    (top(use_ordered_embeddings=False), gemmakv.CorruptFile,
     "unexpected tensor 'masked_embedding.centroids.weight'"),
    (top(tie_word_embeddings=False), gemmakv.MismatchError,
     "tie_word_embeddings is False, expected true for a drafter"),
    (lambda config: config.pop("text_config"), gemmakv.CorruptFile,
     "text_config"),
    (text(model_type="gemma3_text"), gemmakv.MismatchError,
     "text_config.model_type is 'gemma3_text', expected gemma4_text or "
     "gemma4_unified_text"),
    (text(num_kv_shared_layers=2), gemmakv.CorruptFile,
     "num_kv_shared_layers is 2, expected 4, all layers of a drafter"),
    (text(hidden_size_per_layer_input=32), gemmakv.MismatchError,
     "hidden_size_per_layer_input is 32, expected 0 for a drafter"),
    (text(vocab_size_per_layer_input=256), gemmakv.MismatchError,
     "vocab_size_per_layer_input is 256, expected 0 for a drafter"),
    (text(enable_moe_block=True), gemmakv.MismatchError,
     "enable_moe_block is True, expected false for a drafter"),
    (text(use_double_wide_mlp=True), gemmakv.MismatchError,
     "use_double_wide_mlp is True, expected false for a drafter"),
])  # fmt: skip
def test_config_that_is_wrong(
    change: Callable[[Config], object], error: type[Exception], expected: str,
    tmp_path: Path,
) -> None:
    drafter = drafter_models.read("clusters").drafter
    folder = drafter_models.write(tmp_path / "drafter", drafter)
    golden_models.write_config(folder, changed(drafter, change).config)
    with pytest.raises(error) as caught:
        load(folder)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ordering, expected", [
    (lambda order: np.zeros_like(order), "masked_embd_ordering has 0 twice"),
    (lambda order: order - 1, "masked_embd_ordering has -1, expected each of "
                              "0..255 once"),
    (lambda order: order + 1, "masked_embd_ordering has 256, expected each"),
    (lambda order: order[:-1], "has shape [255], expected [256]"),
])  # fmt: skip
def test_an_ordering_that_is_none(
    ordering: Callable[[Array], Array], expected: str, tmp_path: Path
) -> None:
    drafter = drafter_models.read("clusters").drafter
    folder = drafter_models.write(tmp_path / "drafter", drafter)
    tensors = {f"model.{n}": w for n, w in drafter.layers().items()}
    drafter_models.write_tensors(
        folder, {**tensors, **drafter.beside()}, drafter,
        ordering=ordering(drafter.ordering()))  # type: ignore[arg-type]
    for packed in (False, tmp_path / "packed"):
        with pytest.raises(gemmakv.CorruptFile) as caught:
            gemmakv.Gemma.load(folder, packed_cache=packed)
        assert expected in str(caught.value)


def test_keys_that_nobody_reads_may_be_there(tmp_path: Path) -> None:
    drafter = drafter_models.read("dense").drafter
    folder = drafter_models.write(tmp_path / "drafter", drafter)
    tensors = {f"model.{n}": w for n, w in drafter.layers().items()}
    tensors |= drafter.beside()
    expected = load(folder).fingerprint
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones(
        (128, 64), np.float32)
    drafter_models.write_tensors(folder, tensors, drafter)
    assert load(folder).fingerprint == expected
    tensors["model.layers.9.self_attn.q_proj.weight"] = np.ones(
        (128, 64), np.float32)
    drafter_models.write_tensors(folder, tensors, drafter)
    with pytest.raises(gemmakv.CorruptFile, match="layers.9"):
        load(folder)


# ---- GGUF


def gguf_of(
    drafter: Drafter, path: Path,
    change: Callable[[Config], object] = lambda meta: None,
) -> Path:
    """As llama.cpp writes them: without what chooses clusters."""
    folder = drafter_models.write(path.parent / "folder", drafter)
    config = load(folder).config
    tensors = {
        name: w for name, w in drafter.core_tensors().items()
        if not name.startswith("masked_embd")
    }
    tensors |= golden_gguf.rotation_tensors(config)
    meta = golden_gguf.metadata_of(config)
    change(meta)
    return tiny_gguf.write(path, meta, tensors)


@pytest.mark.parametrize("name", drafter_models.names())
def test_gguf(name: str, tmp_path: Path) -> None:
    pair = drafter_models.read(name)
    plain = changed(pair.drafter, top(use_ordered_embeddings=False))
    expected = load(drafter_models.write(tmp_path / "plain", plain))
    path = gguf_of(pair.drafter, tmp_path / "drafter.gguf")
    found = load(path)
    ours = found.config.arguments()
    theirs = expected.config.arguments()
    for field in ("eos_ids", "context_length", "query_scale"):
        ours.pop(field), theirs.pop(field)
    assert ours == theirs
    config = golden_configs.model_config(pair.target.config)
    tensors = core_tensors(pair.target)
    logits = [
        requests_of(gemmakv.Gemma.from_tensors(
            config, tensors, draft=drafter
        )).engine.draft_logits(pair.tokens(), 3)
        for drafter in (expected, found)
    ]
    assert np.array_equal(*logits)
    if name == "dense":
        reference = pair.reference()[-1, :3]
        span = reference.max() - reference.min()
        assert np.abs(logits[1] - reference).max() <= 5e-5 * span


def test_gguf_that_holds_clusters(tmp_path: Path, cli: RunCli) -> None:
    """No metadata says how many are chosen: all tokens have logits."""
    drafter = drafter_models.read("clusters").drafter
    plain = load(gguf_of(drafter, tmp_path / "plain.gguf"))
    tensors = drafter.core_tensors()
    tensors |= golden_gguf.rotation_tensors(plain.config)
    path = tiny_gguf.write(
        tmp_path / "clusters.gguf", golden_gguf.metadata_of(plain.config),
        tensors, {"masked_embd_ordering": 27})  # I64
    found = load(path)
    assert found.fingerprint == plain.fingerprint
    shown = cli("info", path)
    assert shown.returncode == 0
    assert b"supported" not in shown.stdout


@pytest.mark.parametrize("change, expected", [
    (lambda meta: meta.pop("gemma4-assistant.embedding_length_out"),
     "gemma4-assistant.embedding_length_out is missing, expected the hidden "
     "size of the model that this one guesses for"),
    (lambda meta: meta.update({
        "gemma4-assistant.attention.shared_kv_layers": (tiny_gguf.U32, 1)}),
     "shared_kv_layers is 1, expected 3, all layers of a drafter"),
])  # fmt: skip
def test_gguf_that_is_wrong(
    change: Callable[[Config], object], expected: str, tmp_path: Path
) -> None:
    drafter = drafter_models.read("dense").drafter
    path = gguf_of(drafter, tmp_path / "drafter.gguf", change)
    with pytest.raises(gemmakv.CorruptFile) as caught:
        load(path)
    assert expected in str(caught.value)


def test_info(tmp_path: Path, cli: RunCli) -> None:
    drafter = drafter_models.read("clusters").drafter
    folder = drafter_models.write(tmp_path / "drafter", drafter)
    for path, kind in (
        (folder, "gemma4_assistant"),
        (gguf_of(drafter, tmp_path / "drafter.gguf"), "gemma4-assistant"),
    ):
        said = cli("info", str(path)).stdout.decode()
        assert kind in said
        assert "guesses for hidden size" in said
        assert "80" in said


def test_commands_name_what_to_do(tmp_path: Path, cli: RunCli) -> None:
    drafter = drafter_models.read("clusters").drafter
    folder = drafter_models.write(tmp_path / "drafter", drafter)
    assert_fails(
        cli("generate", "--no-packed-cache", "-m", folder, "hello"),
        "expected a model that writes text, found a drafter: name the model "
        "that it guesses for, with this one as --draft",
    )
