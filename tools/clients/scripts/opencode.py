"""opencode, running a prompt."""

import json
from pathlib import Path

from cases import KEY, MODEL, QUESTION, URL, case
from programs import run, try_tool

SETTINGS = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "model": f"gemmakv/{MODEL}",
    "small_model": f"gemmakv/{MODEL}",
    "permission": "allow",
    "provider": {"gemmakv": {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{URL}/v1", "apiKey": KEY},
        "models": {MODEL: {
            "name": "Gemma", "tool_call": True,
            "limit": {"context": 32768, "output": 1024},
        }},
    }},
}  # fmt: skip
folder = Path.home() / ".config/opencode"
folder.mkdir(parents=True)
(folder / "opencode.json").write_text(json.dumps(SETTINGS))
OFF = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}
with case("chat"):
    run("opencode", "run", QUESTION, **OFF)
try_tool("opencode", "run", **OFF)
