"""qwen-code, running a prompt."""

from cases import KEY, MODEL, QUESTION, URL, case
from programs import run, try_tool

COMMAND = ("qwen", "--auth-type", "openai", "--openai-api-key", KEY,
           "--openai-base-url", f"{URL}/v1", "--model", MODEL, "--yolo",
           "-p")  # fmt: skip
with case("chat"):
    run(*COMMAND, QUESTION)
try_tool(COMMAND[0], "--core-tools", "read_file", *COMMAND[1:])
