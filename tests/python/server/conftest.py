"""A server of a tiny random model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra is not installed")
pytest.importorskip("httpx")

import gemmakv
from gemmakv.server.app import App
from support.asgi import make_app
from support.kept import KEYS, serving

# What a server sets up in its process.
LOGGERS = ("gemmakv.server", "uvicorn.error")


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """As they were, whoever serves in this process: a server's logger does not
    propagate, and pytest takes notes of such loggers beside the root's.
    """
    loggers = [logging.getLogger(one) for one in LOGGERS]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def shared(talker_path: Path) -> gemmakv.Gemma:
    """A model that writes letters until max_tokens, with a prefix cache."""
    return gemmakv.Gemma.load(talker_path)


@pytest.fixture
def app(shared: gemmakv.Gemma) -> App:
    return make_app(
        shared, max_model_len=4096, default_max_tokens=8, default_seed=5
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def kept(shared: gemmakv.Gemma, folder: Path) -> Iterator[App]:
    yield from serving(shared, folder)


@pytest.fixture
def keyed(shared: gemmakv.Gemma, folder: Path) -> Iterator[App]:
    yield from serving(shared, folder, api_keys=KEYS)
