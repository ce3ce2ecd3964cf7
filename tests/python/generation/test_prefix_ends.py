"""A prefix cache whose tiers hang, and one in a process that was forked."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest

import gemmakv
from gemmakv import Gemma, PrefixCache, create_kv_cache
from gemmakv.cache import _remote
from support import remote_tier
from support.forks import run_program

TEXT = "the cat sat on the mat and " * 14


class Hanging:
    """A remote store whose puts return when they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = threading.Event()

    def get_many(self, keys: list[str]) -> list[None]:
        return [None] * len(keys)

    def has_many(self, keys: list[str]) -> list[bool]:
        return [False] * len(keys)

    def put_many(self, items: object) -> None:
        self.asked.set()
        self.go.wait()


def test_close_leaves_a_tier_that_hangs(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has not been given up when it is closed.
    monkeypatch.setattr(
        _remote, "open_remote", partial(_remote.open_remote, timeout_s=600)
    )
    remote = Hanging()
    prefix = PrefixCache(ram="64MiB", remote=remote)
    model = Gemma.load(tiny_path, prefix_cache=prefix)
    model.prefill(create_kv_cache(model.config), TEXT)
    assert remote.asked.wait(60)
    assert prefix.flush(timeout=0.01) is False
    with pytest.warns(RuntimeWarning, match="objects are not written"):
        dropped = prefix.close(timeout=0.01)
    assert dropped == prefix.stats().dropped > 0
    assert prefix.stats().queued == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prefix.close() == 0
        assert prefix.flush() is True
    cache = create_kv_cache(model.config)
    assert model.prefill(cache, TEXT).usage.cached["ram"] > 200
    remote.go.set()


@pytest.mark.slow
def test_close_leaves_a_redis_that_hangs(tiny_path: Path) -> None:
    pytest.importorskip("redis", reason="the client")
    impostor = remote_tier.Impostor(remote_tier.hang)
    try:
        prefix = PrefixCache(
            ram="64MiB", remote=f"redis://127.0.0.1:{impostor.port}"
        )
        model = Gemma.load(tiny_path, prefix_cache=prefix)
        for i in range(3):
            model.prefill(create_kv_cache(model.config), f"{i} " * 90)
        assert prefix.flush() is True  # what cannot be written has failed
        model.prefill(create_kv_cache(model.config), TEXT)
        dropped = prefix.close()
    finally:
        impostor.close()
    stats = prefix.stats()
    assert stats.writes["remote"] == 0
    assert stats.failed_writes["remote"] + dropped >= 4


def test_bad_timeouts() -> None:
    prefix = PrefixCache(ram=0)
    for call in (prefix.close, prefix.flush):
        for timeout in (-1, float("nan"), "1", None):
            with pytest.raises(ValueError, match="timeout: expected a number"):
                call(timeout=timeout)  # type: ignore[arg-type]


_SCRIPT = """
import functools, sys, threading
import gemmakv
from gemmakv.cache import _remote

_remote.open_remote = functools.partial(_remote.open_remote, timeout_s=600)

class Hanging:
    asked = threading.Event()
    def get_many(self, keys):
        return [None] * len(keys)
    def has_many(self, keys):
        return [False] * len(keys)
    def put_many(self, items):
        self.asked.set()
        threading.Event().wait()

prefix = gemmakv.PrefixCache(ram="64MiB", remote=Hanging())
model = gemmakv.Gemma.load(sys.argv[1], prefix_cache=prefix)
model.prefill(gemmakv.create_kv_cache(model.config), "a cat " * 60)
assert Hanging.asked.wait(60)
if "close" in sys.argv:
    prefix.close(timeout=0.01)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "exit"])
def test_the_interpreter_ends(tiny_path: Path, how: str) -> None:
    """Neither a call that never returns nor its thread keeps it."""
    result = run_program(_SCRIPT, tiny_path, how)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
    if how == "close":
        assert "objects are not written" in result.stderr


def _child(model: Gemma, expected: gemmakv.Generation) -> int:
    signal.alarm(120)
    prefix = model.prefix_cache
    assert prefix is not None
    cache = create_kv_cache(model.config)
    found = model.generate(cache, TEXT, max_tokens=6)
    if found.token_ids != expected.token_ids:
        return 2
    if set(found.usage.cached) - {"ram"}:
        return 3
    again = model.generate(create_kv_cache(model.config), TEXT, max_tokens=6)
    if again.usage.cached_tokens < 200:
        return 4
    if set(prefix.stats().bytes) != {"ram"}:
        return 5
    if not prefix.cache.flush() or prefix.cache.close() != 0:
        return 6
    try:
        prefix.cache.clear()
    except gemmakv.GemmaKVError:
        prefix.cache.clear("ram")
        return 0
    return 7


@pytest.mark.slow
def test_a_forked_process_has_ram_alone(
    tiny_path: Path, tmp_path: Path
) -> None:
    """Also where other threads compute, load and write at that moment."""
    prefix = PrefixCache(ram="64MiB", disk=tmp_path / "kv")
    model = Gemma.load(tiny_path, prefix_cache=prefix, threads=1)
    expected = model.generate(create_kv_cache(model.config), TEXT, max_tokens=6)
    stop = threading.Event()

    def work(number: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            model.generate(
                create_kv_cache(model.config),
                f"{number} {i % 5} " * 90,
                max_tokens=2,
            )
            if i % 7 == 0:
                prefix.clear("ram")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = _child(model, expected)
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    prefix.close()
