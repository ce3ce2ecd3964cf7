"""Files of models of embeddings: GGUF, and directories with modules."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._requests import requests_of
from support import embedding_models, golden_configs, tiny_gguf
from support.embedding_models import write_json

PUBLISHED = golden_configs.FOLDER / "embeddinggemma-300m"
U32 = tiny_gguf.U32


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def test_gguf_files_state_twice_the_distance(tmp_path: Path) -> None:
    path = tiny_gguf.write_embedding(tmp_path / "x.gguf")
    config = gemmakv.ModelConfig.from_gguf(path)
    assert config.arguments() == tiny_gguf.EMBEDDING.arguments()
    meta = tiny_gguf.metadata(tiny_gguf.EMBEDDING)
    assert meta["gemma-embedding.attention.sliding_window"] == (U32, 16)
    # Of an odd number, half is rounded down.
    meta["gemma-embedding.attention.sliding_window"] = (U32, 17)
    weights = tiny_gguf.tensors(5, tiny_gguf.EMBEDDING)
    tiny_gguf.write(path, meta, weights)
    assert gemmakv.ModelConfig.from_gguf(path).sliding_window == 9


def test_a_file_without_products_says_so(tmp_path: Path) -> None:
    path = tiny_gguf.write_embedding(tmp_path / "x.gguf", dense=False)
    with pytest.warns(gemmakv.PartialModelWarning, match="2_Dense, 3_Dense"):
        gemma = gemmakv.Gemma.load(path)
    assert gemma.config.dense_dim == 0
    assert gemma.embed(["x"]).shape == (1, 160)


Metadata = dict[str, tuple[int, Any]]


def ollamas_form() -> tuple[Metadata, tiny_gguf.Tensors]:
    """Metadata and tensors of a model as Ollama's registry has it: a Gemma 3 by
    its architecture, with names of its own behind the last layer.
    """
    found = tiny_gguf.metadata(tiny_gguf.EMBEDDING)
    meta = {
        key.replace("gemma-embedding.", "gemma3."): value
        for key, value in found.items()
        if "dense_" not in key
    }
    slides = [kind == "sliding" for kind in tiny_gguf.EMBEDDING.layer_kinds]
    meta |= {
        "general.architecture": (tiny_gguf.STR, "gemma3"),
        "gemma3.attention.causal": (tiny_gguf.BOOL, False),
        "gemma3.attention.sliding_window_pattern": (
            tiny_gguf.ARRAY, (tiny_gguf.BOOL, slides)),
        "gemma3.rope.local.freq_base": (tiny_gguf.F32, 1e4),
        "tokenizer.ggml.add_eos_token": (tiny_gguf.BOOL, True),
    }  # fmt: skip
    weights = tiny_gguf.tensors(5, tiny_gguf.EMBEDDING)
    for name, other in (
        ("dense_2.weight", "dense.0.weight"),
        ("dense_3.weight", "dense.1.weight"),
        ("output_norm.weight", "norm.weight"),
    ):
        weights[other] = weights.pop(name)
    return meta, weights


@pytest.mark.parametrize("left_out", [
    None, "gemma3.attention.causal", "gemma3.pooling_type",
    "gemma3.attention.sliding_window_pattern", "gemma3.rope.local.freq_base",
])
def test_ollamas_form_is_the_same_model(
    tmp_path: Path, left_out: str | None
) -> None:
    known = gemmakv.Gemma.load(tiny_gguf.write_embedding(tmp_path / "x.gguf"))
    meta, weights = ollamas_form()
    if left_out is not None:
        del meta[left_out]
    path = tiny_gguf.write(tmp_path / "y.gguf", meta, weights)
    gemma = gemmakv.Gemma.load(path)
    assert gemma.config.architecture == "gemma-embedding"
    assert gemma.fingerprint == known.fingerprint
    assert gemma.embedding_prompts == known.embedding_prompts
    texts = ["the in", "a", "in the a " * 9]
    assert np.array_equal(gemma.embed(texts), known.embed(texts))
    assert np.array_equal(
        gemma.embed(texts, prompt="query"), known.embed(texts, prompt="query")
    )
    with pytest.raises(ValueError):
        cache = gemmakv.create_kv_cache(gemma.config)
        gemma.generate(cache, "the in", max_tokens=1)


@pytest.mark.parametrize("change, message", [
    (lambda meta, weights: weights.pop("dense.1.weight"),
     "dense_3.weight is missing"),
    (lambda meta, weights: weights.pop("norm.weight"),
     "output_norm.weight is missing"),
    (lambda meta, weights: meta.update(
        {"gemma3.attention.causal": (tiny_gguf.BOOL, True)}),
     "gemma3.attention.causal is 1, expected 0"),
    (lambda meta, weights: meta.update({"gemma3.pooling_type": (U32, 3)}),
     "gemma3.pooling_type is 3, expected 1"),
    (lambda meta, weights: meta.update(
        {"gemma3.rope.freq_base_swa": (tiny_gguf.F32, 5e4)}),
     "gemma3.rope.local.freq_base is 10000, expected 50000"),
    # Nothing says that it is a model of embeddings, but what is behind it.
    (lambda meta, weights: (meta.pop("gemma3.attention.causal"),
                            meta.pop("gemma3.pooling_type")),
     "found tensor dense_2.weight, expected none"),
])
def test_ollamas_form_must_be_whole(
    tmp_path: Path, change: Callable[[Any, Any], Any], message: str
) -> None:
    meta, weights = ollamas_form()
    change(meta, weights)
    path = tiny_gguf.write(tmp_path / "y.gguf", meta, weights)
    with pytest.raises(gemmakv.GemmaKVError, match=message) as caught:
        gemmakv.Gemma.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key, value", [
    ("attention.causal", (tiny_gguf.BOOL, False)),
    ("pooling_type", (U32, 1)),
    ("pooling_type", (U32, 3)),
    ("dense_2_feat_in", (U32, 64)),
])
def test_a_model_of_embeddings_never_generates(
    tmp_path: Path, key: str, value: tuple[int, Any]
) -> None:
    """Its layers alone are those of a Gemma 3."""
    meta = tiny_gguf.metadata() | {f"gemma3.{key}": value}
    path = tiny_gguf.write(tmp_path / "x.gguf", meta)
    with pytest.raises(gemmakv.GemmaKVError, match=f"gemma3.{key}"):
        gemmakv.Gemma.load(path)


@pytest.mark.parametrize("key, value, error, message", [
    ("dense_2_feat_in", 64, gemmakv.CorruptFile,
     "dense_2_feat_in is 64, expected 160 by embedding_length"),
    ("dense_3_feat_in", 64, gemmakv.CorruptFile,
     "dense_3_feat_in is 64, expected 96 by dense_2_feat_out"),
    ("dense_3_feat_out", 64, gemmakv.CorruptFile,
     "dense_3_feat_out is 64, expected 160 by embedding_length"),
    ("dense_2_feat_out", None, gemmakv.CorruptFile,
     "dense_3_feat_in is 96, expected 0 by dense_2_feat_out"),
    ("pooling_type", 3, gemmakv.CorruptFile,
     "pooling_type is 3, expected 1, the mean of all positions"),
])
def test_wrong_metadata_is_named(
    tmp_path: Path, key: str, value: int | None, error: type[Exception],
    message: str,
) -> None:
    meta = tiny_gguf.metadata(tiny_gguf.EMBEDDING)
    meta.pop(f"gemma-embedding.{key}")
    if value is not None:
        meta[f"gemma-embedding.{key}"] = (U32, value)
    weights = tiny_gguf.tensors(5, tiny_gguf.EMBEDDING)
    path = tiny_gguf.write(tmp_path / "x.gguf", meta, weights)
    with pytest.raises(error, match=message) as caught:
        gemmakv.Gemma.load(path)
    assert "\n" not in str(caught.value)


def test_products_without_their_sizes_are_refused(tmp_path: Path) -> None:
    meta = {
        key: value
        for key, value in tiny_gguf.metadata(tiny_gguf.EMBEDDING).items()
        if "dense" not in key
    }
    weights = tiny_gguf.tensors(5, tiny_gguf.EMBEDDING)
    path = tiny_gguf.write(tmp_path / "x.gguf", meta, weights)
    with pytest.raises(gemmakv.CorruptFile, match="found tensor dense_2"):
        gemmakv.Gemma.load(path)
    meta = tiny_gguf.metadata(tiny_gguf.EMBEDDING)
    del weights["dense_3.weight"]
    tiny_gguf.write(path, meta, weights)
    with pytest.raises(gemmakv.CorruptFile, match="dense_3.weight is missing"):
        gemmakv.Gemma.load(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    golden = embedding_models.read("dense")
    return embedding_models.write(tmp_path / "model", golden)


def test_a_saved_directory_reads_as_published(tmp_path: Path) -> None:
    found = golden_configs.write_published(tmp_path, "embeddinggemma-300m")
    from gemmakv.models.huggingface._config import read_config
    from gemmakv.models.huggingface._modules import read_embedding_info

    config = read_config(found).config
    assert config.name == "embeddinggemma-300m"
    assert config.dense_dim == 3072 and config.sliding_window == 257
    info = read_embedding_info(found)
    stated = read(PUBLISHED / "config_sentence_transformers.json")
    assert info.prompts == stated["prompts"]
    # What files of other formats get is the same.
    from gemmakv.models._embedding import PUBLISHED_PROMPTS

    assert info.prompts == PUBLISHED_PROMPTS
    assert info.default_prompt is None and not info.adds_eos


Change = Callable[[Any], None]


def put(**values: Any) -> Change:
    return lambda document: document.update(values)


@pytest.mark.parametrize("file, change, error, message", [
    ("1_Pooling/config.json", put(pooling_mode_cls_token=True),
     gemmakv.MismatchError, "pooling_mode_cls_token is True, expected false"),
    ("1_Pooling/config.json", put(pooling_mode_mean_tokens=False),
     gemmakv.MismatchError, "pooling_mode_mean_tokens is False, expected true"),
    ("1_Pooling/config.json", put(pooling_mode="lasttoken"),
     gemmakv.MismatchError, "pooling_mode is 'lasttoken', expected 'mean'"),
    ("1_Pooling/config.json", put(include_prompt=False),
     gemmakv.MismatchError, "include_prompt is False, expected true"),
    ("1_Pooling/config.json", put(word_embedding_dimension=7),
     gemmakv.CorruptFile, "word_embedding_dimension is 7, expected 192"),
    ("2_Dense/config.json", put(bias=True),
     gemmakv.MismatchError, "bias is True, expected false"),
    ("2_Dense/config.json", put(activation_function="torch.nn.Tanh"),
     gemmakv.MismatchError, "activation_function is 'torch.nn.Tanh', expected"),
    ("2_Dense/config.json", put(in_features=100),
     gemmakv.CorruptFile, "in_features is 100, expected 192"),
    ("2_Dense/config.json", put(out_features=100),
     gemmakv.CorruptFile, "in_features is 384, expected 100"),
    ("3_Dense/config.json", put(out_features=None),
     gemmakv.CorruptFile, "out_features is None, expected a size"),
    ("modules.json", lambda modules: modules.pop(3),
     gemmakv.MismatchError, "the modules are Transformer, Pooling, Dense, "
     "Normalize, expected Transformer, Pooling, with or without two Dense and "
     "a Normalize behind them"),
    ("modules.json", lambda modules: modules[0].update(path="0_T"),
     gemmakv.MismatchError, "the model is in '0_T', expected it beside"),
    ("modules.json", lambda modules: modules[2].update(path="../x"),
     gemmakv.CorruptFile, "path is '../x', expected a folder beside"),
    ("config_sentence_transformers.json", put(default_prompt_name="x"),
     gemmakv.CorruptFile, "default_prompt_name is 'x', expected one of query"),
    ("config_sentence_transformers.json", put(prompts={"query": 5}),
     gemmakv.CorruptFile, "prompts.query is 5, expected a string"),
    ("config.json", put(use_bidirectional_attention="vision"),
     gemmakv.CorruptFile, "use_bidirectional_attention is 'vision'"),
])
def test_wrong_modules_are_named(
    folder: Path, file: str, change: Change, error: type[Exception],
    message: str,
) -> None:
    document = read(folder / file)
    change(document)
    write_json(folder / file, document)
    with pytest.raises(error, match=message) as caught:
        gemmakv.Gemma.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_the_list_of_modules_may_begin_with_a_mark(folder: Path) -> None:
    path = folder / "modules.json"
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    assert gemmakv.Gemma.load(folder).config.dense_dim == 384
    path.write_bytes(b"{}")
    with pytest.raises(gemmakv.CorruptFile, match="expected a list of modules"):
        gemmakv.Gemma.load(folder)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_other_models_look_one_way(folder: Path, kind: str) -> None:
    """Not what they are trained for, or the text part of another model."""
    config = read(folder / "config.json")
    if kind == "gemma3":
        config = {"model_type": kind, "text_config": config}
    else:
        config["model_type"] = kind
        del config["rope_parameters"]
    write_json(folder / "config.json", config)
    message = "use_bidirectional_attention is True, expected false"
    with pytest.raises(gemmakv.MismatchError, match=message):
        gemmakv.Gemma.load(folder)


def test_modules_stand_behind_models_of_embeddings_alone(
    folder: Path,
) -> None:
    """One that looks one way would load as one that generates."""
    config = read(folder / "config.json")
    write_json(
        folder / "config.json", config | {"use_bidirectional_attention": False}
    )
    with pytest.raises(gemmakv.MismatchError, match="modules.json") as caught:
        gemmakv.Gemma.load(folder)
    assert str(folder) in str(caught.value)
    (folder / "modules.json").unlink()
    assert not gemmakv.Gemma.load(folder).config.bidirectional
    write_json(
        folder / "config.json",
        config | {"use_bidirectional_attention": None, "is_causal": False},
    )
    with pytest.raises(gemmakv.MismatchError, match="is_causal is False"):
        gemmakv.Gemma.load(folder)


def test_weights_of_modules_are_checked(folder: Path) -> None:
    shutil.copy(folder / "2_Dense" / "model.safetensors",
                folder / "3_Dense" / "model.safetensors")
    with pytest.raises(gemmakv.CorruptFile, match="has shape .384, 192., exp"):
        gemmakv.Gemma.load(folder)
    (folder / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(gemmakv.CorruptFile, match="3_Dense: expected model.s"):
        gemmakv.Gemma.load(folder)


def test_a_default_prompt_counts(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    write_json(path, read(path) | {"default_prompt_name": "query"})
    info = requests_of(gemmakv.Gemma.load(folder)).info
    assert info.embedding.default_prompt == "query"
    # The same of a model that has a tokenizer.
    words = tiny_gguf.write_embedding(folder.parent / "words.gguf")
    gemma = gemmakv.Gemma.load(words)
    requests_of(gemma).info = info
    found = gemma.embed(["in the"])
    assert np.array_equal(
        found, gemma.embed(["q: in the"], prompt="{text}"))
    assert np.array_equal(found, gemma.embed(["in the"], prompt="query"))
    other = gemma.embed(["in the"], prompt="{text}")
    assert not np.array_equal(found, other)


@pytest.mark.parametrize("stated, expected", [
    ({"tokenizer_config.json": {"add_eos_token": True}}, True),
    ({"tokenizer_config.json": {"add_eos_token": False},
      "tokenizer.json": {"post_processor": {"single": [
          {"SpecialToken": {"id": "<eos>"}}]}}}, False),
    ({"tokenizer.json": {"post_processor": {
        "type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<eos>", "type_id": 0}}]}}}, True),
    ({"tokenizer.json": {"post_processor": {
        "type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}]}}}, False),
    ({"tokenizer.json": {"post_processor": None}}, False),
    ({}, False),
])
def test_whether_texts_have_an_end(
    tmp_path: Path, stated: dict[str, Any], expected: bool
) -> None:
    from gemmakv.models.huggingface._modules import read_embedding_info

    for name, content in stated.items():
        write_json(tmp_path / name, content)
    assert read_embedding_info(tmp_path).adds_eos is expected


def second(folder: Path, **changes: Any) -> Path:
    """EmbeddingGemma 2 as its whole model's directory is: the part for text in
    a section, parts for images and sound beside it.
    """
    golden = embedding_models.read("second")
    config = dict(golden.model.config)
    config["architectures"] = ["EmbeddingGemma2Model"]
    whole = {
        "model_type": "embedding_gemma2", "text_config": {**config, **changes},
        "vision_config": {"model_type": "gemma4_vision"},
    }
    model = dataclasses.replace(
        golden.model, config=whole, prefix="language_model.")
    return embedding_models.write(
        folder, dataclasses.replace(golden, model=model))


def test_the_second_generation_as_a_whole_model(tmp_path: Path) -> None:
    golden = embedding_models.read("second")
    with pytest.warns(gemmakv.PartialModelWarning, match="image encoder"):
        gemma = gemmakv.Gemma.load(second(tmp_path / "model"))
    alone = gemmakv.Gemma.load(
        embedding_models.write(tmp_path / "alone", golden))
    texts = golden.texts()
    assert np.array_equal(gemma.embed(texts), alone.embed(texts))
    assert gemma.embedding_dims == [144, 128]
    assert gemma.embed(texts, dim=128).shape == (len(texts), 128)


def test_prompts_of_the_second_generation_are_its_files_alone(
    tmp_path: Path,
) -> None:
    folder = second(tmp_path / "model")
    (folder / "config_sentence_transformers.json").unlink()
    with pytest.warns(gemmakv.PartialModelWarning):
        gemma = gemmakv.Gemma.load(folder)
    assert gemma.embedding_prompts == {}


def test_the_length_of_texts_is_what_the_files_say(tmp_path: Path) -> None:
    folder = second(tmp_path / "model")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9})
    with pytest.warns(gemmakv.PartialModelWarning):
        gemma = gemmakv.Gemma.load(folder)
    gemma.embed([[2] * 9])
    with pytest.raises(ValueError, match=r"10 tokens, expected at most 9"):
        gemma.embed([[2] * 10])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 0})
    with pytest.raises(gemmakv.CorruptFile, match="max_seq_length is 0"):
        gemmakv.Gemma.load(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_shared_layers": 2},
         "text_config.num_kv_shared_layers is 2, expected 0 for this"),
        ({"attention_k_eq_v": True},
         "text_config.attention_k_eq_v is True, expected false for this"),
        ({"enable_moe_block": True},
         "text_config.enable_moe_block is True, expected false for this"),
        ({"hidden_size_per_layer_input": 0},
         "text_config.hidden_size_per_layer_input is 0, expected 1.."),
        ({"embedding_dim": -1},
         "text_config.embedding_dim is -1, expected 1.."),
        ({"rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
         "rope_parameters.full_attention.rope_type is 'yarn', expected "),
    ],
)  # fmt: skip
def test_bad_configurations_of_the_second_generation(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = second(tmp_path / "model")
    config = read(folder / "config.json")
    config["text_config"].update(changes)
    write_json(folder / "config.json", config)
    with pytest.raises(gemmakv.GemmaKVError) as caught:
        gemmakv.Gemma.load(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
