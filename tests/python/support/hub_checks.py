"""What tests of downloads share."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gemmakv.models.hub import _transfer as hub_transfer
from support.fake_hub import FakeHub
from support.waits import wait_until

needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None,
    reason="huggingface_hub is not installed (gemmakv[hub])",
)

CHUNK = hub_transfer._CHUNK_BYTES


def one_line(error: BaseException) -> str:
    """What the command line says for an error."""
    from gemmakv.cli import describe

    text = describe(error)
    assert "\n" not in str(error) and "\n" not in text
    assert len(text) < 400, text
    return text


def environment(server: FakeHub, home: Path, **more: str) -> dict[str, str]:
    """Variables for a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return {
        **clean,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "no_proxy": "*",
        **more,
    }


def wait_for_bytes(folder: Path, count: int) -> None:
    """Until an unfinished download has `count` bytes."""

    def are_here() -> bool:
        # What was listed may be gone a moment later; os.walk passes over it.
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                with suppress(FileNotFoundError):
                    if (
                        path.suffix == ".incomplete"
                        and path.stat().st_size >= count
                    ):
                        return True
        return False

    wait_until(are_here)


def expect_in_processes(check: Callable[[], bool]) -> None:
    """Expects `check` to hold in three processes that run at once."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=lambda: results.put(check())) for _ in range(3)
    ]
    for child in children:
        child.start()
    assert [results.get(timeout=60) for _ in children] == [True] * 3
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

Usage = collections.namedtuple("Usage", "total used free")
