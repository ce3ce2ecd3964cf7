"""Named types: their published shapes, and what their caches take.

All numbers here are computed from the published configurations
(tests/golden/configs), without the project's own table.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmakv import ModelConfig, ModelType, create_kv_cache
from gemmakv.models.huggingface._config import read_config
from support import golden_configs
from support.command import RunCli
from support.golden_checks import fields_of

TYPES = {t.value: golden_configs.published_fields(t.value) for t in ModelType}
# Those that hold conversations; models of embeddings have no cache.
CACHED = {
    name: fields for name, fields in TYPES.items()
    if not fields.get("bidirectional")
}
# Bytes of a stored value; int8 has a float32 scale for every 32 of them.
VALUE_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 32}


def bytes_per_token(name: str, kind: str, dtype: str) -> int:
    if name not in CACHED:
        return 0
    kinds = TYPES[name]["layer_kinds"]
    owners = TYPES[name].get("shares_kv") or [None] * len(kinds)
    values = sum(
        2 * heads * head_dim
        for found, owner, (heads, head_dim) in zip(
            kinds, owners, heads_of(name), strict=True
        )
        if found == kind and owner is None
    )
    return round(values * VALUE_BYTES[dtype])


def heads_of(name: str) -> list[tuple[int, int]]:
    """(heads of keys and values, head_dim) by layer; none of recurrent ones."""
    shape = TYPES[name]
    kinds = shape["layer_kinds"]
    heads, dims = (
        size if isinstance(size, list) else [size] * len(kinds)
        for size in (shape["kv_heads"], shape["head_dim"])
    )
    return [
        (0, 0) if kind == "recurrent" else (count, dim)
        for kind, count, dim in zip(kinds, heads, dims, strict=True)
    ]


def state_shape(name: str) -> tuple[int, int]:
    """The recurrence's state, and the inputs that the convolution keeps."""
    shape = TYPES[name]
    return shape.get("conv_width", 0), shape.get("lru_width", 0)


def state_bytes(name: str) -> int:
    rows, width = state_shape(name)
    return TYPES[name]["layer_kinds"].count("recurrent") * rows * width * 4


def bytes_at(name: str, tokens: int, dtype: str) -> int:
    in_window = min(tokens, TYPES[name].get("sliding_window", 0))
    return (
        tokens * bytes_per_token(name, "full", dtype)
        + in_window * bytes_per_token(name, "sliding", dtype)
        + (state_bytes(name) if tokens else 0)
    )


def test_each_type_has_its_published_file() -> None:
    assert golden_configs.types() == sorted(TYPES)
    assert ModelType("gemma2-9b") is ModelType.GEMMA2_9B


@pytest.mark.parametrize("name", TYPES)
def test_the_table_is_the_published_file(name: str) -> None:
    config = ModelConfig.from_name(name)
    assert config.name == name
    found = fields_of(config)
    expected = fields_of(ModelConfig(**TYPES[name]))
    # Multimodal files have 64 rows of the vocabulary more, for images.
    sizes = expected["vocab_size"], expected.pop("vocab_size") - 64
    assert found.pop("vocab_size") in sizes
    assert found == expected


@pytest.mark.parametrize("name", TYPES)
def test_the_published_file_has_the_type_s_name(
    name: str, tmp_path: Path
) -> None:
    golden_configs.write_published(tmp_path, name)
    config = read_config(tmp_path).config
    assert config.name == name
    assert fields_of(config) == fields_of(ModelConfig(**TYPES[name]))


@pytest.mark.parametrize("name", TYPES)
def test_arguments_make_the_same_configuration(name: str) -> None:
    config = ModelConfig.from_name(name)
    arguments = config.arguments()
    assert ModelConfig(**arguments).arguments() == arguments
    assert arguments["name"] == name
    for field, value in arguments.items():
        assert getattr(config, field) == value
    # An entry for each layer is the same where they do not differ.
    arguments["num_heads"] = [config.num_heads] * config.num_layers
    assert ModelConfig(**arguments).num_heads == config.num_heads


