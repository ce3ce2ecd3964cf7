"""A room of the package imports only from the rooms below it.

The order of the rooms stands in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv
from support.folders import ROOT

PACKAGE = Path(gemmakv.__file__).parent
ROOMS = [path for path in PACKAGE.iterdir() if path.is_dir()]


def test_import_linter_finds_nothing() -> None:
    pytest.importorskip("importlinter", reason="import-linter does the looking")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as main; main()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    "room", [r for r in ROOMS if r.name != "cli"], ids=lambda r: r.name
)
def test_rooms_do_not_import_the_package_itself(room: Path) -> None:
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                assert "gemmakv" not in names, path
            elif isinstance(node, ast.ImportFrom) and node.module == "gemmakv":
                assert [a.name for a in node.names] == ["_core"], path


def test_test_modules_share_through_support_alone() -> None:
    imports = re.compile(r"^\s*(?:from\s+\.*|import\s+)test_", re.MULTILINE)
    for path in (ROOT / "tests" / "python").rglob("*.py"):
        found = imports.search(path.read_text("utf-8"))
        assert found is None, f"{path}: {found}"
