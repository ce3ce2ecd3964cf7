"""The Python of the README and of the guide runs as it stands."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import gemmakv
from gemmakv.cli import main
from gemmakv.cli.chat import first_screen
from gemmakv.cli.chat.view import TerminalView
from support import template_folders
from support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
# A command that continues a text, and the lines below it.
TRANSCRIPT = re.compile(
    r"^    \$ \S+/gemmakv (generate .*)\n((?:    .+\n)+)", re.MULTILINE
)


def run_blocks(
    page: Path, model: Path | None = None, **given: object
) -> dict[str, object]:
    """Runs a page's Python from top to bottom, with `given` names and, if
    there is one, with `model` in place of its own; gives the names it made.
    """
    text = page.read_text("utf-8")
    if model is not None:
        assert '"gemma-3-270m"' in text
        text = text.replace('"gemma-3-270m"', repr(str(model)))
    blocks = list(BLOCK.finditer(text))
    assert blocks
    names = given
    for block in blocks:
        # Errors name the page's own lines.
        before = text[: block.start(1)].count("\n")
        exec(compile("\n" * before + block[1], str(page), "exec"), names)
    return names


@pytest.mark.slow
def test_readme_python_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "README.md")
    restored, original = names["again"], names["other"]
    assert isinstance(restored, gemmakv.KVCache)
    assert isinstance(original, gemmakv.KVCache)
    assert restored.tokens.tolist() == original.tokens.tolist()


@pytest.mark.slow
def test_readme_shows_what_generate_prints(
    model_path: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    del model_path
    found = TRANSCRIPT.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(found) >= 2
    for command, printed in found:
        assert main(shlex.split(command)) == 0
        said = capfdbinary.readouterr().out.decode()
        assert said.split() == printed.split()


def test_readme_shows_the_first_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first_screen.show(
        TerminalView(), "gemma-3-270m", ".venv/bin/gemmakv", ".venv/bin/pip"
    )
    said = textwrap.indent(capsys.readouterr().out, "    ")
    shown = (ROOT / "README.md").read_text("utf-8")
    assert re.sub(" +\n", "\n", said) in shown


@pytest.mark.slow
def test_guide_python_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "docs" / "guide.md")
    chat = names["chat"]
    assert isinstance(chat, gemmakv.Session)
    assert chat.turns == 0


@pytest.mark.slow
def test_python_for_newcomers_runs(model_path: str) -> None:
    del model_path
    names = run_blocks(ROOT / "docs" / "coming-from.md")
    cache, session = names["cache"], names["session"]
    assert isinstance(cache, gemmakv.KVCache)
    assert isinstance(session, gemmakv.Session)
    assert session.turns == 2


@pytest.mark.slow
def test_clients_python_runs(talker_path: Path, tmp_path: Path) -> None:
    """Of the clients that are installed, against a server of its own."""
    for module in ("openai", "uvicorn", "msgspec"):
        pytest.importorskip(module)
    (tmp_path / "keys").write_text("KEY", "utf-8")
    with ServerProcess(
        *("--model", talker_path, "--served-model-name", "gemma-3-270m"),
        *("--api-key-file", tmp_path / "keys", "--sessions", tmp_path / "kept"),
        *("--max-model-len", 4096, "--default-max-tokens", 8),
    ) as server:
        text = (ROOT / "docs" / "clients.md").read_text("utf-8")
        text = text.replace("http://127.0.0.1:8000", server.url)
        page = tmp_path / "clients.md"
        page.write_text(BLOCK.sub(_if_installed, text), "utf-8")
        names = run_blocks(page)
    assert names["trip"]["id"].startswith("sess_")  # type: ignore[index]


def _if_installed(block: re.Match[str]) -> str:
    """The block, unless it imports what is not there."""
    wanted = re.findall(r"^(?:from|import) (\w+)", block[1], re.MULTILINE)
    there = all(importlib.util.find_spec(name) for name in wanted)
    return block[0] if there else ""


TOOLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ tools | tojson }}"
)


def test_sessions_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemma = template_folders.model_with(tmp_path, "model", TOOLS)
    monkeypatch.chdir(tmp_path)
    names = run_blocks(
        ROOT / "docs" / "sessions.md",
        gemmakv=gemmakv,
        gemma=gemma,
        long_text="Be kind.",
    )
    session = names["session"]
    assert isinstance(session, gemmakv.Session)
    assert session.messages[-1].text == "Hello."


def test_padded_caches_python_runs() -> None:
    k = np.ones((2, 5, 1, 32), np.float32)
    names = run_blocks(
        ROOT / "docs" / "padded-caches.md",
        gemmakv=gemmakv,
        **{"k": k, "v": k, "q": k, "k1": k[:, :1], "v1": k[:, :1]},
        q1=k[:, :1],
        segment_ids=np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    )
    cache = names["cache"]
    assert isinstance(cache, gemmakv.LayerCache)
    assert cache.length.tolist() == [4, 6]


@pytest.mark.slow
def test_verify_python_runs(
    model_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one time that the real model is computed in every way."""
    del model_path
    names = run_blocks(ROOT / "docs" / "verify.md")
    report = names["report"]
    assert isinstance(report, gemmakv.verify.Report)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{c.way} {c.digest}" for c in report.checks]


def test_prefix_cache_python_runs(
    talker: gemmakv.Gemma,
    talker_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks(
        ROOT / "docs" / "prefix-cache.md",
        talker_path,
        gemmakv=gemmakv,
        cache=gemmakv.create_kv_cache(talker.config),
        prompt="The capital of France is " * 60,
    )
    assert names["g"].usage.miss_reason == "divergent"
    assert len(names["tenant"].prefix_cache.match(names["prompt"])) == 0
    assert (tmp_path / "prefixes" / "key").is_file()


def test_speculation_python_runs(
    talker: gemmakv.Gemma, talker_path: Path
) -> None:
    names = run_blocks(
        ROOT / "docs" / "speculation.md",
        talker_path,
        gemmakv=gemmakv,
        cache=gemmakv.create_kv_cache(talker.config),
        prompt="one two three one two three one two",
    )
    usage = names["reply"].usage  # type: ignore[attr-defined]
    assert usage.drafted == usage.accepted == 0


@pytest.mark.slow
def test_structured_output_python_runs(model_path: str) -> None:
    del model_path
    pytest.importorskip("llguidance")
    names = run_blocks(ROOT / "docs" / "structured-output.md")
    person = json.loads(names["person"].text)  # type: ignore[attr-defined]
    assert person.keys() == {"name", "age"}
    roles = [message["role"] for message in names["messages"]]  # type: ignore[attr-defined]
    assert roles == ["user", "assistant", "tool"]


def test_every_page_is_listed() -> None:
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        name = page.relative_to(docs).as_posix()
        assert name == "README.md" or f"({name})" in text, name


def test_every_page_with_python_is_run() -> None:
    here = Path(__file__).read_text("utf-8")
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if "```python" in page.read_text("utf-8"):
            assert f'"{page.name}")' in here or f'"{page.name}",' in here


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
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


@pytest.mark.slow
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
