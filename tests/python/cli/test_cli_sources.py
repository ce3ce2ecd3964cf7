"""A bad value is blamed on the place where it stands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import gemmakv

pytest.importorskip("typer")
for needed in ("starlette", "uvicorn", "msgspec"):
    pytest.importorskip(needed, reason="the extra `server` is not installed")

from gemmakv.cli.app import run  # noqa: E402
from gemmakv.cli.serve_settings import ServeSettings  # noqa: E402
from gemmakv.server.settings import Settings  # noqa: E402

# Of a text that is no number, of a number that is out of range, of a path, of
# what the command itself refuses.
BAD = [
    ("port", "x", ["'x'"]),
    ("max-queue", "-1", ["integer", " 0", " -1"]),
    ("max-body-bytes", "0", ["integer", " 1", " 0"]),
    ("response-days", "inf", ["finite", " inf"]),
    ("drain-timeout", "inf", ["finite", " inf"]),
    ("sessions", "/dev/null", ["folder", "file"]),
    ("prefix-cache-disk", "/tmp:x", ["bytes", "'x'"]),
    ("prefix-cache-disk", "/proc/none", ["/proc/none", "No such file"]),
    ("api-key-file", "/no/such", ["/no/such", "No such file"]),
    ("log-format", "xml", ["text", "json"]),
    ("chat-template", "/no/such", ["file", "gemma", "gemma4", "plain"]),
]


def said(
    capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2
) -> str:
    assert run(["serve", "-m", "none.gguf", *flags]) == code
    return capsys.readouterr().err


def code_of(words: list[str]) -> int:
    """Whether a value is bad, or what it names is not there."""
    return 1 if "No such file" in words else 2


def has(text: str, words: list[str]) -> bool:
    """Whether what was found and what was expected are in it."""
    return all(word in text for word in words)


@pytest.mark.parametrize("key, value, words", BAD)
def test_variable(
    key: str, value: str, words: list[str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    variable = "GEMMAKV_" + key.upper().replace("-", "_")
    monkeypatch.setenv(variable, value)
    found = said(capsys, code=code_of(words))
    assert found.startswith(f"gemmakv: error: {variable}: "), found
    assert has(found, words) and f"--{key}" not in found


@pytest.mark.parametrize("key, value, words", BAD)
@pytest.mark.parametrize("written", ["-", "_"])
def test_key_of_the_file(
    key: str, value: str, words: list[str], written: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    key = key.replace("-", written)
    file = tmp_path / "server.toml"
    bare = value.lstrip("-").isdigit() or value == "inf"
    file.write_text(f"{key} = {value}\n" if bare else f'{key} = "{value}"\n')
    found = said(capsys, "--config", str(file), code=code_of(words))
    assert found.startswith(f"gemmakv: error: {file}: {key}: "), found
    assert has(found, words)


def test_a_file_that_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_bytes(b"#\xff\xfe")
    found = said(capsys, "--config", str(file))
    assert has(found, [str(file), "UTF-8", "0xFF", " 1"]), found


@pytest.mark.parametrize("key", ["sessions", "prefix-cache-disk",
                                 "prefix-cache-shared", "api-key-file"])
def test_a_flag_of_a_path_is_blamed(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["serve", "-m", "none.gguf", f"--{key}", "/proc/none"])
    found = capsys.readouterr().err
    assert found.startswith(f"gemmakv: error: --{key}: /proc/none"), found


def test_a_switch_in_a_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMAKV_PROFILE", "maybe")
    found = said(capsys)
    assert found.startswith("gemmakv: error: GEMMAKV_PROFILE: "), found
    assert has(found, ["true", "false", "'maybe'"])


GUARDS = ["api-key", "api-key-file", "prefix-cache-secret-file"]


@pytest.mark.parametrize("value", ["", " ", "\n"])
@pytest.mark.parametrize("key", GUARDS)
def test_an_empty_variable_opens_no_door(
    key: str, value: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """KEY="$NOT_SET" was a server that asks nobody for a key."""
    variable = "GEMMAKV_" + key.upper().replace("-", "_")
    monkeypatch.setenv(variable, value)
    found = said(capsys)
    assert found.startswith(f"gemmakv: error: {variable}: "), found
    assert "empty" in found
    # A flag takes its place: what is wrong then is another thing.
    if key == "api-key":
        found = said(capsys, "--api-key", "k", "--log-format", "xml")
    else:
        run(["serve", "-m", "none.gguf", f"--{key}", "/no/such"])
        found = capsys.readouterr().err
    assert found and variable not in found


def test_an_empty_key_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert has(said(capsys, "--api-key", ""), ["--api-key: ", "printable"])


def test_an_empty_secret_signs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMAKV_PREFIX_CACHE_SECRET", "")
    found = said(capsys, "--prefix-cache-remote", "redis://127.0.0.1:1/0")
    assert has(found, ["GEMMAKV_PREFIX_CACHE_SECRET: ", "at least"]), found


def test_help_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve"]) == 2
    assert capsys.readouterr().err.count("(--help") == 1


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
    assert has(found, [f"{file}: port: ", "integer", "80.5"]), found


@pytest.mark.parametrize("line, place, words", [
    ('port = "18110"', "port", ["integer", "'18110'"]),
    ("port = true", "port", ["integer", "true"]),
    ("model = 5", "model", ["text", "5"]),
    ('api-key = ["a", 3]', "api-key[1]", ["text", "3"]),
    ("api-key = 3", "api-key", ["text", "list", "3"]),
    ("model = ['a']", "model", ["text", "['a']"]),
    ('response-days = "3"', "response-days", ["number", "'3'"]),
    ('insecure = "yes"', "insecure", ["true", "false", "'yes'"]),
    ("insecure = 1", "insecure", ["true", "false", "1"]),
    ("kv-cache-memory = 1.5", "kv-cache-memory", ["bytes", "1.5"]),
    ("host = 1979-05-27", "host", ["text", "1979"]),
])  # fmt: skip
def test_a_value_of_another_type_is_not_coerced(
    line: str, place: str, words: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """18110 for "18110" hid mistakes until they did harm."""
    file = tmp_path / "server.toml"
    file.write_text(line + "\n")
    found = said(capsys, "--config", str(file))
    assert found.startswith(f"gemmakv: error: {file}: {place}: "), found
    assert has(found.split(f"{place}: ")[1], words), found
    assert len(found.splitlines()) == 1


def test_values_of_the_right_types_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 0\nresponse-days = 3\nprefix-cache-ram = 0\n'
        'api-key = ["a", "b"]\nserved-model-name = "x"\ninsecure = true\n'
        'kv-cache-memory = 1048576\nlog-format = "xml"\n'
    )
    found = said(capsys, "--config", str(file))
    assert f"{file}: log-format: " in found, "the others were taken"


def test_every_setting_is_read() -> None:
    package = Path(gemmakv.__file__).parent
    files = [*package.glob("server/**/*.py"), *package.glob("cli/*.py")]
    text = "\n".join(one.read_text("utf-8") for one in files)
    names = [*ServeSettings.model_fields]
    names += [one.name for one in dataclasses.fields(Settings)]
    assert not [n for n in names if not re.search(rf"\w\.{n}\b", text)]
