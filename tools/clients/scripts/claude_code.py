"""Claude Code, printing."""

from cases import KEY, MODEL, QUESTION, URL, case
from programs import run, try_tool

SETTINGS = {
    "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": KEY,
    "ANTHROPIC_MODEL": MODEL, "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
with case("chat"):
    run("claude", "-p", QUESTION, **SETTINGS)
# All of its tools are some 20,000 tokens, again.
try_tool("claude", "--tools", "Read", "-p", **SETTINGS)
