"""A GGUF file of Gemma 3 as a Hugging Face directory in float32.

    python weights.py MODEL.gguf DIR

What the peers' own converters read: config.json with the names that published
files have, the dequantized weights, the vocabulary. Runs in a peer's virtual
environment (numpy, gguf, sentencepiece, torch, transformers).
"""

from __future__ import annotations

import json
import pathlib
import sys

QUALITY = pathlib.Path(__file__).resolve().parents[2] / "quality"
sys.path.insert(0, str(QUALITY))

import gguf_reference  # noqa: E402


def published_config(config) -> dict:
    """Of a transformers configuration, with rotations as in published files:
    converters know those.
    """
    fields = config.to_dict()
    rope = fields.pop("rope_parameters")
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    if full["rope_type"] != "default":
        raise SystemExit("peers are compared with models of one rotation a "
                         f"kind of layer, found {full['rope_type']!r}")
    return {
        **fields,
        "architectures": ["Gemma3ForCausalLM"],
        "dtype": "float32",
        "torch_dtype": "float32",
        "rope_theta": full["rope_theta"],
        "rope_local_base_freq": sliding["rope_theta"],
        "rope_scaling": None,
    }


def write_tokenizer(metadata: dict, out: pathlib.Path) -> None:
    (out / "tokenizer.model").write_bytes(
        gguf_reference.sentencepiece_model(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
               for name, key in (("bos_token", "bos"), ("eos_token", "eos"),
                                 ("pad_token", "padding"),
                                 ("unk_token", "unknown"))}
    (out / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **special}
    ))


def main() -> None:
    gguf, out = sys.argv[1], pathlib.Path(sys.argv[2])
    metadata, tensors = gguf_reference.read_gguf(gguf)
    model = gguf_reference.build_model(metadata, tensors)
    model.tie_weights()  # or the embedding is written twice
    model.save_pretrained(out)
    config = published_config(model.config)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(metadata, out)


if __name__ == "__main__":
    main()
