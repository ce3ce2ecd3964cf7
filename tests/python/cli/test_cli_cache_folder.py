"""`gemmakv cache stats | sweep | clear`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gemmakv import _core
from support.chat_screen import ENTER, Screen
from support.command import RunCli, assert_fails

PAGE = f"{'ab' * 16}-{'cd' * 16}-256-{'0' * 16}-1"
LEAF = f"{'ef' * 16}-{'ab' * 16}-300-{'0' * 16}-3"
TENANT = f"{'12' * 16}-{'34' * 16}-200-{'5' * 16}-3"
ORPHAN = f"{'56' * 16}-{'78' * 16}-900-{'5' * 16}-3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three objects, as their names have it, and an orphan."""
    path = tmp_path / "cache"
    _core.FolderStore(
        str(path), tier="disk", mapped=False, budget_bytes=1 << 20
    )
    for i, name in enumerate([PAGE, LEAF, TENANT, ORPHAN]):
        place = path / name[:2]
        place.mkdir(mode=0o700)
        (place / name).write_bytes(b"x" * 10_000)
        os.utime(place / name, (1e9 + i, 1e9 + i))
    (path / "ab" / ".tmp-0123456789abcdef").write_bytes(b"half")
    return path


def as_json(cli: RunCli, *arguments: object) -> Any:
    result = cli("cache", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", ["stats", "sweep", "clear"])
def test_help(cli: RunCli, command: str) -> None:
    result = cli("cache", command, "--help", COLUMNS="100", NO_COLOR="1")
    assert result.returncode == 0
    assert b"Usage" in result.stdout and b"--json" in result.stdout


def test_stats(cli: RunCli, folder: Path) -> None:
    found = as_json(cli, "stats", f"{folder}:20GiB")
    assert found["folder"] == str(folder)
    assert found["budget"] == 20 << 30
    assert found["entries"] == 4
    assert found["bytes"] == 40_000
    assert found["temporary_files"] == 1
    assert found["file_system"]
    assert found["oldest"] == pytest.approx(1e9)
    assert found["newest"] == pytest.approx(1e9 + 3)
    assert [(g["salt"], g["kind"], g["entries"]) for g in found["groups"]] == [
        ("0" * 16, "page", 1),
        ("0" * 16, "resume point", 1),
        ("5" * 16, "resume point", 2),
    ]
    text = cli("cache", "stats", folder).stdout.decode()
    assert "40,000" in text and "5555555555555555" in text
    assert time.strftime("%Y-%m-%d", time.localtime(1e9)) in text
    assert [*folder.rglob(".tmp-*")]  # nothing was changed


def test_sweep(cli: RunCli, folder: Path) -> None:
    result = as_json(cli, "sweep", folder)
    assert result["removed"] == 1
    assert result["removed_bytes"] == 10_000
    assert result["removed_temporary_files"] == 1
    assert result["entries"] == 3
    assert not (folder / ORPHAN[:2] / ORPHAN).exists()
    # A page is older than what hangs on it, and stays for as long.
    assert as_json(cli, "sweep", f"{folder}:30kB")["removed"] == 1
    assert (folder / PAGE[:2] / PAGE).exists()
    assert not (folder / LEAF[:2] / LEAF).exists()
    assert b"removed" in cli("cache", "sweep", folder).stdout


def test_clear(cli: RunCli, folder: Path) -> None:
    assert_fails(cli("cache", "clear", folder), "--yes")
    result = cli("cache", "clear", "--yes", folder)
    assert result.stdout == b"deleted 4 entries (40.0 kB)\n"
    assert as_json(cli, "stats", folder)["entries"] == 0
    removed = as_json(cli, "clear", "-y", folder)["removed"]
    assert removed == {"entries": 0, "bytes": 0}
    assert (folder / "key").stat().st_size == 32


@pytest.mark.parametrize("answer, stays", [("n", True), ("y", False)])
def test_clear_asks(
    folder: Path, answer: str, stays: bool
) -> None:
    screen = Screen("cache", "clear", folder)
    screen.wait_for("Delete")
    screen.type(answer, ENTER)
    screen.wait_for_exit()
    screen.close()
    assert (folder / PAGE[:2] / PAGE).exists() == stays


@pytest.mark.parametrize("command", ["stats", "sweep", "clear"])
def test_errors_are_one_line(cli: RunCli, tmp_path: Path, command: str) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "letter.txt").write_text("private")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("other")
    extra = ["--yes"] if command == "clear" else []
    for argument, words in {
        str(tmp_path / "gone"): ["No such file"],
        str(other): [str(other), "`key`"],
        str(tmp_path / "file"): ["file", "folder"],
        str(tmp_path / "link"): ["symbolic link"],
        f"{other}:lots": ["bytes", "lots"],
        "": ["DIR"],
    }.items():
        # What is wrong with the command line itself is another code.
        code = 1 if argument.startswith("/") and ":" not in argument else 2
        found = cli("cache", command, *extra, argument)
        assert_fails(found, *words, code=code)
    assert not (tmp_path / "gone").exists()
    assert (other / "letter.txt").read_text() == "private"
