"""Codex, running a prompt."""

from pathlib import Path

from cases import KEY, MODEL, QUESTION, URL, case
from programs import run, try_tool

(Path.home() / ".codex").mkdir()
(Path.home() / ".codex/config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "gemmakv"
[model_providers.gemmakv]
name = "gemmakv"
base_url = "{URL}/v1"
env_key = "GEMMAKV_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")
COMMAND = ("codex", "exec", "--skip-git-repo-check")
with case("chat"):
    run(*COMMAND, QUESTION, GEMMAKV_KEY=KEY)
try_tool(*COMMAND, GEMMAKV_KEY=KEY)
