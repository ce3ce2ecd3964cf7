"""pi, printing, over each API that it can be pointed at."""

import json
from pathlib import Path

from cases import KEY, MODEL, QUESTION, URL, case
from programs import READ, run

PROVIDERS = {
    "openai-completions": f"{URL}/v1", "openai-responses": f"{URL}/v1",
    "anthropic-messages": URL,
}  # fmt: skip
folder = Path.home() / ".pi/agent"
folder.mkdir(parents=True)
(folder / "models.json").write_text(json.dumps({"providers": {
    api: {"baseUrl": base, "api": api, "apiKey": KEY,
          "models": [{"id": MODEL, "contextWindow": 32768,
                      "maxTokens": 1024}]}
    for api, base in PROVIDERS.items()
}}))  # fmt: skip
for api in PROVIDERS:
    command = ("pi", "--offline", "--provider", api, "--model", MODEL, "-p")
    with case(f"{api} chat"):
        run(*command, QUESTION)
    with case(f"{api} tool"):
        run(*command, READ)
