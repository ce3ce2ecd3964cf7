"""`gemmakv bench` measures what it says; how fast is not a matter of tests.

Fixed numbers stand for the machine's limits and for processes of their own,
which take nearly all of the time, but in the one test of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import gemmakv
from gemmakv import _core
from gemmakv.cli import main
from gemmakv.diagnostics import _bench as bench
from gemmakv.generation._requests import requests_of
from support import tiny_gguf, tiny_models
from support.command import RunCli, assert_fails

# 2,048 tokens do not fit the tiny model's context of 512.
NAMES = [
    "prefill 128",
    "prefill 512",
    "decode",
    "decode, batch of 4",
    "decode, batch of 8",
    "decode, batch of 16",
    "decode, batch of 32",
    "load to first token",
    "peak memory",
]


TEXTS = ["edit of code", "new text, sampled"]
LOOKUP = [("lookup", text) for text in TEXTS]
DRAFT = [("draft", text) for text in TEXTS]
ROUNDS = 2

LIMITS = bench.Limits(1e9, 4e9, 2e9)
FIRST_TOKEN_S, PEAK_BYTES = 0.5, 3 << 20


class FixedProbe:
    """Stands for a machine of known limits."""

    def __init__(self, threads: int) -> None:
        assert threads > 0

    def read_bytes_per_s(self) -> float:
        return LIMITS.read_bytes_per_s

    def int8_ops_per_s(self) -> float:
        return LIMITS.int8_ops_per_s

    def float_ops_per_s(self) -> float:
        return LIMITS.float_ops_per_s


def answer(
    command: list[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Says what a process that loads the model and generates would say."""
    assert Path(json.loads(command[-1])["model"]).is_file(), options
    said = {"first_token_s": FIRST_TOKEN_S, "peak_bytes": PEAK_BYTES}
    return subprocess.CompletedProcess(command, 0, json.dumps(said), "")


@contextlib.contextmanager
def known_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "MachineProbe", FixedProbe)
        patch.setattr(subprocess, "run", answer)
        yield


@dataclasses.dataclass(frozen=True)
class Run:
    report: bench.Report
    progress: list[tuple[int, int]]


@pytest.fixture(scope="module")
def run(tiny_path: Path) -> Run:
    """All that one run measures, and the calls that told its progress."""
    calls: list[tuple[int, int]] = []
    draft = gemmakv.Gemma.load(
        tiny_path, prefix_cache=False, packed_cache=False
    )
    with known_machine():
        report = bench.run(
            tiny_path,
            threads=2,
            rounds=ROUNDS,
            packed_cache=False,
            profile=True,
            draft=draft,
            progress=lambda done, total: calls.append((done, total)),
        )
    return Run(report, calls)


@pytest.fixture(scope="module")
def report(run: Run) -> bench.Report:
    return run.report


def test_every_row_is_there(report: bench.Report) -> None:
    assert [row.name for row in report.rows] == NAMES
    assert report.left_out == ["prefill 2048"]
    units = [row.unit for row in report.rows]
    assert units == ["tokens/s"] * 7 + ["s", "bytes"]
    for row in report.rows:
        assert row.value > 0 and row.limit > 0 and row.share > 0
    assert (report.threads, report.rounds) == (2, ROUNDS)
    assert report.target in _core.cpu_info()["targets"]
    assert report.packed_weights == "off"


def test_rows_stand_beside_the_limits(
    report: bench.Report, tiny: gemmakv.Gemma
) -> None:
    assert report.limits == LIMITS
    work = bench.work_of(tiny)
    assert report.weight_bytes == work.read_bytes
    rows = {row.name: row for row in report.rows}
    for name, tokens, logits in (
        ("prefill 128", 128, 1), ("prefill 512", 512, 1), ("decode", 1, 1),
        ("decode, batch of 32", 32, 32),
    ):  # fmt: skip
        limit = tokens / work.seconds(LIMITS, tokens, logits)
        assert rows[name].limit == pytest.approx(limit)
    first, memory = rows["load to first token"], rows["peak memory"]
    assert first.value == FIRST_TOKEN_S and memory.value == PEAK_BYTES
    assert first.limit == work.read_bytes / LIMITS.read_bytes_per_s
    assert memory.limit == work.read_bytes
    for row in (first, memory):
        assert row.share == pytest.approx(row.limit / row.value)


