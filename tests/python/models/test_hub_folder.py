"""Repositories of the hub that are a model's directory."""

from __future__ import annotations

import errno
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv
from gemmakv.models import _catalog as models
from gemmakv.models.hub import _transfer as hub_transfer
from support import golden_models, tiny_gguf, tokenizer_files
from support.command import RunCli, assert_fails
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

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
CONTENT = {
    file: random.Random(i).randbytes((4 + i) * CHUNK + 77)
    for i, file in enumerate(SHARDS)
}


def index_of(*shards: str) -> bytes:
    weight_map = {f"tensor{i}": shard for i, shard in enumerate(shards)}
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


# The order in which they are fetched: the description, then the weights.
NEEDED = {
    INDEX: index_of(*SHARDS),
    "config.json": b'{"a": 1}',
    "generation_config.json": b"{}",
    "tokenizer_config.json": b'{"b": 2}',
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    **CONTENT,
}
OTHERS = {
    "README.md": b"hello",
    "consolidated.safetensors": b"a copy of all",
    "model.safetensors": b"another copy",
    "original/model.safetensors": b"and another",
    "onnx/model.onnx": b"and one more",
    "pytorch_model.bin": b"old",
}
REPOSITORY = {**OTHERS, **NEEDED}
TOTAL = sum(map(len, NEEDED.values()))


def here(path: str) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    folder = Path(path)
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.glob("**/*")
        if file.is_file()
    }


