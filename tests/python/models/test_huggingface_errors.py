"""Model directories that are damaged, contradictory or not supported."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.models.huggingface._safetensors import (
    byte_size,
    read_folder,
    read_header,
)
from support import golden_models
from support.golden_checks import logits_of

MASTERS = (
    "gemma-mqa", "gemma2-gqa", "gemma3-mqa", "gemma4-mqa", "recurrentgemma-mqa",
)  # fmt: skip
_OURS = (ValueError, OSError, MemoryError, gemmakv.GemmaKVError)
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: golden_models.write(
            folder / name, golden_models.read(name), "BF16"
        )
        for name in MASTERS
    }


@pytest.fixture
def model(masters: dict[str, Path], tmp_path: Path) -> Path:
    """A sound directory of one file, to be damaged."""
    return copy_of(masters["gemma3-mqa"], tmp_path)


def copy_of(master: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(master, tmp_path / "model"))


def edit_json(path: Path, edit: Edit) -> None:
    document = json.loads(path.read_text("utf-8"))
    edit(document)
    path.write_text(json.dumps(document), "utf-8")


def edit_header(path: Path, edit: Edit) -> None:
    """Changes a safetensors header, keeping the tensors' bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    edit(header)
    changed = json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(changed)) + changed + data[8 + length :]
    )


def refusal(
    path: Path, expected: type[Exception] | tuple[type[Exception], ...]
) -> str:
    """The message with which a directory is refused: one line."""
    with pytest.raises(expected) as caught:
        gemmakv.Gemma.load(path)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def weights_of(model: Path) -> Path:
    (path,) = model.glob("*.safetensors")
    return path


# ---- config.json


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "expected JSON"),
        (b"[1]", "expected a JSON object, found [1]"),
        (b"{", "expected JSON"),
        (b"\xff\xfe{", "expected JSON"),
        (b'{"a": 1, "a": 2}', "each key once, found 'a' twice"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"a": ' * 100_000, "expected JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "expected JSON"),
    ],
)
def test_config_that_is_no_object(
    model: Path, content: bytes, part: str
) -> None:
    (model / "config.json").write_bytes(content)
    message = refusal(model, gemmakv.CorruptFile)
    assert "config.json" in message
    assert part in message


