"""`gemmakv embed`, in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from support import tiny_gguf
from support.command import RunCli, assert_fails

TEXTS = ["the cat", "a hat, \u00e9\u20ac"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    return tiny_gguf.write_embedding(folder / "embed.gguf")


@pytest.fixture(scope="module")
def embedder(path: Path) -> gemmakv.Gemma:
    return gemmakv.Gemma.load(path)


def rows(text: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.decode().splitlines()]
    assert [row["index"] for row in found] == list(range(len(found)))
    return found


def vectors(text: bytes) -> np.ndarray:
    return np.array([row["embedding"] for row in rows(text)], np.float32)


def test_arguments(
    cli: RunCli, path: Path, embedder: gemmakv.Gemma
) -> None:
    result = cli("embed", "-m", str(path), *TEXTS)
    assert result.returncode == 0, result.stderr
    assert [row["text"] for row in rows(result.stdout)] == TEXTS
    assert np.array_equal(vectors(result.stdout), embedder.embed(TEXTS))


def test_options(cli: RunCli, path: Path, embedder: gemmakv.Gemma) -> None:
    result = cli("embed", "-m", str(path), "--dim", "128", "--prompt",
                 "document", "--threads", "1", TEXTS[0])
    expected = embedder.embed(TEXTS[:1], dim=128, prompt="document")
    assert np.array_equal(vectors(result.stdout), expected)


def test_lines_of_stdin_and_of_a_file(
    cli: RunCli, path: Path, embedder: gemmakv.Gemma, tmp_path: Path
) -> None:
    texts = [f"text {number}" for number in range(300)]
    data = "\r\n".join(texts).encode()
    result = cli("embed", "-m", str(path), "-", stdin=data)
    assert result.returncode == 0, result.stderr
    expected = embedder.embed(texts)
    assert [row["text"] for row in rows(result.stdout)] == texts
    assert np.array_equal(vectors(result.stdout), expected)
    source = tmp_path / "lines.txt"
    source.write_bytes(data)
    for name in ("out.npy", "out.jsonl"):
        out = tmp_path / name
        result = cli("embed", "-m", str(path), "--file", str(source),
                     "--output", str(out))
        assert result.returncode == 0 and result.stdout == b"", result.stderr
        if name.endswith(".npy"):
            found = np.load(out)
            assert found.dtype == np.float32
        else:
            found = vectors(out.read_bytes())
        assert np.array_equal(found, expected)


def test_models_that_generate(cli: RunCli, tiny_path: Path) -> None:
    result = cli("embed", "-m", str(tiny_path), "x")
    assert_fails(result, "--pooling: ", "'mean' or 'last'", "none", code=2)
    assert b"None" not in result.stderr
    result = cli("embed", "-m", str(tiny_path), "--pooling", "last", "x")
    expected = gemmakv.Gemma.load(tiny_path).embed(["x"], pooling="last")
    assert np.array_equal(vectors(result.stdout), expected)


@pytest.mark.parametrize("arguments, words", [
    ([], ["texts", "--file", "neither"]),
    (["--file", "x", "y"], ["texts", "--file", "both"]),
    (["--dim", "64", "x"], ["--dim: ", "160, 128 (default: 160)", " 64"]),
    (["--prompt", "no", "x"], ["--prompt: ", "query, document", "'no'"]),
    (["--pooling", "last", "x"], ["--pooling: ", "none", "'last'"]),
    (["--quantize", "q9", "x"], ["--quantize: ", "q8_0", "'q9'"]),
])
def test_bad_options_are_named(
    cli: RunCli, path: Path, arguments: list[str], words: list[str]
) -> None:
    result = cli("embed", "-m", str(path), *arguments)
    assert_fails(result, *words, code=2)
    assert b"None" not in result.stderr


@pytest.mark.parametrize("lines, words", [
    (b"", ["stdin: ", "text", "none"]),
    (b"a\n\nb\n", ["stdin: line 2: ", "text", "empty"]),
    (b"a\n\xff\n", ["stdin: line 2: ", "UTF-8", "0xFF"]),
    (b"a\n" + b"x" * 2000, ["text 2: ", "tokens", " 512"]),
])
def test_bad_lines_are_named(
    cli: RunCli, path: Path, lines: bytes, words: list[str]
) -> None:
    assert_fails(cli("embed", "-m", str(path), "-", stdin=lines), *words)


def test_a_text_too_long_far_down_is_counted_rightly(
    cli: RunCli, path: Path
) -> None:
    lines = b"x\n" * 299 + b"x" * 2000
    result = cli("embed", "-m", str(path), "-", stdin=lines)
    assert b"text 300: " in result.stderr and b" 512" in result.stderr


@pytest.mark.parametrize("name, words", [
    ("no/such/folder.npy", "No such file or directory"),
    ("embed.gguf/x.jsonl", "Not a directory"),
    ("folder", "Is a directory"),
])
def test_an_output_that_cannot_be_written_is_told_first(
    cli: RunCli, path: Path, name: str, words: str
) -> None:
    (path.parent / "folder").mkdir(exist_ok=True)
    out = path.parent / name
    # Before any text is read, or the model is loaded.
    result = cli("embed", "-m", "none.gguf", "--output", str(out), "-")
    assert_fails(result, str(out), words)


@pytest.mark.parametrize("arguments, words", [
    (["--output", "", "x"], ["--output: ", "path", "''"]),
    (["--file", ""], ["--file: ", "path", "''"]),
])
def test_paths_that_are_none(
    cli: RunCli, path: Path, arguments: list[str], words: list[str]
) -> None:
    assert_fails(cli("embed", "-m", str(path), *arguments), *words, code=2)


def test_a_full_device_is_named(cli: RunCli, path: Path) -> None:
    result = cli("embed", "-m", str(path), "--output", "/dev/full", "x")
    assert_fails(result, "/dev/full", "No space left on device")


def test_an_argument_that_is_no_text(
    cli: RunCli, path: Path
) -> None:
    bad = b"b\xff".decode("utf-8", "surrogateescape")
    result = cli("embed", "-m", str(path), "a", bad)
    assert_fails(result, "UTF-8", "0xFF", " 1", code=2)


def test_conversations_are_refused(cli: RunCli, path: Path) -> None:
    result = cli("generate", "-m", str(path), "x")
    assert_fails(result, "embeddings", "no conversation")
    result = cli("info", str(path), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["architecture"] == "gemma-embedding"


def test_info_has_no_table_of_a_cache_that_is_not_there(
    cli: RunCli, path: Path
) -> None:
    said = cli("info", str(path)).stdout.decode()
    assert "no conversation" in said
    assert "bytes a token" not in said


def test_the_error_names_the_command(cli: RunCli, path: Path) -> None:
    for command in ("generate", "verify"):
        argument = ["x"] if command == "generate" else []
        result = cli(command, "-m", str(path), *argument)
        assert_fails(result, "expected embed")
