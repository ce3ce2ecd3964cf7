"""Threads by default: no more than a container's time keeps busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gemmakv
from gemmakv._support import processors


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


def test_it_is_the_default(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor has no fewer")
    monkeypatch.setattr(processors, "cpu_quota", lambda: 0.7)
    assert gemmakv.Gemma.load(model_path).threads == 1
    assert gemmakv.Gemma.load(model_path, threads=2).threads == 2
