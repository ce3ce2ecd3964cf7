"""Writes a miniature Gemma as a GGUF file, sound or broken on purpose.

Random F32 weights; unless a configuration is given, a Gemma 3: two kinds of
layers, a window of 16 tokens, everything that the real model has, in less than
a megabyte. family_models.py has configurations of the other families.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from gemmakv import ModelConfig

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


CONFIG = ModelConfig(
    architecture="gemma3",
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    ffn_dim=FFN,
    vocab_size=VOCAB,
    context_length=CONTEXT,
    sliding_window=WINDOW,
    layer_kinds=["sliding"] * 5 + ["full", "sliding"],
    query_scale=1 / math.sqrt(HEAD_DIM),
    rope_base_full=1e6,
    qk_norm=True,
    post_norms=True,
    eos_ids=[1, EOT],
)


def metadata(config: ModelConfig = CONFIG) -> dict[str, tuple[int, Any]]:
    """Key -> (type, value); an array's value is (element type, list).

    Without what files commonly omit: the pattern of windows, and the rotary
    base where it is 10,000.
    """
    pieces, scores, types = vocabulary()
    family: dict[str, tuple[int, Any]] = {
        "context_length": (U32, config.context_length),
        "embedding_length": (U32, config.hidden_size),
        "block_count": (U32, config.num_layers),
        "feed_forward_length": (U32, config.ffn_dim),
        "attention.head_count": (U32, config.num_heads),
        "attention.head_count_kv": (U32, config.kv_heads),
        "attention.key_length": (U32, config.head_dim),
        "attention.value_length": (U32, config.head_dim),
        "attention.layer_norm_rms_epsilon": (F32, 1e-6),
    }
    for key, kind, value, usual in (
        ("attention.sliding_window", U32, _stated_window(config), 0),
        ("attn_logit_softcapping", F32, config.attn_soft_cap, 0),
        ("final_logit_softcapping", F32, config.final_soft_cap, 0),
        ("rope.freq_base", F32, config.rope_base_full, 1e4),
        ("rope.scaling.factor", F32, config.rope_factor_full, 1),
    ):
        if value != usual:
            family[key] = (kind, value)
    if config.bidirectional:
        family |= _embedding_metadata(config)
    name = config.architecture
    if config.altup_inputs:
        family |= _streams(config)
    return {
        "general.architecture": (STR, name),
        "general.name": (STR, "tiny"),
        **{f"{name}.{key}": value for key, value in family.items()},
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


def _stated_window(config: ModelConfig) -> int:
    """Of models of embeddings, twice the distance that is seen."""
    window = config.sliding_window
    return 2 * (window - 1) if config.bidirectional else window


def _embedding_metadata(config: ModelConfig) -> dict[str, tuple[int, Any]]:
    found: dict[str, tuple[int, Any]] = {"pooling_type": (U32, 1)}
    if config.dense_dim:
        found |= {
            "dense_2_feat_in": (U32, config.hidden_size),
            "dense_2_feat_out": (U32, config.dense_dim),
            "dense_3_feat_in": (U32, config.dense_dim),
            "dense_3_feat_out": (U32, config.hidden_size),
        }
    return found


def _streams(config: ModelConfig) -> dict[str, tuple[int, Any]]:
    """What Gemma 3n states beside the rest."""
    arguments, dense = config.arguments(), -math.inf
    cutoffs = arguments["sparsity_cutoff"]
    if not isinstance(cutoffs, list):
        cutoffs = [cutoffs] * config.num_layers
    owners = arguments["shares_kv"] or []
    slides = [kind == "sliding" for kind in config.layer_kinds]
    return {
        "altup.active_idx": (U32, config.altup_active),
        "altup.num_inputs": (U32, config.altup_inputs),
        "activation_sparsity_scale": (
            ARRAY, (F32, [dense if z is None else z for z in cutoffs])),
        "attention.shared_kv_layers": (
            U32, sum(owner is not None for owner in owners)),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, slides)),
        "embedding_length_per_layer_input": (U32, config.ple_dim),
    }


Tensors = dict[str, np.ndarray]


def tensors(seed: int = 0, config: ModelConfig = CONFIG) -> Tensors:
    """Name -> float32 array, [rows, columns] or [columns].

    The names are those of GGUF files, and of recurrent layers, which such
    files do not know, those that `Gemma.from_tensors` takes.
    """
    draw = _Draw(seed)
    result = {
        "token_embd.weight": draw.matrix(config.vocab_size, config.hidden_size),
        "output_norm.weight": draw.norm(config.hidden_size),
    }
    if config.ple_dim:
        result |= _per_layer_tensors(config, draw)
    for stream in range(max(0, config.altup_inputs - 1)):
        for stem in ("altup_proj", "altup_unembd_proj"):
            result[f"{stem}.{stream}.weight"] = draw.matrix(
                config.hidden_size, config.hidden_size
            )
    owners = config.shares_kv or [None] * config.num_layers
    for layer, kind in enumerate(config.layer_kinds):
        parts = _layer_tensors(config, layer, kind, draw)
        if owners[layer] is not None:
            for name in ("attn_k", "attn_v", "attn_k_norm"):
                parts.pop(name, None)
        for name, array in parts.items():
            end = name if "." in name or name == "rec_a_param" else (
                name + ".weight"
            )
            result[f"blk.{layer}.{end}"] = array
    if config.dense_dim:
        result["dense_2.weight"] = draw.matrix(
            config.dense_dim, config.hidden_size)
        result["dense_3.weight"] = draw.matrix(
            config.hidden_size, config.dense_dim)
    return result


class _Draw:
    """Random weights, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> np.ndarray:
        scale = 1.0 / np.sqrt(shape[-1])
        return self.rng.normal(0, scale, shape).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.1 * self.rng.normal(size=size)).astype(np.float32)

    def bias(self, size: int) -> np.ndarray:
        return (0.2 * self.rng.normal(size=size)).astype(np.float32)

    def decay(self, size: int) -> np.ndarray:
        """Recurrences that remember from three tokens to a thousand."""
        return self.rng.uniform(-8, -2, size).astype(np.float32)


