"""Random models of every family, as transformers makes them. Needs torch.

What they differ in is drawn from all that their configurations allow; their
weights are drawn so that every part counts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from support import golden_models
from support.golden_models import Array

FAMILIES = [
    "gemma", "gemma2", "gemma3", "multimodal", "recurrentgemma", "gemma4",
    "vaultgemma", "experts", "gemma3n",
]  # fmt: skip
# What the layers add counts more than the token itself, or else every reply
# would repeat its first token.
GAINS = {
    "embed_tokens.weight": 0.15,
    "norm.weight": 8.0,
    "final_norm.weight": 8.0,
    "post_attention_layernorm.weight": 1.0,
    "post_feedforward_layernorm.weight": 1.0,
    "q_proj.weight": 1.5,
    "k_proj.weight": 1.5,
    "o_proj.weight": 3.0,
    "down_proj.weight": 3.0,
    "linear_out.weight": 3.0,
}

# Of norms that have no 1 beside their weights, and of scores that are not
# divided by the length of a head.
GEMMA4_GAINS = {
    **GAINS,
    "input_layernorm.weight": 1.0,
    "pre_feedforward_layernorm.weight": 1.0,
    "q_norm.weight": 0.35,
    "k_norm.weight": 0.35,
    "embed_tokens_per_layer.weight": 2.0,
    "per_layer_projection_norm.weight": 1.0,
    "post_per_layer_input_norm.weight": 0.5,
    "post_feedforward_layernorm_1.weight": 1.0,
    "pre_feedforward_layernorm_2.weight": 1.0,
    "post_feedforward_layernorm_2.weight": 1.0,
    "router.scale": 1.0,
    "per_expert_scale": 1.0,
    "router.proj.weight": 12.0,
    "experts.down_proj": 3.0,
}

# Coefficients of streams that stay small, of routers whose sums are about 1.
GEMMA3N_GAINS = {
    **GEMMA4_GAINS,
    "post_laurel_norm.weight": 0.6,
    "router_norm.weight": 1.0,
    "prediction_coefs.weight": 0.25,
    "correction_coefs.weight": 0.25,
    "modality_router.weight": 60.0,
}


def random_config(
    family: str, seed: int, vocab_size: int | None = None
) -> Any:
    """A small model's configuration, another for each seed."""
    rng = np.random.default_rng([seed, FAMILIES.index(family)])

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    kv_heads = pick(1, 1, 2, 3)
    heads = kv_heads * pick(1, 2, 3)
    layers = int(rng.integers(2, 8))
    common = {
        "vocab_size": int(rng.integers(140, 300)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": pick(1e-6, 1e-5),
        "tie_word_embeddings": pick(True, True, False),
        # No token ends a reply: they are as long as they may be.
        "eos_token_id": 0,
    }
    if vocab_size is not None:
        common["vocab_size"] = vocab_size
    head_dim = pick(32, 64, 96, 128, 256)
    if family == "recurrentgemma":
        return _recurrent_config(common, head_dim, pick)
    common.update(
        head_dim=head_dim,
        hidden_size=heads * pick(24, 32, 40),
        intermediate_size=pick(96, 130, 256),
        max_position_embeddings=4096,
    )
    if family == "gemma":
        rope = {"rope_type": "default", "rope_theta": pick(1e4, 3e5)}
        return transformers.GemmaConfig(**common, rope_parameters=rope)
    if family == "gemma4":
        return _gemma4_config(common, pick)
    if family == "experts":
        experts = pick(1, 3, 8, 40)
        common.update(
            hidden_size=heads * pick(32, 48),
            enable_moe_block=True,
            num_experts=experts,
            top_k_experts=int(rng.integers(1, min(experts, 9) + 1)),
            moe_intermediate_size=pick(16, 48, 64),
        )
        return _gemma4_config(common, pick)
    if family == "gemma3n":
        return _gemma3n_config(common, pick)
    common.update(
        sliding_window=pick(1, 5, 16, 23),
        query_pre_attn_scalar=pick(head_dim, 24, 168),
        layer_types=[
            pick("sliding_attention", "full_attention") for _ in range(layers)
        ],
        final_logit_softcapping=pick(None, 5.0, 30.0),
    )
    if family in ("gemma2", "vaultgemma"):
        rope = {"rope_type": "default", "rope_theta": pick(1e4, 3e5)}
        kind = {
            "gemma2": transformers.Gemma2Config,
            "vaultgemma": transformers.VaultGemmaConfig,
        }[family]
        return kind(
            **common,
            rope_parameters=rope,
            attn_logit_softcapping=pick(None, 2.0, 50.0),
        )
    common["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": pick(
            {"rope_type": "default", "rope_theta": 1e6},
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
    }
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**common)
    return _multimodal_config(common)


def _gemma4_config(common: dict[str, Any], pick: Any) -> Any:
    layers, heads = common["num_hidden_layers"], common["num_attention_heads"]
    kinds = [
        *(pick("sliding_attention", "full_attention")
          for _ in range(layers - 2)),
        "sliding_attention",
        "full_attention",
    ]
    ple = pick(0, 24, 32, 64)
    # Without these the reference fails on layers that share keys and values.
    most = layers if ple else 1
    shared = [n for n in range(most) if set(kinds[:layers - n]) == set(kinds)]
    return transformers.Gemma4TextConfig(
        **common,
        sliding_window=pick(1, 5, 16, 23),
        layer_types=kinds,
        final_logit_softcapping=pick(None, 5.0, 30.0),
        attention_k_eq_v=pick(True, False),
        num_global_key_value_heads=pick(None, 1, heads),
        global_head_dim=pick(64, 128, 512),
        hidden_size_per_layer_input=ple,
        vocab_size_per_layer_input=common["vocab_size"] + pick(0, 9),
        num_kv_shared_layers=pick(*shared),
        use_double_wide_mlp=pick(True, False),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": pick(0.25, 0.6, 1.0),
            },
        },
    )


