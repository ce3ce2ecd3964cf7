#!/usr/bin/env python3
"""Writes the seeds of the GGUF fuzzer: small files, each another feature.

    python tools/make_gguf_corpus.py tests/fuzz/corpus/gguf

Same bytes every time, for a given release of the package `gguf`, which it
needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

QUANTIZED = ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def raw(writer: gguf.GGUFWriter, name: str, kind: str, rows: int) -> None:
    """Adds `rows` rows of one stored block of type `kind`."""
    dtype = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[dtype][1]
    data = np.arange(rows * size, dtype=np.uint64).astype(np.uint8)
    writer.add_tensor(name, data.reshape(rows, size), raw_dtype=dtype)


def scalars(writer: gguf.GGUFWriter) -> None:
    """Every scalar type of metadata, at the ends of its range."""
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", -2.5)
    writer.add_bool("bool", True)
    writer.add_string("string", "text\u00e9\n")
    writer.add_key_value("empty", "", gguf.GGUFValueType.STRING)


def arrays(writer: gguf.GGUFWriter) -> None:
    """Arrays of strings, integers, floats and bools."""
    writer.add_array("strings", ["a", "bc", "\u2581the", "x" * 40])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])


def vocabulary(writer: gguf.GGUFWriter) -> None:
    """A tokenizer as real files have it, of 40 tokens."""
    tokens = ["<pad>", "<eos>", "<bos>"] + [f"t{i}" for i in range(37)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([3, 3, 3] + [1] * 37)
    writer.add_bos_token_id(2)
    writer.add_add_bos_token(True)


def floats(writer: gguf.GGUFWriter) -> None:
    """Vectors and matrices of F32 and F16."""
    ramp = np.arange(12, dtype=np.float32)
    writer.add_tensor("vector", ramp)
    writer.add_tensor("matrix", ramp.reshape(3, 4))
    writer.add_tensor("half", ramp.astype(np.float16).reshape(2, 6))


def quantized(writer: gguf.GGUFWriter) -> None:
    """A tensor of each quantized type."""
    for kind in QUANTIZED:
        raw(writer, f"blk.0.{kind}.weight", kind, 2)


def unsupported(writer: gguf.GGUFWriter) -> None:
    """Types and shapes that can be listed but not read."""
    raw(writer, "old", "Q4_1", 1)
    writer.add_tensor("cube", np.zeros((2, 3, 4), np.float32))
    writer.add_tensor("four", np.zeros((1, 2, 3, 1), np.float32))


def aligned(writer: gguf.GGUFWriter) -> None:
    """An alignment of its own."""
    writer.add_custom_alignment(128)
    floats(writer)


def model(writer: gguf.GGUFWriter) -> None:
    """All together, small: what the start of a real file looks like."""
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_rope_freq_base(1e6)
    vocabulary(writer)
    raw(writer, "token_embd.weight", "Q8_0", 4)
    for layer in range(2):
        name = f"blk.{layer}.attn_norm.weight"
        writer.add_tensor(name, np.ones(32, np.float32))
        raw(writer, f"blk.{layer}.attn_q.weight", "Q5_0", 2)


SEEDS: list[Callable[[gguf.GGUFWriter], None]] = [
    scalars,
    arrays,
    vocabulary,
    floats,
    quantized,
    unsupported,
    aligned,
    model,
]


def write(
    path: Path, fill: Callable[[gguf.GGUFWriter], None], endian: str
) -> None:
    writer = gguf.GGUFWriter(path, "gemma3", endianess=gguf.GGUFEndian[endian])
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for fill in SEEDS:
        write(folder / f"{fill.__name__}.gguf", fill, "LITTLE")
    write(folder / "big_endian.gguf", scalars, "BIG")
    # Versions 2 and 3 have the same layout.
    bytes_v3 = (folder / "model.gguf").read_bytes()
    bytes_v2 = bytes_v3[:4] + (2).to_bytes(4, "little") + bytes_v3[8:]
    (folder / "version_2.gguf").write_bytes(bytes_v2)


if __name__ == "__main__":
    main()
