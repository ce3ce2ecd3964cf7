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
    "top_n_sigma": (-1,), "mcp_servers": ([],), "container": (),
    "images": ([],), "template": ("",), "context": ([],), "session": (),
}  # fmt: skip


def check_supported(fields: Mapping[str, Any], prefix: str = "") -> None:
    """Raises RequestError for a field that asks for what is not there."""
    for name, value in fields.items():
        harmless = UNSUPPORTED.get(name)
        if harmless is not None and value is not None and (
            value not in harmless
        ):
            raise missing(prefix + name)
