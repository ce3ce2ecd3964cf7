"""What is said of errors of commands, and their exit codes."""

from __future__ import annotations

import socket
import typing
from pathlib import Path

import pytest

for needed in ("typer", "starlette", "uvicorn", "msgspec"):
    pytest.importorskip(needed, reason="an extra is not installed")

from gemmakv.cli import main  # noqa: E402
from gemmakv.cli.failures import (  # noqa: E402
    InputError,
    argument_of,
    line_of,
    refusal,
)
from gemmakv.cli.serve_settings import ServeSettings  # noqa: E402
from gemmakv.errors import (  # noqa: E402
    ArgumentError,
    GemmaKVError,
    MismatchError,
    unexpected,
)
from support import tiny_gguf  # noqa: E402

NONE = "none.gguf"
GENERATE = ["generate", "-m", NONE]
CHAT = ["chat", "-m", NONE]
SERVE = ["serve", "-m", NONE]

# Command lines, what they say first, and their exit codes: 2 if what was typed
# is at fault, 1 if it is the state of the machine.
FAILURES = [
    ([*GENERATE, "hi"], "none.gguf: ", 1),
    (["generate", "-m", "threads", "hi"], "threads: no such file", 1),
    (["generate", "-m", "", "hi"], "--model: expected ", 2),
    (["generate", "hi"], "no model: ", 2),
    (["generate", "-m", NONE], "Missing argument 'PROMPT'", 2),
    ([*GENERATE, "a", "b"], "Got unexpected extra argument", 2),
    ([*GENERATE, "--no-such", "hi"], "No such option: --no-such", 2),
    ([*GENERATE, "-5"], "No such option: -5", 2),
    ([*GENERATE, "--threads"], "Option '--threads' requires", 2),
    ([*GENERATE, "--threads", "x", "hi"], "--threads: expected an integer, "
     "found 'x'", 2),
    ([*GENERATE, "--capacity-tokens", "0", "hi"], "--capacity-tokens: ", 2),
    ([*GENERATE, "--kv-dtype", "fp8", "hi"], "--kv-dtype: expected ", 2),
    ([*GENERATE, "--quantize", "q9", "hi"], "--quantize: expected ", 2),
    ([*GENERATE, "--temperature", "hot", "hi"], "--temperature: expected ", 2),
    ([*GENERATE, "--top-p", "0", "hi"], "--top-p: expected ", 2),
    ([*GENERATE, "--logit-bias", "x", "hi"], "--logit-bias: expected ", 2),
    ([*GENERATE, "--logit-bias", "-1=1", "hi"], "--logit-bias", 2),
    ([*GENERATE, "--stop", "", "hi"], "--stop: expected ", 2),
    ([*GENERATE, "--stop-token-ids", "x", "hi"], "--stop-token-ids: ", 2),
    ([*GENERATE, "--response-format", "{", "hi"], "--response-format: ", 2),
    ([*GENERATE, "--speculate", "draft", "hi"], "--speculate: expected ", 2),
    ([*GENERATE, "--logprobs", "hi"], "--logprobs and ", 2),
    ([*GENERATE, "--prefix-cache-ram", "x", "hi"], "--prefix-cache-ram: ", 2),
    ([*GENERATE, "--prefix-cache-disk", "kv:0", "hi"],
     "--prefix-cache-disk: ", 2),
    ([*GENERATE, "--prefix-cache-disk", "/proc/none", "hi"],
     "--prefix-cache-disk: /proc/none", 1),
    ([*CHAT, "--speculate", "draft"], "--speculate: expected ", 2),
    ([*CHAT, "--overflow", "wrap"], "--overflow: expected one of error, ", 2),
    ([*CHAT, "--session", "a b"], "--session: 'a b' is no name", 2),
    (["embed", "-m", NONE], "expected texts or --file", 2),
    (["embed", "-m", NONE, "--file", ""], "--file: expected a path", 2),
    (["embed", "-m", NONE, "--output", "/no/such/x", "a"], "/no/such/x: ", 1),
    (["info"], "MODEL: expected ", 2),
    (["info", "--cpu", "--types"], "--cpu: expected ", 2),
    (["info", NONE], "none.gguf: ", 1),
    (["rm", "--yes", "yes"], "yes: no such model", 1),
    (["packed", "--clear", "--expire"], "--clear, ", 2),
    (["cache", "stats", "/no/such"], "/no/such: ", 1),
    (["cache", "stats", ":"], "DIR[:BYTES]: expected ", 2),
    (["cache", "inspect", "/no/such"], "/no/such: ", 1),
    (["cache", "warm", "kv", "-m", NONE], "expected a FILE", 2),
    (["cache", "no-such"], "No such command", 2),
    (["no-such"], "No such command", 2),
    ([*SERVE, "--port", "x"], "--port: expected an integer, found 'x'", 2),
    ([*SERVE, "--port", "70000"], "--port: expected ", 2),
    ([*SERVE, "--max-n", "0"], "--max-n: expected ", 2),
    ([*SERVE, "--workers", "0"], "--workers: expected ", 2),
    ([*SERVE, "--host", "0.0.0.0"], "--host: ", 2),
    ([*SERVE, "--config", "/no/such.toml"], "/no/such.toml: ", 2),
    ([*SERVE, "--api-key-file", "/no/such"], "--api-key-file: /no/such", 1),
    ([*SERVE, "--sessions", "/proc/none"], "--sessions: /proc/none", 1),
    (["serve"], "no model: ", 2),
    ([*SERVE], "none.gguf: ", 1),
    (["serve", "-m", ""], "--model: expected a model, found ''", 2),
    ([*SERVE, "--draft", ""], "--draft: expected a model, found ''", 2),
    ([*GENERATE, "--draft", "", "hi"], "--draft: expected a model, ", 2),
]  # fmt: skip


