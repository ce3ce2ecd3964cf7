"""`gemmakv cache warm`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support.command import RunCli, assert_fails

PROMPT = "once upon a time there was a model that forgot nothing " * 8


def warm(cli: RunCli, *arguments: object) -> Any:
    result = cli("cache", "warm", *arguments, "--json")
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


def test_later_processes_hit(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    found = warm(
        cli, f"{folder}:64MiB", "-m", tiny_path, file, "--prompt", PROMPT
    )
    assert found["tier"] == "disk"
    first, second = found["prompts"]
    assert (first["prompt"], second["prompt"]) == ("prompt 1", str(file))
    assert first["known"] == 0 and first["computed"] == first["tokens"] > 256
    assert first["written_bytes"] > 0
    assert second["known"] > 200
    assert second["computed"] + second["known"] == second["tokens"]
    assert second["tokens"] == first["tokens"]
    stats = json.loads(cli("cache", "stats", "--json", folder).stdout)
    assert stats["bytes"] == first["written_bytes"] + second["written_bytes"]
    result = cli(
        "generate", "-m", tiny_path, "--json", "--max-tokens=2",
        "--prefix-cache-disk", folder, PROMPT + "and then",
    )  # fmt: skip
    usage = json.loads(result.stdout)["usage"]
    assert usage["cached"]["disk"] >= 256
    lines = cli("cache", "warm", folder, "-m", tiny_path, file)
    assert b" computed, " in lines.stdout and b", 0 bytes" in lines.stdout


def test_of_chats(cli: RunCli, tiny_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    system = tmp_path / "system.txt"
    system.write_text(PROMPT)
    found = warm(cli, folder, "-m", tiny_path, "--chat", system)
    assert found["prompts"][0]["written_bytes"] > 0
    with gemmakv.PrefixCache(ram=0, disk=folder) as prefix:
        gemma = gemmakv.Gemma.load(tiny_path, prefix_cache=prefix)
        ids = gemma.apply_chat_template(
            [
                gemmakv.Message("system", PROMPT),
                gemmakv.Message("user", "Hello"),
            ]
        )
        cache = gemmakv.create_kv_cache(gemma.config)
        assert gemma.prefill(cache, ids).usage.cached["disk"] >= 256


def test_memory_file_systems_are_shared(cli: RunCli, tiny_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as above:
        found = warm(cli, f"{above}/kv", "-m", tiny_path, "--prompt", PROMPT)
        assert found["tier"] == "shared"
        assert found["prompts"][0]["written_bytes"] > 0


def test_errors(cli: RunCli, tiny_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ab\xff")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    model = ("-m", tiny_path)
    result = cli("cache", "warm", folder, *model)
    assert_fails(result, "FILE", "--prompt", "none", code=2)
    for file, words in (
        (bad, ["UTF-8", "0xFF", " 2"]),
        (empty, ["text", "nothing"]),
        (tmp_path / "none.txt", ["none.txt"]),
    ):
        assert_fails(cli("cache", "warm", folder, *model, file), *words)
    assert not folder.exists()
    assert_fails(
        cli("cache", "warm", bad, *model, "--prompt", PROMPT), "bad.txt"
    )
    assert_fails(
        cli("cache", "warm", f"{folder}:20kB", *model, "--prompt", PROMPT),
        "objects could not be written",
    )
