"""Threads by default: no more than a container's time keeps busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gemmakv
from gemmakv._support import processors
from support.machine import describe_cores


def cgroups(tmp_path: Path, own: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        file = tmp_path / "fs" / name / "cpu.max"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "own").write_text(own)
    return processors.cpu_quota(tmp_path / "fs", tmp_path / "own")


@pytest.mark.parametrize(
    "own, files, expected",
    [
        ("0::/\n", {".": "150000 100000\n"}, 1.5),  # a container
        ("0::/\n", {".": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a": "300000 100000", "a/b": "max 100000"}, 3.0),
        ("0::/a/b\n", {"a": "300000 100000", "a/b": "100 200"}, 0.5),
        ("1:cpu:/x\n0::/a\n", {"x": "100 100", "a": "200 100"}, 2.0),
        ("0::/../a\n", {"a": "100 100"}, None),  # not below the root
        ("", {".": "nonsense"}, None),
        ("0::/\n", {".": "100 0"}, None),
    ],
)
def test_quota(
    tmp_path: Path, own: str, files: dict[str, str], expected: float | None
) -> None:
    assert cgroups(tmp_path, own, files) == expected


def test_no_cgroups(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert processors.cpu_quota(none, none) is None


@pytest.mark.parametrize(
    "quota, there, expected",
    [(None, 8, None), (1.5, 8, 2), (0.2, 8, 1), (8.0, 8, None), (9, 2, None)],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, quota: float, there: int, expected: int
) -> None:
    monkeypatch.setattr(processors, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(there)))
    assert processors.thread_limit() == expected


def test_one_thread_for_each_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe_cores(tmp_path, ["0,4", "1,5", "2,6"])
    describe_cores(tmp_path, ["3", "7"], node=1)
    may: set[int] = set()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: may)
    monkeypatch.setattr(processors.cores, "__defaults__", (tmp_path,))
    quota: list[float | None] = [None]
    monkeypatch.setattr(processors, "cpu_quota", lambda: quota[0])
    for ids, cores, nodes, threads in (
        (range(8), 5, 2, 5),
        ((0, 1, 2, 4, 5, 6), 3, 1, 3),
        ((0, 1, 4, 5), 2, 1, None),  # few
        ((0, 1, 2, 3, 7), 5, 2, None),
        (range(8, 14), 6, 1, None),  # of which nothing is said
    ):
        may.clear()
        may.update(ids)
        assert processors.cores(tmp_path) == cores
        assert processors.nodes(tmp_path) == nodes
        assert processors.thread_limit() == threads
    may.update(range(8))
    for quota[0], threads in ((1.5, 2), (4.0, 4), (9.0, None)):
        may.clear()
        may.update(range(8))
        assert processors.thread_limit() == (threads or 5)
    assert processors.nodes() >= 1


def test_it_is_the_default(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor has no fewer")
    monkeypatch.setattr(processors, "cpu_quota", lambda: 0.7)
    assert gemmakv.Gemma.load(model_path).threads == 1
    assert gemmakv.Gemma.load(model_path, threads=2).threads == 2