@pytest.mark.parametrize("words, begin, code", FAILURES)
def test_a_command_that_fails(
    words: list[str], begin: str, code: int, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gemmakv: error: " + begin)
    assert "_" not in line.split(": ")[2], "it names Python's keyword"


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
@pytest.mark.parametrize("name, value, words, code", [
    ("port", None, "another program listens there", 1),
    ("api_key_file", "/no/such", "/no/such: No such file", 1),
    ("sessions", "/proc/none", "/proc/none: ", 1),
    ("speculate", "guess", "expected 'off', 'lookup' or 'draft'", 2),
])  # fmt: skip
def test_the_code_is_that_of_what_failed_wherever_a_value_stands(
    name: str, value: str | None, words: str, code: int, how: str,
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flag, file = "--" + name.replace("_", "-"), tmp_path / "server.toml"
    command = ["serve", "-m", str(tiny_path)]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        if how == "flag":
            place = flag
            command += [flag, str(port) if value is None else value]
        elif how == "file":
            place = f"{file}: {name}"
            written = port if value is None else f'"{value}"'
            file.write_text(f"{name} = {written}\n")
            command += ["--config", str(file)]
        else:
            place = "GEMMAKV_" + name.upper()
            monkeypatch.setenv(place, str(port) if value is None else value)
        assert main(command) == code
    line = capsys.readouterr().err
    assert line.startswith(f"gemmakv: error: {place}: ") and words in line


def test_the_names_of_variables_are_exact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("gemmakv_port", "x")
    monkeypatch.setenv("GEMMAKV_workers", "x")
    assert main(SERVE) == 1
    assert "error: none.gguf: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "embed", "chat"])
def test_a_model_without_a_tokenizer(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No flag is at fault, nor the prompt."""
    monkeypatch.chdir(tmp_path)
    meta = {
        key: value
        for key, value in tiny_gguf.metadata().items()
        if not key.startswith("tokenizer.")
    }
    tiny_gguf.write(tmp_path / "m.gguf", meta)
    words = ["--no-persist"] if command == "chat" else ["hi"]
    assert main([command, "-m", "m.gguf", *words]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gemmakv: error: m.gguf: expected a model with a ")


@pytest.mark.parametrize("grammar", [
    "start: max_tokens", "start: kv_dtype: x", "max_tokens: is",
])  # fmt: skip
def test_the_user_s_own_text_is_left_alone(
    grammar: str, tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    code = main(["generate", "-m", str(tiny_path), "--grammar", grammar, "hi"])
    line = capsys.readouterr().err
    assert code == 2
    assert line.startswith("gemmakv: error: --grammar: ")
    assert "--max-tokens" not in line and "--kv-dtype" not in line


def test_a_model_that_recommends_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No flag is at fault."""
    meta = tiny_gguf.metadata()
    meta["general.sampling.top_p"] = (tiny_gguf.F32, 7.0)
    path = tiny_gguf.write(tmp_path / "m.gguf", meta)
    words = ["generate", "-m", str(path), "--sampling-defaults", "hi"]
    assert main(words) == 1
    line = capsys.readouterr().err
    assert "recommend top_p: " in line and "--top-p" not in line


PLACES = {"threads": "--threads", "max_tokens": "--max-tokens"}


@pytest.mark.parametrize("error, line, code", [
    (unexpected("threads", "less", "threads: max_tokens"),
     "--threads: expected less, found 'threads: max_tokens'", 2),
    (ArgumentError("max_tokens[3]", "a number", "x"),
     "--max-tokens[3]: expected a number, found 'x'", 2),
    (ArgumentError("texts", "max_tokens", "x"),
     "texts: expected max_tokens, found 'x'", 1),
    (ArgumentError("GEMMAKV_DAYS", "a number", "x"),
     "GEMMAKV_DAYS: expected a number, found 'x'", 2),
    # The core's, and those that are not given in parts.
    (ValueError("threads is 9, expected 8"), "--threads is 9, expected 8", 2),
    (ValueError("max_tokens: expected max_tokens"),
     "--max-tokens: expected max_tokens", 2),
    (ValueError("threads wait for max_tokens"),
     "threads wait for max_tokens", 1),
    (OSError("threads: no such folder"), "--threads: no such folder", 1),
    (OSError(2, "No such file", "threads"), "threads: No such file", 1),
    (GemmaKVError("threads: not sound"), "threads: not sound", 1),
    (MismatchError("threads: none here"), "--threads: none here", 2),
    (InputError("threads: expected a text"), "threads: expected a text", 1),
])  # fmt: skip
def test_only_the_name_in_front_is_a_flag_s(
    error: Exception, line: str, code: int
) -> None:
    assert line_of(error, PLACES) == (line, code)


def test_names_that_are_none() -> None:
    for text in ("threads", "threads wait", "max_tokens_of: x", "", ": x"):
        assert argument_of(ValueError(text)) in ("", "max_tokens_of")


def bad_values(name: str) -> list[tuple[str, str]]:
    """Values that are none for a setting, as a variable and in a file."""
    field = ServeSettings.model_fields[name]
    kinds = typing.get_args(field.annotation) or (field.annotation,)
    if name == "kv_cache_memory":
        return [("much", "1.5")]
    if bool in kinds:
        return [("maybe", '"maybe"'), ("maybe", "1")]
    if int in kinds:
        return [("x", '"8"'), ("1.5", "1.5"), ("9" * 5000, "true")]
    if float in kinds:
        return [("x", '"8"'), ("nan", "true"), ("inf", "[]")]
    return [("", "3.5" if name == "prefix_cache_ram" else "3"), ("", "{}")]


@pytest.mark.parametrize("name", sorted(
    set(ServeSettings.model_fields) - {"config"}
))  # fmt: skip
def test_bad_values_of_all_settings_are_said_in_one_form(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "server.toml"
    for variable, written in bad_values(name):
        said = []
        file.write_text(f"{name} = {written}\n")
        assert main(["serve", "--config", str(file)]) == 2
        said.append((f"{file}: {name}: ", capsys.readouterr().err))
        if variable:
            place = "GEMMAKV_" + name.upper()
            with monkeypatch.context() as patched:
                patched.setenv(place, variable)
                assert main(["serve"]) == 2
            said.append((f"{place}: ", capsys.readouterr().err))
            flag = "--" + name.replace("_", "-")
            if bool not in (ServeSettings.model_fields[name].annotation,):
                assert main(["serve", flag, variable]) == 2
                said.append((f"{flag}: ", capsys.readouterr().err))
        for place, line in said:
            assert line.startswith(f"gemmakv: error: {place}expected "), line
            assert ", found " in line and line.count("\n") == 1
            assert "Input" not in line and "valid" not in line


def test_an_unknown_reason_is_told_all_the_same() -> None:
    details = {"type": "new", "msg": "a new rule", "input": 3}
    assert refusal(details) == "expected a new rule, found 3"
