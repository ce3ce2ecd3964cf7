"""Tiny models of every Gemma family in Hugging Face's form, without torch.

A golden is two files of tests/golden/families: NAME.json, which states

    about     what the model is there for
    config    its config.json
    seed      of the weights and of the tokens
    gains     by the end of the name, what the weights' standard deviations are
              multiplied by, and what is added to the weights of norms
    shards    number of .safetensors files; 1 unless given
    prefix    in front of the names of the text part; "model." unless given

and NAME.npz with `tokens` [n] and the reference's `logits` [n, vocab_size],
which tools/make_goldens.py writes. The weights themselves are stored nowhere:
each is a function of its name, shape and seed alone. They are numbers of
bfloat16, so that files of F32 and of BF16 hold the same model.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "families"
PROMPT = 72  # tokens of a golden: more than four windows of 16

Array = npt.NDArray[np.float32]
Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Golden:
    """What NAME.json states."""

    name: str
    about: str
    config: Config
    seed: int
    gains: dict[str, float]
    shards: int = 1
    prefix: str = "model."

    @property
    def text_config(self) -> Config:
        """The part of config.json that describes the language model."""
        text: Config = self.config.get("text_config", self.config)
        return text

    @property
    def multimodal(self) -> bool:
        """Whether there are tensors of an image encoder besides."""
        return "vision_config" in self.config

    def tokens(self) -> list[int]:
        """Token ids of the prompt; the first is BOS."""
        vocab = self.text_config["vocab_size"]
        bits = np.random.PCG64([self.seed, PROMPT]).random_raw(PROMPT - 1)
        return [2, *(int(x) for x in bits % np.uint64(vocab))]

    def tensors(self) -> dict[str, Array]:
        """The text part's weights by name, without the prefix."""
        shapes = tensor_shapes(self.config)
        return {
            name: draw(name, shape, self.seed, self.gains)
            for name, shape in shapes.items()
        }

    def reference(self) -> Array:
        """The logits that transformers computes in float32."""
        with np.load(FOLDER / f"{self.name}.npz") as stored:
            if stored["tokens"].tolist() != self.tokens():
                raise ValueError(f"{self.name}: not the prompt of its logits")
            logits: Array = stored["logits"]
        return logits


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> Golden:
    stated = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return Golden(name, **stated)


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names, as in a checkpoint but without the prefix, and shapes."""
    text = config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    recurrent = text["model_type"] == "recurrent_gemma"
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "final_norm.weight" if recurrent else "norm.weight": (hidden,),
    }
    ple = per_layer_size(text)
    if ple:
        width = ple * text["num_hidden_layers"]
        part = "ple." if encoder(text) else ""
        if not encoder(text):
            rows = text["vocab_size_per_layer_input"]
            shapes["embed_tokens_per_layer.weight"] = (rows, width)
        shapes[f"{part}per_layer_model_projection.weight"] = (width, hidden)
        shapes[f"{part}per_layer_projection_norm.weight"] = (ple,)
    if encoder(text):
        shapes["embedding_projection.weight"] = (text["embedding_dim"], hidden)
    if gemma3n(text):
        for stream in range(text["altup_num_inputs"] - 1):
            for name in ("altup_projections", "altup_unembed_projections"):
                shapes[f"{name}.{stream}.weight"] = (hidden, hidden)
    for layer in range(text["num_hidden_layers"]):
        own = (
            _recurrent_layer(text, layer) if recurrent else _layer(text, layer)
        )
        for name, shape in own.items():
            shapes[f"layers.{layer}.{name}"] = shape
    # What stands nearest to the text model wins.
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is False:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def layer_sizes(text: Config, layer: int) -> tuple[int, int]:
    """(heads of keys and values, head_dim) of a layer that attends."""
    # Families' defaults, which published files rely on.
    kv_heads = text.get("num_key_value_heads", 4)
    head_dim = text.get("head_dim", 256)
    by_kind = gemma4(text) or encoder(text)
    if not by_kind or text["layer_types"][layer] != "full_attention":
        return kv_heads, head_dim
    if "per_layer_config" in text:
        own = text["per_layer_config"].get(str(layer), {})
        return (own.get("num_key_value_heads", kv_heads),
                own.get("head_dim", head_dim))
    if text["attention_k_eq_v"]:
        kv_heads = text.get("num_global_key_value_heads", kv_heads)
    return kv_heads, text.get("global_head_dim", 512)


def gemma4(text: Config) -> bool:
    kind: str = text["model_type"]
    return kind.startswith("gemma4")


def encoder(text: Config) -> bool:
    """EmbeddingGemma 2."""
    kind: str = text["model_type"]
    return kind == "embedding_gemma2_text"


def gemma3n(text: Config) -> bool:
    kind: str = text["model_type"]
    return kind == "gemma3n_text"


def plain_norms(text: Config) -> bool:
    """Whether norms multiply by their weights, not by 1 + weights."""
    return gemma3n(text) or gemma4(text) or encoder(text)


def per_layer_size(text: Config) -> int:
    """Width of the embeddings for each layer; 0 without."""
    kinds = ("gemma3n_text", "gemma4_text")
    default = 256 if text["model_type"] in kinds else 0
    return text.get("hidden_size_per_layer_input", default) or 0


def first_shared_layer(text: Config) -> int:
    """The first that reads the keys and values of another."""
    count: int = text["num_hidden_layers"]
    return count - text.get("num_kv_shared_layers", 0)


def _layer(text: Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn = text["hidden_size"], text["intermediate_size"]
    if isinstance(ffn, list):
        ffn = ffn[layer]
    if text.get("use_double_wide_mlp") and layer >= first_shared_layer(text):
        ffn *= 2
    heads = text.get("num_attention_heads", 8)
    kv_heads, head_dim = layer_sizes(text, layer)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if text["model_type"] == "vaultgemma":
        del shapes["post_attention_layernorm.weight"]
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
    elif text["model_type"] != "gemma":
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    if text["model_type"] == "gemma3_text" or plain_norms(text):
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    if gemma3n(text):
        shapes |= _streams(text)
        if layer >= first_shared_layer(text):
            for name in ("k_proj", "v_proj", "k_norm"):
                del shapes[f"self_attn.{name}.weight"]
    if encoder(text):
        shapes["layer_scalar"] = (1,)
    if gemma4(text):
        shapes["layer_scalar"] = (1,)
        full = text["layer_types"][layer] == "full_attention"
        unread = {"v_proj"} if full and text["attention_k_eq_v"] else set()
        if layer >= first_shared_layer(text):
            unread |= {"k_proj", "v_proj", "k_norm"}
        for name in unread:
            del shapes[f"self_attn.{name}.weight"]
    if text.get("enable_moe_block"):
        shapes |= _experts(text)
    ple = per_layer_size(text)
    if ple:
        part = "ple_block." if encoder(text) else ""
        shapes[f"{part}per_layer_input_gate.weight"] = (ple, hidden)
        shapes[f"{part}per_layer_projection.weight"] = (hidden, ple)
        shapes[f"{part}post_per_layer_input_norm.weight"] = (hidden,)
    return shapes


def _experts(text: Config) -> dict[str, tuple[int, ...]]:
    """What stands beside the feed-forward of a layer."""
    hidden, ffn = text["hidden_size"], text["moe_intermediate_size"]
    count = text["num_experts"]
    return {
        "router.proj.weight": (count, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * ffn, hidden),
        "experts.down_proj": (count, hidden, ffn),
        "post_feedforward_layernorm_1.weight": (hidden,),
        "pre_feedforward_layernorm_2.weight": (hidden,),
        "post_feedforward_layernorm_2.weight": (hidden,),
    }


def _streams(text: Config) -> dict[str, tuple[int, ...]]:
    """What a layer of Gemma 3n has beside the rest."""
    hidden, inputs = text["hidden_size"], text["altup_num_inputs"]
    rank = text["laurel_rank"]
    return {
        "altup.correct_output_scale": (hidden,),
        "altup.correction_coefs.weight": (inputs, inputs),
        "altup.prediction_coefs.weight": (inputs**2, inputs),
        "altup.modality_router.weight": (inputs, hidden),
        "altup.router_norm.weight": (hidden,),
        "laurel.linear_left.weight": (rank, hidden),
        "laurel.linear_right.weight": (hidden, rank),
        "laurel.post_laurel_norm.weight": (hidden,),
    }


def _recurrent_layer(text: Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = hidden // heads
    ffn = text["intermediate_size"] // 2
    # Published files have the second name.
    kinds = text.get("block_types") or text["_block_types"]
    shapes: dict[str, tuple[int, ...]] = {
        "temporal_pre_norm.weight": (hidden,),
        "channel_pre_norm.weight": (hidden,),
        "mlp_block.gate_proj.weight": (ffn, hidden),
        "mlp_block.gate_proj.bias": (ffn,),
        "mlp_block.up_proj.weight": (ffn, hidden),
        "mlp_block.up_proj.bias": (ffn,),
        "mlp_block.down_proj.weight": (hidden, ffn),
        "mlp_block.down_proj.bias": (hidden,),
    }
    if kinds[layer % len(kinds)] == "attention":
        kv_dim = text.get("num_key_value_heads", heads) * head_dim
        mixer: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (hidden, hidden),
            "k_proj.weight": (kv_dim, hidden),
            "v_proj.weight": (kv_dim, hidden),
            "o_proj.weight": (hidden, hidden),
            "o_proj.bias": (hidden,),
        }
    else:
        width = text.get("lru_width") or hidden
        block = width // heads
        mixer = {
            "linear_x.weight": (width, hidden),
            "linear_x.bias": (width,),
            "linear_y.weight": (width, hidden),
            "linear_y.bias": (width,),
            "linear_out.weight": (hidden, width),
            "linear_out.bias": (hidden,),
            "conv_1d.weight": (width, 1, text.get("conv1d_width", 4)),
            "conv_1d.bias": (width,),
            "rg_lru.recurrent_param": (width,),
            "rg_lru.input_gate_weight": (heads, block, block),
            "rg_lru.input_gate_bias": (heads, block),
            "rg_lru.recurrent_gate_weight": (heads, block, block),
            "rg_lru.recurrent_gate_bias": (heads, block),
        }
    for name, shape in mixer.items():
        shapes[f"temporal_block.{name}"] = shape
    return shapes


def to_bfloat16(values: npt.NDArray[Any]) -> Array:
    """Rounds to the nearest number of bfloat16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    up = bits >> np.uint32(16)
    up &= np.uint32(1)
    up += np.uint32(0x7FFF)
    up += bits
    up &= np.uint32(0xFFFF0000)
    rounded: Array = up.view(np.float32)
    return rounded