def _layer_tensors(
    config: ModelConfig, layer: int, kind: str, draw: _Draw
) -> Tensors:
    hidden, ffn = config.hidden_size, config.ffn_dim
    result = {"attn_norm": draw.norm(hidden)}
    if kind == "recurrent":
        result |= _recurrent_tensors(config, draw)
    else:
        result |= _attention_tensors(config, layer, kind, draw)
    if config.post_norms:
        result["post_attention_norm"] = draw.norm(hidden)
    result |= {
        "ffn_norm": draw.norm(hidden),
        "ffn_gate": draw.matrix(ffn, hidden),
        "ffn_up": draw.matrix(ffn, hidden),
        "ffn_down": draw.matrix(hidden, ffn),
    }
    if config.post_norms:
        result["post_ffw_norm"] = draw.norm(hidden)
    if config.ple_dim:
        result |= {
            "inp_gate": draw.matrix(config.ple_dim, hidden),
            "proj": draw.matrix(hidden, config.ple_dim),
            "post_norm": draw.norm(hidden),
        }
    if config.altup_inputs:
        result |= _stream_tensors(config, draw)
    if config.laurel_rank:
        result |= {
            "laurel_l": draw.matrix(config.laurel_rank, hidden),
            "laurel_r": draw.matrix(hidden, config.laurel_rank),
            "laurel_post_norm": draw.norm(hidden),
        }
    if config.biases:
        result |= {
            "ffn_gate.bias": draw.bias(ffn),
            "ffn_up.bias": draw.bias(ffn),
            "ffn_down.bias": draw.bias(hidden),
        }
    if config.layer_scales:
        result["layer_output_scale"] = draw.norm(1)
    if config.num_experts:
        result |= _expert_tensors(config, draw)
    return result


def _expert_tensors(config: ModelConfig, draw: _Draw) -> Tensors:
    hidden, ffn = config.hidden_size, config.expert_ffn_dim
    count = config.num_experts
    return {
        "ffn_gate_inp": 8 * draw.matrix(count, hidden),
        "ffn_gate_inp.scale": draw.norm(hidden),
        "ffn_down_exps.scale": draw.norm(count),
        "post_ffw_norm_1": draw.norm(hidden),
        "pre_ffw_norm_2": draw.norm(hidden),
        "post_ffw_norm_2": draw.norm(hidden),
        "ffn_gate_up_exps": draw.matrix(count, 2 * ffn, hidden),
        "ffn_down_exps": draw.matrix(count, hidden, ffn),
    }


def _of(value: int | list[int], layer: int) -> int:
    """Of a layer: fields are lists where layers differ."""
    return value[layer] if isinstance(value, list) else value


def _per_layer_tensors(config: ModelConfig, draw: _Draw) -> Tensors:
    width = config.ple_dim * config.num_layers
    return {
        "per_layer_token_embd.weight": draw.matrix(config.ple_vocab, width),
        "per_layer_model_proj.weight": draw.matrix(width, config.hidden_size),
        "per_layer_proj_norm.weight": draw.norm(config.ple_dim),
    }


def _stream_tensors(config: ModelConfig, draw: _Draw) -> Tensors:
    hidden, inputs = config.hidden_size, config.altup_inputs
    result = {
        "altup_router_norm": draw.norm(hidden),
        # Sums of about 1: routers divide by the length of a row.
        "altup_router": hidden * draw.matrix(inputs, hidden),
        "altup_predict_coef": 0.3 * draw.matrix(inputs**2, inputs),
        "altup_correct_coef": 0.3 * draw.matrix(inputs, inputs),
    }
    if config.altup_correct_scale:
        result["altup_correct_scale"] = draw.norm(hidden)
    return {name: np.float32(array) for name, array in result.items()}