@pytest.mark.slow
def test_the_machine_is_measured(tiny_path: Path) -> None:
    """With nothing put in its place."""
    measured = bench.Bench(str(tiny_path), 1, False, None)
    seconds, reading = measured.first_token()
    peak, weights = measured.peak_memory()
    assert seconds > 0 and reading > 0
    # A process with the library in it.
    assert peak > weights == measured.work.read_bytes
    assert all(
        limit > 0 for limit in dataclasses.astuple(measured.median_limits())
    )
    with pytest.raises(ValueError, match="threads"):
        _core.MachineProbe(0)


def test_a_process_that_fails(tiny_path: Path, tmp_path: Path) -> None:
    gone = shutil.copy(tiny_path, tmp_path / "gone.gguf")
    with known_machine():
        measured = bench.Bench(str(gone), 1, False, None)
    gone.unlink()
    with pytest.raises(gemmakv.GemmaKVError, match="gone.gguf"):
        measured.peak_memory()


def test_parallel_loops_are_counted(
    report: bench.Report, tiny_path: Path
) -> None:
    # Some for each of the layers, and the same for each token.
    assert report.parallel_loops_per_token >= tiny_gguf.LAYERS
    alone = gemmakv.Gemma.load(tiny_path, threads=1)
    cache = gemmakv.create_kv_cache(alone.config)
    alone.generate(cache, [2], max_tokens=3)
    assert requests_of(alone).engine.parallel_loops == 0
    assert requests_of(alone).engine.steps > 0


def test_work_counts_what_a_step_reads(
    tmp_path: Path, tiny_path: Path
) -> None:
    keys = 2 * tiny_gguf.HIDDEN * tiny_gguf.KV_HEADS * tiny_gguf.HEAD_DIM * 2
    late = 2 * (  # of the last layer, for rows that get logits
        tiny_gguf.HIDDEN * tiny_gguf.HEADS * tiny_gguf.HEAD_DIM * 2
        + tiny_gguf.HIDDEN * tiny_gguf.FFN * 3
    )
    layer = keys + late
    head = 2 * tiny_gguf.VOCAB * tiny_gguf.HIDDEN
    work = bench.work_of(gemmakv.Gemma.load(tiny_path))
    assert work.layer_float_ops == tiny_gguf.LAYERS * layer - late
    assert work.head_float_ops == head + late
    assert work.layer_int8_ops == work.head_int8_ops == 0
    assert work.read_bytes == 2 * (tiny_gguf.LAYERS * layer + head)
    # An output matrix of its own is the head; the embedding gives single rows.
    weights = tiny_gguf.tensors()
    weights["output.weight"] = weights["token_embd.weight"]
    untied = tiny_gguf.write(tmp_path / "untied.gguf", weights=weights)
    assert bench.work_of(gemmakv.Gemma.load(untied)) == work
    path = tiny_models.write_tiny_gguf(tmp_path / "q.gguf", "Q8_0")
    quantized = bench.work_of(gemmakv.Gemma.load(path))
    assert quantized.layer_float_ops == quantized.head_float_ops == 0
    assert quantized.layer_int8_ops > 0 and quantized.head_int8_ops > 0


def test_limit_is_the_slower_of_reading_and_computing() -> None:
    limits = bench.Limits(100.0, 10.0, 5.0)
    work = bench.Work(1000, 10, 0, 20, 5)
    assert work.seconds(limits, 1, 1) == 10.0  # reading
    assert work.seconds(limits, 20, 1) == 20 + 2 + 1
    assert work.seconds(limits, 20, 0) == 20.0


def test_bad_arguments(tiny_path: Path) -> None:
    for bad in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="rounds"):
            bench.run(tiny_path, rounds=bad)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        bench.run("no such model")


def test_progress_reaches_the_total(run: Run) -> None:
    total = (1 + ROUNDS) * (len(NAMES) + len(LOOKUP) + len(DRAFT))
    assert run.progress == [(i + 1, total) for i in range(total)]


def test_speculation_is_measured_beside(report: bench.Report) -> None:
    ways = [(row.speculate, row.name) for row in report.speculation]
    assert ways == LOOKUP + DRAFT
    for row in report.speculation:
        assert row.tokens_per_s > 0 and row.without_tokens_per_s > 0
        assert row.ratio > 0
        assert 0 <= row.accepted <= row.drafted