def draw(
    name: str, shape: tuple[int, ...], seed: int, gains: Mapping[str, float]
) -> Array:
    """The weights of one tensor, nearly normal, in bfloat16's numbers.

    Made of the raw bits of a generator whose stream never changes, by exact
    arithmetic and one rounding, so that any NumPy draws the same.
    """
    count = int(np.prod(shape))
    generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
    bits = generator.random_raw(count).astype("<u8", copy=False)
    quarters = bits.view("<u2").reshape(-1, 4)
    parts = quarters[:, 0].astype(np.uint32)
    for i in range(1, 4):
        parts += quarters[:, i]
    # A sum of four uniform numbers in [0, 1) has variance 1/3.
    unit = (parts / 65536 - 2) * np.sqrt(3)
    gain = [g for end, g in gains.items() if f".{name}".endswith(f".{end}")]
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight",
                      "router.scale", "per_expert_scale")):
        return to_bfloat16((sum(gain) + 0.2 * unit).reshape(shape))
    if name.endswith(("layer_scalar", "correct_output_scale")):
        return to_bfloat16((0.9 + 0.15 * unit).reshape(shape))
    if name.endswith("recurrent_param"):
        # Decays of a token from 0.6 to nearly 1.
        return to_bfloat16((-4 + 1.2 * unit).reshape(shape))
    spread = 1 / np.sqrt(_inputs(name, shape)) * np.prod(gain)
    return to_bfloat16((spread * unit).reshape(shape))


