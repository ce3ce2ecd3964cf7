"""Tiny random Gemma 3 models for tests; importing this imports nothing heavy.

    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", "Q4_0")

`TINY` (hidden 64, 7 layers, window 32) carries every type whose block is 32
values or less, `WIDE` (hidden 256, 2 layers) the K-quants too. Both have a
512-piece vocabulary with byte fallback and Gemma's special ids: 0 pad, 1 eos,
2 bos, 3 unk, 105 start_of_turn, 106 end_of_turn. Needs `gguf` when called.
"""

from __future__ import annotations

import pathlib

from support.tools import tool

make_random_gguf = tool("make_random_gguf")
requantize = tool("requantize_gguf").requantize

Shape = make_random_gguf.Shape
TINY = Shape()
WIDE = make_random_gguf.WIDE
of_family = make_random_gguf.of_family
FLAT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
ALL_TYPES = FLAT_TYPES + K_TYPES


def write_tiny_gguf(path, matrix_type="F32", embedding_type=None, shape=None,
                    seed=0) -> pathlib.Path:
    """Writes a random model and returns its path; same arguments, same bytes.

    `matrix_type` is one type name or a sequence that matrices take in turn;
    `embedding_type` is the first of them unless given. `shape` is WIDE if a
    K-quant is among them, else TINY.
    """
    kinds = [matrix_type] if isinstance(matrix_type, str) else list(matrix_type)
    if embedding_type is None:
        embedding_type = kinds[0]
    if shape is None:
        wide = any(kind in K_TYPES for kind in [*kinds, embedding_type])
        shape = WIDE if wide else TINY
    return make_random_gguf.write_random_gguf(
        path, shape, kinds, embedding_type, seed)