def _gemma3n_config(common: dict[str, Any], pick: Any) -> Any:
    layers, inputs = common["num_hidden_layers"], pick(2, 3, 4, 6)
    kinds = [
        *(pick("sliding_attention", "full_attention")
          for _ in range(layers - 2)),
        "sliding_attention",
        "full_attention",
    ]
    shared = [n for n in range(layers) if set(kinds[:layers - n]) == set(kinds)]
    common["intermediate_size"] = pick(
        130, [pick(96, 130, 256) for _ in range(layers)])
    return transformers.Gemma3nTextConfig(
        **common,
        sliding_window=pick(1, 5, 16, 23),
        layer_types=kinds,
        final_logit_softcapping=pick(5.0, 30.0),
        hidden_size_per_layer_input=pick(24, 32, 64),
        vocab_size_per_layer_input=common["vocab_size"] + pick(0, 9, -40),
        num_kv_shared_layers=pick(*shared),
        altup_num_inputs=inputs,
        altup_active_idx=pick(0, 0, inputs - 1),
        altup_correct_scale=pick(True, True, False),
        laurel_rank=pick(8, 20, 64),
        activation_sparsity_pattern=pick(
            None, [pick(0.95, 0.5, 0.0) for _ in range(layers)]),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": pick(
                {"rope_type": "default", "rope_theta": 1e6},
                {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            ),
        },
    )


def _recurrent_config(common: dict[str, Any], head_dim: int, pick: Any) -> Any:
    heads = common["num_attention_heads"]
    return transformers.RecurrentGemmaConfig(
        **common,
        hidden_size=heads * min(head_dim, 128),
        lru_width=heads * pick(16, 48, 64),
        intermediate_size=pick(192, 260),
        attention_window_size=pick(1, 5, 16, 23),
        conv1d_width=pick(2, 4),
        logits_soft_cap=pick(5.0, 30.0),
        block_types=pick(
            ["recurrent", "recurrent", "attention"],
            ["attention", "recurrent"],
            ["recurrent", "attention", "attention"],
        ),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": pick(1e4, 3e5),
            "partial_rotary_factor": pick(0.25, 0.5, 1.0),
        },
    )


def _multimodal_config(text: dict[str, Any]) -> Any:
    # The class that holds both parts applies no cap of the logits.
    text = {**text, "final_logit_softcapping": None}
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "image_size": 28,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        tie_word_embeddings=text["tie_word_embeddings"],
        eos_token_id=text["eos_token_id"],
    )


