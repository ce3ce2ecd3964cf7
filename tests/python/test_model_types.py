"""Named types: their published shapes, and what their caches take.

All numbers here are computed from the published configurations, without the
project's own table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from conftest import RunCli
from gemmakv import ModelConfig, ModelType, create_kv_cache


@dataclass(frozen=True)
class Published:
    """What the model's config.json says; `window` 0: every layer is full."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    window: int
    context: int
    query_divisor: int
    vocab: int
    period: int = 1  # the last layer of each attends fully

    def kind(self, layer: int) -> str:
        if self.window and layer % self.period != self.period - 1:
            return "sliding"
        return "full"


@dataclass(frozen=True)
class Recurrent(Published):
    """Two recurrent layers, then one of local attention, and so on."""

    def kind(self, layer: int) -> str:
        return "sliding" if layer % 3 == 2 else "recurrent"


K = 1024
TYPES = {
    "gemma-2b": Published(
        2048, 18, 8, 1, 256, 16384, 0, 8 * K, 256, 256000),
    "gemma-7b": Published(
        3072, 28, 16, 16, 256, 24576, 0, 8 * K, 256, 256000),
    "gemma2-2b": Published(
        2304, 26, 8, 4, 256, 9216, 4096, 8 * K, 256, 256000, 2),
    "gemma2-9b": Published(
        3584, 42, 16, 8, 256, 14336, 4096, 8 * K, 256, 256000, 2),
    "gemma2-27b": Published(
        4608, 46, 32, 16, 128, 36864, 4096, 8 * K, 144, 256000, 2),
    "gemma3-270m": Published(
        640, 18, 4, 1, 256, 2048, 512, 32 * K, 256, 262144, 6),
    "gemma3-1b": Published(
        1152, 26, 4, 1, 256, 6912, 512, 32 * K, 256, 262144, 6),
    "gemma3-4b": Published(
        2560, 34, 8, 4, 256, 10240, 1024, 128 * K, 256, 262144, 6),
    "gemma3-12b": Published(
        3840, 48, 16, 8, 256, 15360, 1024, 128 * K, 256, 262144, 6),
    "gemma3-27b": Published(
        5376, 62, 32, 16, 128, 21504, 1024, 128 * K, 168, 262144, 6),
    "recurrentgemma-2b": Recurrent(
        2560, 26, 10, 1, 256, 7680, 2048, 8 * K, 256, 256000),
    "recurrentgemma-9b": Recurrent(
        4096, 38, 16, 1, 256, 12288, 2048, 8 * K, 256, 256000),
}  # fmt: skip
# Bytes of a stored value; int8 has a float32 scale for every 32 of them.
VALUE_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 32}
CONV_TAIL = 3


def bytes_per_token(shape: Published, kind: str, dtype: str) -> int:
    layers = [shape.kind(i) for i in range(shape.layers)].count(kind)
    values = 2 * shape.kv_heads * shape.head_dim
    return round(layers * values * VALUE_BYTES[dtype])


def state_bytes(shape: Published) -> int:
    layers = [shape.kind(i) for i in range(shape.layers)].count("recurrent")
    return layers * (1 + CONV_TAIL) * shape.hidden * 4


def bytes_at(shape: Published, tokens: int, dtype: str) -> int:
    return (
        tokens * bytes_per_token(shape, "full", dtype)
        + min(tokens, shape.window) * bytes_per_token(shape, "sliding", dtype)
        + (state_bytes(shape) if tokens else 0)
    )


def test_all_types_are_here() -> None:
    assert [t.value for t in ModelType] == list(TYPES)
    assert ModelType("gemma2-9b") is ModelType.GEMMA2_9B


@pytest.mark.parametrize("name", TYPES)
def test_published_shape(name: str) -> None:
    shape, config = TYPES[name], ModelConfig.from_name(name)
    assert config.name == name
    assert config.architecture == name.rpartition("-")[0]
    assert (
        config.hidden_size, config.num_layers, config.num_heads,
        config.kv_heads, config.head_dim, config.ffn_dim,
        config.sliding_window, config.context_length, config.vocab_size,
    ) == (
        shape.hidden, shape.layers, shape.heads,
        shape.kv_heads, shape.head_dim, shape.ffn,
        shape.window, shape.context, shape.vocab,
    )  # fmt: skip
    assert config.query_scale == pytest.approx(shape.query_divisor**-0.5)
    assert config.layer_kinds == [shape.kind(i) for i in range(shape.layers)]
    recurrent = isinstance(shape, Recurrent)
    assert config.biases == recurrent
    assert config.rope_dim == shape.head_dim // (2 if recurrent else 1)
    assert config.qk_norm == name.startswith("gemma3")
    assert config.post_norms == name.startswith(("gemma2", "gemma3"))
    assert config.attn_soft_cap == (50 if name.startswith("gemma2") else 0)
    capped = recurrent or name.startswith("gemma2")
    assert config.final_soft_cap == (30 if capped else 0)
    lru = (shape.hidden, shape.heads, CONV_TAIL + 1) if recurrent else (0,) * 3
    assert (config.lru_width, config.lru_blocks, config.conv_width) == lru
    if recurrent:  # the factor is a bfloat16 number
        assert config.embedding_scale == {2560: 50.5, 4096: 64}[shape.hidden]
    else:
        assert config.embedding_scale == pytest.approx(shape.hidden**0.5)


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("name", TYPES)
def test_cache_of_a_named_type(name: str, dtype: str) -> None:
    shape = TYPES[name]
    cache = create_kv_cache(name, kv_dtype=dtype)
    assert cache.model_type is ModelType(name)
    assert cache.capacity_tokens == shape.context
    assert cache.nbytes == len(cache) == 0
    kinds = [layer.kind for layer in cache.layers]
    assert kinds == [shape.kind(i) for i in range(shape.layers)]
    for layer in cache.layers:
        sliding = layer.kind == "sliding"
        assert layer.window == (shape.window if sliding else None)
        recurrent = layer.kind == "recurrent"
        state = (CONV_TAIL + 1, shape.hidden) if recurrent else (0, 0)
        assert layer.state.shape == state and not layer.state.any()
        heads = (0, 0) if recurrent else (shape.kv_heads, shape.head_dim)
        assert layer.keys.shape == layer.values.shape == (0, *heads)
    config = ModelConfig.from_name(name)
    assert config.state_bytes == state_bytes(shape)
    assert config.kv_bytes_per_token(dtype) == (
        bytes_per_token(shape, "full", dtype),
        bytes_per_token(shape, "sliding", dtype),
    )
    window = shape.window or 100
    for tokens in (0, 1, window - 1, window, window + 1, shape.context):
        assert config.kv_bytes_at(tokens, dtype) == bytes_at(
            shape, tokens, dtype
        )


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
    for entry, (name, shape) in zip(types, TYPES.items()):
        assert entry["state_bytes"] == state_bytes(shape)
        for dtype, kv in entry["kv_cache"].items():
            full = bytes_per_token(shape, "full", dtype)
            sliding = bytes_per_token(shape, "sliding", dtype)
            total = bytes_at(shape, shape.context, dtype)
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
        cache = create_kv_cache(entry["model_type"], capacity_tokens=10)
        assert len(cache.layers) == entry["num_layers"]
