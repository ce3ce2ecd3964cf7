"""Servers at a Unix socket."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import httpx
import pytest

from gemmakv.server.process import sockets as _sockets
from gemmakv.server.settings import Settings
from support.server_process import ServerProcess

SAID = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def ask(path: Path) -> httpx.Response:
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, timeout=60) as http:
        return http.post("http://localhost/v1/chat/completions", json=SAID)


def settings(path: Path, *keys: str) -> Settings:
    return Settings(("a",), host=str(path), api_keys=keys)


def refused(words: str, path: Path) -> None:
    with (
        pytest.raises(OSError, match=f"^host: .*{words}"),
        _sockets.bound(settings(path)),
    ):
        pass


def check(path: Path, url: str) -> None:
    """Has a server at a socket answer."""
    assert url == f"unix:{path}"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert path.stat().st_mode & 0o007 == 0
    found = ask(path)
    assert found.status_code == 200, found.text


def test_serves(talker_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with ServerProcess(
        "-m", talker_path, "--host", path, "--served-model-name", "talker",
        "--max-model-len", 256,
    ) as own:  # fmt: skip
        check(path, own.url)
        own.signal()
        own.end()
    assert not path.exists()


@pytest.mark.slow
def test_workers_serve(talker_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with ServerProcess(
        "-m", talker_path, "--host", path, "--workers", 2,
        "--served-model-name", "talker", "--max-model-len", 256,
    ) as own:  # fmt: skip
        check(path, own.url)
        own.signal()
        assert own.wait() == 0
    assert not path.exists()


def test_the_file_is_there_for_the_block(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with _sockets.bound(settings(path)) as sock:
        assert path.exists()
        refused("listens", path)
        assert path.exists()
        sock.close()
    assert not path.exists()


def test_a_file_that_was_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with _sockets.bound(settings(path)) as sock:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
        sock.close()


def test_what_another_server_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with _sockets.bound(settings(path)) as sock:
        sock.close()
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    refused("socket", path)
    assert path.read_text() == "mine"
    for bad in (tmp_path / "none" / "s.sock", tmp_path / ("x" * 200)):
        refused("", bad)


def test_who_may_connect(tmp_path: Path) -> None:
    """The umask says so; without keys nobody but user and group."""
    path = tmp_path / "s.sock"
    before = os.umask(0)
    try:
        for keys, mode in (((), 0o660), (("key",), 0o666)):
            with _sockets.bound(settings(path, *keys)) as sock:
                assert stat.S_IMODE(path.stat().st_mode) == mode
                sock.close()
    finally:
        os.umask(before)