def random_model(
    family: str, seed: int, vocab_size: int | None = None
) -> Any:
    """In float32; the weights are numbers of bfloat16."""
    kind = {
        "gemma": transformers.GemmaForCausalLM,
        "gemma2": transformers.Gemma2ForCausalLM,
        "vaultgemma": transformers.VaultGemmaForCausalLM,
        "gemma3": transformers.Gemma3ForCausalLM,
        "multimodal": transformers.Gemma3ForConditionalGeneration,
        "recurrentgemma": transformers.RecurrentGemmaForCausalLM,
        "gemma4": transformers.Gemma4ForCausalLM,
        "experts": transformers.Gemma4ForCausalLM,
        "gemma3n": transformers.Gemma3nForCausalLM,
    }[family]
    eager = {"attn_implementation": "eager"}  # others leave out soft caps
    if family == "experts":
        eager["experts_implementation"] = "eager"
    model = kind._from_config(
        random_config(family, seed, vocab_size), dtype=torch.float32, **eager
    ).eval()
    gains = {"gemma3n": GEMMA3N_GAINS, "gemma4": GEMMA4_GAINS,
             "experts": GEMMA4_GAINS}.get(
        family, GAINS)
    draw_weights(model, seed, gains)
    model.tie_weights()
    return model


def draw_weights(model: Any, seed: int, gains: dict[str, float]) -> None:
    drawn = dict(model.named_parameters())
    drawn.update(
        (n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar"))
    for name, parameter in drawn.items():
        shape = tuple(parameter.shape)
        parameter.data = torch.from_numpy(
            golden_models.draw(name, shape, seed, gains))


def prompt_of(model: Any, seed: int, length: int) -> list[int]:
    """BOS and as many tokens."""
    vocab = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(seed).integers(1, vocab, length)
    return [2, *(int(i) for i in ids)]


def reference_logits(model: Any, tokens: list[int]) -> Array:
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False)
    logits: Array = out.logits[0].float().numpy()
    return logits


def save(model: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path, max_shard_size="200KB")
    return path


EMBEDDING_FAMILIES = ["embedding", "embedding2"]


def random_embedding_model(family: str, seed: int) -> Any:
    """A model of embeddings in float32; EmbeddingGemma, or the second one."""
    rng = np.random.default_rng([seed, 100 + EMBEDDING_FAMILIES.index(family)])

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    kv_heads, layers = pick(1, 1, 2), int(rng.integers(2, 7))
    heads = kv_heads * pick(1, 2, 3)
    types = [
        *(pick("sliding_attention", "full_attention")
          for _ in range(layers - 2)),
        "sliding_attention",
        "full_attention",
    ]
    common = {
        "vocab_size": int(rng.integers(140, 300)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": pick(1e-6, 1e-5),
        "hidden_size": heads * pick(32, 48),
        "intermediate_size": pick(96, 130, 256),
        "head_dim": pick(32, 64, 256),
        "max_position_embeddings": 2048,
        "layer_types": types,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }
    if family == "embedding":
        config = transformers.Gemma3TextConfig(
            **common,
            sliding_window=pick(2, 5, 16, 23),
            query_pre_attn_scalar=pick(common["head_dim"], 24, 168),
            use_bidirectional_attention=True,
        )
        kind, gains = transformers.Gemma3TextModel, GAINS
    else:
        config = transformers.EmbeddingGemma2TextConfig(
            **common,
            sliding_window=pick(1, 5, 16, 23),
            global_head_dim=pick(64, 512),
            num_global_key_value_heads=pick(1, kv_heads),
            hidden_size_per_layer_input=pick(24, 32, 64),
            embedding_dim=pick(144, 160),
        )
        kind, gains = transformers.EmbeddingGemma2TextModel, GEMMA4_GAINS
    model = kind._from_config(
        config, dtype=torch.float32, attn_implementation="eager").eval()
    draw_weights(model, seed, gains)
    return model


def reference_vector(model: Any, tokens: list[int]) -> Array:
    """The mean of all positions, of length 1."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]))
    mean = out.last_hidden_state[0].mean(0)
    vector: Array = (mean / mean.norm()).float().numpy()
    return vector
