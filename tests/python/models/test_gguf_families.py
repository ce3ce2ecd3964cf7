"""GGUF files of every family that the format has, whole and contradictory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, ModelConfig, ModelType, create_kv_cache
from support import family_models, golden_models, tiny_gguf, tiny_models
from support.bad_files import forget, one_line, put
from support.command import RunCli, assert_fails
from support.golden_gguf import (
    GGUF_NAMES,
    config_of,
    gguf_tensors,
    metadata_of,
    rotation_tensors,
)
from support.logits import mean_kl, our_logits, some_tokens
from support.tiny_gguf import F32, STR, U32

FAMILIES = ("gemma", "gemma2", "gemma3")
TOKENS = [2, *(20 + (13 * i) % 250 for i in range(99))]


def logits_of(model: Gemma) -> np.ndarray:
    return model.logits(create_kv_cache(model.config), TOKENS, True)


def file_of(
    folder: Path, config: ModelConfig, *edits: Any, seed: int = 0
) -> Path:
    meta, weights = tiny_gguf.metadata(config), tiny_gguf.tensors(seed, config)
    for edit in edits:
        edit(meta, weights)
    return tiny_gguf.write(folder / "model.gguf", meta, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_equals_its_tensors(family: str, tmp_path: Path) -> None:
    config = family_models.config(family)
    file = Gemma.load(file_of(tmp_path, config))
    assert file.config.architecture == family
    assert file.model_type is None
    model = family_models.model(family, tokenizer=file.tokenizer)
    assert file.fingerprint == model.fingerprint
    assert np.array_equal(logits_of(file), logits_of(model))
    # One conversation goes on with either.
    cache = create_kv_cache(file.config)
    file.generate(cache, "the in a", max_tokens=5)
    other = create_kv_cache(model.config)
    model.generate(other, "the in a", max_tokens=5)
    assert cache.to_bytes() == other.to_bytes()
    model.logits(cache, [9])


@pytest.mark.filterwarnings("ignore:.*image encoder")
@pytest.mark.parametrize("name", GGUF_NAMES)
def test_a_file_equals_the_directory(name: str, tmp_path: Path) -> None:
    """A conversation begun with one goes on with the other."""
    golden_models.write(tmp_path / "hf", golden_models.read(name), "F32")
    directory = Gemma.load(tmp_path / "hf")
    file = Gemma.load(
        tiny_gguf.write(
            tmp_path / "m.gguf",
            metadata_of(directory.config),
            gguf_tensors(name),
        )
    )
    assert file.fingerprint == directory.fingerprint
    cache = create_kv_cache(directory.config)
    directory.logits(cache, [2, 5, 7] * 13)
    again = gemmakv.KVCache.from_bytes(cache.to_bytes(), file)
    ids = [token % directory.config.vocab_size for token in TOKENS[40:]]
    assert np.array_equal(
        file.logits(again, ids), directory.logits(cache, ids)
    )


_STACKS = ("altup_proj.weight", "altup_unembd_proj.weight")


@pytest.mark.parametrize("kind", tiny_models.ALL_TYPES)
@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3n", "gemma4-moe", "gemma4-e2b"]
)
def test_every_stored_type(family: str, kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the writer needs gguf")
    wide = kind in tiny_models.K_TYPES
    shape = tiny_models.of_family(
        tiny_models.WIDE if wide else tiny_models.TINY, family
    )
    # All count: a choice would now and then be another with 8 bits.
    shape = dataclasses.replace(shape, experts_used=shape.experts)
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", kind, shape=shape)
    model = Gemma.load(path)
    tensors = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(str(path)).tensors
    }
    # Streams are matrices of their own; experts stay in one tensor.
    for name in [n for n in tensors if n in _STACKS]:
        stem = name.removesuffix(".weight")
        for i, matrix in enumerate(tensors.pop(name)):
            tensors[f"{stem}.{i}.weight"] = matrix
    floats = Gemma.from_tensors(model.config, tensors)
    ids = some_tokens(shape.vocab)
    found, expected = our_logits(model, ids), our_logits(floats, ids)
    if kind == "F32":
        assert np.array_equal(found, expected)
    # Activations of 8 bits cost up to 0.01 on these models.
    assert mean_kl(expected, found) <= 0.03


# ---- What files omit ----


@pytest.mark.parametrize(
    "family, key, changes",
    [
        ("gemma", "rope.freq_base", {"rope_base_full": 1e4}),
        ("gemma", "attention.head_count_kv", {"kv_heads": 2}),
        ("gemma", "attention.layer_norm_rms_epsilon", {"rms_epsilon": 1e-6}),
        ("gemma2", "attention.sliding_window", {"sliding_window": 4096}),
        ("gemma2", "attn_logit_softcapping", {"attn_soft_cap": 50.0}),
        ("gemma2", "final_logit_softcapping", {"final_soft_cap": 30.0}),
        ("gemma2", "rope.freq_base", {"rope_base_sliding": 1e4}),
        ("gemma2", "attention.head_count_kv", {"kv_heads": 4}),
        ("gemma3", "rope.freq_base", {"rope_base_full": 1e6}),
        ("gemma3", "rope.scaling.factor", {"rope_factor_full": 1.0}),
        (
            "gemma3",
            "attention.sliding_window",
            {"sliding_window": 0, "layer_kinds": ["full"] * 7,
             "rope_base_sliding": 0.0},
        ),
    ],
)  # fmt: skip
def test_what_a_file_omits(
    family: str, key: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """It is the model that `changes` state."""
    config = family_models.config(family, **changes)
    meta, weights = tiny_gguf.metadata(config), tiny_gguf.tensors(0, config)
    meta.pop(f"{family}.{key}", None)
    file = Gemma.load(tiny_gguf.write(tmp_path / "m.gguf", meta, weights))
    model = Gemma.from_tensors(config, weights)
    for name, value in changes.items():
        assert getattr(file.config, name) == pytest.approx(value)
    assert file.fingerprint == model.fingerprint
    assert np.array_equal(logits_of(file), logits_of(model))


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_pattern_may_name_each_layer(family: str, tmp_path: Path) -> None:
    config = family_models.config(family)
    kinds = ["full", *config.layer_kinds[1:]]  # in no period
    config = family_models.config(family, layer_kinds=kinds)
    key = f"{family}.attention.sliding_window_pattern"

    def load(flags: list[Any], kind: int = tiny_gguf.BOOL) -> Gemma:
        value = (kind, flags)
        edit = put(key, tiny_gguf.ARRAY, value)
        return Gemma.load(file_of(tmp_path, config, edit))

    flags = [kind == "sliding" for kind in kinds]
    model = Gemma.from_tensors(config, tiny_gguf.tensors(0, config))
    for file in (load(flags), load(list(map(int, flags)), U32)):
        assert file.config.layer_kinds == kinds
        assert file.fingerprint == model.fingerprint
    for bad, kind, text in (
        (flags[1:], tiny_gguf.BOOL, f"expected one for each of {len(kinds)}"),
        ([0.5] * len(kinds), F32, "sliding_window_pattern"),
    ):
        with pytest.raises(gemmakv.CorruptFile, match=text) as caught:
            load(bad, kind)
        one_line(caught.value)


def test_what_a_file_states_is_not_the_default(tmp_path: Path) -> None:
    """Each of these keys changes the logits."""
    config = family_models.config("gemma2")
    usual = logits_of(Gemma.load(file_of(tmp_path, config)))
    for key, kind, value in (
        ("attention.sliding_window", U32, 15),
        ("attention.sliding_window_pattern", U32, 3),
        ("attn_logit_softcapping", F32, 2.5),
        ("final_logit_softcapping", F32, 2.5),
        ("rope.freq_base", F32, 20000.0),
        ("rope.freq_base_swa", F32, 20000.0),
        ("rope.dimension_count", U32, 16),
        ("attention.layer_norm_rms_epsilon", F32, 1e-3),
    ):
        path = file_of(tmp_path, config, put(f"gemma2.{key}", kind, value))
        assert not np.array_equal(logits_of(Gemma.load(path)), usual), key


@pytest.mark.parametrize("omit", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        t.value for t in ModelType
        if ModelConfig.from_name(t.value).architecture
        not in ("recurrentgemma", "embeddinggemma2")
    ],
)
def test_files_of_named_types(name: str, omit: bool, tmp_path: Path) -> None:
    table = ModelConfig.from_name(name)
    meta = tiny_gguf.metadata(table)
    if table.architecture in ("gemma3n", "gemma4"):
        meta |= metadata_of(table)
    keys = ["attn_logit_softcapping", "final_logit_softcapping",
            "attention.key_length", "attention.value_length"]  # fmt: skip
    if table.architecture == "gemma2":
        keys.append("attention.sliding_window")
    if table.head_dim != 256:
        keys = keys[:2]
    for key in keys if omit else []:
        meta.pop(f"{table.architecture}.{key}", None)
    # A vocabulary of another size is no other type.
    weights = {"token_embd.weight": np.zeros((600, 1), np.float32)}
    weights |= rotation_tensors(table)
    if table.laurel_rank:
        weights["blk.0.laurel_l.weight"] = np.zeros(
            (table.laurel_rank, 1), np.float32)
    if table.ple_dim:
        weights["per_layer_token_embd.weight"] = weights["token_embd.weight"]
    if not table.keys_are_values and table.architecture == "gemma4":
        full = table.layer_kinds.index("full")
        weights[f"blk.{full}.attn_v.weight"] = np.zeros((1, 1), np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", meta, weights)
    config = ModelConfig.from_gguf(str(path))
    assert config.name == name
    if not table.bidirectional:
        assert create_kv_cache(config).model_type is ModelType(name)
    assert config.vocab_size == 600
    assert config.query_scale == table.query_scale


@pytest.mark.parametrize(
    "family, stated, expected",
    [
        # That of the name, as early files of the first generation omit it.
        ("gemma", None, [1, tiny_gguf.EOT]),
        ("gemma", 107, [1, 107]),
        ("gemma2", None, [1, 107]),
        ("gemma2", 1, [1]),
        ("gemma3", None, [1, 106]),
        ("gemma3", 107, [1, 107]),
    ],
)
def test_tokens_that_end_a_reply(
    family: str, stated: int | None, expected: list[int], tmp_path: Path
) -> None:
    key = "tokenizer.ggml.eot_token_id"
    edit = forget(key) if stated is None else put(key, U32, stated)
    path = file_of(tmp_path, family_models.config(family), edit)
    assert Gemma.load(path).config.eos_ids == expected


# ---- What is refused ----


@pytest.mark.parametrize(
    "name, words",
    [
        ("recurrentgemma", ["Hugging Face directory"]),
        ("embeddinggemma2", ["Hugging Face directory"]),
        ("llama", []),
        ("gemma3p5", []),
        ("gemma4-dspark", []),
        ("gemma-embedding2", []),
        ("Gemma2", []),
    ],
)
def test_architectures(name: str, words: list[str], tmp_path: Path) -> None:
    path = file_of(
        tmp_path, tiny_gguf.CONFIG, put("general.architecture", STR, name)
    )
    with pytest.raises(gemmakv.MismatchError) as caught:
        Gemma.load(path)
    text = one_line(caught.value)
    for word in (f"'{name}'", *(f"'{known}'" for known in FAMILIES), *words):
        assert word in text


def test_the_command_line_names_an_architecture(
    tmp_path: Path, cli: RunCli
) -> None:
    name = "recurrentgemma"  # refused, though the family is known
    path = file_of(
        tmp_path, tiny_gguf.CONFIG, put("general.architecture", STR, name)
    )
    assert_fails(cli("generate", "-m", path, "x"), "Hugging Face", name)
    shown = cli("info", path)
    assert shown.returncode == 0 and name.encode() in shown.stdout


def drop_all(end: str) -> Any:
    def edit(meta: dict[str, Any], weights: dict[str, Any]) -> None:
        for name in [n for n in weights if n.endswith(end)]:
            del weights[name]

    return edit


def add(name: str, *shape: int) -> Any:
    def edit(meta: dict[str, Any], weights: dict[str, Any]) -> None:
        weights[name] = np.ones(shape, np.float32)

    return edit


def both(first: Any, second: Any) -> Any:
    return lambda meta, weights: (first(meta, weights), second(meta, weights))


def as_family(name: str) -> Any:
    """States another family; what it does not know it ignores."""

    def edit(meta: dict[str, Any], weights: dict[str, Any]) -> None:
        was, _ = meta["general.architecture"][1], meta.pop("general.name")
        for key in list(meta):
            if key.startswith(f"{was}."):
                meta[name + key[len(was) :]] = meta.pop(key)
        meta["general.architecture"] = (STR, name)

    return edit


CONTRADICTIONS = [
    # Weights of another family than is stated, in both directions.
    ("gemma", as_family("gemma2"), "post_attention_norm"),
    ("gemma", as_family("gemma3"), "attn_q_norm"),
    ("gemma2", as_family("gemma"), "post_attention_norm"),
    ("gemma2", as_family("gemma3"), "attn_q_norm"),
    ("gemma3", as_family("gemma"), "attn_q_norm"),
    ("gemma3", as_family("gemma2"), "attn_q_norm"),
    ("gemma2", drop_all("post_ffw_norm.weight"), "post_ffw_norm"),
    ("gemma", add("blk.0.attn_q.bias", 64), "blk.0.attn_q.bias"),
    ("gemma", add("blk.3.ffn_norm.weight", 64), "blk.3.ffn_norm"),
    ("gemma", put("gemma.block_count", U32, 2), "blk.2."),
    ("gemma", put("gemma.block_count", U32, 4), "blk.3."),
    ("gemma", put("gemma.attention.head_count_kv", U32, 1), "blk.0.attn_k"),
    ("gemma2", put("gemma2.attention.head_count", U32, 2), "blk.0.attn_q"),
    ("gemma2", put("gemma2.attention.key_length", U32, 64), "value_length"),
    ("gemma2", put("gemma2.feed_forward_length", U32, 64), "blk.0.ffn_gate"),
    ("gemma2", put("gemma2.embedding_length", U32, 96), "token_embd"),
    ("gemma2", put("gemma2.attention.sliding_window", U32, 0), "window"),
    ("gemma2", put("gemma2.attn_logit_softcapping", F32, -1.0), "softcapping"),
    ("gemma2", put("gemma2.rope.scaling.factor", F32, 8.0), "scaling.factor"),
    ("gemma2", put("gemma2.rope.dimension_count", U32, 31), "rope_dim"),
    ("gemma2", put("gemma2.rope.scaling.type", STR, "yarn"), "yarn"),
    # What changes the result and is not known.
    ("gemma", add("zz.weight", 64), "zz.weight"),
    ("gemma2", add("output_norm.bias", 64), "output_norm.bias"),
    ("gemma3", add("dense.0.weight", 64), "dense_2.weight"),
    ("gemma3", add("rope_freqs.weight", 16), "rope_freqs.weight"),
    ("gemma", put("gemma.attention.clamp_kqv", F32, 8.0), "clamp_kqv"),
    ("gemma2", put("gemma2.logit_scale", F32, 8.0), "gemma2.logit_scale"),
    ("gemma3", put("gemma3.unheard_of", U32, 1), "gemma3.unheard_of"),
    ("gemma3", put("gemma3.rope.scaling.attn_factor", F32, 2.0),
     "attn_factor"),
    ("gemma3", both(put("gemma3.rope.local.freq_base", F32, 2e4),
                    put("gemma3.rope.freq_base_swa", F32, 1e4)),
     "rope.local.freq_base"),
]


@pytest.mark.parametrize("family, edit, expected", CONTRADICTIONS)
def test_contradictions(
    family: str, edit: Any, expected: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, family_models.config(family), edit)
    with pytest.raises(gemmakv.GemmaKVError) as caught:
        Gemma.load(path)
    text = one_line(caught.value)
    assert expected in text and str(path) in text
    assert "expected" in text


def test_an_image_encoder_may_stand_beside_the_text(tmp_path: Path) -> None:
    config = family_models.config("gemma3")
    path = file_of(
        tmp_path,
        config,
        add("v.blk.0.attn_q.weight", 8, 8),
        add("v.patch_embd.weight", 2, 3, 4, 4),
    )
    with pytest.warns(gemmakv.PartialModelWarning, match="2 tensors: v"):
        found = logits_of(Gemma.load(path))
    assert np.array_equal(found, logits_of(family_models.model("gemma3")))


def test_info_names_the_parts_left_out(tmp_path: Path, cli: RunCli) -> None:
    config = family_models.config("gemma3")
    path = file_of(tmp_path, config, add("v.blk.0.attn_q.weight", 8, 8))
    found = json.loads(cli("info", "--json", path).stdout)
    assert found["supported"] and found["left_out_tensors"] == 1
    assert "image encoder" in found["left_out"]


# What converters write beside what counts, by architecture.
_BESIDE: dict[str, dict[str, tuple[int, Any]]] = {
    "gemma": {"vocab_size": (U32, 256)},
    "gemma2": {"rope.scaling.attn_factor": (F32, 1.0)},
    "gemma3": {
        "attention.causal": (tiny_gguf.BOOL, True),
        "mm.tokens_per_image": (U32, 256),
        "vision.block_count": (U32, 27),
        "vision.attention.layer_norm_epsilon": (F32, 1e-6),
        "rope.local.freq_base": (F32, 1e4),
        "rope.global.freq_base": (F32, 1e6),
        "rope.scaling.type": (STR, "linear"),
        "rope.scaling.original_context_length": (U32, 512),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_may_be_there(
    family: str, tmp_path: Path
) -> None:
    config = family_models.config(family)
    edits = [
        put(f"{family}.{key}", *value)
        for key, value in _BESIDE[family].items()
    ] + [put("someone.quantized_by", STR, "x"), put("general.tags", STR, "y")]
    model = Gemma.load(file_of(tmp_path, config, *edits))
    assert model.fingerprint == family_models.model(family).fingerprint


# What llama.cpp writes into each file that it saves after training: all that
# any of its models has, as 0 where a model has nothing of it.
_SAVED: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        (
            "attention.kv_lora_rank", "attention.q_lora_rank",
            "attention.relative_buckets_count", "expert_count",
            "expert_feed_forward_length", "expert_shared_count",
            "expert_shared_feed_forward_length", "expert_used_count",
            "leading_dense_block_count", "pooling_type",
            "rescale_every_n_layers", "ssm.conv_kernel", "ssm.inner_size",
            "ssm.state_size", "ssm.time_step_rank", "time_decay_extra_dim",
            "time_mix_extra_dim", "wkv.head_size",
        ),
        (U32, 0),
    ),
    **dict.fromkeys(
        (
            "attention.clamp_kqv", "attention.layer_norm_epsilon",
            "attention.max_alibi_bias", "attention.scale", "embedding_scale",
            "expert_weights_scale", "logit_scale", "residual_scale",
            "rope.scaling.factor", "rope.scaling.yarn_log_multiplier",
        ),
        (F32, 0.0),
    ),
    **dict.fromkeys(
        (
            "rope.scaling.finetuned", "ssm.dt_b_c_rms", "swin_norm",
            "use_parallel_residual",
        ),
        (tiny_gguf.BOOL, False),
    ),
    "attention.causal": (tiny_gguf.BOOL, True),
    "decoder_start_token_id": (U32, 0xFFFFFFFF),
    "rope.scaling.attn_factor": (F32, 1.0),
    "rope.scaling.original_context_length": (U32, 512),
    "rope.scaling.type": (STR, "linear"),
    "vocab_size": (U32, tiny_gguf.VOCAB),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_saved_after_training_is_the_model(
    family: str, tmp_path: Path
) -> None:
    edits = [put(f"{family}.{key}", *value) for key, value in _SAVED.items()]
    model = Gemma.load(
        file_of(tmp_path, family_models.config(family), *edits)
    )
    assert model.fingerprint == family_models.model(family).fingerprint


@pytest.mark.parametrize(
    "key, kind, value",
    [
        ("attention.scale", F32, 0.5),
        ("embedding_scale", F32, 1.0),
        ("expert_weights_scale", F32, 1.0),
        ("logit_scale", F32, 1.0),
        ("leading_dense_block_count", U32, 1),
        ("swin_norm", tiny_gguf.BOOL, True),
        ("attention.clamp_kqv", STR, ""),
    ],
)
def test_a_key_that_switches_on_what_no_gemma_has_is_an_error(
    key: str, kind: int, value: Any, tmp_path: Path
) -> None:
    config = family_models.config("gemma3")
    path = file_of(tmp_path, config, put(f"gemma3.{key}", kind, value))
    with pytest.raises(gemmakv.MismatchError, match=f"gemma3.{key}[ ,]"):
        Gemma.load(path)


_SCALE_OF_OLLAMA = "blk.{}.ffn_gate_inp.per_expert_scale"


def test_scales_of_experts_may_have_the_name_of_ollama(
    tmp_path: Path,
) -> None:
    name = "gemma4-moe"
    config, tensors = config_of(name), gguf_tensors(name)
    meta = metadata_of(config)
    model = Gemma.load(tiny_gguf.write(tmp_path / "a.gguf", meta, tensors))
    for i in range(config.num_layers):
        scale = tensors.pop(f"blk.{i}.ffn_down_exps.scale")
        tensors[_SCALE_OF_OLLAMA.format(i)] = scale
    other = Gemma.load(tiny_gguf.write(tmp_path / "b.gguf", meta, tensors))
    assert other.fingerprint == model.fingerprint
    ids = [token % config.vocab_size for token in TOKENS]
    assert np.array_equal(
        other.logits(create_kv_cache(config), ids),
        model.logits(create_kv_cache(config), ids),
    )


def test_scales_of_experts_have_one_of_their_names(tmp_path: Path) -> None:
    name = "gemma4-moe"
    tensors = gguf_tensors(name)
    second = _SCALE_OF_OLLAMA.format(0)
    tensors[second] = tensors["blk.0.ffn_down_exps.scale"]
    path = tiny_gguf.write(
        tmp_path / "m.gguf", metadata_of(config_of(name)), tensors
    )
    with pytest.raises(gemmakv.CorruptFile, match=second):
        Gemma.load(path)