def test_rows_of_decoding_are_without_guesses(tiny_path: Path) -> None:
    with known_machine():
        measured = bench.Bench(str(tiny_path), 1, False, None)
    before = requests_of(measured.gemma).engine.steps
    measured.decode(1, 40)
    assert requests_of(measured.gemma).engine.steps - before == 40


def test_profile_sums_to_the_time_of_steps(report: bench.Report) -> None:
    assert report.profile is not None
    by_name = {profile.name: profile for profile in report.profile}
    # Those that run in a process of their own have none.
    assert list(by_name) == NAMES[:-2]
    for name, profile in by_name.items():
        parts = sum(profile.parts.values())
        assert parts == pytest.approx(profile.seconds, rel=0.01)
        assert profile.seconds > 0 and profile.between_s >= 0
        assert profile.rows % profile.steps == 0
        # The first token of a conversation is of its prompt.
        tokens = bench.BATCH_TOKENS
        if name == "decode":
            tokens = bench.DECODE_TOKENS
        steps = ROUNDS * (tokens - 1)
        if name.startswith("prefill"):
            steps = ROUNDS * -(-int(name.split()[1]) // 128)
        assert profile.steps == steps
    assert by_name["decode, batch of 8"].rows == 8 * ROUNDS * (
        bench.BATCH_TOKENS - 1
    )


# The command line.


def bench_here(*flags: object) -> str:
    """Runs the command and gives what it prints."""
    words = ["bench", "--rounds", "1", *map(str, flags)]
    shown = io.StringIO()
    with known_machine(), contextlib.redirect_stdout(shown):
        assert main(words) == 0
    return shown.getvalue()


def test_table(tiny_path: Path) -> None:
    table = bench_here(
        *("--model", tiny_path, "--threads", 1, "--pin-threads"),
        *("--no-packed-cache", "--profile"),
    )
    assert "1 thread, pinned to CPUs " in table
    assert "longer than the model's context: prefill 2048\n" in table
    for name in [
        *NAMES, *TEXTS, "parallel loops", "limits: read 1.0 GB/s", "0.500 s",
        "share of a step's time", "gate_up", "between steps",
    ]:  # fmt: skip
        assert name in table


def test_json(tiny_path: Path) -> None:
    document = json.loads(
        bench_here("--model", tiny_path, "--threads", 1, "--json")
    )
    assert [row["name"] for row in document["rows"]] == NAMES
    assert set(document) == {
        field.name for field in dataclasses.fields(bench.Report)
    }
    assert document["placement"]["threads"] == 1
    assert not document["placement"]["pinned"]
    assert document["profile"] is None
    found = document["speculation"]
    assert [(row["speculate"], row["name"]) for row in found] == LOOKUP
    assert {"ratio", "drafted", "accepted"} < set(found[0])


def test_picture_has_a_bar_for_each_work(
    tiny_path: Path, tmp_path: Path
) -> None:
    copy = shutil.copy(tiny_path, tmp_path / "draft.gguf")
    drawn = tmp_path / "profile.svg"
    document = json.loads(
        bench_here(
            *("--model", tiny_path, "--threads", 2, "--draft", copy),
            *("--profile", "--plot", drawn, "--json"),
        )
    )
    found = document["speculation"]
    assert [(row["speculate"], row["name"]) for row in found] == LOOKUP + DRAFT
    names = [profile["name"] for profile in document["profile"]]
    assert names == NAMES[:-2]
    root = ElementTree.fromstring(drawn.read_text("utf-8"))
    texts = [element.text for element in root.iter() if element.text]
    for name in [*names, "joins", "gate_up"]:
        assert name in texts


@pytest.mark.parametrize(
    "flags, flag",
    [
        (["--rounds", "0"], "rounds"),
        (["--plot", "x.svg"], "--plot"),
        (["--profile", "--plot", "no/such/x.svg"], "--plot"),
        (["--profile", "--plot", "/"], "--plot"),
        (["--profile", "--plot", ""], "--plot"),
    ],
)
def test_bad_flags(
    cli: RunCli, flags: list[str], flag: str, tiny_path: Path
) -> None:
    failed = cli("bench", "--model", tiny_path, *flags)
    assert_fails(failed, flag, code=2)
