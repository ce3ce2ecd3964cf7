"""Writes the tokenizer files of Hugging Face directories, out of GGUF's rows.

As in Gemma's own directories, tokenizer.model calls control tokens
user-defined and tokenizer_config.json names those that are special.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemmakv import _core

CONTROL, USER_DEFINED = 3, 4  # token types, the same in both formats
FIRST = ("<pad>", "<eos>", "<bos>", "<unk>")

Rows = tuple[list[str], list[float], list[int]]  # pieces, scores, types


def rows_of_gguf(path: str) -> Rows:
    file = _core.GgufFile(path)
    keys = ("tokens", "scores", "token_type")
    pieces, scores, types = (
        file.get(f"tokenizer.ggml.{key}") for key in keys
    )
    return pieces, scores, types


def varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def message(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def sentencepiece(
    rows: Rows,
    trainer: Mapping[int, int] = MappingProxyType({}),
    normalizer: Mapping[int, int] = MappingProxyType({}),
) -> bytes:
    """A tokenizer.model; settings by their numbers in the format."""
    model = bytearray()
    for piece, score, kind in zip(*rows):
        if piece == "<unk>":
            kind = 2
        elif kind == CONTROL and piece not in FIRST:
            kind = USER_DEFINED
        text = piece.replace(" ", "\u2581").encode()
        body = message(1, text) + struct.pack("<Bf", 0x15, score)
        model += message(1, body + bytes([0x18, kind]))
    # Kind (BPE), byte fallback; no added space, no removed spaces.
    for number, settings in (
        (2, {3: 2, 35: 1, 40: 3, 41: 2, 42: 1, 43: 0, **trainer}),
        (3, {3: 0, 4: 0, **normalizer}),
    ):
        fields = (varint(k << 3) + varint(v) for k, v in settings.items())
        model += message(number, b"".join(fields))
    return bytes(model)


def added_token(content: str, special: bool, **flags: Any) -> dict[str, Any]:
    """An entry of added_tokens_decoder."""
    names = ("lstrip", "normalized", "rstrip", "single_word")
    rest = dict.fromkeys(names, False)
    return {"content": content, **rest, "special": special, **flags}


def config(rows: Rows) -> dict[str, Any]:
    """A tokenizer_config.json."""
    added = {}
    for i, (piece, _, kind) in enumerate(zip(*rows)):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL and not piece.startswith("<unused")
            text = piece.replace(" ", "\u2581")
            added[str(i)] = added_token(text, special)
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "sp_model_kwargs": {},
        "tokenizer_class": "GemmaTokenizer",
    }


def tokenizer_json(rows: Rows) -> dict[str, Any]:
    """A tokenizer.json, with merges as transformers derives them."""
    vocab = {
        piece.replace(" ", "\u2581"): i for i, piece in enumerate(rows[0])
    }
    merges = []
    for piece, token in vocab.items():
        if rows[2][token] == CONTROL:
            continue
        pairs = (
            (piece[:i], piece[i:])
            for i in range(1, len(piece))
            if piece[:i] in vocab and piece[i:] in vocab
        )
        merges += sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))
    added = config(rows)["added_tokens_decoder"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(i), **one} for i, one in added.items()],
        "normalizer": {
            "type": "Replace",
            "pattern": {"String": " "},
            "content": "\u2581",
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), "utf-8")


def write(folder: Path, rows: Rows, kind: str) -> Path:
    """Writes a directory's files; `kind` is "model" or "json"."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer_config.json", config(rows))
    if kind == "model":
        (folder / "tokenizer.model").write_bytes(sentencepiece(rows))
    else:
        write_json(folder / "tokenizer.json", tokenizer_json(rows))
    return folder
