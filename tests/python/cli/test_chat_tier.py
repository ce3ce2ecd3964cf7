"""`gemmakv chat` with what it keeps on disk for later starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmakv.chat._session_file import kept_tokens
from support.chat_screen import Screen
from support.command import RunCli
from support.forks import FORKS, Talk
from support.stored import (
    said_in,
    stored_session,
    stored_sessions,
    token_count,
)
from support.waits import wait_until

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
LONG = b"once upon a time there was a model that forgot nothing " * 6
SYSTEM = "You never forget what was said to you, not one word of it. " * 5


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path


def chat_words(model: Path, *arguments: object) -> list[str]:
    return [
        "chat", "--model", str(model),
        "--max-tokens", "12", "--ignore-eos", *map(str, arguments),
    ]  # fmt: skip


def folders(home: Path) -> dict[str, str]:
    """Variables for what is kept, and for sessions."""
    return {
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }


@pytest.fixture
def run(cli: RunCli, talker_path: Path, home: Path) -> Run:
    def run(
        text: bytes, *arguments: object, **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        words = chat_words(talker_path, *arguments)
        return cli(*words, stdin=text, **(folders(home) | env))

    return run


def prefixes(home: Path) -> Path:
    return home / "cache" / "gemmakv" / "prefix"


def objects(home: Path) -> set[str]:
    """Names of what is stored whole."""
    return {path.name for path in prefixes(home).glob("??/[!.]*")}


def session_files(home: Path) -> list[Path]:
    return sorted((home / "data").rglob("*.session"))


def replies(result: subprocess.CompletedProcess[bytes]) -> list[dict]:
    assert result.returncode == 0, result.stderr.decode()
    return [json.loads(line) for line in result.stdout.splitlines()]


def texts(result: subprocess.CompletedProcess[bytes]) -> list[str]:
    return [reply["text"] for reply in replies(result)]


def test_it_is_there_by_default_and_says_so_once(run: Run, home: Path) -> None:
    first = run(LONG + b"\n", "--json")
    [line] = first.stderr.decode().splitlines()
    assert line.startswith("gemmakv: note: ")
    assert str(prefixes(home)) in line and "at most" in line
    assert "--prefix-cache-disk none" in line
    assert prefixes(home).stat().st_mode & 0o777 == 0o700
    second = run(LONG + b"\n", "--json")
    assert second.stderr == b""
    assert texts(first) == texts(second)
    assert replies(first)[0]["usage"]["cached"] == {}
    assert replies(second)[0]["usage"]["cached"]["disk"] > 0
    assert not (home / "data").exists()


@pytest.mark.parametrize(
    "flags", [["--prefix-cache-disk", "none"], ["--no-persist"]]
)
def test_it_can_be_switched_off(run: Run, home: Path, flags: list[str]) -> None:
    result = run(b"one\n/stats\n", *flags)
    assert result.returncode == 0 and b"note" not in result.stderr
    assert not prefixes(home).exists()


def test_generate_keeps_none(
    cli: RunCli, talker_path: Path, home: Path
) -> None:
    for flags in ([], ["--prefix-cache-disk", "none"]):
        result = cli(
            "generate", "--model", talker_path, "--max-tokens", 2, *flags,
            "Hi", **folders(home),
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert list((home / "cache").iterdir()) == []


def test_its_size_is_a_share_of_what_is_free(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmakv.cache._folders import default_disk_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    free = 0

    def statvfs(path: object) -> object:
        found = os.fstatvfs(os.open(home, os.O_RDONLY))
        fields = list(found)
        fields[1], fields[4] = 4096, free // 4096
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    free = 1 << 40
    assert default_disk_folder() == (prefixes(home), 50 << 30)
    free = 100 << 30
    assert default_disk_folder() == (prefixes(home), (100 << 30) // 10)
    free = 100 << 20
    with pytest.raises(OSError, match="No space left"):
        default_disk_folder()


def test_where_there_can_be_none_chat_goes_on(run: Run, home: Path) -> None:
    file = home / "file"
    file.write_text("mine")
    result = run(b"one\ntwo\n", XDG_CACHE_HOME=str(file))
    assert len(result.stdout.splitlines()) == 2 and result.returncode == 0
    [line] = result.stderr.decode().splitlines()
    assert line.startswith("gemmakv: note: ") and str(file) in line
    assert line.endswith("set XDG_CACHE_HOME to a folder that can be written")
    stranger = prefixes(home)
    stranger.mkdir(parents=True)
    (stranger / "letter.txt").write_text("mine")
    result = run(b"one\n", "--session", "main")
    assert result.returncode == 0 and len(result.stderr.splitlines()) == 1
    assert os.listdir(stranger) == ["letter.txt"]
    # Sessions are stored as they are without.
    [path] = session_files(home)
    with open(path, "rb") as opened:
        assert kept_tokens(opened) is None


@pytest.fixture
def mounted(home: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a memory file system in place of the cache folder."""
    place = str(home / "cache")

    def mount(options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip("mounting needs the right to do so")

    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)


