"""Files that appear whole, and what is read of files of others."""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gemmakv._support import files


def test_permissions_are_those_of_a_new_file_or_of_the_one_replaced(
    tmp_path: Path,
) -> None:
    plain, new = tmp_path / "plain", tmp_path / "new"
    plain.touch()
    files.write_atomically(new, b"1")
    assert new.stat().st_mode == plain.stat().st_mode
    new.chmod(0o640)
    files.write_atomically(new, b"2")
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert new.read_bytes() == b"2"
    assert sorted(tmp_path.iterdir()) == [new, plain]


def test_the_umask_of_other_threads_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # It belongs to the process: another thread's file would be open to all.
    changed = []
    monkeypatch.setattr(os, "umask", changed.append)
    files.write_atomically(tmp_path / "file", b"")
    assert changed == []


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "file", Path("/proc/file")):
        with pytest.raises(OSError) as caught:
            files.write_atomically(path, b"")
        assert caught.value.filename == str(path)
        assert caught.value.filename2 is None
        assert ".tmp" not in str(caught.value)
        assert " -> " not in str(caught.value)


def test_a_file_that_would_block_takes_nothing_silently() -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with (
        open(source, "rb"),
        open(sink, "wb", buffering=0) as file,
        files.piecewise_writer(file) as write,
        pytest.raises(BlockingIOError),
    ):
        write(b"x" * (4 << 20))


def test_a_file_that_gives_more_than_is_asked_for() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"x" * (size + 1)

    with pytest.raises(ValueError, match="8 bytes.*found 9"):
        files.read_all(Endless(), 8, lambda head: 1 << 62)  # type: ignore[arg-type]


def test_a_full_disk_is_named_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(OSError, match="make room") as caught,
        files.atomic_writer(path),
    ):
        raise full
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="make room") as caught:
        files.write_atomically("/dev/full", b"x")
    assert caught.value.filename == "/dev/full"


def test_a_file_that_grows_too_large_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    large = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    with pytest.raises(OSError) as caught, files.atomic_writer(path):
        raise large
    assert caught.value.filename == str(path)


def test_what_a_killed_writer_left_is_swept_and_what_is_written_is_not(
    tmp_path: Path,
) -> None:
    script = (
        "import os, sys\n"
        "from gemmakv._support.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as file:\n"
        "    file.write(b'half')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "one"], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    others = [
        tmp_path / name
        for name in (".mine.tmp", "one.12-0123abcd.tmp", ".one.12-0123.tmp")
    ]
    for other in others:
        other.touch()
    with files.atomic_writer(tmp_path / "two") as file:
        assert not leftover.exists()
        (writing,) = tmp_path.glob(".two.*.tmp")
        # Of the same process here: a lock is that of the open file.
        files.write_atomically(tmp_path / "three", b"3")
        assert writing.exists()
        file.write(b"2")
    assert (tmp_path / "two").read_bytes() == b"2"
    names = {path.name for path in [*others, tmp_path / "two"]} | {"three"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_only_plain_files_are_swept(tmp_path: Path) -> None:
    names = [f".x.1-0000000{i}.tmp" for i in range(3)]
    (tmp_path / names[0]).mkdir()
    os.mkfifo(tmp_path / names[1])
    (tmp_path / names[2]).symlink_to(tmp_path / "kept")
    (tmp_path / "kept").touch()
    files.write_atomically(tmp_path / "file", b"1")
    assert {path.name for path in tmp_path.iterdir()} == {
        *names, "kept", "file"
    }


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = files.fcntl.flock, []

    def sweep_first(descriptor: int, how: int) -> None:
        if not swept:
            swept.extend(tmp_path.glob(".*.tmp"))
            for path in swept:
                path.unlink()
        lock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", sweep_first)
    files.write_atomically(tmp_path / "file", b"1")
    assert len(swept) == 1
    assert (tmp_path / "file").read_bytes() == b"1"


class Trickle(io.RawIOBase):
    """Gives and takes at most three bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self.rest = data
        self.taken = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        part, self.rest = self.rest[:3], self.rest[3:]
        return part

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.taken += bytes(data[:3])
        return len(data[:3])


def write_all(file: Any, data: bytes) -> None:
    with files.piecewise_writer(file) as write:
        write(data)


def test_files_that_give_or_take_a_part_at_a_time() -> None:
    assert files.read_all(Trickle(b"0123456789")) == b"0123456789"
    file = Trickle(b"")
    write_all(file, b"0123456789")
    assert file.taken == b"0123456789"


@pytest.mark.parametrize("wrong", [io.StringIO("text"), 5, None, True])
def test_what_is_no_binary_file_is_refused(wrong: object) -> None:
    for call in (files.read_all, lambda f: write_all(f, b"1")):
        with pytest.raises(ValueError, match="binary"):
            call(wrong)  # type: ignore[operator]


class Text:
    def read(self, size: int) -> str:
        return "text"


def test_what_gives_text_is_refused() -> None:
    with pytest.raises(ValueError, match="binary file"):
        files.read_all(Text())  # type: ignore[arg-type]


def test_no_more_is_read_than_the_head_says() -> None:
    heads = []

    def size_of(head: bytes) -> int:
        heads.append(head)
        return 6

    assert files.read_all(io.BytesIO(b"0123456789"), 4, size_of) == b"0123456"
    assert files.read_all(io.BytesIO(b"01"), 4, size_of) == b"01"
    assert heads == [b"0123", b"01"]


def test_an_endless_file_is_read_as_far_as_its_head() -> None:
    def refuse(head: bytes) -> int:
        raise ValueError(f"found {head!r}")

    with pytest.raises(ValueError, match="found"):
        files.read_all("/dev/zero", 4, refuse)


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_all(path, b"content")
    reader.join(60)
    assert read == [b"content"]
