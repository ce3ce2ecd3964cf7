"""Where pinned threads are placed, on machines that are not this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemmakv._support import processors
from support.machine import describe_cores


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of three cores with two processors each."""
    describe_cores(tmp_path, ["0,6", "1,7", "2,8"])
    describe_cores(tmp_path, ["3,9", "4,10", "5,11"], node=1)
    allow(monkeypatch, range(12))
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, ids: range | list[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ids))


def test_one_on_each_core_node_after_node(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = processors.placement_order(server)
    assert [id for id, _, _ in order] == list(range(12))
    assert order[10] == (10, 4, 1)
    allow(monkeypatch, [11, 9, 8, 5, 2])
    order = processors.placement_order(server)
    assert [id for id, _, _ in order] == [2, 5, 9, 8, 11]


@pytest.mark.parametrize(
    "workers, expected",
    [
        (1, ["0-11"]),
        (2, ["0-2,6-8", "3-5,9-11"]),  # a node each
        (3, ["0-1,6-7", "2-3,8-9", "4-5,10-11"]),
        (4, ["0,6", "1-2,7-8", "3,9", "4-5,10-11"]),
        (6, ["0,6", "1,7", "2,8", "3,9", "4,10", "5,11"]),
        (12, ["0", "6", "1", "7", "2", "8", "3", "9", "4", "10", "5", "11"]),
    ],
)
def test_workers_have_their_own_cores(
    server: Path, workers: int, expected: list[str]
) -> None:
    shares = processors.shares(workers, server)
    assert list(map(processors.in_ranges, shares)) == expected
    assert set().union(*shares) == set(range(12))
    assert sum(map(len, shares)) == 12


@pytest.mark.parametrize(
    "ids, text",
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0-1"),
        ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
    ],
)
def test_lists_of_processors(ids: list[int], text: str) -> None:
    assert processors.in_ranges(ids) == text


@pytest.mark.parametrize(
    "threads, workers, quota, words",
    [
        (8, 1, None, ()),
        (4, 2, None, ()),
        (4, 2, 8.0, ()),
        (9, 1, None, ("found 9 with", "at most 8")),
        (5, 2, None, ("found 5 with", "2 workers", "at most 4")),
        (3, 3, None, ("found 3 with", "3 workers", "at most 2")),
        (1, 9, None, ("9 workers", "at most 8")),
        (4, 1, 2.5, ("found 4 with", "at most 3", "control groups", "2.5")),
        (2, 2, 3.0, ("found 2 with", "2 workers", "at most 1", "3 proc")),
    ],
)
def test_more_threads_than_processors(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    workers: int,
    quota: float | None,
    words: tuple[str, ...],
) -> None:
    allow(monkeypatch, range(1000, 1008))  # each is taken for a core
    monkeypatch.setattr(processors, "cpu_quota", lambda: quota)
    if not words:
        processors.check_pinned(threads, workers)
        return
    with pytest.raises(ValueError) as caught:
        processors.check_pinned(threads, workers)
    text = str(caught.value)
    assert all(word in text for word in ("pin_threads", *words)), text
