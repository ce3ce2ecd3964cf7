"""Gemma 4's files that contradict themselves: GGUF, and directories whose
table of embeddings for each layer is cut off. One line each, which names the
field or the tensor, and its value. (What config.json alone can say wrong is in
test_gemma4_config.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support import golden_models, tiny_gguf
from support.golden_gguf import config_of, gguf_tensors, metadata_of
from support.golden_models import Array
from support.tiny_gguf import ARRAY, BOOL, F32, STR, U32

TABLE = "per_layer_token_embd.weight"

Metadata = dict[str, tuple[int, Any]]
Tensors = dict[str, Array]
Edit = Callable[[Metadata, Tensors], object]


def put(key: str, kind: int, value: Any) -> Edit:
    return lambda meta, _: meta.update({f"gemma4.{key}": (kind, value)})


def forget(key: str) -> Edit:
    return lambda meta, _: meta.pop(f"gemma4.{key}")


def drop(name: str) -> Edit:
    return lambda _, tensors: tensors.pop(name)


def change(name: str, how: Callable[[Array], Array]) -> Edit:
    return lambda _, tensors: tensors.update({name: how(tensors[name])})


SIX = [True, True, False] * 2
GATES = "blk.1.ffn_gate_up_exps.weight"

BAD = [
    # Kinds of layers.
    ("gemma4-moe", put("attention.sliding_window_pattern", ARRAY,
                       (BOOL, SIX[:5])),
     "sliding_window_pattern has 5 entries, expected one for each of 6"),
    ("gemma4-moe", put("attention.sliding_window_pattern", STR, "sliding"),
     "attention.sliding_window_pattern"),
    ("gemma4-moe", put("attention.sliding_window_pattern", ARRAY,
                       (BOOL, [not slides for slides in SIX])),
     "blk.0."),
    ("gemma4-moe", put("attention.head_count_kv", ARRAY, (U32, [2, 2, 1])),
     "head_count_kv has 3 entries, expected one number or one for each"),
    ("gemma4-moe", put("attention.sliding_window", U32, 0),
     "attention.sliding_window is 0, expected"),
    ("gemma4-moe", put("attention.value_length", U32, 32),
     "value_length is 32, expected key_length 64"),
    ("gemma4-ple", put("attention.shared_kv_layers", U32, 7),
     "attention.shared_kv_layers is 7, expected"),
    ("gemma4-ple", put("attention.shared_kv_layers", U32, 5),
     "attention.shared_kv_layers is 5, expected"),
    # Rotations.
    ("gemma4-moe", put("rope.scaling.type", STR, "yarn"),
     "rope.scaling.type is 'yarn', expected"),
    ("gemma4-moe", put("rope.freq_base", F32, 0.5), "rope.freq_base is 0.5"),
    ("gemma4-moe", put("rope.dimension_count", U32, 31),
     "rope_freqs.weight has 32 values, expected 15 by rope.dimension_count"),
    ("gemma4-moe", change("rope_freqs.weight", lambda w: w[:-1].copy()),
     "rope_freqs.weight"),
    ("gemma4-moe", change("rope_freqs.weight", lambda w: 2 * w),
     "rope_freqs.weight"),
    # Experts.
    ("gemma4-moe", forget("expert_used_count"), "experts_used is 0, expected"),
    ("gemma4-moe", put("expert_used_count", U32, 9),
     "experts_used is 9, expected 1..8"),
    ("gemma4-moe", forget("expert_feed_forward_length"),
     "expert_ffn_dim is 0, expected"),
    ("gemma4-moe", put("expert_feed_forward_length", U32, 30),
     "expert_ffn_dim is 30, expected a multiple of 16"),
    ("gemma4-moe", put("expert_count", U32, 9), "blk.0.ffn_"),
    ("gemma4-moe", forget("expert_count"), "ffn_"),
    ("gemma4-moe", drop(GATES), GATES),
    ("gemma4-moe", drop("blk.2.ffn_gate_inp.weight"),
     "blk.2.ffn_gate_inp.weight"),
    ("gemma4-moe", drop("blk.2.ffn_down_exps.scale"),
     "blk.2.ffn_down_exps.scale"),
    ("gemma4-moe", change(GATES, lambda w: w[:-1].copy()), GATES),
    # The table.
    ("gemma4-ple", drop(TABLE), TABLE),
    ("gemma4-ple", change(TABLE, lambda w: w[:159].copy()),
     "ple_vocab is 159, expected at least vocab_size 160"),
    ("gemma4-ple", change(TABLE, lambda w: w[:, :-32].copy()), TABLE),
    ("gemma4-ple", put("embedding_length_per_layer_input", U32, 64),
     f"{TABLE} has shape [176, 224], expected [176, 448]"),
    ("gemma4-ple", forget("embedding_length_per_layer_input"),
     "found tensor per_layer_token_embd.weight, expected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edit", "part"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_gguf_files(
    name: str, edit: Edit, part: str, tmp_path: Path
) -> None:
    meta, tensors = metadata_of(config_of(name)), gguf_tensors(name)
    edit(meta, tensors)
    path = tiny_gguf.write(tmp_path / "m.gguf", meta, tensors)
    with pytest.raises(gemmakv.GemmaKVError) as caught:
        gemmakv.Gemma.load(path)
    message = str(caught.value)
    assert part in message and str(path) in message, message
    assert "\n" not in message


def test_a_gguf_file_that_ends_within_the_table(tmp_path: Path) -> None:
    name = "gemma4-ple"
    tensors = gguf_tensors(name)
    tensors[TABLE] = tensors.pop(TABLE)  # the last of the file
    path = tiny_gguf.write(
        tmp_path / "m.gguf", metadata_of(config_of(name)), tensors)
    gemmakv.Gemma.load(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - tensors[TABLE].nbytes // 2)
    with pytest.raises(gemmakv.CorruptFile) as caught:
        gemmakv.Gemma.load(path)
    message = str(caught.value)
    assert TABLE in message and "\n" not in message, message


@pytest.mark.parametrize("name", ["gemma4-ple", "gemma3n-mqa"])
def test_directories_whose_table_is_cut(name: str, tmp_path: Path) -> None:
    golden = golden_models.read(name)
    table = "model.embed_tokens_per_layer.weight"
    whole = {f"model.{n}": w for n, w in golden.tensors().items()}
    rows, cols = whole[table].shape
    folder = golden_models.write(tmp_path / "model", golden)
    path = folder / "model.safetensors"
    for cut in (whole[table][:-1].copy(), whole[table][:, :-32].copy()):
        golden_models.write_safetensors(path, {**whole, table: cut}, "F32")
        with pytest.raises(gemmakv.CorruptFile) as caught:
            gemmakv.Gemma.load(folder)
        assert (f"tensor {table} has shape {list(cut.shape)}, expected "
                f"{[rows, cols]} by config.json") in str(caught.value)
    del whole[table]
    golden_models.write_safetensors(path, whole, "F32")
    with pytest.raises(gemmakv.CorruptFile, match=f"{table} is missing"):
        gemmakv.Gemma.load(folder)


def test_a_directory_whose_table_s_file_is_cut_off(tmp_path: Path) -> None:
    golden = golden_models.read("gemma4-ple")
    table = "model.embed_tokens_per_layer.weight"
    tensors = {f"model.{n}": w for n, w in golden.tensors().items()}
    tensors[table] = tensors.pop(table)
    folder = golden_models.write(tmp_path / "model", golden)
    path = folder / "model.safetensors"
    golden_models.write_safetensors(path, tensors, "F32")
    gemmakv.Gemma.load(folder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - tensors[table].nbytes // 2)
    with pytest.raises(gemmakv.CorruptFile) as caught:
        gemmakv.Gemma.load(folder)
    message = str(caught.value)
    size = path.stat().st_size
    assert f"expected the end of the file, {size}; is it whole?" in message
    assert str(path) in message and "\n" not in message
