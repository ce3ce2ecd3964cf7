"""Orders of roles that clients send, and templates that they are sent to."""

from __future__ import annotations

import functools
from typing import Any

from gemmakv import Tokenizer
from gemmakv.chat._file_template import FileTemplate
from gemmakv.templates import Gemma4Template, GemmaTemplate, PlainTemplate
from support import gemma4_files
from support.chat_cases import FUNCTIONS, PARTS, TURNS

# As Gemma 1's and 2's: no system text, and nobody speaks twice in a row.
NO_SYSTEM = PARTS.replace(
    "{%- if messages[0].role == 'system' %}",
    "{%- if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}",
)
SOURCES = {
    "file gemma 2": NO_SYSTEM,
    "file gemma 3": PARTS,
    "file gemma 4": gemma4_files.TEMPLATE,
    "file functions": FUNCTIONS,
    "file loose": TURNS.replace("SYSTEM", "true"),
    "file loose without system": TURNS.replace("SYSTEM", "false"),
}
NAMES = ("plain", "gemma", "gemma4", *SOURCES)
ALTERNATING = ("gemma", "file gemma 2", "file gemma 3")


def _message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


# Letters are roles. "t" is a result without a call.
ROLES = {
    "s": "system",
    "d": "developer",
    "u": "user",
    "a": "assistant",
    "t": "tool",
}
ORDERS = {
    "usual": "suau",
    "system in the middle": "uasu",
    "system after the user": "us",
    "system between": "usu",
    "system last": "uas",
    "system alone": "s",
    "assistant first": "au",
    "assistant after the system": "sau",
    "two users": "uu",
    "two users with a system": "suuau",
    "two assistants": "uaau",
    "developer and system": "dsuu",
    "two developers and two users": "dduu",
    "late developer": "uadu",
    "result without a call": "ut",
    "result first": "tu",
}


def messages(order: str) -> list[dict[str, Any]]:
    """Messages with the roles of an order, each with a word of its own."""
    return [
        _message(
            ROLES[letter],
            f"word{chr(ord('a') + i)}x",
            **({"tool_call_id": "call_0"} if letter == "t" else {}),
        )
        for i, letter in enumerate(order)
    ]


def words(order: str) -> list[str]:
    return [one["content"] for one in messages(order)]


@functools.lru_cache(maxsize=64)
def template_of(name: str, tokenizer: Tokenizer) -> Any:
    """The template that is called `name` in `NAMES`, made once: compiling a
    file's takes longer than any rendering.
    """
    if name in SOURCES:
        return FileTemplate(SOURCES[name], tokenizer, bos_id=2, eos_ids=[1])
    made = {
        "plain": PlainTemplate,
        "gemma": GemmaTemplate,
        "gemma4": Gemma4Template,
    }
    return made[name]()
