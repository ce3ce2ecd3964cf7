"""Fields of requests that other servers know, and this one does not.

One table for all routes: a request may have such a field with a value that
asks for nothing, and gets an error that names it otherwise. A route that does
what a field asks for declares the field, and so never looks for it here.

Fields that change no token of a reply are not listed. They say where or when a
request runs, or who sends it (`priority`, `id_slot`, `user`), bound a sampler
that is off (`dry_base`, `xtc_threshold`, `mirostat_tau`), or are hints
(`prediction`, `draft_model`). Such fields are ignored, as unknown ones are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmakv.server.service.errors import unsupported

# The order of samplers that llama-server has by default, of several versions;
# its page sends it with each request.
_SAMPLERS = (
    "edkypmxt", "edskypmxt",
    ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc",
     "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p",
     "xtc", "temperature"],
)  # fmt: skip

# By name, the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # Samplers and penalties: llama-server, LM Studio, KoboldCpp and others.
    "adaptive_target": (-1,), "dry_multiplier": (0,),
    "dynamic_temperature": (False,), "dynatemp_range": (0,),
    "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "min_keep": (0,), "mirostat": (0,),
    "mirostat_mode": (0,), "no_repeat_ngram_size": (0,), "nsigma": (0,),
    "penalty_alpha": (0,), "sampler_order": ([],), "sampler_priority": ([],),
    "samplers": ([], "", *_SAMPLERS), "smoothing_factor": (0,),
    "temperature_last": (False,), "tfs": (1,), "tfs_z": (1,), "top_a": (0,),
    "top_n_sigma": (-1,), "typical": (1,), "typical_p": (1,),
    "xtc_probability": (0,),
    # Searches, and tokens that a reply may have.
    "allowed_token_ids": ([],), "bad_words": ([],), "ban_eos_token": (False,),
    "banned_strings": ([],), "banned_tokens": ([], ""), "best_of": (1,),
    "custom_token_bans": ("",), "cfg_scale": (1,), "do_sample": (True,),
    "early_stopping": (False,), "guidance_scale": (1,), "length_penalty": (1,),
    "min_length": (0,), "negative_prompt": ("",), "num_beams": (1,),
    "repetition_detection": (), "use_beam_search": (False,),
    "watermarking": (False,),
    # Code and weights of the client's.
    "custom_logit_processor": ("",), "custom_params": ({},),
    "logits_processors": ([],), "lora": ([],), "lora_path": ("",),
    "session_params": ({},), "vllm_xargs": ({},),
    # Where a reply ends, and what of it is shown.
    "detokenize": (True,), "include_reasoning": (True,),
    "include_stop_str_in_output": (False,), "n_indent": (0,),
    "no_stop_trim": (False,), "separate_reasoning": (True,),
    "skip_special_tokens": (True,), "stop_regex": ("", []),
    "stream_reasoning": (True,), "t_max_predict_ms": (0, -1),
    "thinking_budget_tokens": (-1,), "thinking_token_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    # What the answer tells beside the reply.
    "logprob_token_ids": ([],), "post_sampling_probs": (False,),
    "prompt_logprobs": (), "response_fields": ([],),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,), "return_routed_experts": (False,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    # Forms of the reply.
    "ebnf": ("",), "function_call": ("none", "auto"), "functions": ([],),
    "grammar_lazy": (False,), "grammar_triggers": ([],), "guided_choice": (),
    "guided_decoding_backend": (), "guided_grammar": (), "guided_json": (),
    "guided_regex": (), "guided_whitespace_pattern": (), "json_schema": (),
    "regex": ("",), "structural_tag": (), "structured_outputs": ({},),
    # Other parts of the prompt.
    "add_special_tokens": (False,), "chat_template": ("",),
    "context": ([],), "documents": ([],), "echo": (False,),
    "image_data": ([],), "images": ([],), "template": ("",),
    "input_embeds": ([],), "input_extra": ([],), "input_ids": ([],),
    "input_prefix": ("",), "input_suffix": ("",), "prompt_embeds": ([],),
    "suffix": ("",), "truncate_prompt_tokens": (),
    # Generation options, on routes that do not take them.
    "frequency_penalty": (0,), "ignore_eos": (False,), "logit_bias": ({}, []),
    "min_p": (0,), "presence_penalty": (0,), "repeat_penalty": (1,),
    "response_format": ({"type": "text"},), "stop": ("", []),
    "stop_token_ids": ([],),
    # Of chats, on other routes.
    "chat_template_kwargs": ({},), "grammar": ("",),
    "reasoning_effort": ("none",), "session": (),
    "thinking": ({"type": "disabled"},), "tool_choice": ("none", "auto"),
    "tools": ([],),
    # More than one reply.
    "n": (1,), "n_cmpl": (1,),
    # Sounds, the web, other servers, and what these keep.
    "audio": (), "background": (False,), "container": (),
    "context_management": ([],), "conversation": (),
    "kv_transfer_params": ({},), "mcp_servers": ([],),
    "modalities": (["text"],), "previous_response_id": (),
    "web_search_options": (),
}  # fmt: skip


def check_supported(
    fields: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]] = {}
) -> None:
    """Raises RequestError for a field that asks for what is not there.

    `more` are such fields of one route.
    """
    for name, value in fields.items():
        harmless = more.get(name, UNSUPPORTED.get(name))
        if harmless is not None and value is not None and (
            value not in harmless
        ):
            raise unsupported(name)