def _inputs(name: str, shape: tuple[int, ...]) -> float:
    """How many numbers a row multiplies; 4 for biases: they count."""
    if name.endswith("bias"):
        return 4
    if name.endswith("gate_weight"):
        return shape[1]
    return shape[-1]


# The core's names by those of a checkpoint, both without "weight" and layer.
_CORE_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "embedding_projection": "embedding_projection",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "final_norm": "output_norm",
    "norm": "output_norm",
    "temporal_pre_norm": "attn_norm",
    "channel_pre_norm": "ffn_norm",
    "temporal_block.q_proj": "attn_q",
    "temporal_block.k_proj": "attn_k",
    "temporal_block.v_proj": "attn_v",
    "temporal_block.o_proj": "attn_output",
    "temporal_block.linear_x": "rec_x",
    "temporal_block.linear_y": "rec_y",
    "temporal_block.linear_out": "rec_output",
    "temporal_block.conv_1d": "rec_conv",
    "mlp_block.gate_proj": "ffn_gate",
    "mlp_block.up_proj": "ffn_up",
    "mlp_block.down_proj": "ffn_down",
}
# The same of experts, whole.
_EXPERTS = {
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
_GATES = {"input_gate": "rec_input_gate", "recurrent_gate": "rec_a_gate"}


def core_tensors(golden: Golden) -> dict[str, Array]:
    """The weights as the core names and shapes them (from_tensors)."""
    kind = golden.text_config["model_type"]
    return {
        core_name(name, kind): w
        if plain_norms(golden.text_config)
        else _core_form(name, w)
        for name, w in golden.tensors().items()
    }


def core_name(name: str, model_type: str) -> str:
    """The core's name for a checkpoint's, without prefix."""
    start = ""
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        start = f"blk.{layer}."
    if name == "temporal_block.rg_lru.recurrent_param":
        return start + "rec_a_param"
    for gate, core in _GATES.items():
        for kind in ("weight", "bias"):
            if name == f"temporal_block.rg_lru.{gate}_{kind}":
                return f"{start}{core}.{kind}"
    if name in _EXPERTS:
        return start + _EXPERTS[name]
    if name == "layer_scalar":
        return start + "layer_output_scale.weight"
    if name == "altup.correct_output_scale":
        return start + "altup_correct_scale.weight"
    if name.startswith("altup_"):  # of a stream
        name = name.replace("_projections", "_proj")
        return name.replace("unembed", "unembd")
    stem, kind = name.rsplit(".", 1)
    stem = stem.removeprefix("ple.").removeprefix("ple_block.")
    if stem == "post_attention_layernorm":
        # The first generation's name for the norm before the feed-forward.
        stem = "ffn_norm" if model_type == "gemma" else "post_attention_norm"
        return f"{start}{stem}.{kind}"
    return f"{start}{_CORE_NAMES[stem]}.{kind}"


def _core_form(name: str, weights: Array) -> Array:
    if name.endswith("norm.weight"):
        return 1 + weights
    if name.endswith("gate_weight"):  # [block, input, output]
        return weights.transpose(0, 2, 1).reshape(-1, weights.shape[1])
    if name.endswith("gate_bias"):
        return weights.reshape(-1)
    if name.endswith("conv_1d.weight"):
        return weights[:, 0, :]
    return weights


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def write(folder: Path, golden: Golden, dtype: str = "F32") -> Path:
    """Writes a model directory; `dtype` is "F32", "F16" or "BF16"."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, golden.config)
    tensors = {
        _stored_name(golden, name): array
        for name, array in golden.tensors().items()
    }
    if golden.multimodal:
        tensors.update(_vision_tensors())
    listed = list(tensors)
    files = [listed[i :: golden.shards] for i in range(golden.shards)]
    weight_map = {}
    for i, part in enumerate(files):
        file = f"model-{i + 1:05d}-of-{golden.shards:05d}.safetensors"
        file = "model.safetensors" if golden.shards == 1 else file
        write_safetensors(folder / file, {n: tensors[n] for n in part}, dtype)
        weight_map.update(dict.fromkeys(part, file))
    if golden.shards > 1:
        size = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index), "utf-8")
    return folder


def _stored_name(golden: Golden, name: str) -> str:
    if name == "lm_head.weight":
        return golden.prefix.removesuffix("model.") + name
    return golden.prefix + name


def _vision_tensors() -> dict[str, Array]:
    """Some of what a multimodal checkpoint holds besides."""
    return {
        name: draw(name, shape, 0, {})
        for name, shape in {
            "vision_tower.vision_model.post_layernorm.weight": (8,),
            "vision_tower.vision_model.embeddings.patch_embedding.weight": (
                8, 3, 14, 14),
            "multi_modal_projector.mm_input_projection_weight": (8, 16),
        }.items()
    }


def write_safetensors(
    path: Path, tensors: Mapping[str, Array], dtype: str
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts = []
    offset = 0
    for name, array in tensors.items():
        data = array.astype("<f4").tobytes()
        if dtype == "F16":
            data = array.astype("<f2").tobytes()
        elif dtype == "BF16":
            high = array.view(np.uint32) >> np.uint32(16)
            data = high.astype("<u2").tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(parts))
