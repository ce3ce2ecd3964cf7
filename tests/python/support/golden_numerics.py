"""Hashes of the bits that models give: stored keys and values, and logits.

tests/golden/numerics.json has them, and the fingerprints that bind caches to
weights, with the numerics version beside. tools/make_numerics.py writes it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import gemmakv
from gemmakv import _core
from support import golden_configs, tiny_models
from support.golden_checks import NAMES, golden_of, tensors_of

PATH = Path(__file__).resolve().parents[2] / "golden" / "numerics.json"
TOOL = "tools/make_numerics.py"

# Types that weights are kept in, and keys and values.
_WAYS = (("f32", "f32"), ("bf16", "bf16"), ("q8_0", "int8"),
         ("q5_0", "bf16"), ("q4_0", "bf16"))  # fmt: skip

# By model, by way.
Digests = dict[str, dict[str, str]]


def read() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return stored


def arithmetic() -> str:
    """Of the current target, as the file calls it."""
    return {1: "fused", 2: "unfused"}[_core.numerics_id() & 0xF]


def digests(folder: Path) -> Digests:
    """Of the current target; `folder` is for files."""
    found: Digests = {}
    for name in NAMES:
        golden = golden_of(name)
        config = golden_configs.model_config(golden.config)
        found[name] = {}
        widths = np.hstack([
            config.hidden_size, config.ffn_dim, config.lru_width,
            config.ple_dim, config.expert_ffn_dim, config.laurel_rank])
        # Quantized rows are whole blocks of 32 columns.
        ways = _WAYS[:2] if (widths % 32).any() else _WAYS
        for weights, keys in ways:
            gemma = gemmakv.Gemma.from_tensors(
                config, tensors_of(name), threads=2,
                quantize=None if weights == "f32" else weights)
            found[name][f"{weights}, {keys}"] = _digest(
                gemma, golden.tokens(), keys)
            found[name].setdefault("fingerprint", gemma.fingerprint)
    # Types that only files have.
    path = tiny_models.write_tiny_gguf(
        folder / "every.gguf", tiny_models.ALL_TYPES, "Q6_K")
    gemma = gemmakv.Gemma.load(path)
    found["every type of weights"] = {
        "bf16": _digest(gemma, [2, *range(110, 180)], "bf16"),
        "fingerprint": gemma.fingerprint,
    }
    return found


def _digest(gemma: gemmakv.Gemma, tokens: list[int], keys: str) -> str:
    sha = hashlib.sha256()
    cache = gemmakv.create_kv_cache(gemma.config, kv_dtype=keys)
    sha.update(gemma.logits(cache, tokens, all_positions=True).tobytes())
    for layer in cache.layers:
        for array in (layer.keys, layer.values, layer.state):
            sha.update(array.tobytes())
    return sha.hexdigest()[:16]