def test_what_a_model_needs_is_fetched_once(fake: FakeHub) -> None:
    fake.add("org/repo", REPOSITORY)
    calls: list[tuple[int, int]] = []
    path = models.resolve("org/repo", lambda *call: calls.append(call))
    assert here(path) == NEEDED
    assert Path(path).name == fake.repos["org/repo"].revisions["main"]
    assert [r.bytes_sent for r in fake.downloads()] == [
        len(data) for data in NEEDED.values()
    ]
    total = TOTAL - len(NEEDED[INDEX])
    assert calls[-1] == (total, total)
    assert {all_bytes for _, all_bytes in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    fake.requests.clear()
    assert models.resolve("org/repo") == path
    assert len(fake.requests) == 1  # is it still this commit?


@pytest.mark.parametrize(
    "file", ["model.safetensors", "weights.safetensors"]
)
def test_one_file_of_weights(fake: FakeHub, file: str) -> None:
    files = {"config.json": b"{}", file: b"weights"}
    fake.add("org/repo", {**files, "sub/x.safetensors": b"no"})
    assert here(models.resolve("org/repo")) == files


def test_nothing_is_fetched_of_weights_with_an_adapter(fake: FakeHub) -> None:
    """Only the weights would be, which are another model."""
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    fake.add("org/repo", {**REPOSITORY, **adapter})
    with pytest.raises(gemmakv.MismatchError, match="adapter_config") as e:
        models.resolve("org/repo")
    assert "org/repo" in one_line(e.value)
    assert not fake.downloads()


def test_the_only_gguf_wins(fake: FakeHub) -> None:
    fake.add("org/repo", {**REPOSITORY, "m.gguf": b"gguf"})
    assert models.resolve("org/repo").endswith("/m.gguf")
    fake.add("org/two", {**REPOSITORY, "a.gguf": b"a", "b.gguf": b"b"})
    with pytest.raises(ValueError, match=r"found 2; name one") as caught:
        models.resolve("org/two")
    one_line(caught.value)


def test_revision(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = fake.add("org/repo", REPOSITORY)
    commit = repo.revisions["main"]
    repo.revisions.update({"v1": commit, "refs/pr/3": commit})
    path = models.resolve("org/repo@refs/pr/3")
    names = ["org/repo@v1", f"org/repo@{commit}", "org/repo"]
    assert {models.resolve(name) for name in names} == {path}
    with pytest.raises(FileNotFoundError, match="no such branch"):
        models.resolve("org/repo@v2")
    offline(monkeypatch)
    assert {models.resolve(name) for name in names} == {path}


def test_other_programs_files_are_used(fake: FakeHub) -> None:
    api = pytest.importorskip("huggingface_hub")
    fake.add("org/repo", REPOSITORY)
    for file in (INDEX, *SHARDS):
        api.hf_hub_download("org/repo", file, endpoint=fake.url)
    fake.requests.clear()
    path = models.resolve("org/repo")
    assert here(path) == NEEDED
    sent = sum(r.bytes_sent for r in fake.downloads())
    assert sent == TOTAL - sum(len(NEEDED[f]) for f in (INDEX, *SHARDS))


# What will not do.


@pytest.mark.parametrize(
    "files, kind, words",
    [
        (
            {k: v for k, v in REPOSITORY.items() if k != SHARDS[1]},
            FileNotFoundError,
            f"no {SHARDS[1]}, which its {INDEX} names",
        ),
        (
            {"model.safetensors": b"x"},
            gemmakv.GemmaKVError,
            "expected config.json and model.safetensors",
        ),
        (
            {"config.json": b"", "a.safetensors": b"", "b.safetensors": b""},
            gemmakv.GemmaKVError,
            "or shards with model.safetensors.index.json",
        ),
        ({"config.json": b"{}"}, FileNotFoundError, "no model"),
        (
            {**REPOSITORY, INDEX: b"{"},
            gemmakv.CorruptFile,
            f"{INDEX}: expected JSON",
        ),
        (
            {**REPOSITORY, INDEX: index_of("../x.safetensors")},
            gemmakv.CorruptFile,
            "'../x.safetensors'",
        ),
    ],
)
def test_repositories_that_will_not_do(
    fake: FakeHub, files: dict[str, bytes], kind: type[Exception], words: str
) -> None:
    fake.add("org/repo", files)
    with pytest.raises(kind) as caught:
        models.resolve("org/repo")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sum(r.bytes_sent for r in fake.downloads()) < CHUNK


def test_gated(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/gated", REPOSITORY, gated=True)
    for token in (None, TOKEN):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PermissionError) as caught:
            models.resolve("org/gated")
        text = one_line(caught.value)
        assert text.startswith("org/gated: gated: accept its terms at ")
        assert caught.value.errno == errno.EACCES


def test_no_room_for_all(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either shard has room, both have not."""
    fake.add("org/repo", REPOSITORY)
    monkeypatch.setattr(
        hub_transfer.shutil, "disk_usage", lambda _: Usage(9, 9, 7 * CHUNK)
    )
    with pytest.raises(OSError) as caught:
        models.resolve("org/repo")
    assert caught.value.errno == errno.ENOSPC
    assert "more needed" in one_line(caught.value)
    assert sum(r.bytes_sent for r in fake.downloads()) == len(NEEDED[INDEX])


# Interruptions.


def test_interrupted_shard_goes_on(fake: FakeHub) -> None:
    fake.add("org/repo", REPOSITORY)
    before = len(NEEDED) - 1
    lost = len(CONTENT[SHARDS[1]]) - 2 * CHUNK
    # Whole files, then one that breaks off and does not come again.
    fake.cut_after = [1 << 30] * before + [2 * CHUNK, 0, 0, 0]
    with pytest.raises(ConnectionError) as caught:
        models.resolve("org/repo")
    assert "broke off after 524 kB" in one_line(caught.value)
    fake.requests.clear()
    calls: list[tuple[int, int]] = []
    path = models.resolve("org/repo", lambda *call: calls.append(call))
    assert here(path) == NEEDED
    [download] = fake.downloads()
    assert download.range == f"bytes={2 * CHUNK}-"
    assert download.bytes_sent == lost
    assert calls[0][0] > TOTAL - lost - len(NEEDED[INDEX])
    assert calls[-1][0] == calls[-1][1]


def test_damaged_shard(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/repo", REPOSITORY)
    fake.damage = True
    with pytest.raises(gemmakv.CorruptFile, match="SHA256"):
        models.resolve("org/repo")
    fake.damage = False
    assert here(models.resolve("org/repo")) == NEEDED


def test_small_files_come_from_the_hub_itself(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fake.add("org/repo", REPOSITORY, direct=True)
    fake.damage = True
    with pytest.raises(gemmakv.CorruptFile, match="Git's SHA1"):
        models.resolve("org/repo")
    fake.damage = False
    assert here(models.resolve("org/repo")) == NEEDED
    assert [r.bytes_sent for r in fake.downloads()] == [
        len(data) for data in CONTENT.values()
    ]


def test_many_processes_download_once(fake: FakeHub) -> None:
    pytest.importorskip("huggingface_hub")
    fake.add("org/repo", REPOSITORY)
    fake.bytes_per_s = 20 * CHUNK
    expect_in_processes(lambda: here(models.resolve("org/repo")) == NEEDED)
    assert sum(r.bytes_sent for r in fake.downloads()) == TOTAL


# No network.


def test_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/repo", REPOSITORY)
    path = models.resolve("org/repo")
    offline(monkeypatch)
    count = len(fake.requests)
    assert models.resolve("org/repo") == path
    (Path(path) / SHARDS[1]).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve("org/repo")
    assert "not all of it" in one_line(caught.value)
    assert "unset HF_HUB_OFFLINE" in one_line(caught.value)
    assert len(fake.requests) == count


def test_half_a_download_is_no_model_offline(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/repo", REPOSITORY)
    fake.cut_after = [1 << 30] * (len(NEEDED) - 1) + [CHUNK, 0, 0, 0]
    with pytest.raises(ConnectionError):
        models.resolve("org/repo")
    offline(monkeypatch)
    with pytest.raises(FileNotFoundError, match="not all of it"):
        models.resolve("org/repo")


def test_unreachable_hub(fake: FakeHub) -> None:
    fake.add("org/repo", REPOSITORY)
    path = models.resolve("org/repo")
    fake.failing = 503
    with pytest.warns(UserWarning, match="downloaded before"):
        assert models.resolve("org/repo") == path
    (Path(path) / SHARDS[0]).unlink()
    with pytest.raises(OSError, match="HTTP 503"):
        models.resolve("org/repo")


# A model that runs.


def model_files(folder: Path) -> dict[str, bytes]:
    golden = golden_models.read("gemma3-gqa")
    config = {**golden.config, "vocab_size": tiny_gguf.VOCAB}
    changed = golden_models.Golden(
        "tiny", "", config, golden.seed, golden.gains, shards=2
    )
    golden_models.write(folder, changed)
    tokenizer_files.write(folder, tiny_gguf.vocabulary(), "model")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_load(fake: FakeHub, tmp_path: Path) -> None:
    fake.add("org/tiny-it", model_files(tmp_path / "tiny"))
    gemma = gemmakv.Gemma.load("org/tiny-it")
    other = gemmakv.Gemma.load(tmp_path / "tiny")
    assert gemma.fingerprint == other.fingerprint
    assert gemma.instruction_tuned and not other.instruction_tuned
    cache = gemmakv.create_kv_cache(gemma.config)
    assert gemma.generate(cache, "the", max_tokens=3).token_ids


@pytest.mark.slow
@needs_hub
def test_killed_process_resumes(
    server: FakeHub, tmp_path: Path, cli: RunCli
) -> None:
    files = model_files(tmp_path / "tiny")
    server.add("org/tiny", {**files, **CONTENT, INDEX: index_of(*SHARDS)})
    server.holds_after = 4 * CHUNK  # no file ends before it is killed
    env = environment(server, tmp_path / "home")
    command = [sys.executable, "-m", "gemmakv", "info", "org/tiny"]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_bytes(tmp_path / "home", 3 * CHUNK)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    sent = sum(r.bytes_sent for r in server.downloads())
    server.requests.clear()
    server.holds_after = None
    # Random bytes are no weights, which is said once all are here.
    assert_fails(cli("info", "org/tiny", **env), SHARDS[0])
    again = sum(r.bytes_sent for r in server.downloads())
    assert again <= sum(map(len, CONTENT.values())) - 3 * CHUNK
    assert sent >= 3 * CHUNK


@needs_hub
def test_command_line(
    cli: RunCli, server: FakeHub, tmp_path: Path
) -> None:
    server.add("org/tiny", model_files(tmp_path / "tiny"))
    env = environment(server, tmp_path / "home")
    arguments = ["generate", "--max-tokens", 3, "--model"]
    result = cli(*arguments, "org/tiny", "the", **env)
    assert result.returncode == 0, result.stderr
    assert result.stdout == cli(*arguments, tmp_path / "tiny", "the").stdout
    offline_env = {**env, "HF_HUB_OFFLINE": "1"}
    again = cli(*arguments, "org/tiny", "the", **offline_env)
    assert again.stdout == result.stdout
