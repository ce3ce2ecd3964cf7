"""The command that a message names installs an extra where it is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gemmakv._support.extras import install_command, pip_command


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a venv's programs, below the current folder."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "pip").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    return folder


def test_the_pip_of_a_venv_below(scripts: Path) -> None:
    del scripts
    assert install_command("hub") == '.venv/bin/pip install "gemmakv[hub]"'
    assert install_command("hub", "pip") == 'pip install "gemmakv[hub]"'


def test_the_pip_of_an_active_venv(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin")
    assert pip_command() == "pip"


def test_the_pip_of_a_venv_elsewhere(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert pip_command() == str(scripts / "pip")


def test_a_python_without_that_program(scripts: Path) -> None:
    (scripts / "pip").unlink()
    assert pip_command() == f"{scripts / 'python'} -m pip"
