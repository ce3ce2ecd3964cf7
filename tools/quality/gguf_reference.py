"""The float32 oracle: a GGUF file as a Hugging Face Gemma 3 model.

Weights are dequantized by the `gguf` package and run by the modelling code of
`transformers`, so no line of gemmakv takes part in the figures that gemmakv is
measured by. Heavy packages are imported where they are used: a caller that
only wants token ids needs neither torch nor transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

TEXTS = pathlib.Path(__file__).resolve().parent / "texts"

# GGUF's per-layer tensors and the modules of transformers that hold them.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read_gguf(path: str | pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Metadata and every tensor dequantized to float32, under GGUF names.

    Matrices are [rows, cols]; norm weights hold 1 + w, as the file has them.
    """
    import gguf

    reader = gguf.GGUFReader(str(path))
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[tensor.name] = np.ascontiguousarray(
            values.reshape(shape), dtype=np.float32
        )
    return metadata, tensors


def hf_config(metadata: Mapping, vocab_size: int):
    """The transformers configuration that the metadata of a file describes."""
    import transformers

    arch = metadata["general.architecture"]
    if arch != "gemma3":
        raise ValueError(f"the oracle runs gemma3, the file says {arch!r}")

    def get(key: str, default=None):
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ValueError(f"the file has no {arch}.{key}")
        return value

    layers = int(get("block_count"))
    heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length"))
    # The files say nothing of the query scale; 27B alone (62 layers) deviates.
    query_scalar = 168 if layers == 62 else head_dim
    factor = float(metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    full_rope = {
        "rope_type": "linear" if factor != 1.0 else "default",
        "rope_theta": float(get("rope.freq_base", 1e6)),
    }
    if factor != 1.0:
        full_rope["factor"] = factor
    period = int(metadata.get(f"{arch}.attention.sliding_window_pattern", 6))
    return transformers.Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=int(get("embedding_length")),
        intermediate_size=int(get("feed_forward_length")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(get("attention.head_count_kv")),
        head_dim=head_dim,
        max_position_embeddings=int(get("context_length")),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
        query_pre_attn_scalar=query_scalar,
        sliding_window=int(get("attention.sliding_window")),
        layer_types=[
            "full_attention" if i % period == period - 1
            else "sliding_attention"
            for i in range(layers)
        ],
        rope_parameters={
            "full_attention": full_rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(
                    metadata.get(f"{arch}.rope.freq_base_swa", 1e4)
                ),
            },
        },
        tie_word_embeddings=True,
    )


def build_model(metadata: Mapping, tensors: Mapping[str, np.ndarray],
                attention: str = "sdpa"):
    """A Gemma3ForCausalLM in float32, in evaluation mode, with these weights.

    Raises ValueError if a tensor is left over or a parameter is not given.
    """
    import torch
    import transformers

    config = hf_config(metadata, tensors["token_embd.weight"].shape[0])
    config._attn_implementation = attention
    state = {}
    for name, values in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        if parts == ["token_embd"]:
            state["model.embed_tokens.weight"] = values
            state["lm_head.weight"] = tensors.get("output.weight", values)
        elif parts == ["output_norm"]:
            state["model.norm.weight"] = values - 1.0
        elif parts[0] == "blk" and parts[2] in _LAYER:
            key = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
            state[key] = values - 1.0 if "norm" in parts[2] else values
        elif parts != ["output"]:
            raise ValueError(f"no place in the model for tensor {name}")
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(
        {key: torch.from_numpy(np.array(v)) for key, v in state.items()},
        strict=False, assign=True,
    )
    if missing or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    return model


def check_window(model) -> None:
    """Asserts that attention sees max(0, p - window + 1) .. p, no more.

    Needs an eager model: only that one returns attention weights.
    """
    import torch

    config = model.config
    window = config.sliding_window
    length = window + 8
    ids = torch.arange(length)[None] % (config.vocab_size - 8) + 4
    with torch.inference_mode():
        output = model.model(ids, output_attentions=True, use_cache=False)
        maps = output.attentions
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    for kind, attention in zip(config.layer_types, maps):
        seen = (attention[0] > 0).any(0)
        limit = window if kind == "sliding_attention" else length
        outside = (distance < 0) | (distance >= limit)
        if bool((seen & outside).any()):
            raise AssertionError(f"{kind} sees positions that it must not")
        # Softmax may underflow to zero for a few pairs, never for the diagonal
        # of the window's far edge as a whole.
        edge = seen[distance == limit - 1]
        if not bool(edge.any()):
            raise AssertionError(f"{kind} misses the far edge of its window")


def logits_in_chunks(model, ids, rows: int = 128
                     ) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first position, float32 logits [n, vocab]) over all of `ids`.

    One pass makes the hidden states; the head runs `rows` positions at a time,
    because the logits of 3,000 positions are 3 GB.
    """
    import torch

    with torch.inference_mode():
        hidden = model.model(torch.tensor([list(ids)]), use_cache=False)[0][0]
        cap = model.config.final_logit_softcapping
        for begin in range(0, hidden.shape[0], rows):
            logits = model.lm_head(hidden[begin:begin + rows])
            if cap:
                logits = torch.tanh(logits / cap) * cap
            yield begin, logits.numpy()


def sentencepiece_model(metadata: Mapping) -> bytes:
    """The vocabulary of a GGUF file as a serialized SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    proto = pb.ModelProto()
    spec = proto.trainer_spec
    spec.model_type = pb.TrainerSpec.ModelType.BPE
    spec.byte_fallback = True
    spec.unk_id = int(metadata.get("tokenizer.ggml.unknown_token_id", 3))
    spec.bos_id = int(metadata.get("tokenizer.ggml.bos_token_id", 2))
    spec.eos_id = int(metadata.get("tokenizer.ggml.eos_token_id", 1))
    spec.pad_id = int(metadata.get("tokenizer.ggml.padding_token_id", 0))
    tokens = metadata["tokenizer.ggml.tokens"]
    spec.unk_piece = tokens[spec.unk_id]
    spec.bos_piece = tokens[spec.bos_id]
    spec.eos_piece = tokens[spec.eos_id]
    spec.pad_piece = tokens[spec.pad_id]
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    for piece, score, kind in zip(
        tokens, metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
    ):
        proto.pieces.add(piece=piece, score=score, type=kind)
    spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString()


def tokenize(metadata: Mapping, text: str) -> list[int]:
    """Token ids of plain text with the beginning-of-sequence id in front."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(
        model_proto=sentencepiece_model(metadata)
    )
    bos = int(metadata.get("tokenizer.ggml.bos_token_id", 2))
    return [bos, *processor.encode(text)]


def read_text(name: str) -> tuple[str, str]:
    """(short name, content) of a text of texts/ or of any file."""
    path = TEXTS / f"{name}.txt"
    if not path.exists():
        path = pathlib.Path(name)
    return path.stem, path.read_text(encoding="utf-8")
