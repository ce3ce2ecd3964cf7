"""Writes a miniature Gemma 3 as a GGUF file, sound or broken on purpose.

Random F32 weights, two kinds of layers, a window of 16 tokens: everything
that the real model has, in less than a megabyte.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

U32, F32, BOOL, STR, ARRAY = 4, 6, 7, 8, 9
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 7, 2, 1, 32, 96
CONTEXT, WINDOW = 512, 16
ALIGNMENT = 32

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
RUNS = ["\n", "\n\n", "  ", "   "]
LETTERS = [chr(c) for c in range(0x20, 0x7F)]
WORDS = ["\u2581a", "th", "the", "\u2581the", "in", "er", "\u00e9", "\u20ac"]

BYTE_0 = len(SPECIALS) + len(TURNS) + len(RUNS)
EOT = len(SPECIALS) + 1


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and GGUF token types."""
    rows: list[tuple[str, float, int]] = []
    rows += [(piece, 0.0, 3) for piece in SPECIALS + TURNS]
    rows += [(piece, 0.0, 4) for piece in RUNS]
    rows += [(f"<0x{value:02X}>", 0.0, 6) for value in range(256)]
    letters = [c.replace(" ", "\u2581") for c in LETTERS]
    rows += [(c, -100.0 - i, 1) for i, c in enumerate(letters)]
    rows += [(piece, -1.0 - i, 1) for i, piece in enumerate(WORDS)]
    pieces, scores, types = zip(*rows)
    return list(pieces), list(scores), list(types)


VOCAB = len(vocabulary()[0])


def metadata() -> dict[str, tuple[int, Any]]:
    """Key -> (type, value); an array's value is (element type, list)."""
    pieces, scores, types = vocabulary()
    return {
        "general.architecture": (STR, "gemma3"),
        "general.name": (STR, "tiny"),
        "gemma3.context_length": (U32, CONTEXT),
        "gemma3.embedding_length": (U32, HIDDEN),
        "gemma3.block_count": (U32, LAYERS),
        "gemma3.feed_forward_length": (U32, FFN),
        "gemma3.attention.head_count": (U32, HEADS),
        "gemma3.attention.head_count_kv": (U32, KV_HEADS),
        "gemma3.attention.key_length": (U32, HEAD_DIM),
        "gemma3.attention.value_length": (U32, HEAD_DIM),
        "gemma3.attention.sliding_window": (U32, WINDOW),
        "gemma3.attention.layer_norm_rms_epsilon": (F32, 1e-6),
        "gemma3.rope.freq_base": (F32, 1e6),
        "tokenizer.ggml.model": (STR, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STR, pieces)),
        "tokenizer.ggml.scores": (ARRAY, (F32, scores)),
        "tokenizer.ggml.token_type": (ARRAY, (U32, types)),
        "tokenizer.ggml.bos_token_id": (U32, 2),
        "tokenizer.ggml.eos_token_id": (U32, 1),
        "tokenizer.ggml.eot_token_id": (U32, EOT),
        "tokenizer.ggml.unknown_token_id": (U32, 3),
        "tokenizer.ggml.padding_token_id": (U32, 0),
        "tokenizer.ggml.add_space_prefix": (BOOL, False),
    }


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Name -> float32 array, [rows, columns] or [columns]."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray:
        scale = 1.0 / np.sqrt(cols)
        return rng.normal(0, scale, (rows, cols)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.normal(size=size)).astype(np.float32)

    result = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": norm(HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": norm(HIDDEN),
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_q_norm": norm(HEAD_DIM),
            "attn_k_norm": norm(HEAD_DIM),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "post_attention_norm": norm(HIDDEN),
            "ffn_norm": norm(HIDDEN),
            "ffn_gate": matrix(FFN, HIDDEN),
            "ffn_up": matrix(FFN, HIDDEN),
            "ffn_down": matrix(HIDDEN, FFN),
            "post_ffw_norm": norm(HIDDEN),
        }
        for name, array in shapes.items():
            result[f"blk.{layer}.{name}.weight"] = array
    return result


def write(
    path: Path,
    meta: dict[str, tuple[int, Any]] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    type_ids: dict[str, int] | None = None,
) -> Path:
    """Writes a file; `type_ids` overrides the type that a tensor states."""
    meta = metadata() if meta is None else meta
    weights = tensors() if weights is None else weights
    header = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(meta))
    for key, (kind, value) in meta.items():
        header += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    offset = 0
    data = b""
    for name, array in weights.items():
        shape = array.shape[::-1]
        header += _string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape)
        type_id = (type_ids or {}).get(name, 0)
        header += struct.pack("<IQ", type_id, offset)
        payload = _padded(array.astype("<f4").tobytes())
        data += payload
        offset += len(payload)
    path.write_bytes(_padded(header) + data)
    return path


def write_talker(path: Path) -> Path:
    """A random model whose replies are letters, and end at max_tokens only."""
    meta = metadata()
    meta["gemma3.context_length"] = (U32, 1 << 20)
    pieces, _, _ = vocabulary()
    quiet = [i for i, piece in enumerate(pieces)
             if not re.fullmatch("[a-z\u2581]", piece)]
    weights = tensors(3)
    # Small rows have small logits; as input they count like any other.
    weights["token_embd.weight"][quiet] *= np.float32(1e-3)
    return write(path, meta, weights)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STR:
        return _string(value)
    if kind == ARRAY:
        element, values = value
        body = b"".join(_value(element, one) for one in values)
        return struct.pack("<IQ", element, len(values)) + body
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)
