"""Gemma 3n's config.json: what it may leave out, slices with widths by layer,
and what is refused, each with one line that names the field and the value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.models.huggingface._config import read_config
from support import golden_configs, golden_models
from support.command import RunCli
from support.golden_checks import (
    fields_of,
    from_tensors,
    golden_of,
    logits_of,
    tensors_of,
)

Text = dict[str, Any]
Edit = Callable[[Text], object]


def read(folder: Path, config: dict[str, Any]) -> gemmakv.ModelConfig:
    golden_models.write_config(folder, config)
    return read_config(folder).config


def edited(edit: Edit, name: str = "gemma3n-e4b") -> dict[str, Any]:
    config = copy.deepcopy(golden_configs.published(name))
    edit(config["text_config"])
    return config


def put(key: str, value: Any) -> Edit:
    return lambda text: text.update({key: value})


@pytest.mark.parametrize("name", ["gemma3n-e2b", "gemma3n-e4b"])
def test_the_text_part_alone_is_the_same(name: str, tmp_path: Path) -> None:
    nested = golden_configs.published(name)
    text = {"eos_token_id": [1, 106], **nested["text_config"]}
    found = read(tmp_path, text)
    assert found.name == name
    assert fields_of(found) == fields_of(read(tmp_path, nested))


def test_what_may_be_left_out(tmp_path: Path) -> None:
    """The class of transformers describes the larger one."""
    text = {"model_type": "gemma3n_text"}
    assert read(tmp_path, text).name == "gemma3n-e4b"
    nothing = {"model_type": "gemma3n", "text_config": {}}
    assert read(tmp_path, nothing).name == "gemma3n-e4b"


def test_models_of_few_layers_are_dense_unless_they_say_otherwise(
    tmp_path: Path,
) -> None:
    def shorten(text: Text) -> None:
        del text["activation_sparsity_pattern"], text["layer_types"]
        text.update(num_hidden_layers=10, num_kv_shared_layers=0,
                    intermediate_size=16384)

    found = read(tmp_path, edited(shorten))
    assert found.arguments()["sparsity_cutoff"] is None
    assert found.layer_kinds == (["sliding"] * 4 + ["full"]) * 2
    assert found.arguments()["shares_kv"] is None


def test_slices_have_widths_by_layer(tmp_path: Path) -> None:
    """Between the two published sizes: fewer layers, some of them narrower."""
    def cut(text: Text) -> None:
        del text["layer_types"]
        text.update(
            num_hidden_layers=30,
            num_kv_shared_layers=10,
            intermediate_size=[8192] * 15 + [12288] * 15,
            activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
        )

    found = read(tmp_path, edited(cut))
    assert found.arguments()["ffn_dim"] == [8192] * 15 + [12288] * 15
    assert found.name == ""
    owners = found.arguments()["shares_kv"]
    assert owners == [None] * 20 + [18, 18, 18, 18, 19] * 2
    # 16 own layers that slide and 4 that do not.
    assert found.kv_bytes_per_token("bf16") == (4 * 2048, 16 * 2048)


@pytest.mark.parametrize("share, cutoff", [
    (0.0, None), (0.5, 0.0), (0.95, 1.6448535919189453),
    (0.9, 1.281551480293274), (0.25, -0.6744897365570068),
    (0.99, 2.326348304748535),
])
def test_shares_are_quantiles_in_float32(
    share: float, cutoff: float | None, tmp_path: Path
) -> None:
    """To the bit what torch 2.13 computes."""
    shares = [0.0] * 34 + [share]
    found = read(tmp_path, edited(put("activation_sparsity_pattern", shares)))
    cutoffs = found.arguments()["sparsity_cutoff"]
    if cutoff is None:
        assert cutoffs is None
    else:
        assert cutoffs == [None] * 34 + [cutoff]
        again = gemmakv.ModelConfig(**found.arguments())
        assert again.arguments() == found.arguments()


@pytest.mark.parametrize("cap, expected", [(None, 0.0), (12.5, 12.5)])
def test_the_cap_may_be_switched_off(
    cap: float | None, expected: float, tmp_path: Path
) -> None:
    config = edited(put("final_logit_softcapping", cap))
    assert read(tmp_path, config).final_soft_cap == expected


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (put("altup_num_inputs", 1), "altup_num_inputs is 1, expected 2..8"),
        (put("altup_num_inputs", 9), "altup_num_inputs is 9, expected 2..8"),
        (put("altup_num_inputs", 4.0),
         "altup_num_inputs is 4.0, expected an integer"),
        (put("altup_active_idx", 4),
         "altup_active_idx is 4, expected less than altup_num_inputs, 4"),
        (put("altup_active_idx", -1),
         "altup_active_idx is -1, expected less than altup_num_inputs, 4"),
        (put("altup_active_idx", True),
         "altup_active_idx is True, expected less than"),
        (put("altup_correct_scale", 1),
         "altup_correct_scale is 1, expected true or false"),
        (put("altup_coef_clip", 0),
         "altup_coef_clip is 0, expected a positive number or null"),
        (put("altup_coef_clip", "120"),
         "altup_coef_clip is '120', expected a number"),
        (put("laurel_rank", 0), "laurel_rank is 0, expected "),
        (put("laurel_rank", "64"), "laurel_rank is '64', expected an integer"),
        (put("hidden_size_per_layer_input", 0),
         "hidden_size_per_layer_input is 0, expected a size of 1 or more"),
        (put("hidden_size_per_layer_input", 5000),
         "ple_dim is 5000, expected 0..4096"),
        (put("vocab_size_per_layer_input", 0),
         "vocab_size_per_layer_input is 0, expected 1.."),
        (put("intermediate_size", [8192] * 34),
         "expected one for each of 35 layers, found 34"),
        (put("intermediate_size", [8192] * 34 + [0]),
         "expected sizes, found 0"),
        (put("intermediate_size", [8192] * 34 + [None]),
         "expected sizes, found None"),
        (put("intermediate_size", [8192] * 34 + [1 << 40]),
         "ffn_dim of layer 34 is 1099511627776, expected 1..16777216"),
        (put("intermediate_size", "8192"),
         "intermediate_size is '8192', expected an integer"),
        (put("activation_sparsity_pattern", [0.95] * 34),
         "expected one for each of 35 layers, found 34"),
        (put("activation_sparsity_pattern", 0.95),
         "activation_sparsity_pattern is 0.95, expected a list"),
        (put("activation_sparsity_pattern", [0.0] * 34 + [1.0]),
         "expected shares from 0 to less than 1, found 1.0"),
        (put("activation_sparsity_pattern", [0.0] * 34 + [-0.5]),
         "found -0.5"),
        (put("activation_sparsity_pattern", [0.0] * 34 + [0.99999999]),
         "found 0.99999999"),
        (put("activation_sparsity_pattern", [0.0] * 34 + [1e-12]),
         "found 1e-12"),
        (put("activation_sparsity_pattern", [0.0] * 34 + [True]),
         "found True"),
        (put("num_kv_shared_layers", 31),
         "num_kv_shared_layers is 31, expected layers of each type before"),
        (put("num_kv_shared_layers", -1),
         "num_kv_shared_layers is -1, expected 1.."),
        (put("layer_types", ["full_attention"] * 34),
         "expected 35 entries, found 34"),
        (put("hidden_activation", "gelu"),
         "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
        (put("attn_logit_softcapping", 50.0),
         "attn_logit_softcapping is 50.0, expected null"),
        (put("final_logit_softcapping", -1.0),
         "final_logit_softcapping is -1.0, expected a positive number"),
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


def test_what_shared_layers_do_not_need_is_left_alone(tmp_path: Path) -> None:
    """Published files hold it all the same."""
    golden = golden_models.read("gemma3n-gqa")
    plain = gemmakv.Gemma.load(golden_models.write(tmp_path / "a", golden))
    folder = golden_models.write(tmp_path / "b", golden)
    tensors = {f"model.{n}": w for n, w in golden.tensors().items()}
    for name in ("k_proj", "v_proj", "k_norm"):
        end = f"self_attn.{name}.weight"
        tensors[f"model.layers.9.{end}"] = tensors[f"model.layers.3.{end}"]
    path = folder / "model.safetensors"
    golden_models.write_safetensors(path, tensors, "F32")
    assert gemmakv.Gemma.load(folder).fingerprint == plain.fingerprint

    tensors["model.altup_projections.3.weight"] = tensors[
        "model.altup_projections.2.weight"]
    golden_models.write_safetensors(path, tensors, "F32")
    with pytest.raises(gemmakv.CorruptFile, match="altup_projections.3"):
        gemmakv.Gemma.load(folder)
    del tensors["model.altup_projections.3.weight"]
    del tensors["model.altup_projections.0.weight"]
    golden_models.write_safetensors(path, tensors, "F32")
    with pytest.raises(gemmakv.CorruptFile, match="altup_projections.0"):
        gemmakv.Gemma.load(folder)


def test_tokens_beyond_the_table_have_its_first_row() -> None:
    golden = golden_of("gemma3n-gqa")
    config = from_tensors("gemma3n-gqa").config
    assert config.ple_vocab < config.vocab_size
    assert max(golden.tokens()) >= config.ple_vocab
    table = "per_layer_token_embd.weight"
    tensors = dict(tensors_of("gemma3n-gqa"))
    rows = tensors[table]
    beyond = config.vocab_size - config.ple_vocab
    tensors[table] = np.vstack([rows, np.repeat(rows[:1], beyond, 0)])
    fields = {**config.arguments(), "ple_vocab": config.vocab_size}
    whole = gemmakv.Gemma.from_tensors(
        gemmakv.ModelConfig(**fields), tensors)
    tokens = golden.tokens()
    np.testing.assert_array_equal(
        logits_of(whole, tokens),
        logits_of(from_tensors("gemma3n-gqa"), tokens),
    )


def test_info_shows_what_layers_differ_in(cli: RunCli, tmp_path: Path) -> None:
    golden = golden_models.read("gemma3n-gqa")
    folder = golden_models.write(tmp_path / "model", golden)
    shown = cli("info", folder)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.decode().split())
    assert "ffn dim 160 or 224, by layer" in text
