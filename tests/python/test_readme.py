"""The Python of the README and of the guide runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv

ROOT = Path(__file__).parents[2]


def run_blocks(page: Path) -> dict[str, object]:
    """Runs a page's Python from top to bottom; gives the names it made."""
    text = page.read_text("utf-8")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        # Errors name the page's own lines.
        before = text[: block.start(1)].count("\n")
        exec(compile("\n" * before + block[1], str(page), "exec"), names)
    return names


def test_readme_python_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "README.md")
    restored, original = names["again"], names["other"]
    assert isinstance(restored, gemmakv.KVCache)
    assert isinstance(original, gemmakv.KVCache)
    assert restored.tokens.tolist() == original.tokens.tolist()


def test_guide_python_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "docs" / "guide.md")
    chat = names["chat"]
    assert isinstance(chat, gemmakv.Session)
    assert chat.turns == 0


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert not broken


@pytest.mark.skipif(
    sys.version_info < (3, 10), reason="signatures print otherwise before 3.10"
)
def test_api_reference_is_up_to_date() -> None:
    tool = ROOT / "tools" / "make_api_reference.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