def test_layers_may_differ() -> None:
    arguments = ModelConfig.from_name("gemma3-270m").arguments()
    arguments |= {"name": "", "ffn_dim": [2048] * 17 + [4096]}
    arguments["sliding_window"] = [512] * 9 + [256] * 9
    shared: list[int | None] = [None] * 17 + [11]
    arguments["shares_kv"] = shared
    config = ModelConfig(**arguments)
    assert config.ffn_dim == arguments["ffn_dim"]
    assert config.shares_kv == shared
    # Full layers read no window.
    windows: list[int] = config.arguments()["sliding_window"]
    assert windows[4:7] == [512, 0, 512] and windows[-2:] == [256, 0]
    assert ModelConfig(**config.arguments()).arguments() == config.arguments()
    assert config.named().name == ""


@pytest.mark.parametrize("changes, error, text", [
    ({"head_dim": "x"}, TypeError, "head_dim: expected a whole number"),
    ({"head_dim": 64.5}, TypeError, "head_dim: expected a whole number"),
    ({"ffn_dim": [2048, None]}, ValueError, "ffn_dim has 2 entries"),
    ({"ffn_dim": [8] * 17 + [-1]}, ValueError, "ffn_dim of layer 17 is -1"),
    ({"query_scale": []}, ValueError, "query_scale has 0 entries"),
    ({"query_scale": [1.0] * 18}, ValueError, "query_scale has 18 entries"),
    ({"shares_kv": 0}, ValueError, "shares_kv is 0 in layer 0"),
    ({"window": 3}, TypeError, "unexpected keyword argument 'window'"),
])
def test_wrong_fields_are_named(
    changes: dict[str, object], error: type[Exception], text: str
) -> None:
    arguments = {**ModelConfig.from_name("gemma3-270m").arguments(), **changes}
    with pytest.raises(error, match=text) as caught:
        ModelConfig(**arguments)
    assert "\n" not in str(caught.value)
    arguments = ModelConfig.from_name("gemma3-270m").arguments()
    del arguments["head_dim"]
    with pytest.raises(TypeError, match="missing keyword argument 'head_dim'"):
        ModelConfig(**arguments)


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("name", CACHED)
def test_cache_of_a_named_type(name: str, dtype: str) -> None:
    shape = TYPES[name]
    window = shape.get("sliding_window", 0)
    cache = create_kv_cache(name, kv_dtype=dtype)
    assert cache.model_type is ModelType(name)
    assert cache.capacity_tokens == shape["context_length"]
    assert cache.nbytes == len(cache) == 0
    assert [layer.kind for layer in cache.layers] == shape["layer_kinds"]
    for layer, heads in zip(cache.layers, heads_of(name), strict=True):
        assert layer.window == (window if layer.kind == "sliding" else None)
        recurrent = layer.kind == "recurrent"
        state = state_shape(name) if recurrent else (0, 0)
        assert layer.state.shape == state and not layer.state.any()
        assert layer.keys.shape == layer.values.shape == (0, *heads)
    config = ModelConfig.from_name(name)
    assert config.state_bytes == state_bytes(name)
    assert config.kv_bytes_per_token(dtype) == (
        bytes_per_token(name, "full", dtype),
        bytes_per_token(name, "sliding", dtype),
    )
    edge = window or 100
    for tokens in (0, 1, edge - 1, edge, edge + 1, shape["context_length"]):
        assert config.kv_bytes_at(tokens, dtype) == bytes_at(
            name, tokens, dtype
        )


@pytest.mark.parametrize("tokens", [2**52, 2**60, 2**64 - 1])
def test_bytes_of_more_tokens_than_can_be_counted(tokens: int) -> None:
    config = ModelConfig.from_name("gemma2-9b")
    found = f"tokens: expected 0.*, found {tokens}"
    with pytest.raises(ValueError, match=found):
        config.kv_bytes_at(tokens)


