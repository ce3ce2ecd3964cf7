"""The alias: assembling, checking and sharing the demo file."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest

import gemmakv
from gemmakv._support import folders
from gemmakv.models import _catalog as models
from gemmakv.models._aliases import ALIASES, Alias

PARTS = [b"first part " * 1000, b"second", b"", b"third" * 77777]
CONTENT = b"".join(PARTS)


@pytest.fixture
def alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Alias:
    """A small model in four parts, and an empty cache folder."""
    paths = []
    for i, part in enumerate(PARTS):
        path = tmp_path / f"part{i}"
        path.write_bytes(part)
        paths.append(path)
    package = types.ModuleType("fake_demo_package")
    package.chunk_paths = lambda: paths  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_demo_package", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Alias(
        package="fake_demo_package",
        file_name="fake.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        model_type="gemma3-270m",
    )


def test_assembles_once(alias: Alias, tmp_path: Path) -> None:
    path = models.fetch(alias)
    assert path == tmp_path / "cache" / "gemmakv" / "fake.gguf"
    assert path.read_bytes() == CONTENT
    before = path.stat()
    assert models.fetch(alias) == path
    after = path.stat()  # reading it may have set its time of access
    assert after.st_ino == before.st_ino
    assert after.st_mtime_ns == before.st_mtime_ns


def test_a_cache_folder_that_cannot_be_written(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what helps, wherever the first write fails."""
    helps = "Read-only file system; set XDG_CACHE_HOME to a folder"

    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(OSError, match=helps):
            models.fetch(alias)
    (tmp_path / "cache/gemmakv").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("gemmakv._support.locks.os.open", refuse)
        with pytest.raises(OSError, match=helps):
            models.fetch(alias)
    models.fetch(alias)


def test_reports_progress(alias: Alias) -> None:
    calls: list[tuple[int, int]] = []
    models.fetch(alias, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    models.fetch(alias, lambda done, total: calls.append((done, total)))
    assert calls == []


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "gone"])
def test_damaged_file_is_made_again(
    alias: Alias, damage: str
) -> None:
    path = models.fetch(alias)
    data = bytearray(CONTENT)
    data[1234] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "flip": bytes(data),
                "cut": CONTENT[:-1],
                "grow": CONTENT + b"x",
                "empty": b"",
            }[damage]
        )
    assert models.fetch(alias).read_bytes() == CONTENT


def test_flip_with_old_times_is_seen(alias: Alias) -> None:
    path = models.fetch(alias)
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert models.fetch(alias).read_bytes() == CONTENT


def test_sound_file_without_note_is_kept(alias: Alias) -> None:
    path = models.fetch(alias)
    before = path.stat()
    for note in path.parent.glob("*.checked"):
        note.unlink()
    models.fetch(alias)
    after = path.stat()  # reading it may have set its time of access
    assert after.st_ino == before.st_ino
    assert after.st_mtime_ns == before.st_mtime_ns


def test_wrong_parts_are_an_error(alias: Alias) -> None:
    wrong = dataclasses.replace(alias, sha256="0" * 64)
    with pytest.raises(gemmakv.CorruptFile, match="SHA256 0000"):
        models.fetch(wrong)
    folder = folders.cache_folder()
    assert not (folder / "fake.gguf").exists()
    assert list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp")) == []


def test_missing_package_says_how_to_get_it(alias: Alias) -> None:
    missing = dataclasses.replace(alias, package="no_such_demo_package")
    with pytest.raises(gemmakv.GemmaKVError) as caught:
        models.fetch(missing)
    assert 'pip install "gemmakv[demo]"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_leftovers_of_a_killed_process_are_removed(
    alias: Alias,
) -> None:
    folder = folders.cache_folder()
    folder.mkdir(parents=True)
    leftover = folder / ".fake.gguf.123-0123abcd.tmp"
    leftover.write_bytes(b"half")
    models.fetch(alias)
    assert not leftover.exists()


def _fetch_in_child(alias: Alias, results: Any) -> None:
    results.put(models.fetch(alias).read_bytes() == CONTENT)


def test_many_processes_at_once(alias: Alias) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=_fetch_in_child, args=(alias, results))
        for _ in range(6)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [results.get(timeout=60) for _ in children] == [True] * 6


def test_demo_alias_is_the_published_file(model_path: str) -> None:
    alias = ALIASES["gemma-3-270m"]
    assert os.path.getsize(model_path) == alias.size_bytes
    digest = hashlib.sha256(Path(model_path).read_bytes()).hexdigest()
    assert digest == alias.sha256


def test_resolve_path(tiny_path: Path) -> None:
    assert models.resolve(tiny_path) == str(tiny_path)
    assert models.resolve(str(tiny_path)) == str(tiny_path)


def test_resolve_names_the_aliases(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gemma-3-270m") as caught:
        models.resolve(str(tmp_path / "gemma-9"))
    assert caught.value.filename == str(tmp_path / "gemma-9")


def test_resolve_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="config.json"):
        models.resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IsADirectoryError, match="safetensors"):
        models.resolve(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert models.resolve(tmp_path) == str(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model-00001-of-00002.safetensors"]
)
def test_resolve_part_of_a_folder(tmp_path: Path, name: str) -> None:
    part = tmp_path / name
    part.write_bytes(b"{}")
    with pytest.raises(ValueError, match="expected the folder that it is in"):
        models.resolve(part)


@pytest.mark.parametrize("model", ["", "a\0b", 7, None, b"x.gguf"])
def test_resolve_rejects_what_is_no_path(model: object) -> None:
    with pytest.raises(ValueError, match="model"):
        models.resolve(model)  # type: ignore[arg-type]
