"""Errors of arguments have one grammar: "NAME: expected ..., found ..."."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gemmakv

PACKAGE = Path(gemmakv.__file__).parent
# A name, maybe with a place in it or with what it is of; {} is a value.
NAMED = re.compile(r"(?:\{\}|[a-z_]\w*)[\w.\[\]{}-]*(?:: [\w{}]+)?: ")
ELSEWHERE = {
    "cli": "it speaks of commands and flags to people",
    "_support/json.py": "a hook of the reader, which names what it reads",
    "_support/text.py": "its callers know what the bytes are",
    "chat/_native_calls.py": "what it says is read by nobody",
}
# Errors whose words are in a variable, or are another error's.
WITHOUT_WORDS = {"generation/_grammar.py": 1, "server/service/prompts.py": 2}


def words_of(node: ast.expr) -> str | None:
    """Gives what an expression says, with {} for values; None: unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        left = words_of(node.left)
        return left and left + (words_of(node.right) or "{}")
    return None


def raised(path: Path) -> list[tuple[int, str | None]]:
    """Gives the line and the words of each ValueError."""
    return [
        (node.lineno, words_of(node.exc.args[0]))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) == "ValueError"
        and node.exc.args
    ]


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))
)
def test_value_errors_begin_with_a_name(name: str) -> None:
    if name in ELSEWHERE or name.split("/")[0] in ELSEWHERE:
        return
    without = 0
    for line, words in raised(PACKAGE / name):
        if words is None or words == "{}{}":
            without += 1
        else:
            assert NAMED.match(words), f"{name}:{line}: {words}"
    assert without == WITHOUT_WORDS.get(name, 0), name
