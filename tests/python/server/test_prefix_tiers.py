"""A prefix cache that outlives the server."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gemmakv.server.process import secret as _secret
from support.command import RunCli, assert_fails
from support.server_process import ServerProcess

PROMPT = "once upon a time there was a server that forgot nothing " * 10


def ask(server: ServerProcess, path: str, key: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        data = answer.read().decode()
    return data if body is None else json.loads(data)


def cached(server: ServerProcess, key: str) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2, "seed": 5}
    usage = ask(server, "/v1/completions", key, body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_each_key_finds_its_own_at_the_next_start(
    talker_path: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    config = tmp_path / "server.toml"
    config.write_text(f'prefix-cache-disk = "{tmp_path}/kv:64MiB"\n')
    arguments = (
        "-m", talker_path, "--api-key-file", keys, "--config", config,
    )  # fmt: skip
    secret = tmp_path / "kv.secret"

    with ServerProcess(*arguments) as server:
        assert secret.stat().st_mode & 0o777 == 0o600
        assert cached(server, "one") == 0
        server.signal()
        server.end()
    with ServerProcess(*arguments) as server:
        assert cached(server, "two") == 0, "another tenant"
        assert cached(server, "one") >= 256
        metrics = ask(server, "/metrics", "one")
        for name in ("bytes", "tokens_total", "evictions_total"):
            assert f'gemmakv_prefix_cache_{name}{{tier="disk"}}' in metrics
        server.signal()
        server.end()
    for text in (secret.read_text().split()[-1], "RuntimeWarning"):
        assert text not in server.log
    secret.unlink()
    with ServerProcess(*arguments) as server:
        assert cached(server, "one") == 0


def test_a_secret_is_made_once_and_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    secret = _secret.read_or_make(path)
    assert len(secret) == 32 and any(secret)
    assert _secret.read_or_make(path) == secret
    assert os.listdir(tmp_path) == ["secret"]
    assert _secret.read_or_make(str(tmp_path / "other")) != secret


@pytest.mark.parametrize("kind", ["mode", "text", "short", "folder", "pipe"])
def test_bad_secrets(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    words = "secret"
    if kind == "folder":
        path.mkdir(mode=0o700)
        words = "regular file"
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
        words = "regular file"
    else:
        _secret.read_or_make(str(path))
        if kind == "mode":
            path.chmod(0o640)
            words = "0600.*0640"
        else:
            path.write_text("x" * 89 if kind == "text" else "gemmakv")
    with pytest.raises(
        ValueError, match=f"prefix_cache_secret_file: .*{words}"
    ):
        _secret.read_or_make(str(path))


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="secret"):
        _secret.read_or_make(str(tmp_path / "secret"))


def test_bad_flags(cli: RunCli, talker_path: Path, tmp_path: Path) -> None:
    def fails(*flags: object, words: str, code: int = 1) -> None:
        result = cli("serve", "-m", talker_path, "--port", "0", *flags)
        assert_fails(result, words, code=code)

    disk = ("--prefix-cache-disk", tmp_path / "kv")
    fails("--prefix-cache-disk", "kv:0", words="--prefix-cache-disk", code=2)
    fails(
        "--prefix-cache-ram", "off", *disk, words="--prefix-cache-ram", code=2
    )
    fails(
        *disk, "--prefix-cache-secret-file", tmp_path / "s",
        words="--prefix-cache-secret-file: ", code=2,
    )  # fmt: skip
    fails(
        "--prefix-cache-remote", f"file://{tmp_path}/remote", "--api-key",
        "one", words="--prefix-cache-secret-file: ", code=2,
    )  # fmt: skip
    (tmp_path / "kv.secret").write_text("mine")
    (tmp_path / "kv.secret").chmod(0o600)
    fails(*disk, "--api-key", "one", words="kv.secret", code=2)
