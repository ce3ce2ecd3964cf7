"""Every tensor type of GGUF files against the `gguf` package, bit for bit."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest

from gemmakv import _core

gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")

ROWS, COLS = 37, 512  # two whole groups of 16 rows and a part of one
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
)


def random_tensor(kind: str, rng: np.random.Generator) -> np.ndarray:
    """uint8 [ROWS, bytes of a row]: any bits that are not NaN or infinite."""
    type_id = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_id]
    blocks = rng.integers(
        0, 256, (ROWS, COLS // block, size), dtype=np.uint8)
    # Where a type keeps half precision scales; no exponent of all ones.
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2],
              "Q5_K": [0, 2], "Q6_K": [208], "F16": [0]}
    for at in halves.get(kind, []):
        high = blocks[:, :, at + 1]
        high[(high & 0x7C) == 0x7C] ^= 0x40
    if kind in ("F32", "BF16"):
        high = blocks[:, :, -1]
        high[(high & 0x7F) == 0x7F] ^= 0x40
    return blocks.reshape(ROWS, -1)


def write_tensor(path: Path, kind: str, raw: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_gguf_package(
    kind: str, tmp_path: Path
) -> None:
    type_id = gguf.GGMLQuantizationType[kind]
    raw = random_tensor(kind, np.random.default_rng(11))
    path = tmp_path / "tensor.gguf"
    write_tensor(path, kind, raw)

    expected = gguf.dequantize(raw, type_id).reshape(ROWS, COLS)
    assert np.isfinite(expected).all()
    found = _core.GgufFile(str(path)).read_tensor("w")
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_values_do_not_depend_on_the_callers_rounding(tmp_path: Path) -> None:
    rounding = ctypes.CDLL("libm.so.6")
    upward = 0x800 if platform.machine() == "x86_64" else 0x400000
    before = rounding.fegetround()
    for kind in TYPES:
        path = tmp_path / f"{kind}.gguf"
        raw = random_tensor(kind, np.random.default_rng(11))
        write_tensor(path, kind, raw)
        file = _core.GgufFile(str(path))
        expected = file.read_tensor("w")
        assert rounding.fesetround(upward) == 0
        found = file.read_tensor("w")
        assert rounding.fesetround(before) == 0
        np.testing.assert_array_equal(found, expected)


def test_every_supported_type_is_compared() -> None:
    """A type that the reader learns must join TYPES."""
    assert sorted(_core.tensor_types()) == sorted(TYPES)