def test_a_read_only_cache_folder(
    run: Run, mounted: Callable[[str], None]
) -> None:
    mounted("size=1g,ro")
    result = run(b"one\ntwo\n", "--session", "main")
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 2
    [line] = result.stderr.decode().splitlines()
    assert "Read-only file system" in line


def test_a_full_cache_folder(
    run: Run, home: Path, mounted: Callable[[str], None]
) -> None:
    mounted("size=1g")
    whole = texts(run(LONG + b"\ntwo\n", "--json", "--prefix-cache-disk=none"))
    assert run(b"one\n").returncode == 0
    with open(home / "cache" / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1000 << 20)
    flags = ("--prefix-cache-disk", f"{prefixes(home)}:1GiB")
    for _ in range(2):
        with open(home / "cache" / "rest", "ab") as file:
            while os.statvfs(home / "cache").f_bavail > 4:
                os.posix_fallocate(file.fileno(), file.seek(0, 2), 4096)
        result = run(LONG + b"\n", "--json", "--session", "s", *flags)
        assert texts(result) == whole[:1]
        [line] = result.stderr.splitlines()
        assert b"--prefix-cache-disk: " in line and b" asked for, " in line
        assert run(b"/undo\n", "--session", "s", *flags).returncode == 0
    result = run(b"one\n")  # too little is free for it by default
    assert result.returncode == 0
    [line] = result.stderr.decode().splitlines()
    assert "No space left on device" in line


def test_a_turn_writes_little(run: Run, home: Path) -> None:
    text = b"/set max_tokens 40\n" + LONG + b"\n"
    assert run(text, "--session", "plain", "--prefix-cache-disk=none")
    [whole] = session_files(home)
    before = whole.stat().st_size
    result = run(text, "--session", "tier", "--json")
    assert result.returncode == 0, result.stderr
    assert session_files(home) == [whole]
    kept = stored_sessions(home / "data")[-1]
    assert kept["name"] == "tier" and token_count(kept) > 100
    assert sum(len(str(turn)) for turn in kept["turns"]) < before / 4


def test_stored_sessions_go_on_with_and_without_it(
    run: Run, home: Path
) -> None:
    """Each start may have a disk or not; the bits are the same."""
    lines = [LONG, b"two " * 60, b"three", b"four", b"five"]
    wanted = texts(run(b"\n".join(lines), "--json", "--prefix-cache-disk=none"))
    disks = [False, True, True, False, True]
    usages = []
    for line, disk in zip(lines, disks):
        flags = () if disk else ("--prefix-cache-disk", "none")
        [reply] = replies(
            run(line + b"\n", "--json", "--session", "main", *flags)
        )
        assert reply["text"] == wanted.pop(0)
        usages.append(reply["usage"])
        assert bool(session_files(home)) != disk
        if disk:
            assert token_count(stored_session(home / "data")) > 0
    # Of a whole file, of the disk, of neither, of a whole file.
    assert usages[1]["cached_tokens"] > 200 and not usages[1]["cached"]
    assert usages[2]["cached"].get("disk", 0) > 200
    assert usages[3]["cached_tokens"] == 0
    assert usages[4]["cached_tokens"] > 300


@pytest.mark.parametrize("harm", ["evict", "damage", "part"])
def test_what_is_gone_is_computed_and_told(
    run: Run, home: Path, harm: str
) -> None:
    whole = texts(run(LONG + b"\ntwo\n", "--json", "--prefix-cache-disk=none"))
    run(LONG + b"\n", "--json", "--session", "main")
    for number, path in enumerate(sorted(prefixes(home).glob("??/*"))):
        if harm == "evict" or (harm == "part" and number % 2):
            path.unlink()
        elif harm == "damage":
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            data[-9] ^= 255
            path.write_bytes(data)
            path.chmod(0o400)
    result = run(b"two\n/stats\n", "--json", "--session", "main")
    assert texts(result) == whole[1:]
    if harm == "part":
        return
    stats = result.stderr.decode()
    assert "computed again" in stats and "evicted" in stats
    if harm == "damage":
        return  # what was not read is still there
    again = run(b"three\n/stats\n", "--session", "main").stderr.decode()
    assert " disk " in again.split("last turn")[1].splitlines()[0]


