"""--prefix-cache-* of the commands that load a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.cli import prefix_flags
from gemmakv.cli.prefix_flags import open_prefix_cache, tier_folder
from support.command import RunCli, assert_fails

PROMPT = "once upon a time there was a model that forgot nothing " * 8


def test_a_second_start_computes_nothing_again(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    def generate(*flags: object) -> dict[str, object]:
        result = cli(
            "generate", "--model", tiny_path, "--json", "--max-tokens=4",
            *flags, PROMPT,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr.decode()
        return dict(json.loads(result.stdout))

    folder = ("--prefix-cache-disk", f"{tmp_path / 'kv'}:64MiB")
    cold = generate()
    first = generate(*folder)
    second = generate(*folder, "--prefix-cache-ram", "0")
    assert first["token_ids"] == second["token_ids"] == cold["token_ids"]
    assert first["usage"]["cached"] == {}  # type: ignore[index]
    assert second["usage"]["cached"]["disk"] > 0  # type: ignore[index]
    stats = cli("cache", "stats", tmp_path / "kv")
    assert stats.returncode == 0, stats.stderr.decode()


def test_chat_keeps_it_too(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    result = cli(
        "chat", "--model", tiny_path, "--max-tokens=4",
        "--prefix-cache-disk", tmp_path / "kv", stdin=PROMPT.encode() + b"\n",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    assert (tmp_path / "kv" / "key").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefix-cache-ram", "-1"], ["--prefix-cache-ram", "-1"]),
        (["--prefix-cache-ram", "much"], ["--prefix-cache-ram", "much"]),
        (["--prefix-cache-disk", "kv:0"], ["--prefix-cache-disk", "1 byte"]),
        (
            ["--prefix-cache-shared", "default:0"],
            ["--prefix-cache-shared", "1 byte"],
        ),
        (
            ["--prefix-cache-shared", "default:much"],
            ["--prefix-cache-shared", "much"],
        ),
        (
            ["--prefix-cache-remote", "gopher://host"],
            ["--prefix-cache-remote", "gopher"],
        ),
    ],
)
def test_a_bad_flag_is_one_line(
    cli: RunCli, tiny_path: Path, flags: list[str], words: list[str]
) -> None:
    result = cli("generate", "--model", tiny_path, *flags, "Hi")
    assert_fails(result, *words, code=2)


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_tier_that_is_not_to_be_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """One called "off" was made, and refused for being on a disk."""
    monkeypatch.chdir(tmp_path)
    assert open_prefix_cache(None, word, word, None) is True
    opened = open_prefix_cache("1MiB", word, word, None)
    assert isinstance(opened, gemmakv.PrefixCache)
    assert list(opened.tiers) == ["ram"]
    assert list(tmp_path.iterdir()) == []


def test_the_default_shared_folder_may_have_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}

    def note(ram: str | None, **options: Any) -> None:
        made.update(options)

    monkeypatch.setattr(prefix_flags, "PrefixCache", note)
    open_prefix_cache(None, "default:64MiB", None, None)
    assert made["shared"] is True
    assert made["shared_bytes"] == 64 << 20
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = str(tmp_path / "gemmakv")
    assert tier_folder("shared", "default:64MiB") == place
    assert tier_folder("shared", "default") == place


def test_a_file_where_a_folder_should_be(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    result = cli(
        "generate", "--model", tiny_path, "--prefix-cache-disk", file, "Hi"
    )
    assert_fails(result, str(file))
    assert file.read_text() == "mine"


def test_more_than_the_disk_has_is_said(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    for size, told in (("900TB", True), ("1MB", False)):
        result = cli(
            "generate", "--model", tiny_path, "--max-tokens=1",
            "--prefix-cache-disk", f"{tmp_path / 'kv'}:{size}", "Hi",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr.decode()
        note = b"900 TB asked for, " in result.stderr
        assert note == told, result.stderr.decode()
