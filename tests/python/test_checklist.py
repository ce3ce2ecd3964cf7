"""Point 9 of the cache's acceptance checklist, for the whole project.

Which test covers which point stands in docs/cache.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PYTHON_FILES = sorted((TESTS / "python").rglob("test_*.py"))
CPP_FILES = sorted((TESTS / "cpp").rglob("*_test.cc"))
CPP_TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)\s*\{", re.MULTILINE)


def _says_something(node: ast.AST) -> bool:
    """Whether a body does more than state that it is there."""
    return any(
        isinstance(child, (ast.Assert, ast.Call, ast.Raise))
        for child in ast.walk(node)
    )


def _members(module: ast.Module) -> Iterator[ast.stmt]:
    """What a module states, and what its classes do."""
    for node in module.body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from node.body


@pytest.mark.slow
@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: p.name)
def test_checklist_09_no_empty_python_test(path: Path) -> None:
    text = path.read_text()
    tests = [
        node
        for node in _members(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    # A state machine's test case is one too.
    assert tests or "TestCase" in text
    empty = [
        node.name
        for node in tests
        if not any(_says_something(statement) for statement in node.body)
    ]
    assert empty == []


@pytest.mark.parametrize(
    "path", CPP_FILES, ids=lambda p: "/".join(p.parts[-2:])
)
def test_checklist_09_no_empty_cpp_test(path: Path) -> None:
    text = path.read_text()
    bodies = {}
    for match in CPP_TEST.finditer(text):
        end = text.index("\n}", match.end() - 1)
        bodies[match.group(2)] = text[match.end() : end]
    assert bodies or "TEST_SUITE_P(" in text
    # A check of its own, or a call of a function of the file that checks.
    checks = re.compile(r"EXPECT_|ASSERT_|FAIL\(|[A-Z]\w*(?:<\w+>)?\(")
    empty = [name for name, body in bodies.items() if not checks.search(body)]
    assert empty == []


def test_checklist_09_import_sets_up_no_logging() -> None:
    code = (
        "import logging, gemmakv\n"
        "named = [n for n in logging.root.manager.loggerDict "
        "if n.startswith('gemmakv')]\n"
        "assert not logging.root.handlers, logging.root.handlers\n"
        "assert not any(logging.getLogger(n).handlers for n in named)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""