def _attention_tensors(
    config: ModelConfig, layer: int, kind: str, draw: _Draw
) -> Tensors:
    hidden, head_dim = config.hidden_size, _of(config.head_dim, layer)
    kv_heads = _of(config.kv_heads, layer)
    result = {
        "attn_q": draw.matrix(config.num_heads * head_dim, hidden),
        "attn_k": draw.matrix(kv_heads * head_dim, hidden),
    }
    if not (config.keys_are_values and kind == "full"):
        result["attn_v"] = draw.matrix(kv_heads * head_dim, hidden)
    if config.qk_norm:
        result["attn_q_norm"] = draw.norm(head_dim)
        result["attn_k_norm"] = draw.norm(head_dim)
    result["attn_output"] = draw.matrix(hidden, config.num_heads * head_dim)
    if config.biases:
        result["attn_output.bias"] = draw.bias(hidden)
    return result


def _recurrent_tensors(config: ModelConfig, draw: _Draw) -> Tensors:
    hidden, width = config.hidden_size, config.lru_width
    block = width // config.lru_blocks
    result = {
        "rec_x": draw.matrix(width, hidden),
        "rec_y": draw.matrix(width, hidden),
        "rec_output": draw.matrix(hidden, width),
        "rec_conv": draw.matrix(width, config.conv_width),
        "rec_conv.bias": draw.bias(width),
        "rec_input_gate": draw.matrix(width, block),
        "rec_input_gate.bias": draw.bias(width),
        "rec_a_gate": draw.matrix(width, block),
        "rec_a_gate.bias": draw.bias(width),
        "rec_a_param": draw.decay(width),
    }
    if config.biases:
        result |= {
            "rec_x.bias": draw.bias(width),
            "rec_y.bias": draw.bias(width),
            "rec_output.bias": draw.bias(hidden),
        }
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
    payloads = []
    for name, array in weights.items():
        shape = array.shape[::-1]
        header += _string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape)
        type_id = (type_ids or {}).get(name, 0)
        header += struct.pack("<IQ", type_id, offset)
        payload = _padded(array.astype("<f4").tobytes())
        payloads.append(payload)
        offset += len(payload)
    with path.open("wb") as file:
        file.write(_padded(header))
        file.writelines(payloads)
    return path


EMBEDDING = ModelConfig(
    **CONFIG.arguments()
    | {
        "architecture": "gemma-embedding", "bidirectional": True,
        "hidden_size": 160, "dense_dim": 96, "sliding_window": 9,
        "layer_kinds": ["sliding"] * 5 + ["full", "sliding"],
        "eos_ids": [1], "embedding_scale": None,
    }
)  # fmt: skip


def write_embedding(
    path: Path, dense: bool = True, add_eos: bool = True
) -> Path:
    """A model of embeddings, whole or without its products."""
    config = EMBEDDING
    if not dense:
        config = ModelConfig(**config.arguments() | {"dense_dim": 0})
    meta = metadata(config)
    del meta["tokenizer.ggml.eot_token_id"]
    meta["tokenizer.ggml.add_eos_token"] = (BOOL, add_eos)
    return write(path, meta, tensors(5, config))


def write_split(folder: Path, count: int = 3) -> list[Path]:
    """The model of `write` in several files; the first one has no tensor."""
    weights = list(tensors().items())
    paths = []
    for number in range(count):
        meta = metadata() if number == 0 else {}
        meta["split.no"] = (U32, number)
        meta["split.count"] = (U32, count)
        meta["split.tensors.count"] = (U32, len(weights))
        part = weights[number - 1 :: count - 1] if number > 0 else []
        path = folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, meta, dict(part)))
    return paths


def write_talker(path: Path, endless: bool = True) -> Path:
    """A random model whose likeliest next tokens are letters. If `endless`, no
    reply ends before max_tokens, however it is sampled.
    """
    meta = metadata()
    meta["gemma3.context_length"] = (U32, 1 << 20)
    pieces, _, _ = vocabulary()
    quiet = [i for i, piece in enumerate(pieces)
             if not re.fullmatch("[a-z\u2581]", piece)]
    weights = tensors(3)
    # Small rows have small logits; as input they count like any other.
    embedding = weights["token_embd.weight"]
    embedding[quiet] *= np.float32(1e-3)
    if endless:
        # No layer writes column 0: there stands what each token brings, a
        # little, and the rows of tokens that end a reply turn it into logits
        # below -25.
        for name, array in weights.items():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                array[0] = 0
        embedding[:, 0] = 1e-3
        embedding[CONFIG.eos_ids, 0] = -160
        weights["output_norm.weight"][0] = 100
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
