"""The user's folders, locks between processes, and sizes in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gemmakv._support import folders, locks
from gemmakv._support.sizes import in_bytes
from gemmakv.cli import describe


def test_relative_folders_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, "relative/folder")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.cache_folder() == tmp_path / ".cache" / "gemmakv"
    assert folders.data_folder() == tmp_path / ".local/share" / "gemmakv"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert folders.data_folder() == tmp_path / "data" / "gemmakv"


def test_no_home_is_an_error_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(FileNotFoundError, match="set HOME or XDG_CACHE_HOME"):
        folders.cache_folder()


@pytest.mark.parametrize("home", ["", "relative/folder", "."])
def test_a_home_that_is_no_place_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """An empty one was the folder /, a relative one any folder."""
    monkeypatch.setenv("HOME", home)
    for variable, folder in (
        ("XDG_CACHE_HOME", folders.cache_folder),
        ("XDG_DATA_HOME", folders.data_folder),
    ):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(FileNotFoundError, match=f"HOME or {variable}"):
            folder()
        monkeypatch.setenv(variable, str(tmp_path))
        assert folder() == tmp_path / "gemmakv"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_a_folder_that_cannot_be_written(code: int) -> None:
    with pytest.raises(OSError) as caught, folders.in_cache_folder():
        raise OSError(code, os.strerror(code), "/home/me/.cache")
    assert caught.value.errno == code
    said = describe(caught.value)
    assert said.startswith("/home/me/.cache: ") and "XDG_CACHE_HOME" in said


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locks.locked(path):
        other = os.open(path, os.O_RDWR)
        assert not locks.lock(other, wait=False)
    assert locks.lock(other, wait=False)
    os.close(other)


def test_sizes_in_words() -> None:
    assert [in_bytes(n) for n in (0, 999, 1536, 18_400_000)] == [
        "0 B", "999 B", "1.5 kB", "18.4 MB",
    ]  # fmt: skip
    assert in_bytes(253_113_024) == "253 MB"
    assert in_bytes(2_300_000_000) == "2.3 GB"
    assert in_bytes(999_600) == "1.0 MB"
    assert in_bytes(3e15) == "3000 TB"
