"""The Python of the README and of the guide runs as it stands."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

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


def test_python_for_newcomers_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "docs" / "coming-from.md")
    cache, session = names["cache"], names["session"]
    assert isinstance(cache, gemmakv.KVCache)
    assert isinstance(session, gemmakv.Session)
    assert session.turns == 2


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert not broken


MODULES = [
    gemmakv,
    gemmakv.options,
    gemmakv.templates,
    gemmakv.verify,
    importlib.import_module("gemmakv.chat.store"),
]


def test_api_reference_is_up_to_date() -> None:
    pytest.importorskip("griffe", reason="griffe reads the docstrings")
    tool = ROOT / "tools" / "make_api_reference.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_api_reference_has_every_option_and_field(module: ModuleType) -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert f"\n## {module.__name__}\n" in page
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, ModuleType):
            continue
        about = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
        keys = []
        if typing.is_typeddict(thing):
            keys = list(typing.get_type_hints(thing))
            assert set(gemmakv.options.GenerationOptions.table) < set(keys)
        elif dataclasses.is_dataclass(thing):
            keys = [field.name for field in dataclasses.fields(thing)]
        for key in keys:
            assert f"`{key}" in about, f"{name}.{key}"