def test_stats_fit_in_40_columns(
    talker_path: Path, home: Path
) -> None:
    screen = Screen(
        *chat_words(talker_path), columns=40, **folders(home)
    )
    try:
        screen.wait_for_prompt("main")
        screen.line("hello")
        screen.wait_for("tokens/s")
        screen.wait_for_prompt("main")
        screen.line("/new other")
        screen.wait_for_prompt("other")
        screen.line("/switch main")
        screen.wait_for_prompt("main")
        screen.line("and on")
        screen.wait_for("ram ")
        screen.wait_for_prompt("main")
        screen.line("/stats")
        screen.wait_for("all sessions")
        text = screen.wait_for_prompt("main")
        [line] = [x for x in text.splitlines() if "last turn" in x]
        assert " ram " in line
        assert "2, 1 in memory" in screen.text
    finally:
        screen.close()


def test_deleting_takes_what_only_it_used(run: Run, home: Path) -> None:
    flags = ("--session", "a", "--system", SYSTEM)
    kept = run(LONG + b"\n", "--json", *flags)
    assert kept.returncode == 0, kept.stderr
    before = objects(home)
    text = b"/fork b\n" + b"a thing " * 60 + b"\n/undo\n" + LONG + b"\n"
    assert run(text, *flags).returncode == 0
    assert objects(home) > before
    other = run(b"/new c\nsomething\n/delete b\n/switch a\nmore\n", *flags)
    assert other.returncode == 0, other.stderr
    # What is left serves a and c alone.
    deleted = run(b"/delete a\n/delete c\n", "--session", "d")
    assert deleted.returncode == 0, deleted.stderr
    assert objects(home) == set()
    back = run(b"/restore\n/restore\n/switch a\nagain\n", "--session", "d")
    assert back.returncode == 0, back.stderr
    assert len(back.stdout.splitlines()) == 1


@pytest.fixture
def start(
    talker_path: Path, home: Path
) -> Callable[..., Talk]:
    def start(*arguments: object) -> Talk:
        words = chat_words(talker_path, *arguments)
        return FORKS.talk(words, {**os.environ, **folders(home)})

    return start


def test_killed_at_any_moment(
    run: Run, start: Callable[..., Talk], home: Path
) -> None:
    """What was said before a reply came out is there, with its tokens."""
    said: list[bytes] = []
    for moment in range(6):
        talk = start("--session", "main")
        lines = [b"turn %d.%d" % (moment, i) for i in range(30)]
        talk.say(b"\n".join(lines) + b"\n")
        for _ in range(1 + moment):
            talk.stdout.readline()
        talk.process.kill()
        # From the same buffer as the first lines, which may hold others.
        more = talk.end().count(b"\n")
        said += lines[: 1 + moment + more]
        kept = stored_session(home / "data")
        found = [text.encode() for text in said_in(kept)]
        assert found[: len(said)] == said
        # The last reply may have been stored and not shown.
        assert len(found) - len(said) <= 1
        said = found
        assert token_count(kept) > 0
    cold = shutil.copytree(home / "data", home / "cold" / "data")
    (home / "cold" / "cache").mkdir()
    assert cold.exists()
    warm = run(b"and on\n", "--session", "main", "--json")
    other = run(
        b"and on\n", "--session", "main", "--json", **folders(home / "cold")
    )
    assert texts(warm) == texts(other)


def test_two_chats_on_one_store_and_disk(
    run: Run, start: Callable[..., Talk], home: Path
) -> None:
    other = home / "other"
    (other / "cache").mkdir(parents=True)
    whole = ("--session", "a", "--system", SYSTEM)
    assert run(LONG + b"\n", *whole, **folders(other)).returncode == 0
    first = start(*whole)
    first.say(LONG + b"\n")
    first.stdout.readline()
    # They are written in the background.
    wait_until(lambda: len(objects(home)) == len(objects(other)) > 0)
    second = run(b"mine\n", "--session", "B", "--system", SYSTEM, "--json")
    [reply] = replies(second)
    assert reply["usage"]["cached"].get("disk", 0) > 100
    # What the other one uses is not taken from it.
    gone = run(b"/delete\n", "--session", "B")
    assert gone.returncode == 0, gone.stderr
    first.say(b"two\n")
    first.end()
    assert first.process.returncode == 0
    [later] = replies(run(b"three\n", "--session", "a", "--json"))
    assert later["usage"]["cached"].get("disk", 0) > 300
