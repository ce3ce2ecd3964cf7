"""Tiny random models against transformers, live and in float32."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from support import tiny_models
from support.logits import Logits, mean_kl, our_logits, some_tokens

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def oracle() -> Any:
    pytest.importorskip("torch", reason="the oracle needs torch")
    pytest.importorskip("transformers", reason="the oracle needs transformers")
    pytest.importorskip("gguf", reason="the oracle needs gguf")
    folder = str(ROOT / "tools" / "quality")
    sys.path.insert(0, folder)
    try:
        import gguf_reference
    finally:
        sys.path.remove(folder)
    return gguf_reference


def oracle_logits(oracle: Any, path: Path, ids: Sequence[int]) -> Logits:
    model = oracle.build_model(*oracle.read_gguf(path))
    return np.concatenate([p for _, p in oracle.logits_in_chunks(model, ids)])


def test_the_oracle_s_window_is_exact(oracle: Any, tmp_path: Path) -> None:
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf")
    model = oracle.build_model(*oracle.read_gguf(path), attention="eager")
    oracle.check_window(model)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", [
    tiny_models.TINY,
    tiny_models.WIDE,
    # One head for each kv head, a window that is no power of two, a head
    # wider than the hidden state is per head, two full layers.
    tiny_models.Shape(hidden=96, layers=12, heads=3, kv_heads=3, head_dim=64,
                      ffn=160, window=19),
])
def test_float32_weights_give_the_oracle_s_logits(
    oracle: Any, tmp_path: Path, shape: tiny_models.Shape, seed: int
) -> None:
    path = tiny_models.write_tiny_gguf(
        tmp_path / "m.gguf", shape=shape, seed=seed)
    ids = some_tokens(shape.vocab)
    expected = oracle_logits(oracle, path, ids)
    found = our_logits(gemmakv.Gemma.load(path), ids)
    assert mean_kl(expected, found) <= 1e-6
    # Random layers amplify rounding more than trained ones do.
    np.testing.assert_allclose(found, expected, atol=5e-3, rtol=0)


def test_tensors_from_arrays_give_the_file_s_logits(
    oracle: Any, tmp_path: Path
) -> None:
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf")
    ids = some_tokens(tiny_models.TINY.vocab)
    from_file = gemmakv.Gemma.load(path)
    _, tensors = oracle.read_gguf(path)
    from_arrays = gemmakv.Gemma.from_tensors(from_file.config, tensors)
    np.testing.assert_array_equal(
        our_logits(from_arrays, ids), our_logits(from_file, ids))


@pytest.mark.parametrize("kind", tiny_models.ALL_TYPES)
def test_every_stored_type_is_near_the_oracle(
    oracle: Any, tmp_path: Path, kind: str
) -> None:
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", kind)
    gemma = gemmakv.Gemma.load(path)
    ids = some_tokens(gemma.config.vocab_size)
    expected = oracle_logits(oracle, path, ids)
    # Activations of 8 bits cost up to 0.01 on these models; a wrong scale,
    # nibble or window costs nats.
    assert mean_kl(expected, our_logits(gemma, ids)) <= 0.03
    assert mean_kl(expected, our_logits(gemma, ids, "bf16")) <= 0.03


def test_a_file_that_mixes_all_types_is_near_the_oracle(
    oracle: Any, tmp_path: Path
) -> None:
    path = tiny_models.write_tiny_gguf(
        tmp_path / "m.gguf", tiny_models.ALL_TYPES, embedding_type="Q6_K")
    gemma = gemmakv.Gemma.load(path)
    ids = some_tokens(gemma.config.vocab_size)
    expected = oracle_logits(oracle, path, ids)
    assert mean_kl(expected, our_logits(gemma, ids, "int8")) <= 0.05
