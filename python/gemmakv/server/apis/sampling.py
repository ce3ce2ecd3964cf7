"""The names of generation options in the APIs of Ollama and llama-server."""

from __future__ import annotations

# Our names by theirs.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip
# Tokens that penalties look at in these APIs, if a request does not say it.
LAST_TOKENS = 64