# Whoever plans memory may check these by hand: full + sliding bytes of a
# token, and the whole context, in bf16.
@pytest.mark.parametrize("name, full, sliding, total", [
    ("gemma-7b", 28 * 2 * 16 * 256 * 2, 0, 8192 * 458_752),
    ("gemma2-9b", 21 * 2 * 8 * 256 * 2, 21 * 2 * 8 * 256 * 2,
     (8192 + 4096) * 172_032),
    ("gemma3-270m", 3 * 2 * 256 * 2, 15 * 2 * 256 * 2,
     32768 * 3072 + 512 * 15_360),
    ("gemma3n-e2b", 8192, 32_768, 32_768 * 8192 + 512 * 32_768),
    ("gemma3n-e4b", 8192, 32_768, 32_768 * 8192 + 512 * 32_768),
    ("gemma4-e2b", 6144, 12_288, 131_072 * 6144 + 512 * 12_288),
    ("gemma4-e4b", 16_384, 40_960, 131_072 * 16_384 + 512 * 40_960),
    ("gemma4-26b-a4b", 20_480, 204_800, 262_144 * 20_480 + 1024 * 204_800),
    ("gemma4-31b", 81_920, 819_200, 262_144 * 81_920 + 1024 * 819_200),
    ("recurrentgemma-2b", 0, 8 * 2 * 256 * 2,
     2048 * 8192 + 18 * 4 * 2560 * 4),
])
def test_bytes_that_were_computed_by_hand(
    name: str, full: int, sliding: int, total: int
) -> None:
    config = ModelConfig.from_name(name)
    assert config.kv_bytes_per_token("bf16") == (full, sliding)
    assert config.kv_bytes_at(config.context_length, "bf16") == total


@pytest.mark.parametrize(
    "name, same", [("codegemma-2b", "gemma-2b"), ("codegemma-7b", "gemma-7b")]
)
def test_models_that_share_a_shape(name: str, same: str) -> None:
    assert create_kv_cache(name).model_type is ModelType(same)
    assert ModelConfig.from_name(name).name == same


@pytest.mark.parametrize("name", ["gemma2-3b", "gemma-2-9b", "GEMMA2-9B", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="unknown model type") as caught:
        create_kv_cache(name)
    assert all(known in str(caught.value) for known in TYPES)
    assert "\n" not in str(caught.value)


def test_info_lists_the_types(cli: RunCli) -> None:
    result = cli("info", "--types", "--json")
    assert result.returncode == 0, result.stderr
    types = json.loads(result.stdout)["types"]
    assert [entry["model_type"] for entry in types] == list(TYPES)
    table = cli("info", "--types").stdout.decode()
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    for entry, name in zip(types, TYPES):
        assert entry["state_bytes"] == state_bytes(name)
        for dtype, kv in entry["kv_cache"].items():
            full = bytes_per_token(name, "full", dtype)
            sliding = bytes_per_token(name, "sliding", dtype)
            total = bytes_at(name, TYPES[name]["context_length"], dtype)
            assert list(kv.values()) == [full, sliding, total]
            for text in (f" {full:,} + {sliding:,}", f" {total:,}"):
                assert any(
                    line.startswith(name + " ") and text in line
                    for line in lines
                )


def test_types_can_be_given_to_create_kv_cache(cli: RunCli) -> None:
    """What the list names is what the function takes."""
    types = json.loads(cli("info", "--types", "--json").stdout)["types"]
    for entry in types:
        if entry["model_type"] not in CACHED:
            continue
        cache = create_kv_cache(entry["model_type"], capacity_tokens=10)
        assert len(cache.layers) == entry["num_layers"]


def pickled(config: ModelConfig) -> ModelConfig:
    found = pickle.loads(pickle.dumps(config))
    assert isinstance(found, ModelConfig)
    return found


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_configs_can_be_pickled_and_copied(
    again: Callable[[ModelConfig], ModelConfig],
) -> None:
    for name in (
        "gemma3-270m", "gemma3n-e2b", "gemma4-12b", "recurrentgemma-2b"
    ):
        config = ModelConfig.from_name(name)
        assert again(config).arguments() == config.arguments()
