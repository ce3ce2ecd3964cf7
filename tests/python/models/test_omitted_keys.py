"""What the files of named types leave out.

Each key of each named size is left out in turn: the configuration is right,
or a warning names the field, or an error the key. Metadata alone; no weights.
"""

from __future__ import annotations

import copy
import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, ModelConfig, ModelType, _core
from gemmakv.models import _loading as loading
from gemmakv.models.huggingface._config import read_config
from support import family_models, golden_configs, tiny_gguf
from support.edited_gguf import Entries, append_to_array, rewrite
from support.golden_gguf import metadata_of, rotation_tensors, stacked
from support.tiny_gguf import F32, STR, U32

GGUF_TYPES = [
    t.value
    for t in ModelType
    if ModelConfig.from_name(t.value).architecture
    not in ("recurrentgemma", "embeddinggemma2")
]
# Without these there is nothing to compare with, or a tensor has no meaning.
REQUIRED = {
    "embedding_length",
    "block_count",
    "attention.head_count",
    "dense_2_feat_out",
}
# A file of Gemma 3 without a window says that no layer slides, as files of
# models of other makers do.
WARNED = {"attention.sliding_window": {"layer_kinds", "sliding_window"}}


def file_of(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """All metadata of a named type, and the tensors that tell of shapes."""
    table = ModelConfig.from_name(name)
    prefix = f"{table.architecture}."
    meta = tiny_gguf.metadata(table)
    if not table.bidirectional:
        meta |= metadata_of(table)
    weights = {"token_embd.weight": np.zeros((600, 1), np.float32)}
    weights |= rotation_tensors(table)
    if table.laurel_rank:
        weights["blk.0.laurel_l.weight"] = np.zeros(
            (table.laurel_rank, 1), np.float32
        )
    if table.ple_dim:
        weights["per_layer_token_embd.weight"] = weights["token_embd.weight"]
    if table.dense_dim:
        for tensor in ("dense_2.weight", "dense_3.weight"):
            weights[tensor] = np.zeros((1, 1), np.float32)
    if not table.keys_are_values and table.architecture == "gemma4":
        full = table.layer_kinds.index("full")
        weights[f"blk.{full}.attn_v.weight"] = np.zeros((1, 1), np.float32)
    # Keys that are not stated where they are usual.
    usual: dict[str, tuple[int, Any]] = {
        "rope.freq_base": (F32, table.rope_base_full),
        "rope.scaling.type": (STR, "linear"),
        "rope.scaling.factor": (F32, table.rope_factor_full),
    }
    if "sliding" in table.layer_kinds:
        usual["rope.freq_base_swa"] = (F32, table.rope_base_sliding)
    if not isinstance(table.arguments()["rope_dim"], list):
        usual["rope.dimension_count"] = (U32, table.head_dim)
    meta |= {
        prefix + key: value
        for key, value in usual.items()
        if prefix + key not in meta
    }
    if table.architecture == "gemma":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            meta.pop(prefix + key, None)
    return meta, weights


def config_of(path: Path, meta: Any, weights: Any) -> ModelConfig:
    return ModelConfig.from_gguf(str(tiny_gguf.write(path, meta, weights)))


def fields(config: ModelConfig) -> dict[str, Any]:
    """All fields but the sizes of vocabularies, which files pad."""
    found = config.arguments()
    for key in ("vocab_size", "ple_vocab"):
        del found[key]
    return found


def differing(config: ModelConfig) -> set[str]:
    text = loading.describe_differences(config)
    found = {field for field, *_ in _core.compare_with_named(config)[1]}
    assert all(field in text for field in found)
    return found


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_each_key_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    meta, weights = file_of(name)
    path = tmp_path / "m.gguf"
    whole = config_of(path, meta, weights)
    assert whole.name == name and not differing(whole)
    prefix = f"{whole.architecture}."
    keys = [key for key in meta if key.startswith(prefix)]
    assert len(keys) >= 10
    for key in keys:
        short = key.removeprefix(prefix)
        rest = {k: v for k, v in meta.items() if k != key}
        if short in REQUIRED:
            with pytest.raises(gemmakv.CorruptFile, match=short):
                config_of(path, rest, weights)
            continue
        found = config_of(path, rest, weights)
        if whole.architecture == "gemma3" and short in WARNED:
            assert differing(found) == WARNED[short], key
        else:
            assert fields(found) == fields(whole), key
            assert not differing(found), key
        assert found.query_scale == whole.query_scale


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_a_gguf_file_of_what_is_required_alone(
    name: str, tmp_path: Path
) -> None:
    """With the window, without which Gemma 3 is another model."""
    meta, weights = file_of(name)
    whole = ModelConfig.from_name(name)
    kept = {
        f"{whole.architecture}.{key}"
        for key in REQUIRED | set(WARNED)
    } | {"general.architecture"}
    rest = {key: value for key, value in meta.items() if key in kept}
    config = config_of(tmp_path / "m.gguf", rest, weights)
    assert fields(config) == fields(whole)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_other_values_are_told(name: str, tmp_path: Path) -> None:
    """What a file states counts, and a warning names the field."""
    meta, weights = file_of(name)
    prefix = f"{ModelConfig.from_name(name).architecture}."
    changes: dict[str, tuple[str, Any]] = {
        "context_length": ("context_length", (U32, 1000)),
        "attention.layer_norm_rms_epsilon": ("rms_epsilon", (F32, 1e-5)),
        "rope.freq_base": ("rope_base_full", (F32, 5e5)),
        "feed_forward_length": ("ffn_dim", (U32, 64)),
    }
    if prefix in ("gemma.", "gemma3."):
        changes["rope.scaling.factor"] = ("rope_factor_full", (F32, 2.0))
    for key, (field, value) in changes.items():
        config = config_of(
            tmp_path / "m.gguf", {**meta, prefix + key: value}, weights
        )
        assert config.name == ""
        assert field in differing(config), key
        text = loading.describe_differences(config)
        assert name in text and "expected" in text and "\n" not in text


@pytest.mark.parametrize(
    "name, factor",
    [("gemma3-4b", 8), ("gemma3-12b", 8), ("gemma3-27b", 8),
     ("gemma3-1b", 1), ("gemma3-270m", 1)],
)  # fmt: skip
def test_positions_of_gemma3_without_a_factor(
    name: str, factor: int, tmp_path: Path
) -> None:
    """As Ollama's files are."""
    meta, weights = file_of(name)
    rest = {k: v for k, v in meta.items() if ".rope.scaling." not in k}
    config = config_of(tmp_path / "m.gguf", rest, weights)
    assert config.rope_factor_full == factor
    assert config.name == name and loading.describe_differences(config) == ""


def test_a_small_gemma3_that_states_a_factor(tmp_path: Path) -> None:
    meta, weights = file_of("gemma3-1b")
    meta["gemma3.rope.scaling.factor"] = (F32, 8.0)
    config = config_of(tmp_path / "m.gguf", meta, weights)
    assert config.rope_factor_full == 8
    assert loading.describe_differences(config) == (
        "the model looks like gemma3-1b, but: rope_factor_full is 8, "
        "expected 1"
    )


# ---- The tokenizer's keys ----

# Without these there is no vocabulary, or nothing says how it is used.
_NEEDED = {"model", "tokens", "scores", "token_type"}


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "gemma3n"])
def test_each_key_of_a_tokenizer(family: str, tmp_path: Path) -> None:
    config = family_models.config(family)
    meta, weights = tiny_gguf.metadata(config), tiny_gguf.tensors(0, config)
    if family == "gemma3n":
        weights = stacked(weights)
    path = tmp_path / "m.gguf"
    whole = Gemma.load(tiny_gguf.write(path, meta, weights))
    assert whole.tokenizer is not None
    prefix = "tokenizer.ggml."
    keys = [key for key in meta if key.startswith(prefix)]
    assert prefix + "add_space_prefix" in keys and len(keys) >= 10
    for key in keys:
        tiny_gguf.write(path, {k: meta[k] for k in meta if k != key}, weights)
        if key.removeprefix(prefix) in _NEEDED:
            with pytest.raises(gemmakv.GemmaKVError, match="tokenizer"):
                Gemma.load(path)
            continue
        found = Gemma.load(path)
        assert found.tokenizer is not None
        assert found.fingerprint == whole.fingerprint
        assert found.config.bos_id == whole.config.bos_id
        # Of the other families the token has the id that it has there.
        if family == "gemma" or "eot" not in key:
            assert found.config.eos_ids == whole.config.eos_ids, key
        for text in ("the", " a<end_of_turn>", "\u00e9\n\n  in"):
            for special in (False, True):
                ids = whole.tokenizer.encode(text, special)
                assert found.tokenizer.encode(text, special) == ids, key
                assert found.tokenizer.decode(ids) == whole.tokenizer.decode(
                    ids
                )


