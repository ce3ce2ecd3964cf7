"""Folders of the prefix cache: their places, their core class."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemmakv import _core
from gemmakv.cache._folders import default_shared_folder, parse_folder


def test_the_shared_folder_is_this_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_shared_folder() == str(tmp_path / "gemmakv")
    for value in ("", "relative", str(tmp_path / "gone")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        expected = f"/dev/shm/gemmakv-{os.geteuid()}"
        assert default_shared_folder() == expected
    monkeypatch.setattr("gemmakv.cache._folders._SHARED_MEMORY", "/nowhere")
    with pytest.raises(FileNotFoundError, match="set XDG_RUNTIME_DIR"):
        default_shared_folder()


@pytest.mark.parametrize(
    "text, folder, size",
    [
        ("a", "a", None),
        ("/a/b", "/a/b", None),
        ("a:1GiB", "a", 1 << 30),
        ("/a:b/c", "/a:b/c", None),
        ("a:b:20kB", "a:b", 20_000),
        ("a:b/", "a:b/", None),
        (Path("/a/b:7"), "/a/b", 7),
    ],
)
def test_a_folder_and_its_bytes(
    text: object, folder: str, size: int | None
) -> None:
    assert parse_folder("disk", text) == (folder, size)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_folder("disk", "~/a:1MB") == ("/home/me/a", 1_000_000)


@pytest.mark.parametrize(
    "value", ["", ":1GiB", "a:", "a:b", "a:-1", "a:0", 7, None, "a\0b"]
)
def test_what_is_no_folder(value: object) -> None:
    with pytest.raises(ValueError, match="^disk: expected"):
        parse_folder("disk", value)


def test_a_store(tmp_path: Path) -> None:
    store = _core.FolderStore(
        str(tmp_path / "a"), tier="disk", mapped=False, budget_bytes=1 << 20
    )
    assert isinstance(store, _core.BlockStore)
    assert store.tier == "disk"
    assert store.budget_bytes == 1 << 20
    assert store.sweep() == {
        "swept": True, "removed": 0, "removed_bytes": 0,
        "removed_temporary_files": 0, "entries": 0, "bytes": 0,
    }  # fmt: skip
    assert store.stats()["paused"] is False
    store.clear()
    store.flush()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_nobody_s_environment_makes_a_store_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The switch by which C++ tests make it is not in the module."""
    monkeypatch.setenv("GEMMAKV_FAULT", "nonsense")
    store = _core.FolderStore(
        str(tmp_path / "a"), tier="disk", mapped=False, budget_bytes=1 << 20
    )
    assert store.sweep()["swept"]
    assert b"GEMMAKV_FAULT" not in Path(_core.__file__).read_bytes()


def test_errors_say_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    for name, message in {
        "file": "is a file, expected a folder",
        "link": "is a symbolic link",
        "open": "has mode 0755, expected 0700",
    }.items():
        with pytest.raises(Exception, match=message):
            _core.FolderStore(
                str(tmp_path / name), tier="disk", mapped=False, budget_bytes=1
            )
    with pytest.raises(FileNotFoundError):
        _core.FolderStore.describe(str(tmp_path / "gone"))
