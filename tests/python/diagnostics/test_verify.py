"""`gemmakv verify`: it agrees, and it sees what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.cli import main
from gemmakv.diagnostics import _verify as verify
from support import family_models, golden_models, tiny_gguf
from support.command import RunCli, assert_fails

TARGETS = gemmakv.cpu_info()["targets"]
WINDOW = 16  # of the tiny model


def different(report: verify.Report) -> list[str]:
    return [check.way for check in report.checks if not check.equal]


@pytest.fixture(scope="module")
def report(tiny_path: Path) -> verify.Report:
    return verify.run(tiny_path)


def test_all_ways_agree(report: verify.Report, tiny: gemmakv.Gemma) -> None:
    assert report.equal and different(report) == []
    assert report.fingerprint == tiny.fingerprint
    assert report.tokens == WINDOW + 128
    for group in {check.arithmetic for check in report.checks}:
        checks = [c for c in report.checks if c.arithmetic == group]
        assert len(checks) >= 2, "nothing to compare with"
        assert len({c.digest for c in checks}) == 1
        assert len(checks[0].digest) == 64


@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    directory = {"recurrentgemma": "recurrentgemma-mqa", "gemma4": "gemma4-moe"}
    if family in directory:
        path = tmp_path / "directory"
        golden = golden_models.read(directory[family])
        golden_models.write(path, golden, "F32")
    else:
        config = family_models.config(family)
        path = tiny_gguf.write(
            tmp_path / "tiny.gguf",
            tiny_gguf.metadata(config),
            tiny_gguf.tensors(0, config),
        )
    found = verify.run(path, tokens=120)
    assert found.equal and different(found) == []
    [rewind] = [c.way for c in found.checks if c.way.startswith("rewind of")]
    if found.sliding_window:
        assert rewind.endswith(f", past the window of {found.sliding_window}")
    else:
        assert family == "gemma" and rewind.endswith(" tokens")


def test_what_is_compared(
    report: verify.Report, tiny: gemmakv.Gemma
) -> None:
    ways = " / ".join(check.way for check in report.checks)
    for words in (
        "one chunk", "chunks of 7", "chunks of 1, 2, 3", "token by token",
        "sampled", "batch of 4", "fork", "snapshot", "4 callers",
        "rewind to a checkpoint",
        f"past the window of {WINDOW}", "packed again",
        f"{report.threads + 1} threads",
    ):
        assert words in ways
    assert tiny.config.sliding_window == WINDOW
    if report.threads > 1:
        assert "1 thread" in ways
    assert report.target == TARGETS[0]
    for target in TARGETS[1:]:
        assert f"SIMD target {target}" in ways


def test_target_is_the_best_again(report: verify.Report) -> None:
    del report
    assert gemmakv.cpu_info()["target"] == TARGETS[0]


def test_arithmetics_differ(report: verify.Report) -> None:
    """The hash sees a difference of rounding."""
    digests = {check.digest for check in report.checks}
    groups = {check.arithmetic for check in report.checks}
    assert len(digests) == len(groups)
    if {"AVX2", "SSE2"} <= set(TARGETS):
        assert groups == {
            "with fused multiply-add", "without fused multiply-add"
        }


def test_options_change_the_hash(
    report: verify.Report, tiny_path: Path
) -> None:
    shorter = verify.run(tiny_path, tokens=100)
    int8 = verify.run(tiny_path, kv_dtype="int8")
    assert shorter.equal and int8.equal
    assert shorter.tokens == 100 and int8.kv_dtype == "int8"
    first = [r.checks[0].digest for r in (report, shorter, int8)]
    assert len(set(first)) == 3


def test_same_again(report: verify.Report, tiny_path: Path) -> None:
    again = verify.run(tiny_path, threads=1)
    assert again.threads == 1
    assert again.checks[0].digest == report.checks[0].digest


def test_progress(tiny_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = verify.run(
        tiny_path, tokens=100, progress=lambda *call: calls.append(call)
    )
    total = len(found.checks)
    assert calls == [(done, total) for done in range(total + 1)]


# Faults that it must see. Each breaks one thing of the public interface.


def break_fork(patch: pytest.MonkeyPatch) -> None:
    """A fork lacks a token."""
    real = gemmakv.KVCache.fork

    def fork(cache: gemmakv.KVCache) -> gemmakv.KVCache:
        copy = real(cache)
        copy.truncate(len(copy) - 1)
        return copy

    patch.setattr(gemmakv.KVCache, "fork", fork)


def break_restore(patch: pytest.MonkeyPatch) -> None:
    """A snapshot loses a token."""
    real = gemmakv.KVCache.from_bytes

    def from_bytes(data: bytes, gemma: Any = None) -> gemmakv.KVCache:
        cache = real(data, gemma)
        cache.truncate(len(cache) - 1)
        return cache

    patch.setattr(gemmakv.KVCache, "from_bytes", staticmethod(from_bytes))


def break_rewind(patch: pytest.MonkeyPatch) -> None:
    """One token too many stays."""
    real = gemmakv.KVCache.truncate

    def truncate(cache: gemmakv.KVCache, length: int) -> Any:
        return real(cache, min(length + 1, len(cache)))

    patch.setattr(gemmakv.KVCache, "truncate", truncate)


def break_batch(patch: pytest.MonkeyPatch) -> None:
    """Two conversations of a batch are swapped."""
    real = gemmakv.Gemma.generate_batch

    def swapped(
        gemma: gemmakv.Gemma, caches: Any, prompts: Any, **options: Any
    ) -> Any:
        return real(gemma, caches, prompts[::-1], **options)

    patch.setattr(gemmakv.Gemma, "generate_batch", swapped)


def break_sampling(patch: pytest.MonkeyPatch) -> None:
    """Sampling takes another token than the first time."""
    real = gemmakv.Gemma.generate
    count = 0

    def generate(
        gemma: gemmakv.Gemma, cache: Any, prompt: Any, **options: Any
    ) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            options["temperature"] = 5.0
        return real(gemma, cache, prompt, **options)

    patch.setattr(gemmakv.Gemma, "generate", generate)


def break_threads(patch: pytest.MonkeyPatch) -> None:
    """With another number of threads the logits are off by a bit."""
    real = gemmakv.Gemma.logits
    usual = gemmakv.cpu_info()["threads"]

    def logits(gemma: gemmakv.Gemma, *args: Any, **options: Any) -> Any:
        rows = real(gemma, *args, **options)
        if gemma.threads == usual + 1:
            rows.reshape(-1).view("uint32")[-1] ^= 1
        return rows

    patch.setattr(gemmakv.Gemma, "logits", logits)


def break_targets(patch: pytest.MonkeyPatch) -> None:
    """Targets that round differently are said to be of one arithmetic."""
    if not {"AVX2", "SSE2"} <= set(TARGETS):
        pytest.skip("this processor has targets of one arithmetic only")
    patch.setattr(verify, "_arithmetic_of", lambda _: "all alike")


FAULTS = [
    (break_fork, "fork"),
    (break_restore, "snapshot and restore"),
    (break_rewind, "rewind"),
    (break_batch, "batch of 4"),
    (break_sampling, "sampled"),
    (break_threads, "threads"),
    (break_targets, "SIMD target SSE"),
]


@pytest.mark.parametrize(
    "fault, way", FAULTS, ids=[f.__name__ for f, _ in FAULTS]
)
def test_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    way: str,
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    found = verify.run(tiny_path, tokens=128)
    assert not found.equal
    seen = different(found)
    assert seen and all(name.startswith((way, "3 thr")) or way in name
                        for name in seen), seen


def test_exit_code_and_table_of_a_fault(
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_restore(monkeypatch)
    arguments = ["verify", "-m", str(tiny_path), "--tokens", "100"]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    [bad] = [line for line in lines if " DIFFERS" in line and "  " in line]
    assert bad.startswith("snapshot and restore")
    assert sum(" equal" in line for line in lines) >= 10
    assert any("1 of " in line and "report this" not in line for line in lines)
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is False
    ways = [c["way"] for c in document["checks"] if not c["equal"]]
    assert ways == ["snapshot and restore"]


# The command line.


def test_table(cli: RunCli, tiny_path: Path, report: verify.Report) -> None:
    result = cli("verify", "--model", tiny_path, "--tokens", report.tokens)
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    lines = result.stdout.decode().splitlines()
    assert lines[0].startswith(str(tiny_path))
    hashes = {check.digest[:16] for check in report.checks}
    shown = [line for line in lines if any(h in line for h in hashes)]
    assert len(shown) == len(report.checks)
    assert not any("DIFFERS" in line for line in lines)
    assert f"All {len(shown)} ways" in result.stdout.decode()
    assert all(len(line) <= 80 for line in lines[1:])


def test_json(cli: RunCli, tiny_path: Path) -> None:
    result = cli("verify", "-m", tiny_path, "--tokens=100", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["equal"] is True
    assert document["tokens"] == 100
    assert document["model"] == str(tiny_path)
    assert all(check["equal"] for check in document["checks"])


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--tokens", 3, ("96", "found 3")),
        ("--tokens", 10**9, ("context",)),
        ("--kv-dtype", "fp4", ("'fp4'",)),
        ("--threads", 0, ("found 0",)),
    ],
)
def test_bad_flags(
    cli: RunCli, flag: str, value: object, words: tuple[str, ...],
    tiny_path: Path,
) -> None:  # fmt: skip
    result = cli("verify", "--model", tiny_path, flag, value)
    assert_fails(result, flag, *words, code=2)


def test_bad_models(cli: RunCli, tmp_path: Path) -> None:
    assert_fails(cli("verify", "-m", "no-such"), "no-such", "gemma-3-270m")
    meta = tiny_gguf.metadata()
    meta["gemma3.context_length"] = (4, 64)
    short = tiny_gguf.write(tmp_path / "short.gguf", meta)
    assert_fails(cli("verify", "-m", short), "context", "96", "64")


def test_longest_context(tiny_path: Path, tiny: gemmakv.Gemma) -> None:
    """No room for other tokens to push these out of the window."""
    found = verify.run(tiny_path, tokens=tiny.config.context_length)
    assert found.equal
    [rewind] = [c.way for c in found.checks if c.way.startswith("rewind of")]
    assert rewind.endswith(f"past the window of {WINDOW}")
    assert int(rewind.split()[2].replace(",", "")) > WINDOW
