"""Models of the hub, against a server that plays it."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.models import _catalog as models
from gemmakv.models.hub import _download as hub
from gemmakv.models.hub import _transfer as hub_transfer
from support.command import RunCli, assert_fails, first_on_path
from support.fake_hub import TOKEN, FakeHub
from support.hub_checks import (
    CHUNK,
    Usage,
    environment,
    expect_in_processes,
    needs_hub,
    offline,
    one_line,
    wait_for_bytes,
)

DATA = random.Random(1).randbytes(10 * CHUNK + 12345)
ONE_FILE = {"README.md": b"hello", "m.gguf": DATA}


# Names.


@pytest.mark.parametrize(
    "text, expected",
    [
        ("org/repo", ("org/repo", None, "main")),
        ("o.r-g/Re_po-1.5", ("o.r-g/Re_po-1.5", None, "main")),
        ("org/repo@v1.0", ("org/repo", None, "v1.0")),
        ("org/repo/m.gguf", ("org/repo", "m.gguf", "main")),
        ("org/repo/a/b.GGUF", ("org/repo", "a/b.GGUF", "main")),
        ("org/repo@abc/a/b.gguf", ("org/repo", "a/b.gguf", "abc")),
        ("org/repo@refs/pr/7", ("org/repo", None, "refs/pr/7")),
        ("org/repo@refs/pr/7/m.gguf", ("org/repo", "m.gguf", "refs/pr/7")),
        ("org/repo:Q4_K_M", ("org/repo", None, "main", "Q4_K_M")),
        ("org/repo@v1:q8_0", ("org/repo", None, "v1", "q8_0")),
    ],
)
def test_parse(
    text: str, expected: tuple[Any, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = hub.parse(text)
    assert name == hub.HubName(*expected)
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "gemma", "/org/repo", "./org/repo", "../repo", "org/", "org//repo",
        "org/m.gguf", "org/repo/", "org/repo/x.bin", "org/repo/../m.gguf",
        "org/repo/a//m.gguf", "~/models/m.gguf", "org/repo@", "org/re po",
        "https://hub/org/repo", "org\\repo", "org/repo/a\\m.gguf",
        "org/repo/@m.gguf", "org/repo@a@b", "org/repo:", "org/repo:a/m.gguf",
    ],
)
def test_parse_leaves_paths_alone(text: str) -> None:
    assert hub.parse(text) is None


def test_folder_that_is_here_lacks_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "repo").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no such file"):
        models.resolve("org/repo/m.gguf")


# Downloads.


def test_only_gguf_of_a_repository(fake: FakeHub) -> None:
    fake.add("org/repo", {**ONE_FILE, "mmproj-F16.gguf": b"eyes"})
    path = models.resolve("org/repo")
    assert Path(path).read_bytes() == DATA
    assert path.endswith("m.gguf")
    assert [r.bytes_sent for r in fake.downloads()] == [len(DATA)]
    # The next time nothing is transferred.
    assert models.resolve("org/repo") == path
    assert models.resolve("org/repo/m.gguf") == path
    assert len(fake.downloads()) == 1


def test_file_of_a_repository(fake: FakeHub) -> None:
    fake.add("org/repo", {"a/m.gguf": DATA, "b.gguf": b"bb"})
    assert Path(models.resolve("org/repo/a/m.gguf")).read_bytes() == DATA
    assert Path(models.resolve("org/repo/b.gguf")).read_bytes() == b"bb"
    # A file by name needs no list of the others.
    assert not any("/api/" in r.path for r in fake.requests)


def test_gemma_loads(fake: FakeHub, tiny_path: Path) -> None:
    fake.add("org/tiny", {"tiny.gguf": tiny_path.read_bytes()})
    calls: list[tuple[int, int]] = []
    model = gemmakv.Gemma.load(
        "org/tiny", progress=lambda done, total: calls.append((done, total))
    )
    same = gemmakv.Gemma.load(tiny_path)
    assert model.fingerprint == same.fingerprint
    size = tiny_path.stat().st_size
    assert (size, size) in calls


def test_path_wins(fake: FakeHub, tiny_path: Path, tmp_path: Path) -> None:
    fake.add("org/repo", ONE_FILE)
    (tmp_path / "org").mkdir()
    shutil.copy(tiny_path, tmp_path / "org" / "repo")
    assert models.resolve("org/repo") == "org/repo"
    (tmp_path / "org" / "repo").unlink()
    (tmp_path / "org" / "repo").mkdir()
    with pytest.raises(IsADirectoryError):
        models.resolve("org/repo")
    shutil.copy(tiny_path, tmp_path / "org" / "repo" / "m.gguf")
    assert models.resolve("org/repo/m.gguf") == "org/repo/m.gguf"
    assert fake.requests == []


def test_path_object_is_a_path(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    with pytest.raises(FileNotFoundError):
        models.resolve(Path("org/repo"))
    assert fake.requests == []


def test_revisions(fake: FakeHub) -> None:
    repo = fake.add("org/repo", ONE_FILE)
    repo.revisions["v1"] = repo.revisions["main"]
    main = models.resolve("org/repo")
    assert models.resolve("org/repo@v1") == main
    assert models.resolve(f"org/repo@{repo.revisions['v1']}/m.gguf") == main
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve("org/repo@v2")
    assert "branch, tag or commit" in one_line(caught.value)
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve("org/repo@v2/m.gguf")
    assert "org/repo@v2/m.gguf" in one_line(caught.value)


def test_nothing_is_asked_of_the_branch_after_a_download(
    fake: FakeHub,
) -> None:
    # It may have moved meanwhile: the file would be of two commits.
    fake.add("org/repo", ONE_FILE)
    models.resolve("org/repo/m.gguf")
    asked = [request.path for request in fake.requests]
    last = max(i for i, path in enumerate(asked) if path.startswith("/blob/"))
    assert not [path for path in asked[last:] if "/resolve/main/" in path]


QUANTIZED = {
    "README.md": b"hello",
    "mmproj-Q4_K_M.gguf": b"images",
    "m-BF16.gguf": b"bf16",
    "m-Q4_K_M.gguf": b"q4_k_m",
    "m-Q4_K_S.gguf": b"q4_k_s",
    "f16/m.gguf": b"f16",
    "m-Q8_0-00001-of-00002.gguf": b"one",
    "m-Q8_0-00002-of-00002.gguf": b"three",
}


@pytest.mark.parametrize(
    "word, content",
    [("Q4_K_M", b"q4_k_m"), ("q4_k_s", b"q4_k_s"), ("F16", b"f16"),
     ("Q8_0", b"one")],
)
def test_quantization_of_a_repository(
    fake: FakeHub, word: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/repo", QUANTIZED)
    path = models.resolve(f"org/repo:{word}")
    assert Path(path).read_bytes() == content
    offline(monkeypatch)
    assert models.resolve(f"org/repo:{word}") == path


def test_quantization_that_is_not_there(fake: FakeHub) -> None:
    fake.add("org/repo", QUANTIZED)
    for word in ("Q4_K", "Q5_0"):
        with pytest.raises(ValueError) as caught:
            models.resolve(f"org/repo:{word}")
        text = one_line(caught.value)
        assert "no .gguf file is of that quantization" in text
        assert "m-BF16.gguf (4 B)" in text
        assert "m-Q8_0-00001-of-00002.gguf (8 B)" in text
        assert "mmproj" not in text and "00002-of" not in text


@pytest.mark.parametrize(
    "name", ["org/repo", "org/repo/m-00002-of-00002.gguf"]
)
def test_all_parts_are_downloaded(
    fake: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    fake.add("org/repo", {first: DATA, second: b"rest"})
    seen: list[tuple[int, int]] = []
    path = Path(
        models.resolve(name, lambda done, total: seen.append((done, total)))
    )
    assert path.name == first
    assert path.with_name(second).read_bytes() == b"rest"
    assert seen[-1] == (len(DATA) + 4, len(DATA) + 4)
    count = len(fake.downloads())
    assert models.resolve(name) == str(path)
    assert len(fake.downloads()) == count
    offline(monkeypatch)
    assert models.resolve(name) == str(path)
    path.with_name(second).unlink()
    with pytest.raises(FileNotFoundError, match="not all of it"):
        models.resolve(name)


def test_moved_branch_is_followed(fake: FakeHub) -> None:
    repo = fake.add("org/repo", dict(ONE_FILE))
    models.resolve("org/repo")
    newer = "b" * 40
    repo.files["m.gguf"] = b"newer"
    repo.revisions.update({"main": newer, newer: newer})
    assert Path(models.resolve("org/repo")).read_bytes() == b"newer"


def test_progress_of_bytes(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    calls: list[tuple[int, int]] = []
    models.resolve("org/repo", lambda *call: calls.append(call))
    assert calls[-1] == (len(DATA), len(DATA))
    assert {total for _, total in calls} == {len(DATA)}
    done = [done for done, _ in calls]
    assert done == sorted(done) and len(set(done)) >= 10


def test_callback_that_raises_ends_the_download(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)

    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Enough

    with pytest.raises(Enough):
        models.resolve("org/repo", stop)
    path = models.resolve("org/repo")
    assert Path(path).read_bytes() == DATA
    assert sum(r.bytes_sent for r in fake.downloads()[1:]) < len(DATA) // 2


def test_file_of_an_other_program_is_used(fake: FakeHub) -> None:
    api = importlib.import_module("huggingface_hub")
    fake.add("org/repo", ONE_FILE)
    theirs = api.hf_hub_download("org/repo", "m.gguf", endpoint=fake.url)
    count = len(fake.downloads())
    assert models.resolve("org/repo") == theirs
    assert len(fake.downloads()) == count


def test_other_programs_use_ours(fake: FakeHub) -> None:
    api = importlib.import_module("huggingface_hub")
    fake.add("org/repo", ONE_FILE)
    ours = models.resolve("org/repo")
    count = len(fake.downloads())
    assert api.hf_hub_download(
        "org/repo", "m.gguf", endpoint=fake.url
    ) == ours
    assert len(fake.downloads()) == count


# Interruptions.


def test_cut_reply_goes_on_by_itself(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    fake.cut_after = [3 * CHUNK, 100, 2 * CHUNK]
    assert Path(models.resolve("org/repo")).read_bytes() == DATA
    ranges = [r.range for r in fake.downloads()]
    assert ranges[0] is None and len(ranges) == 4
    assert ranges[1] == f"bytes={3 * CHUNK}-"
    # A piece of less than a chunk is lost, and nothing else.
    assert sum(r.bytes_sent for r in fake.downloads()) < len(DATA) + CHUNK


def test_interrupted_download_resumes(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    fake.cut_after = [4 * CHUNK, 0, 0, 0]
    with pytest.raises(ConnectionError) as caught:
        models.resolve("org/repo")
    text = one_line(caught.value)
    assert "broke off after 1.0 MB of 2.6 MB" in text
    assert "again" in text
    fake.requests.clear()
    calls: list[int] = []
    path = models.resolve("org/repo", lambda done, _: calls.append(done))
    assert Path(path).read_bytes() == DATA
    [download] = fake.downloads()
    assert download.range == f"bytes={4 * CHUNK}-"
    assert download.bytes_sent == len(DATA) - 4 * CHUNK
    assert calls[0] > 4 * CHUNK
    folder = Path(path).resolve().parent
    assert [p.name for p in folder.iterdir()] == [
        hashlib.sha256(DATA).hexdigest()
    ]


def test_server_that_cannot_resume(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    fake.ignores_range = True
    fake.cut_after = [4 * CHUNK, 2 * CHUNK]
    assert Path(models.resolve("org/repo")).read_bytes() == DATA


def test_server_that_always_cuts_is_given_up(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    fake.ignores_range = True
    fake.cut_after = [4 * CHUNK] * 100
    with pytest.raises(ConnectionError):
        models.resolve("org/repo")
    assert len(fake.downloads()) == 4


def test_finished_file_that_was_not_renamed(fake: FakeHub) -> None:
    """As if the process had died between the last byte and the rename."""
    fake.add("org/repo", ONE_FILE)
    path = Path(models.resolve("org/repo"))
    blob = path.resolve()
    blob.rename(blob.with_name(blob.name + ".gemmakv.incomplete"))
    path.unlink()
    fake.requests.clear()
    assert Path(models.resolve("org/repo")).read_bytes() == DATA
    assert fake.downloads() == []


@pytest.mark.parametrize("left", ["other bytes", "too long"])
def test_wrong_leftover_does_no_harm(fake: FakeHub, left: str) -> None:
    fake.add("org/repo", ONE_FILE)
    path = Path(models.resolve("org/repo"))
    blob = path.resolve()
    partial = blob.with_name(blob.name + ".gemmakv.incomplete")
    for file in (path, blob):
        file.unlink()
    if left == "too long":
        partial.write_bytes(DATA + b"more")
    else:
        partial.write_bytes(bytes(CHUNK))
        with pytest.raises(gemmakv.CorruptFile) as caught:
            models.resolve("org/repo")
        assert "try again" in one_line(caught.value)
    assert Path(models.resolve("org/repo")).read_bytes() == DATA


def test_damaged_content(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    fake.damage = True
    with pytest.raises(gemmakv.CorruptFile, match="SHA256"):
        models.resolve("org/repo")
    fake.damage = False
    assert Path(models.resolve("org/repo")).read_bytes() == DATA


@pytest.mark.slow
@needs_hub
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_process_resumes(
    cli: RunCli,
    server: FakeHub,
    tmp_path: Path,
    tiny_path: Path,
    how: signal.Signals,
) -> None:
    data = tiny_path.read_bytes() + bytes(20 * CHUNK)
    server.add("org/tiny", {"tiny.gguf": data})
    server.holds_after = 4 * CHUNK  # it cannot end before it is stopped
    env = environment(server, tmp_path)
    info = ["info", "--json", "org/tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gemmakv", *info],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for_bytes(tmp_path, 3 * CHUNK)
    process.send_signal(how)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert error == b""
    server.requests.clear()
    server.holds_after = None
    result = cli(*info, **env)
    assert result.returncode == 0, result.stderr
    assert b"gemma3" in result.stdout
    [download] = server.downloads()
    assert download.range is not None
    assert download.bytes_sent <= len(data) - 3 * CHUNK


def test_many_processes_download_once(fake: FakeHub) -> None:
    importlib.import_module("huggingface_hub")
    fake.add("org/repo", ONE_FILE)
    fake.bytes_per_s = 20 * CHUNK
    expect_in_processes(
        lambda: Path(models.resolve("org/repo")).read_bytes() == DATA
    )
    assert len(fake.downloads()) == 1


# Access.


def test_token(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/secret", ONE_FILE, private=True)
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve("org/secret")
    assert "HF_TOKEN" in one_line(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Path(models.resolve("org/secret")).read_bytes() == DATA
    assert all(r.token is None for r in fake.downloads())
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PermissionError) as caught:
        models.resolve("org/secret@main/other.gguf")
    assert "401" in one_line(caught.value)
    assert "HF_TOKEN" in one_line(caught.value)


@pytest.mark.parametrize("signed_in", [False, True])
@pytest.mark.parametrize("name", ["org/gated", "org/gated/m.gguf"])
def test_gated(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, signed_in: bool, name: str
) -> None:
    fake.add("org/gated", ONE_FILE, gated=True)
    if signed_in:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(PermissionError) as caught:
        models.resolve(name)
    text = one_line(caught.value)
    assert text.startswith(f"{name}: gated: accept its terms at ")
    assert f"{fake.url}/org/gated " in text
    assert "HF_TOKEN" in text
    assert caught.value.errno == errno.EACCES


def test_missing_repository(fake: FakeHub) -> None:
    for name in ("org/none", "org/none/m.gguf"):
        with pytest.raises(FileNotFoundError) as caught:
            models.resolve(name)
        text = one_line(caught.value)
        assert text.startswith(f"{name}: no such file here, and no such repo")
        assert fake.url in text


def test_missing_file_lists_what_there_is(fake: FakeHub) -> None:
    fake.add("org/repo", ONE_FILE)
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve("org/repo/q8.gguf")
    assert "it holds m.gguf (2.6 MB)" in one_line(caught.value)


def test_several_models_are_listed(fake: FakeHub) -> None:
    fake.add("org/repo", {"b.gguf": DATA, "a.gguf": b"12", "mmproj.gguf": b""})
    with pytest.raises(ValueError) as caught:
        models.resolve("org/repo")
    text = one_line(caught.value)
    assert "found 2; name one, as in org/repo/a.gguf" in text
    assert "it holds a.gguf (2 B), b.gguf (2.6 MB)" in text


@pytest.mark.parametrize(
    "files, kind, word",
    [
        ({"model.safetensors": b"x"}, gemmakv.GemmaKVError, "safetensors"),
        ({"README.md": b"x"}, FileNotFoundError, "neither a .gguf file nor"),
        (
            {"m-00001-of-00002.gguf": b"x"},
            FileNotFoundError,
            "the repository has no m-00002-of-00002.gguf",
        ),
    ],
)
def test_repositories_that_will_not_do(
    fake: FakeHub, files: dict[str, bytes], kind: type[Exception], word: str
) -> None:
    fake.add("org/repo", files)
    with pytest.raises(kind) as caught:
        models.resolve("org/repo")
    assert word in one_line(caught.value)


def test_impossible_name(fake: FakeHub) -> None:
    with pytest.raises(ValueError) as caught:
        models.resolve("org/re--po")
    assert "org/re--po" in one_line(caught.value)


# No network.


def test_offline_mode(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/repo", ONE_FILE)
    path = models.resolve("org/repo")
    offline(monkeypatch)
    count = len(fake.requests)
    assert models.resolve("org/repo") == path
    assert models.resolve("org/repo/m.gguf") == path
    commit = fake.repos["org/repo"].revisions["main"]
    assert models.resolve(f"org/repo@{commit}") == path
    for name in ("org/other", "org/repo/x.gguf", "org/repo@v9"):
        with pytest.raises(FileNotFoundError) as caught:
            models.resolve(name)
        assert "unset HF_HUB_OFFLINE" in one_line(caught.value)
    assert len(fake.requests) == count


def test_offline_with_several(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/repo", {"a.gguf": b"a", "b.gguf": b"b"})
    for file in ("a", "b"):
        models.resolve(f"org/repo/{file}.gguf")
    offline(monkeypatch)
    with pytest.raises(ValueError, match="name one: a.gguf, b.gguf"):
        models.resolve("org/repo")


@pytest.mark.parametrize("trouble", ["down", "busy"])
def test_unreachable_hub(fake: FakeHub, trouble: str) -> None:
    fake.add("org/repo", ONE_FILE)
    path = models.resolve("org/repo")
    url = fake.url
    if trouble == "down":
        fake.stop()
    else:
        fake.failing = 503
    for name in ("org/repo", "org/repo/m.gguf"):
        with pytest.warns(UserWarning, match="downloaded before"):
            assert models.resolve(name) == path
    for name in ("org/other", "org/other/m.gguf"):
        with pytest.raises(OSError) as caught:
            models.resolve(name)
        text = one_line(caught.value)
        assert url in text and "HF_ENDPOINT" in text
        assert ("503" in text) == (trouble == "busy")


def test_endpoint_that_is_no_hub(fake: FakeHub) -> None:
    fake.failing = 200
    with pytest.raises(OSError) as caught:
        models.resolve("org/repo/m.gguf")
    assert "HF_ENDPOINT" in one_line(caught.value)


# The disk.


def test_no_room(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/repo", ONE_FILE)
    with monkeypatch.context() as patch:
        patch.setattr(
            hub_transfer.shutil, "disk_usage", lambda _: Usage(9, 9, 1 << 20)
        )
        with pytest.raises(OSError) as caught:
            models.resolve("org/repo")
    assert caught.value.errno == errno.ENOSPC
    text = one_line(caught.value)
    assert "2.6 MB more needed" in text and "HF_HOME" in text
    assert fake.downloads() == []


def test_disk_that_fills_up(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    fake.add("org/repo", ONE_FILE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A write that the system refuses, as on a full disk.
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * CHUNK, limits[1]))
        with pytest.raises(OSError) as caught:
            models.resolve("org/repo")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.errno == errno.EFBIG
    assert "broke off" not in one_line(caught.value)
    fake.requests.clear()
    assert Path(models.resolve("org/repo")).read_bytes() == DATA
    [download] = fake.downloads()
    assert download.range == f"bytes={5 * CHUNK}-"


def test_folder_that_cannot_be_written(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.add("org/repo", ONE_FILE)
    (tmp_path / "hub").write_text("a file is in the way")
    with pytest.raises(OSError) as caught:
        models.resolve("org/repo")
    assert str(tmp_path / "hub") in one_line(caught.value)


# The command line.


@needs_hub
def test_command_line(
    cli: RunCli, server: FakeHub, tmp_path: Path, tiny_path: Path
) -> None:
    server.add("org/tiny", {"tiny.gguf": tiny_path.read_bytes()})
    env = environment(server, tmp_path)
    base = ["generate", "--max-tokens", 3, "--model"]
    result = cli(*base, "org/tiny", "the", **env)
    assert result.returncode == 0, result.stderr
    assert result.stdout == cli(*base, tiny_path, "the").stdout
    assert result.stderr == b""
    again = cli(
        *base, "org/tiny", "the", **{**env, "HF_HUB_OFFLINE": "1"}
    )
    assert again.stdout == result.stdout
    assert len(server.downloads()) == 1
    assert_fails(cli("info", "org/none", **env), "org/none", server.url)
    server.failing = 500
    busy = cli(*base, "org/tiny", "the", **env)
    assert busy.returncode == 0
    assert busy.stdout == result.stdout
    line = busy.stderr.decode()
    assert line.startswith("gemmakv: warning: org/tiny: ")
    assert line.count("\n") == 1 and "HTTP 500" in line


@pytest.mark.slow
def test_missing_package(
    cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        "raise ModuleNotFoundError('none', name='huggingface_hub')"
    )
    result = cli("info", "org/repo", PYTHONPATH=first_on_path(tmp_path))
    assert_fails(result, 'pip install "gemmakv[hub]"', "org/repo")


def test_nothing_of_the_hub_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, gemmakv;"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
