"""llm's command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import KEY, MODEL, QUESTION, SCHEMA, URL, case, city, expect

folder = tempfile.mkdtemp()
shared = {"model_name": MODEL, "api_base": f"{URL}/v1",
          "api_key_name": "gemmakv"}  # fmt: skip
models = [
    {"model_id": "gemma", "supports_tools": True, "supports_schema": True,
     **shared},
    {"model_id": "gemma-text", "completion": True, **shared},
]  # fmt: skip
# YAML has all of JSON.
(Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))
tools = Path(folder) / "tools.py"
tools.write_text(
    'def rain(city: str) -> str:\n    "Tells the rain."\n    return "3 mm"\n'
)


def llm(*arguments):
    found = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env={**os.environ, "LLM_USER_PATH": folder},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode:
        raise ValueError(found.stderr)
    return found.stdout.strip() + found.stderr


llm("keys", "set", "gemmakv", "--value", KEY)
given = ["-o", "max_tokens", "24"]
with case("chat"):
    expect(llm("-m", "gemma", "--no-stream", *given, QUESTION))
    expect(llm("-m", "gemma", "-s", "Be brief.", *given, QUESTION))
    expect(llm("-c", *given, "And of Spain?"))
with case("stream"):
    expect(llm("-m", "gemma", *given, QUESTION))
with case("completions"):
    expect(llm("-m", "gemma-text", *given, "A city in Italy is"))
with case("tool"):
    said = llm("-m", "gemma", "--functions", str(tools), "--td", "Rain?")
    expect("3 mm" in said, said)
with case("structured"):
    city(llm("-m", "gemma", "--schema", json.dumps(SCHEMA), "Rome"))
