"""A bad value is blamed on the place where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")
for needed in ("starlette", "uvicorn", "msgspec"):
    pytest.importorskip(needed, reason="the extra `server` is not installed")

from gemmakv.cli.app import run  # noqa: E402

# Of a text that is no number, of a number that is out of range, of a path, of
# what the command itself refuses.
BAD = [
    ("port", "x", "'x'"),
    ("max-queue", "-1", "expected an integer of at least 0, found -1"),
    ("max-body-bytes", "0", "expected an integer of at least 1, found 0"),
    ("response-days", "inf", "expected a finite number, found inf"),
    ("drain-timeout", "inf", "expected a finite number, found inf"),
    ("sessions", "/dev/null", "expected a folder, found a file"),
    ("prefix-cache-disk", "/tmp:x", "expected"),
    ("log-format", "xml", "expected one of text, json"),
    ("chat-template", "/no/such", "expected file, gemma, gemma4, plain or"),
]


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    code = run(["serve", "-m", "none.gguf", *flags])
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("key, value, words", BAD)
def test_variable(
    key: str, value: str, words: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    variable = "GEMMAKV_" + key.upper().replace("-", "_")
    monkeypatch.setenv(variable, value)
    found = said(capsys)
    assert found.startswith(f"gemmakv: error: {variable}: "), found
    assert words in found and f"--{key}" not in found


@pytest.mark.parametrize("key, value, words", BAD)
@pytest.mark.parametrize("written", ["-", "_"])
def test_key_of_the_file(
    key: str, value: str, words: str, written: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    key = key.replace("-", written)
    file = tmp_path / "server.toml"
    file.write_text(f'{key} = "{value}"\n')
    found = said(capsys, "--config", str(file))
    assert found.startswith(f"gemmakv: error: {file}: {key}: "), found
    assert words in found


def test_a_flag_is_blamed_as_ever(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMAKV_MAX_QUEUE", "3")
    for key, value, _ in BAD[:2]:
        found = said(capsys, f"--{key}", value)
        assert f"--{key}" in found and "GEMMAKV" not in found


def test_a_fraction_is_no_integer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_text("port = 80.5\n")
    found = said(capsys, "--config", str(file))
    assert f"{file}: port: expected an integer, found 80.5" in found
