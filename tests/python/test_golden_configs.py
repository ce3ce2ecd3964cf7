"""The table of named types says what the published files say."""

from __future__ import annotations

import pytest

import golden_configs
from gemmakv import ModelConfig, ModelType, create_kv_cache
from golden_checks import fields_of

NAMES = golden_configs.types()
# Stored bytes of a value.
VALUE_BYTES = {"f32": 4, "bf16": 2}


def test_each_named_type_has_its_published_file() -> None:
    assert NAMES == sorted(t.value for t in ModelType)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_the_published_file(name: str) -> None:
    named = ModelConfig.from_name(name)
    published = golden_configs.model_config(golden_configs.published(name))
    ours, theirs = fields_of(named), fields_of(published)
    # Multimodal files have 64 rows of the vocabulary more, for images.
    assert ours.pop("vocab_size") in (
        theirs["vocab_size"], theirs.pop("vocab_size") - 64)
    assert ours == theirs


def bytes_at(name: str, tokens: int, value_bytes: int) -> int:
    """What the keys, values and states of a conversation take."""
    fields = golden_configs.fields(golden_configs.published(name))
    window = fields.get("sliding_window", 0)
    # The state of a recurrent layer, and the inputs that its convolution
    # looks back on, in float32.
    state = 4 * fields.get("lru_width", 0) * fields.get("conv_width", 0)
    of_a_token = 2 * fields["kv_heads"] * fields["head_dim"] * value_bytes
    of_a_layer = {
        "full": tokens * of_a_token,
        "sliding": min(tokens, window) * of_a_token,
        "recurrent": state,
    }
    return sum(of_a_layer[kind] for kind in fields["layer_kinds"])


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_takes_what_the_published_shape_takes(
    name: str, dtype: str
) -> None:
    config = ModelConfig.from_name(name)
    assert create_kv_cache(name).capacity_tokens == config.context_length
    for tokens in (1, 1000, config.sliding_window + 1, config.context_length):
        found = config.kv_bytes_at(tokens, dtype)
        assert found == bytes_at(name, tokens, VALUE_BYTES[dtype])
