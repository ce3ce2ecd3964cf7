"""Gemma 4's config.json: both forms of its full layers' sizes, and what is
refused, each with one line that names the field and the value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.models.huggingface._config import read_config
from support import golden_configs, golden_models
from support.command import RunCli
from support.golden_checks import fields_of

Text = dict[str, Any]
Edit = Callable[[Text], object]


def read(folder: Path, config: dict[str, Any]) -> gemmakv.ModelConfig:
    golden_models.write_config(folder, config)
    return read_config(folder).config


def edited(edit: Edit, name: str = "gemma4-31b") -> dict[str, Any]:
    config = copy.deepcopy(golden_configs.published(name))
    edit(config["text_config"])
    return config


def by_layer(text: Text) -> None:
    """The newer form, as transformers writes it."""
    sizes = {
        "head_dim": text.pop("global_head_dim"),
        "num_key_value_heads": text.pop("num_global_key_value_heads"),
    }
    text["per_layer_config"] = {
        str(i): sizes
        for i, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }


def by_type(text: Text) -> None:
    by_layer(text)
    sizes = next(iter(text["per_layer_config"].values()))
    text["per_layer_config"] = {"full_attention": sizes}


@pytest.mark.parametrize(
    "name", ["gemma4-12b", "gemma4-26b-a4b", "gemma4-31b"])
@pytest.mark.parametrize("edit", [by_layer, by_type])
def test_both_forms_of_sizes_are_the_same(
    name: str, edit: Edit, tmp_path: Path
) -> None:
    found = read(tmp_path, edited(edit, name))
    assert found.name == name
    stated = read(tmp_path, golden_configs.published(name))
    assert fields_of(found) == fields_of(stated)


@pytest.mark.parametrize("name", ["gemma4-12b", "gemma4-31b", "gemma4-e4b"])
def test_what_may_be_left_out(name: str, tmp_path: Path) -> None:
    def forget(text: Text) -> None:
        for key in ("global_head_dim", "head_dim", "rope_parameters",
                    "layer_types"):
            del text[key]

    assert read(tmp_path, edited(forget, name)).name == name


def test_the_last_layer_is_full_without_a_list(tmp_path: Path) -> None:
    def shorten(text: Text) -> None:
        del text["layer_types"]
        text["num_hidden_layers"] = 8

    found = read(tmp_path, edited(shorten))
    assert found.layer_kinds == [*["sliding"] * 5, "full", "sliding", "full"]


def test_no_cap_unless_it_is_stated(tmp_path: Path) -> None:
    config = edited(lambda text: text.pop("final_logit_softcapping"))
    assert read(tmp_path, config).final_soft_cap == 0


def test_shared_layers_read_the_last_own_one_of_their_kind(
    tmp_path: Path,
) -> None:
    def share(text: Text) -> None:
        text.update(num_kv_shared_layers=20, use_double_wide_mlp=True)

    found = read(tmp_path, edited(share)).arguments()
    assert found["shares_kv"] == [None] * 40 + [
        39 if (i + 1) % 6 else 35 for i in range(40, 60)]
    assert found["ffn_dim"] == [21504] * 40 + [43008] * 20
    # 33 + 7 layers keep something: 16 KiB of a token that slide, 8 full ones.
    config = gemmakv.ModelConfig(**found)
    assert config.kv_bytes_per_token("bf16") == (6 * 8192, 34 * 16384)


def test_heads_of_full_layers_count_with_shared_products_only(
    tmp_path: Path,
) -> None:
    config = edited(lambda text: text.update(attention_k_eq_v=False))
    found = read(tmp_path, config)
    assert found.kv_heads == 16 and not found.keys_are_values


def test_per_layer_embeddings_unless_the_file_says_no(tmp_path: Path) -> None:
    key = "hidden_size_per_layer_input"
    for edit, expected in (
        (lambda text: text.pop(key), (256, 262144)),
        (put(key, value=None), (0, 0)),
        (put(key, value=0), (0, 0)),
        (put(key, value=64), (64, 262144)),
    ):
        found = read(tmp_path, edited(edit))
        assert (found.ple_dim, found.ple_vocab) == expected
    # A kind of model that has none.
    refused = f"{key} is 256, expected 0"
    with pytest.raises(gemmakv.MismatchError, match=refused):
        read(tmp_path, edited(put(key, value=256), "gemma4-12b"))


def put(*path: str, value: Any) -> Edit:
    def edit(text: Text) -> None:
        *above, last = path
        place = text
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value

    return edit


_FULL = ("rope_parameters", "full_attention")
_SLIDING = ("rope_parameters", "sliding_attention")


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (put("hidden_size_per_layer_input", value=-256),
         "hidden_size_per_layer_input is -256, expected 1.."),
        (put("hidden_size_per_layer_input", value="256"),
         "hidden_size_per_layer_input is '256', expected an integer"),
        (put("hidden_size_per_layer_input", value=5000),
         "ple_dim is 5000, expected 0..4096"),
        (lambda text: text.update(hidden_size_per_layer_input=256,
                                  vocab_size_per_layer_input=262143),
         "ple_vocab is 262143, expected at least vocab_size 262144 with "
         "ple_dim 256"),
        (put("num_kv_shared_layers", value=57),
         "num_kv_shared_layers is 57, expected layers of each type before"),
        (put("num_kv_shared_layers", value=60),
         "num_kv_shared_layers is 60, expected layers of each type before"),
        (put("num_kv_shared_layers", value=-1),
         "num_kv_shared_layers is -1, expected 1.."),
        (put("use_bidirectional_attention", value="all"),
         "use_bidirectional_attention is 'all', expected null or 'vision'"),
        (put(*_FULL, "rope_type", value="yarn"),
         "full_attention.rope_type is 'yarn', expected 'default' or "
         "'proportional'"),
        (put(*_SLIDING, "rope_type", value="linear"),
         "sliding_attention.rope_type is 'linear', expected 'default' or"),
        (lambda text: text["rope_parameters"].pop("full_attention"),
         "rope_parameters.full_attention is None, expected an object"),
        (put(*_FULL, "partial_rotary_factor", value=1.5),
         "partial_rotary_factor is 1.5, expected a share of 0 to 1"),
        (put(*_SLIDING, "partial_rotary_factor", value=0.5),
         "partial_rotary_factor is 0.5, expected 1 with rope_type 'default'"),
        (put(*_FULL, "factor", value=0.5),
         "full_attention.factor is 0.5, expected a number >= 1"),
        (put(*_FULL, "rope_theta", value=1),
         "rope_theta is 1, expected a number above 1"),
        (put("layer_types", value=["full_attention"] * 59
             + ["sliding_attention"]),
         "expected 'full_attention' as the last one"),
        (put("layer_types", value=["full_attention"] * 59),
         "expected 60 entries, found 59"),
        (put("layer_types", value=["chunked_attention"] * 60),
         "found 'chunked_attention'"),
        (put("attn_logit_softcapping", value=50.0),
         "attn_logit_softcapping is 50.0, expected null"),
        (put("per_layer_config", "60", value={"head_dim": 512}),
         "per_layer_config has the key '60', expected full_attention or"),
        (put("per_layer_config", "5", value={"intermediate_size": 512}),
         "per_layer_config.5.intermediate_size is 512, expected head_dim or"),
        (put("per_layer_config", "5", value=512),
         "per_layer_config.5 is 512, expected an object"),
        (put("per_layer_config", "5", value={"head_dim": 512}),
         "expected one head_dim for layers of a type"),
        (put("global_head_dim", value=500),
         "head_dim is 500 in layer 5, expected a multiple of 32"),
        (put("num_global_key_value_heads", value=3),
         "expected a multiple of kv_heads 3"),
        (put("num_global_key_value_heads", value=1),
         "expected at most 16 for each of kv_heads 1"),
    ],
)
def test_bad_configs_are_refused_in_one_line(
    edit: Edit, part: str, tmp_path: Path
) -> None:
    errors = gemmakv.CorruptFile, gemmakv.MismatchError
    with pytest.raises(errors) as caught:
        read(tmp_path, edited(edit))
    message = str(caught.value)
    assert part in message
    assert "config.json: " in message and "\n" not in message


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda text: text.pop("num_experts"),
         "num_experts is None, expected a size with enable_moe_block"),
        (put("top_k_experts", value=None),
         "top_k_experts is None, expected a size with enable_moe_block"),
        (lambda text: text.pop("moe_intermediate_size"),
         "moe_intermediate_size is None, expected a size with"),
        (put("top_k_experts", value=129),
         "top_k_experts is 129, expected at most num_experts 128"),
        (put("top_k_experts", value=0), "top_k_experts is 0, expected 1.."),
        (put("num_experts", value=-1), "num_experts is -1, expected 1.."),
        (put("num_experts", value=5000),
         "num_experts is 5000, expected 0..4096"),
        (put("num_experts", value="128"),
         "num_experts is '128', expected an integer"),
        (put("moe_intermediate_size", value=700),
         "moe_intermediate_size is 700, expected a multiple of 16"),
        (put("hidden_size", value=2820),
         "hidden_size is 2820, expected a multiple of 16 with num_experts 128"),
        (put("enable_moe_block", value=1),
         "enable_moe_block is 1, expected true or false"),
    ],
)
def test_bad_experts_are_refused_in_one_line(
    edit: Edit, part: str, tmp_path: Path
) -> None:
    errors = gemmakv.CorruptFile, gemmakv.MismatchError
    with pytest.raises(errors) as caught:
        read(tmp_path, edited(edit, "gemma4-26b-a4b"))
    message = str(caught.value)
    assert part in message
    assert "config.json: " in message and "\n" not in message


def test_sizes_of_experts_that_are_not_there_count_for_nothing(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, edited(lambda text: text.update(
        num_experts=128, top_k_experts=8, moe_intermediate_size=704)))
    assert found.name == "gemma4-31b" and found.num_experts == 0


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    golden = golden_models.read("gemma4-moe")
    tensors = {f"model.{n}": w for n, w in golden.tensors().items()}
    for end, shape, expected in (
        ("experts.gate_up_proj", (4, 128, 96), [8, 64, 96]),
        ("experts.gate_up_proj", (512, 96), [8, 64, 96]),
        ("experts.down_proj", (8, 32, 96), [8, 96, 32]),
        ("router.proj.weight", (96, 8), [8, 96]),
    ):
        name = f"model.layers.2.{end}"
        folder = golden_models.write(tmp_path / "model", golden)
        golden_models.write_safetensors(
            folder / "model.safetensors",
            {**tensors, name: tensors[name].reshape(shape)}, "F32")
        with pytest.raises(gemmakv.CorruptFile) as caught:
            gemmakv.Gemma.load(folder)
        assert (f"tensor {name} has shape {list(shape)}, expected {expected} "
                "by config.json") in str(caught.value)
        del tensors[name]
        golden_models.write_safetensors(
            folder / "model.safetensors", tensors, "F32")
        with pytest.raises(gemmakv.CorruptFile, match=f"{name} is missing"):
            gemmakv.Gemma.load(folder)
        tensors = {f"model.{n}": w for n, w in golden.tensors().items()}


def test_products_that_shared_layers_do_not_need_are_left_alone(
    tmp_path: Path,
) -> None:
    """Published files hold them all the same."""
    golden = golden_models.read("gemma4-shared")
    plain = gemmakv.Gemma.load(golden_models.write(tmp_path / "a", golden))
    folder = golden_models.write(tmp_path / "b", golden)
    tensors = {f"model.{n}": w for n, w in golden.tensors().items()}
    for name in ("k_proj", "v_proj", "k_norm"):
        end = f"self_attn.{name}.weight"
        tensors[f"model.layers.4.{end}"] = tensors[f"model.layers.3.{end}"]
    path = folder / "model.safetensors"
    golden_models.write_safetensors(path, tensors, "F32")
    assert gemmakv.Gemma.load(folder).fingerprint == plain.fingerprint

    tensors["model.layers.4.self_attn.k_bias"] = tensors["model.norm.weight"]
    golden_models.write_safetensors(path, tensors, "F32")
    with pytest.raises(gemmakv.CorruptFile, match="k_bias"):
        gemmakv.Gemma.load(folder)


def test_info_shows_what_layers_differ_in(cli: RunCli, tmp_path: Path) -> None:
    golden = golden_models.read("gemma4-shared")
    folder = golden_models.write(tmp_path / "model", golden)
    shown = cli("info", folder)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.decode().split())
    assert "head dim 64 or 128, by layer" in text
    assert "ffn dim 128 or 256, by layer" in text


def test_info_shows_experts(cli: RunCli, tmp_path: Path) -> None:
    for name, expected in (("gemma4-moe", True), ("gemma4-shared", False)):
        folder = golden_models.write(
            tmp_path / name, golden_models.read(name))
        shown = cli("info", folder)
        assert shown.returncode == 0, shown.stderr
        text = " ".join(shown.stdout.decode().split())
        assert (
            "num experts 8 experts used 3 expert ffn dim 32" in text
        ) == expected
        assert ("num experts" in text) == expected
