"""`gemmakv bench` measures what it says; how fast is not a matter of tests."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gemmakv
from gemmakv import _core
from gemmakv.diagnostics import _bench as bench
from support import tiny_gguf, tiny_models
from support.command import RunCli

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


@pytest.fixture(scope="module")
def report(tiny_path: Path) -> bench.Report:
    return bench.run(tiny_path, threads=2, rounds=2, packed_cache=False)


def test_every_row_is_there(report: bench.Report) -> None:
    assert [row.name for row in report.rows] == NAMES
    assert report.left_out == ["prefill 2048"]
    units = [row.unit for row in report.rows]
    assert units == ["tokens/s"] * 7 + ["s", "bytes"]
    for row in report.rows:
        assert row.value > 0 and row.limit > 0 and row.share > 0
    assert all(limit > 0 for limit in dataclasses.astuple(report.limits))
    assert (report.threads, report.rounds) == (2, 2)
    assert report.target in _core.cpu_info()["targets"]
    assert report.packed_weights == "off"


def test_parallel_loops_are_counted(
    report: bench.Report, tiny_path: Path
) -> None:
    # Some for each of the layers, and the same for each token.
    assert report.parallel_loops_per_token >= tiny_gguf.LAYERS
    alone = gemmakv.Gemma.load(tiny_path, threads=1)
    cache = gemmakv.create_kv_cache(alone.config)
    alone.generate(cache, [2], max_tokens=3)
    assert alone._engine.parallel_loops == 0
    assert alone._engine.steps > 0


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


def test_progress_reaches_the_total(tiny_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    bench.run(
        tiny_path,
        threads=1,
        rounds=1,
        packed_cache=False,
        progress=lambda done, total: calls.append((done, total)),
    )
    total = 2 * (len(NAMES) + len(TEXTS))
    assert calls == [(i + 1, total) for i in range(total)]


def test_speculation_is_measured_beside(
    report: bench.Report, tiny_path: Path
) -> None:
    def ways(report: bench.Report) -> list[tuple[str, str]]:
        return [(row.speculate, row.name) for row in report.speculation]

    lookup = [("lookup", text) for text in TEXTS]
    assert ways(report) == lookup
    draft = gemmakv.Gemma.load(
        tiny_path, prefix_cache=False, packed_cache=False
    )
    drafted = bench.run(
        tiny_path, threads=1, rounds=1, packed_cache=False, draft=draft
    )
    assert ways(drafted) == lookup + [("draft", text) for text in TEXTS]
    for row in report.speculation + drafted.speculation:
        assert row.tokens_per_s > 0 and row.without_tokens_per_s > 0
        assert row.ratio > 0
        assert 0 <= row.accepted <= row.drafted


def test_rows_of_decoding_are_without_guesses(tiny_path: Path) -> None:
    measured = bench.Bench(str(tiny_path), 1, False, None)
    before = measured.gemma._engine.steps
    measured.decode(1, 40)
    assert measured.gemma._engine.steps - before == 40


def test_command_line(cli: RunCli, tiny_path: Path, tmp_path: Path) -> None:
    run = ["bench", "--model", tiny_path, "--threads", 1, "--rounds", 1]
    result = cli(*run, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert [row["name"] for row in document["rows"]] == NAMES
    assert set(document) == {
        field.name for field in dataclasses.fields(bench.Report)
    }
    assert document["placement"]["threads"] == 1
    assert not document["placement"]["pinned"]
    table = cli(*run, "--no-packed-cache", "--pin-threads").stdout.decode()
    assert "1 thread, pinned to CPUs " in table
    assert "longer than the model's context: prefill 2048\n" in table
    for name in [*NAMES, "parallel loops", "limits: read", *TEXTS]:
        assert name in table
    spec = document["speculation"][0]
    assert {"ratio", "drafted", "accepted"} < set(spec)
    copy = shutil.copy(tiny_path, tmp_path / "draft.gguf")
    drafts = json.loads(cli(*run, "--json", "--draft", copy).stdout)
    ways = [row["speculate"] for row in drafts["speculation"]]
    assert ways == ["lookup", "lookup", "draft", "draft"]
    failed = cli("bench", "--model", tiny_path, "--rounds", 0)
    assert failed.returncode == 2
    assert failed.stderr.count(b"\n") == 1


def test_profile_sums_to_the_time_of_steps(tiny_path: Path) -> None:
    report = bench.run(
        tiny_path, threads=2, rounds=2, packed_cache=False, profile=True
    )
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
        steps = 2 * (tokens - 1)
        if name.startswith("prefill"):
            steps = 2 * -(-int(name.split()[1]) // 128)
        assert profile.steps == steps
    assert by_name["decode, batch of 8"].rows == 8 * 2 * (
        bench.BATCH_TOKENS - 1
    )


def test_picture_has_a_bar_for_each_work(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    run = ["bench", "--model", tiny_path, "--threads", 2, "--rounds", 1]
    drawn = tmp_path / "profile.svg"
    result = cli(*run, "--profile", "--plot", drawn, "--json")
    assert result.returncode == 0, result.stderr
    profiles = json.loads(result.stdout)["profile"]
    root = ElementTree.fromstring(drawn.read_text("utf-8"))
    texts = [element.text for element in root.iter() if element.text]
    for name in [*(p["name"] for p in profiles), "joins", "gate_up"]:
        assert name in texts
    table = cli(*run, "--profile").stdout.decode()
    for name in ["share of a step's time", "gate_up", "joins", "between steps"]:
        assert name in table
    for bad in (
        ["--plot", drawn],
        ["--profile", "--plot", "no/such/x.svg"],
        ["--profile", "--plot", tmp_path],
        ["--profile", "--plot", ""],
    ):
        failed = cli(*run, *bad)
        assert failed.returncode == 2, bad
        assert b"--plot" in failed.stderr and failed.stderr.count(b"\n") == 1


def test_probe_measures_the_machine() -> None:
    probe = _core.MachineProbe(1)
    assert probe.read_bytes_per_s() > 0
    assert probe.int8_ops_per_s() > 0
    assert probe.float_ops_per_s() > 0
    with pytest.raises(ValueError, match="threads"):
        _core.MachineProbe(0)
