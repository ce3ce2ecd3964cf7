"""Threads that stay on their processors: opt-in, told, and of no effect on
results.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

import gemmakv
from gemmakv._support import processors
from support import embedding_models
from support.waits import wait_until

ALL = sorted(os.sched_getaffinity(0))


def masks_of_threads() -> list[set[int]]:
    """Of all threads of this process."""
    masks = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            masks.append(os.sched_getaffinity(int(task)))
    return masks


def wait_until_none_is_held() -> None:
    """Waits for one that has been joined and is on its way out of the list."""
    wait_until(lambda: all(mask == set(ALL) for mask in masks_of_threads()))


def tokens_of(gemma: gemmakv.Gemma) -> list[int]:
    cache = gemmakv.create_kv_cache(gemma.config, 64)
    return gemma.generate(cache, [2, 5, 9], max_tokens=12).token_ids


def test_threads_are_not_pinned_by_default(tiny_path: Path) -> None:
    gemma = gemmakv.Gemma.load(tiny_path)
    tokens_of(gemma)
    placement = gemma.thread_placement
    assert not placement.pinned
    assert placement.threads == gemma.threads
    assert list(placement.cpus) == ALL
    assert "not pinned" in str(placement)
    wait_until_none_is_held()


@pytest.mark.skipif(len(ALL) < 2, reason="one processor shows no order")
def test_each_thread_stays_on_a_processor(tiny_path: Path) -> None:
    expected = tokens_of(gemmakv.Gemma.load(tiny_path, threads=1))
    gemma = gemmakv.Gemma.load(tiny_path, threads=2, pin_threads=True)
    assert tokens_of(gemma) == expected
    placement = gemma.thread_placement
    assert placement.pinned
    assert len(set(placement.cpus)) == 2
    for cpu in placement.cpus:
        assert {cpu} in masks_of_threads()
    # Nobody else is: not the caller, and not those who load and keep.
    assert os.sched_getaffinity(0) == set(ALL)
    assert processors.in_ranges(placement.cpus) in str(placement)
    gemma.close()
    wait_until_none_is_held()


@pytest.mark.skipif(len(ALL) < 2, reason="two models need two processors")
def test_two_models_have_their_own(tiny_path: Path) -> None:
    first = gemmakv.Gemma.load(tiny_path, threads=1, pin_threads=True)
    second = gemmakv.Gemma.load(tiny_path, threads=1, pin_threads=True)
    assert first.thread_placement.cpus != second.thread_placement.cpus
    taken = first.thread_placement.cpus
    first.close()
    third = gemmakv.Gemma.load(tiny_path, threads=1, pin_threads=True)
    assert third.thread_placement.cpus == taken
    assert tokens_of(third) == tokens_of(second)


def test_the_affinity_mask_holds(tiny_path: Path) -> None:
    found: list[tuple[int, ...]] = []

    def load() -> None:
        os.sched_setaffinity(0, {ALL[-1]})  # of this thread alone
        gemma = gemmakv.Gemma.load(tiny_path, pin_threads=True)
        found.append(gemma.thread_placement.cpus)
        with pytest.raises(ValueError, match="threads: .* 2 with pin_threads"):
            gemmakv.Gemma.load(tiny_path, threads=2, pin_threads=True)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert found == [(ALL[-1],)]


def test_more_threads_than_processors(tiny_path: Path) -> None:
    many = len(ALL) + 1
    with pytest.raises(ValueError) as caught:
        gemmakv.Gemma.load(tiny_path, threads=many, pin_threads=True)
    for part in ("threads", "pin_threads", str(many), str(len(ALL))):
        assert part in str(caught.value)
    assert gemmakv.Gemma.load(tiny_path, threads=many).threads == many
    with pytest.raises(ValueError, match="pin_threads"):
        gemmakv.Gemma.load(tiny_path, pin_threads="yes")  # type: ignore[arg-type]


def test_a_child_of_fork_is_not_pinned(tiny_path: Path) -> None:
    """Parent and child would wait for each other on the same processors."""
    gemma = gemmakv.Gemma.load(tiny_path, threads=1, pin_threads=True)
    expected = tokens_of(gemma)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            same = tokens_of(gemma) == expected
            free = not gemma.thread_placement.pinned and all(
                mask == set(ALL) for mask in masks_of_threads()
            )
            os.write(writer, b"yes" if same and free else b"no")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"yes"
    os.waitpid(child, 0)
    assert gemma.thread_placement.pinned


@pytest.mark.skipif(len(ALL) < 2, reason="one processor is every thread's")
def test_nothing_else_is_held(tiny_path: Path) -> None:
    """What the pinned thread starts would wait for it, on its processor: the
    one that makes a grammar's masks is started by it.
    """
    pytest.importorskip("llguidance")
    wait_until_none_is_held()
    gemma = gemmakv.Gemma.load(tiny_path, threads=1, pin_threads=True)
    cache = gemmakv.create_kv_cache(gemma.config, 64)
    before = set(os.listdir("/proc/self/task"))
    gemma.generate(
        cache, "A word: ", max_tokens=4, grammar=gemmakv.Grammar.regex("[a-z]+")
    )
    # Others, of models that are gone, may end meanwhile.
    assert len(set(os.listdir("/proc/self/task")) - before) >= 2
    held = [mask for mask in masks_of_threads() if mask != set(ALL)]
    assert held == [set(gemma.thread_placement.cpus)]


def test_embeddings_are_made_on_the_pinned_processor(tmp_path: Path) -> None:
    path = embedding_models.write(
        tmp_path, embedding_models.read(embedding_models.names()[0])
    )
    expected = gemmakv.Gemma.load(path, threads=1).embed([[2, 5, 9, 1]])
    gemma = gemmakv.Gemma.load(path, threads=1, pin_threads=True)
    assert (gemma.embed([[2, 5, 9, 1]]) == expected).all()
    assert os.sched_getaffinity(0) == set(ALL)
