"""Fields of requests that other servers know, and this one does not.

One table for all routes: a request may have such a field with a value that
asks for nothing, and gets an error that names it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmakv.server.service.errors import missing

# By name, the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "web_search_options": (),
    "suffix": ("",), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "json_schema": (), "conversation": (), "previous_response_id": (),
    "mirostat": (0,), "typical_p": (1,), "tfs_z": (1,),
    "dynatemp_range": (0,), "xtc_probability": (0,), "dry_multiplier": (0,),
    "top_n_sigma": (-1,), "n_indent": (0,), "t_max_predict_ms": (0, -1),
    "min_keep": (0,), "post_sampling_probs": (False,), "image_data": ([],),
    "response_fields": ([],), "lora": ([],),
    "samplers": ([],), "n_cmpl": (1,), "n": (1,), "input_prefix": ("",),
    "input_suffix": ("",), "input_extra": ([],), "session": (),
    "grammar": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",), "thinking": ({"type": "disabled"},),
    "chat_template_kwargs": ({},), "background": (False,),
    "context_management": ([],), "mcp_servers": ([],), "container": (),
    "images": ([],), "template": ("",), "context": ([],),
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
            raise missing(name)