# ---- config.json ----

# Other values of these are other sizes, whose weights have other shapes.
_SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads"}

# What the makers' classes assume is not these sizes.
TOLD = {
    "gemma-7b": {},
    "gemma2-2b": {},
    "gemma3-1b": {
        "intermediate_size": {"ffn_dim"},
        "max_position_embeddings": {"context_length"},
        "num_key_value_heads": {"kv_heads"},
        "sliding_window": {"sliding_window"},
    },
    "gemma3-27b": {
        "head_dim": {"head_dim", "rope_dim"},
        "intermediate_size": {"ffn_dim"},
        "num_key_value_heads": {"kv_heads"},
        "query_pre_attn_scalar": {"query_scale"},
        "rope_scaling": {"rope_factor_full"},
        "rope_scaling.rope_type": {"rope_factor_full"},
        "sliding_window": {"sliding_window"},
    },
    "gemma4-e4b": {
        "final_logit_softcapping": {"final_soft_cap"},
        "intermediate_size": {"ffn_dim"},
        "num_key_value_heads": {"kv_heads"},
        "num_kv_shared_layers": {"shares_kv"},
        "rope_parameters.full_attention.partial_rotary_factor": {
            "still_pairs"
        },
    },
}


def leave_out(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of the language model's section, and of the sections in it, in
    turn.
    """

    def paths(section: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for key, value in section.items():
            yield (key,)
            for path in paths(value) if isinstance(value, dict) else ():
                yield (key, *path)

    for path in paths(config.get("text_config", config)):
        rest = copy.deepcopy(config)
        section = rest.get("text_config", rest)
        for key in path[:-1]:
            section = section[key]
        del section[path[-1]]
        yield ".".join(path), rest


@pytest.mark.parametrize("name", golden_configs.types())
def test_each_key_of_a_config(name: str, tmp_path: Path) -> None:
    golden_configs.write_published(tmp_path, name)
    whole = read_config(tmp_path).config
    assert whole.name == name and not differing(whole)
    told: dict[str, set[str]] = {}
    for key, rest in leave_out(golden_configs.published(name)):
        (tmp_path / "config.json").write_text(json.dumps(rest), "utf-8")
        try:
            found = read_config(tmp_path).config
        except gemmakv.GemmaKVError as error:
            assert "config.json" in str(error)
            continue
        if found.eos_ids != whole.eos_ids:
            assert key == "eos_token_id"
        shape = {k: v for k, v in fields(found).items() if k != "eos_ids"}
        expected = {k: v for k, v in fields(whole).items() if k != "eos_ids"}
        del shape["name"], expected["name"]
        wrong = {k for k in shape if shape[k] != expected[k]}
        if key in _SIZES or found.architecture != whole.architecture:
            continue
        # Without per-layer embeddings there is no table of them either.
        assert differing(found) - {"ple_vocab"} == wrong, key
        assert (found.name == "") == bool(wrong)
        told[key] = wrong
    told = {key: wrong for key, wrong in told.items() if wrong}
    assert told == TOLD.get(name, told)


def test_a_config_of_gemma3_without_a_factor(tmp_path: Path) -> None:
    config = golden_configs.published("gemma3-4b")
    del config["text_config"]["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    found = read_config(tmp_path).config
    assert found.name == "" and found.rope_factor_full == 1
    assert loading.describe_differences(found) == (
        "the model looks like gemma3-4b, but: rope_factor_full is 1, "
        "expected 8"
    )


def test_other_shapes_look_like_nothing(tmp_path: Path) -> None:
    assert _core.compare_with_named(tiny_gguf.CONFIG) == ("", [])
    assert loading.describe_differences(tiny_gguf.CONFIG) == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gemma.load(tiny_gguf.write(tmp_path / "m.gguf"))


@pytest.mark.slow
def test_a_load_warns(model_path: str, tmp_path: Path) -> None:
    """The real model, whose file states another base."""

    def edit(entries: Entries) -> None:
        entries["gemma3.rope.freq_base"] = struct.pack("<If", F32, 5e5)

    path = rewrite(Path(model_path), tmp_path / "m.gguf", edit)
    with pytest.warns(gemmakv.PartialModelWarning) as caught:
        gemma = Gemma.load(path, prefix_cache=False, packed_cache=False)
    assert gemma.model_type is None
    [warning] = caught
    for word in (str(path), "gemma3-270m", "rope_base_full is 500000"):
        assert word in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.slow
def test_the_real_model_in_ollamas_form(
    model_path: str, gemma: Gemma, tmp_path: Path
) -> None:
    """Other names of keys, few keys, and a token without a row."""

    def edit(entries: Entries) -> None:
        for key in list(entries):
            if key.startswith(("gemma3.rope.", "tokenizer.ggml.add_")) or (
                key.endswith(("rms_epsilon", "_token_id"))
            ):
                del entries[key]
        for key, value in (("global", 1e6), ("local", 1e4)):
            entries[f"gemma3.rope.{key}.freq_base"] = struct.pack(
                "<If", F32, value
            )
        name = b"<image_soft_token>"
        for key, value in (
            ("tokens", struct.pack("<Q", len(name)) + name),
            ("scores", struct.pack("<f", -1000)),
            ("token_type", struct.pack("<i", 4)),
        ):
            key = f"tokenizer.ggml.{key}"
            entries[key] = append_to_array(entries[key], value)

    path = rewrite(Path(model_path), tmp_path / "m.gguf", edit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Gemma.load(path, prefix_cache=False, packed_cache=False)
    assert other.model_type is gemma.model_type is ModelType.GEMMA3_270M
    assert other.fingerprint == gemma.fingerprint
    assert other.config.eos_ids == gemma.config.eos_ids
    assert other.tokenizer is not None and gemma.tokenizer is not None
    assert other.tokenizer.vocab_size == 262_145
    for text in ("Hello", "a <image_soft_token> and <start_of_turn>"):
        assert other.tokenizer.encode(text) == gemma.tokenizer.encode(text)
    assert other.tokenizer.encode("Hello") == [9259]
    caches = [gemmakv.create_kv_cache(model.config) for model in (other, gemma)]
    found = [
        model.generate(cache, "Hello", max_tokens=4).token_ids
        for model, cache in zip((other, gemma), caches, strict=True)
    ]
    assert found[0] == found[1]