def _set(**values: Any) -> Edit:
    return lambda document: document.update(values)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (_set(hidden_size="640"), "hidden_size is '640', expected an integer"),
        (_set(hidden_size=True), "hidden_size is True, expected an integer"),
        (_set(hidden_size=-1), "hidden_size is -1, expected 1.."),
        (_set(hidden_size=1 << 80), "hidden_size"),
        (_set(hidden_size=1.5), "hidden_size is 1.5, expected an integer"),
        (_set(num_hidden_layers=1 << 20), "num_hidden_layers"),
        (_set(num_attention_heads=3, num_key_value_heads=2), "kv_heads"),
        (_set(head_dim=100), "head_dim"),
        (_set(rms_norm_eps="x"), "rms_norm_eps is 'x', expected a number"),
        (_set(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (_set(rope_theta=0), "rope_theta is 0, expected a number above 1"),
        (_set(sliding_window=[1]), "sliding_window is [1]"),
        (_set(sliding_window=None), "sliding_window is None, expected a"),
        (_set(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (_set(layer_types="full"), "expected a list of strings"),
        (_set(layer_types=[]), "layer_types is [], expected at least one"),
        (_set(layer_types=["full_attention"]), "entries, found 1"),
        (_set(rope_parameters=[1]), "rope_parameters is [1]"),
        (_set(rope_parameters={"rope_theta": 1e4}), "each layer type"),
        (_set(rope_scaling={"rope_type": "linear"}), "rope_scaling.factor"),
        (_set(tie_word_embeddings=1), "tie_word_embeddings is 1"),
        (_set(eos_token_id="1"), "eos_token_id is '1'"),
        (_set(eos_token_id=[1, -1]), "eos_token_id is [1, -1]"),
        (_set(eos_token_id=10_000_000), "eos id 10000000"),
        (_set(bos_token_id=[1, 2]), "bos_token_id is [1, 2]"),
        (_set(model_type=7), "model_type is 7, expected a string"),
    ],
)
def test_values_of_a_wrong_type_or_range(
    model: Path, edit: Edit, part: str
) -> None:
    edit_json(model / "config.json", edit)
    message = refusal(model, gemmakv.CorruptFile)
    assert "config.json" in message
    assert part in message


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (_set(model_type="llama"), "'llama', expected one of embedding"),
        (_set(model_type="gemma9"), "'gemma9', expected one of"),
        (_set(hidden_activation="silu"), "hidden_activation is 'silu'"),
        (_set(hidden_activation="gelu"), "hidden_activation is 'gelu'"),
        (_set(hidden_act="silu"), "hidden_act is 'silu'"),
        (_set(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (
            _set(
                rope_parameters={
                    "full_attention": {"partial_rotary_factor": 0.25}
                }
            ),
            "rope_parameters.full_attention.partial_rotary_factor is 0.25",
        ),
        (
            lambda c: c.update(layer_types=["attention"] * 2),
            "full_attention or sliding_attention, found 'attention'",
        ),
        (_set(attention_bias=True), "attention_bias is True"),
        (_set(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (_set(rope_scaling={"rope_type": "yarn", "factor": 2}), "'yarn'"),
        (_set(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    model: Path, edit: Edit, part: str
) -> None:
    edit_json(model / "config.json", edit)
    assert part in refusal(model, gemmakv.MismatchError)


@pytest.mark.parametrize(
    ("name", "edit", "part"),
    [
        (
            "gemma2-gqa",
            _set(rope_scaling={"rope_type": "linear", "factor": 2.0}),
            "rope_scaling",
        ),
        (
            "gemma2-gqa",
            _set(rope_parameters={"full_attention": {"rope_theta": 1e5}}),
            "rope_parameters is {'full_attention'",
        ),
        ("gemma-mqa", _set(partial_rotary_factor=0.5), "partial_rotary"),
        (
            "gemma-mqa",
            _set(final_logit_softcapping=30.0),
            "final_logit_softcapping is 30.0, expected null",
        ),
        (
            "gemma-mqa",
            lambda c: c.update(
                layer_types=["sliding_attention"] * c["num_hidden_layers"]
            ),
            "'full_attention' alone",
        ),
        (
            "recurrentgemma-mqa",
            _set(block_types=["full_attention"]),
            "attention or recurrent, found 'full_attention'",
        ),
        ("recurrentgemma-mqa", _set(head_dim=32), "head_dim"),
        (
            "recurrentgemma-mqa",
            _set(embeddings_scale_by_sqrt_dim=False),
            "embeddings_scale",
        ),
        ("recurrentgemma-mqa", _set(block_types=["mamba"]), "'mamba'"),
    ],
)
def test_what_cannot_be_honoured_of_other_families(
    masters: dict[str, Path],
    tmp_path: Path,
    name: str,
    edit: Edit,
    part: str,
) -> None:
    model = copy_of(masters[name], tmp_path)
    edit_json(model / "config.json", edit)
    assert part in refusal(model, gemmakv.MismatchError)


def test_generation_config_is_checked_and_wins(model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text('{"eos_token_id": [5, 3], "bos_token_id": 4}')
    config = gemmakv.Gemma.load(model).config
    assert (config.eos_ids, config.bos_id) == ([3, 5], 4)
    path.write_text('{"eos_token_id": {}}')
    assert "generation_config.json" in refusal(model, gemmakv.CorruptFile)


def test_omitted_token_ids_are_those_of_transformers(model: Path) -> None:
    def omit(config: dict[str, Any]) -> None:
        config.pop("eos_token_id", None)
        config.pop("bos_token_id", None)

    (model / "generation_config.json").unlink(missing_ok=True)
    edit_json(model / "config.json", omit)
    config = gemmakv.Gemma.load(model).config
    assert (config.eos_ids, config.bos_id) == ([1], 2)


def test_both_names_of_a_recurrent_model_s_window(
    masters: dict[str, Path], tmp_path: Path
) -> None:
    model = copy_of(masters["recurrentgemma-mqa"], tmp_path)

    def rename(config: dict[str, Any]) -> None:
        config["sliding_window"] = config.pop("attention_window_size") + 1

    window = gemmakv.Gemma.load(model).config.sliding_window
    edit_json(model / "config.json", rename)
    assert gemmakv.Gemma.load(model).config.sliding_window == window + 1


def test_no_safetensors(model: Path) -> None:
    weights_of(model).unlink()
    with pytest.raises(IsADirectoryError, match="safetensors"):
        gemmakv.Gemma.load(model)


def test_files_that_nobody_can_choose_between(model: Path) -> None:
    weights = weights_of(model)
    shutil.copy(weights, model / "a.safetensors")
    weights.rename(model / "b.safetensors")
    message = refusal(model, gemmakv.CorruptFile)
    assert "found a.safetensors, b.safetensors" in message


# ---- Tensors


def _retype(name: str, dtype: str, factor: int) -> Edit:
    """Another dtype of the same bytes: the last dimension changes."""

    def edit(header: dict[str, Any]) -> None:
        entry = header[name]
        entry["dtype"] = dtype
        entry["shape"][-1] = entry["shape"][-1] * factor

    return edit


def test_tensor_that_is_missing(model: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"

    def rename(header: dict[str, Any]) -> None:
        header["model.layers.0.self_attn.k_projection.weight"] = header.pop(
            name
        )

    edit_header(weights_of(model), rename)
    message = refusal(model, gemmakv.CorruptFile)
    assert f"tensor {name} is missing, expected shape [" in message


def test_tensor_that_nothing_describes(model: Path) -> None:
    edit_json(
        model / "config.json",
        lambda c: c.update(
            num_hidden_layers=c["num_hidden_layers"] - 1, layer_types=None
        ),
    )
    message = refusal(model, gemmakv.CorruptFile)
    assert "unexpected tensor 'model.layers." in message
    assert "more" in message


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("hidden_size", "embed_tokens.weight has shape"),
        ("intermediate_size", "mlp.gate_proj.weight has shape"),
        ("num_attention_heads", "self_attn.q_proj.weight has shape"),
        ("vocab_size", "embed_tokens.weight has shape"),
        ("num_hidden_layers", "is missing"),
    ],
)
def test_config_that_contradicts_the_tensors(
    model: Path, key: str, part: str
) -> None:
    edit_json(
        model / "config.json",
        lambda c: c.update({key: 2 * c[key], "layer_types": None}),
    )
    assert part in refusal(model, gemmakv.CorruptFile)


def test_tensor_of_a_type_that_is_not_supported(model: Path) -> None:
    name = "model.norm.weight"
    edit_header(weights_of(model), _retype(name, "I16", 1))
    message = refusal(model, gemmakv.MismatchError)
    assert f"tensor {name} has type I16, expected one of F32" in message


def test_untied_head_that_is_missing(model: Path) -> None:
    edit_json(model / "config.json", _set(tie_word_embeddings=False))
    message = refusal(model, gemmakv.CorruptFile)
    assert "tensor lm_head.weight is missing" in message


def test_head_of_a_tied_model_must_be_its_embedding(tmp_path: Path) -> None:
    for name in golden_models.names():
        golden = golden_models.read(name)
        if golden.text_config.get("tie_word_embeddings") is False:
            break
    else:
        pytest.fail("no golden has a head of its own")
    model = golden_models.write(tmp_path / "untied", golden)
    config = json.loads((model / "config.json").read_text("utf-8"))
    untied = gemmakv.Gemma.load(model)
    config["tie_word_embeddings"] = True
    golden_models.write_config(model, config)
    message = refusal(model, gemmakv.MismatchError)
    assert "tensor lm_head.weight is not the embedding" in message
    assert "tie_word_embeddings" in message

    weights = weights_of(model)
    tensors = read_header(weights)
    head = tensors["lm_head.weight"]
    embedding = tensors["model.embed_tokens.weight"]
    data = bytearray(weights.read_bytes())
    size = byte_size(head)
    data[head.offset : head.offset + size] = data[
        embedding.offset : embedding.offset + size
    ]
    weights.write_bytes(data)
    tied = gemmakv.Gemma.load(model)
    config["tie_word_embeddings"] = False
    golden_models.write_config(model, config)
    with_head = gemmakv.Gemma.load(model)
    assert tied.fingerprint != untied.fingerprint
    assert tied.fingerprint != with_head.fingerprint
    tokens = golden.tokens()
    np.testing.assert_array_equal(
        logits_of(tied, tokens), logits_of(with_head, tokens)
    )


def test_parts_of_other_models_are_unexpected(model: Path) -> None:
    def add(header: dict[str, Any]) -> None:
        begin = header["model.norm.weight"]["data_offsets"][0]
        header["depth_tower.x"] = {
            "dtype": "F32",
            "shape": [0],
            "data_offsets": [begin, begin],
        }

    edit_header(weights_of(model), add)
    message = refusal(model, gemmakv.CorruptFile)
    assert "unexpected tensor 'depth_tower.x'" in message


# ---- Safetensors


def _first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header["model.norm.weight"]
    return entry


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda h: h.update(x=1), "'x': its description is 1"),
        (lambda h: _first(h).update(dtype="F31"), "dtype is 'F31'"),
        (lambda h: _first(h).pop("dtype"), "dtype is None"),
        (lambda h: _first(h).update(shape="big"), "shape is 'big'"),
        (lambda h: _first(h).update(shape=[-1]), "shape is [-1]"),
        (lambda h: _first(h).update(shape=[1 << 62]), "shape is ["),
        (lambda h: _first(h).update(shape=[True]), "shape is [True]"),
        (lambda h: _first(h).update(shape=[1] * 9), "shape is ["),
        (lambda h: _first(h).update(shape=[1 << 40, 1 << 40]), "offsets is"),
        (lambda h: _first(h).update(data_offsets=[0]), "data_offsets is [0]"),
        (lambda h: _first(h).update(data_offsets=[4, 2]), "data_offsets"),
        (lambda h: _first(h).update(data_offsets=None), "data_offsets"),
        (
            lambda h: _first(h).update(
                data_offsets=[o + 2 for o in _first(h)["data_offsets"]]
            ),
            "where the one before it ends",
        ),
        (lambda h: h.pop("model.norm.weight"), "ends"),
    ],
)
def test_headers_that_are_wrong(model: Path, edit: Edit, part: str) -> None:
    edit_header(weights_of(model), edit)
    message = refusal(model, gemmakv.CorruptFile)
    assert weights_of(model).name in message
    assert part in message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}tail",
        b"GGUF" + bytes(100),
    ],
)
def test_files_that_are_no_safetensors(model: Path, data: bytes) -> None:
    weights_of(model).write_bytes(data)
    assert weights_of(model).name in refusal(model, gemmakv.CorruptFile)


def test_files_that_were_cut_off(model: Path) -> None:
    weights = weights_of(model)
    data = weights.read_bytes()
    for size in (9, 500, len(data) // 2, len(data) - 1):
        weights.write_bytes(data[:size])
        assert "is it whole?" in refusal(model, gemmakv.CorruptFile)


def test_headers_of_any_length(model: Path) -> None:
    """Tensors need not lie at multiples of their size."""
    fingerprint = gemmakv.Gemma.load(model).fingerprint
    for _ in range(3):
        data = weights_of(model).read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        weights_of(model).write_bytes(
            struct.pack("<Q", length + 1)
            + data[8 : 8 + length]
            + b" "
            + data[8 + length :]
        )
        assert gemmakv.Gemma.load(model).fingerprint == fingerprint


@pytest.mark.parametrize("at", [0, 1])
def test_tensors_without_values(model: Path, at: int) -> None:
    def add(header: dict[str, Any]) -> None:
        offset = header["model.norm.weight"]["data_offsets"][at]
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
            "dtype": "F32",
            "shape": [0],
            "data_offsets": [offset, offset],
        }

    fingerprint = gemmakv.Gemma.load(model).fingerprint
    edit_header(weights_of(model), add)
    assert gemmakv.Gemma.load(model).fingerprint == fingerprint


# ---- Files


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "tokenizer.json",
    ],
)
def test_pipes_are_refused_and_not_waited_for(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    message = refusal(model, OSError)
    assert "expected a regular file" in message
    assert name in message


def test_directories_of_any_name(model: Path, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xc3\xa9")
    shutil.copytree(model, path)
    gemma = gemmakv.Gemma.load(path)
    assert gemma.fingerprint == gemmakv.Gemma.load(model).fingerprint
    edit_json(Path(path) / "config.json", _set(hidden_size=32))
    message = refusal(Path(path), gemmakv.CorruptFile)
    assert "\udcff" in message


def test_gguf_files_of_any_name(tiny_path: Path, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")
    shutil.copy(tiny_path, path)
    fingerprint = gemmakv.Gemma.load(tiny_path).fingerprint
    assert gemmakv.Gemma.load(path).fingerprint == fingerprint
    with open(path, "r+b") as file:
        file.truncate(1000)
    assert "\\xff.gguf" in refusal(Path(path), gemmakv.CorruptFile)
    os.unlink(path)
    os.symlink("nowhere", path)
    with pytest.raises(FileNotFoundError) as caught:
        gemmakv.Gemma.load(path)
    assert caught.value.filename == path


@pytest.mark.slow
def test_no_header_crashes(model: Path) -> None:
    """Random damage to the header: loaded, or refused in one line."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        weights = weights_of(model)
        sound = weights.read_bytes()
        (length,) = struct.unpack_from("<Q", sound)
        damaged = bytearray(sound)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, 8 + length - 1))
            damaged[at] = data.draw(st.integers(0, 255))
        try:
            weights.write_bytes(damaged)
            try:
                read_header(weights)
                gemmakv.Gemma.load(model)
            except _OURS as error:
                assert "\n" not in str(error)
        finally:
            weights.write_bytes(sound)

    check()


@pytest.mark.slow
def test_no_config_crashes(masters: dict[str, Path]) -> None:
    """Any value for any key of any family: loaded, or refused in one line."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        model = masters[data.draw(st.sampled_from(sorted(masters)))]
        path = model / "config.json"
        sound = path.read_text("utf-8")
        config = json.loads(sound)
        values = st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.integers(0, 600),
            st.floats(),
            st.text(max_size=5),
            st.lists(
                st.sampled_from(["full_attention", "recurrent", 1]), max_size=9
            ),
            st.dictionaries(
                st.sampled_from(["rope_type", "factor", "rope_theta"]),
                st.one_of(st.floats(), st.sampled_from(["linear", "default"])),
            ),
        )
        for key in data.draw(
            st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)
        ):
            config[key] = data.draw(values)
        try:
            path.write_text(json.dumps(config), "utf-8")
            try:
                gemmakv.Gemma.load(model)
            except _OURS as error:
                assert "\n" not in str(error)
        finally:
            path.write_text(sound, "utf-8")

    check()


# ---- Shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    goldens = map(golden_models.read, golden_models.names())
    golden = next(golden for golden in goldens if golden.shards > 1)
    return golden_models.write(tmp_path / "sharded", golden)


def _index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def test_shards_that_are_missing(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.unlink()
    assert shard.name in refusal(sharded, FileNotFoundError)


@pytest.mark.parametrize(
    ("weight_map", "part"),
    [
        (None, "weight_map is None"),
        ({}, "weight_map is {}"),
        ([1], "weight_map is [1]"),
        ({"a": 1}, "tensor 'a' is in 1"),
        ({"a": ""}, "the name of a file in the same"),
        ({"a": ".."}, "the name of a file in the same"),
        ({"a": "../x.safetensors"}, "the name of a file in the same"),
        ({"a": "/etc/passwd"}, "the name of a file in the same"),
    ],
)
def test_indexes_that_are_wrong(
    sharded: Path, weight_map: object, part: str
) -> None:
    edit_json(_index(sharded), _set(weight_map=weight_map))
    message = refusal(sharded, gemmakv.CorruptFile)
    assert "index.json" in message
    assert part in message


def test_index_and_shards_must_agree(sharded: Path) -> None:
    tensors = read_folder(sharded)
    name = next(iter(tensors))
    other = next(
        path.name
        for path in sharded.glob("*.safetensors")
        if str(path) != tensors[name].path
    )
    edit_json(_index(sharded), lambda d: d["weight_map"].update({name: other}))
    assert f"tensor '{name}' is missing" in refusal(
        sharded, gemmakv.CorruptFile
    )
    edit_json(_index(sharded), lambda d: d["weight_map"].pop(name))
    assert "does not place there" in refusal(sharded, gemmakv.CorruptFile)
