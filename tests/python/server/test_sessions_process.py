"""Conversations of real processes: kill -9, several on one folder, flags."""

from __future__ import annotations

import concurrent.futures
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.asgi import NAME, USER
from support.command import RunCli, assert_fails
from support.server_process import ServerProcess
from support.waits import wait_until

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"


def start(
    talker_path: Path, folder: Path, *more: object, **env: str
) -> ServerProcess:
    return ServerProcess(
        "-m", talker_path, "--sessions", folder, "--max-model-len", 4096,
        "--default-seed", 3, *more, **env,
    )  # fmt: skip


def ask(server: ServerProcess, path: str, body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def look(server: ServerProcess, path: str) -> Any:
    response = httpx.get(server.url + path, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def body_of(session: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "session": session, "max_tokens": 6, "temperature": 1,
        "messages": [{"role": "user", "content": text}], **more,
    }  # fmt: skip


def streamed(server: ServerProcess, body: dict[str, Any]) -> str:
    """The text of a streamed reply, up to its last event."""
    text = ""
    with httpx.stream(
        "POST", server.url + CHAT, json={**body, "stream": True}, timeout=60
    ) as lines:
        for line in lines.iter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
    raise AssertionError(f"no end of {text!r}")


def replies(server: ServerProcess, session: str) -> list[str]:
    turns = look(server, f"{SESSIONS}/{session}")["turns"]
    return [turn["reply"]["content"] for turn in turns]


@pytest.mark.slow
def test_killed(talker_path: Path, tmp_path: Path) -> None:
    """After the last event nothing is lost, whenever the process dies. Of a
    turn that runs then nothing is kept, and the session is free before long.
    Among many, of what was answered all is there, and at most one turn more.
    """
    folder = tmp_path / "kept"
    more: dict[str, Any] = {"max_output_tokens": 4}
    with start(talker_path, folder) as server:
        session = ask(server, SESSIONS, {"name": "a"})["id"]
        text = streamed(server, body_of(session, "q 0"))
        server.signal(signal.SIGKILL)
        server.wait()
    with start(talker_path, folder) as server:
        assert replies(server, session) == [text]
        reply = ask(server, CHAT, body_of(session, "q 1"))
        said = [text, reply["choices"][0]["message"]["content"]]
        response = ask(server, "/v1/responses", {"input": "r", **more})["id"]
        server.signal(signal.SIGKILL)
        server.wait()
    with start(talker_path, folder, "--max-model-len", 600_000) as server:
        assert replies(server, session) == said
        body = {"input": "r", "previous_response_id": response, **more}
        response = ask(server, "/v1/responses", body)["id"]
        body = body_of(
            session, "q 2", max_tokens=500_000, ignore_eos=True, stream=True
        )
        with httpx.stream(
            "POST", server.url + CHAT, json=body, timeout=60
        ) as lines:
            next(lines.iter_lines())
            server.signal(signal.SIGKILL)
            server.wait()
    with start(talker_path, folder) as server:
        assert look(server, f"/v1/responses/{response}")["id"] == response
        assert replies(server, session) == said
        wait_until(lambda: is_free(server, session), pause_s=0.2)
        assert len(replies(server, session)) == 3
        many = kill_among_many(server)
    with start(talker_path, folder) as server:
        for session, texts in many.items():
            found = replies(server, session)
            assert found[: len(texts)] == texts
            assert len(found) <= len(texts) + 1


def is_free(server: ServerProcess, session: str) -> bool:
    """Says whether a session takes a turn, which this one is then."""
    answer = httpx.post(
        server.url + CHAT, json=body_of(session, "q 2"), timeout=60
    )
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == "session_busy"
        assert int(answer.headers["retry-after"]) > 0
    return answer.status_code == 200


def kill_among_many(server: ServerProcess) -> dict[str, list[str]]:
    """Kills a server while four talk to it, and returns the replies that each
    session got.
    """
    said: dict[str, list[str]] = {}

    def talk(session: str) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for i in range(1000):
                try:
                    found = http.post(CHAT, json=body_of(session, f"q {i}"))
                    choice = found.json()["choices"][0]
                except (httpx.TransportError, ValueError):
                    return
                said[session].append(choice["message"]["content"])

    for _ in range(4):
        said[ask(server, SESSIONS, {})["id"]] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for session in said:
            pool.submit(talk, session)
        wait_until(lambda: min(map(len, said.values())) >= 3)
        server.signal(signal.SIGKILL)
        server.wait()
    return said


@pytest.mark.slow
def test_two_processes_on_one_folder(talker_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with (
        start(talker_path, folder) as one,
        start(talker_path, folder) as other,
    ):
        session = ask(one, SESSIONS, {})["id"]

        def post(i: int) -> int:
            server = (one, other)[i % 2]
            return httpx.post(
                server.url + CHAT, json=body_of(session, f"q {i}"), timeout=60
            ).status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(post, range(16)))
        assert set(codes) <= {200, 409}
        found = [look(s, f"{SESSIONS}/{session}") for s in (one, other)]
        assert found[0] == found[1]
        turns = found[0]["turns"]
        assert len(turns) == codes.count(200) >= 1
        parents = [turn["parent"] for turn in turns]
        assert parents == [None, *[turn["id"] for turn in turns[:-1]]]


@pytest.mark.slow
def test_openai_client(talker_path: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")

    with ServerProcess(
        "-m", talker_path, "--sessions", tmp_path / "kept"
    ) as server:
        http = openai.OpenAI(
            base_url=server.url + "/v1", api_key="none",
            _strict_response_validation=True,
        )  # fmt: skip
        options: Any = {"model": NAME, "max_output_tokens": 6}
        one = http.responses.create(input="hello", **options)
        with http.responses.stream(
            input="more", previous_response_id=one.id, **options
        ) as stream:
            events = list(stream)
        assert events[-1].type == "response.incomplete"
        two = events[-1].response
        assert two.previous_response_id == one.id
        again = http.responses.retrieve(two.id)
        assert again.output_text == two.output_text
        http.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError):
            http.responses.retrieve(one.id)
        session = http.post("/sessions", cast_to=object, body={})
        reply = http.chat.completions.create(
            model=NAME, messages=USER, max_tokens=4,
            extra_body={"session": session["id"]},
        )  # fmt: skip
        assert reply.session["id"] == session["id"]
        http.close()
        server.signal()
        server.end()


def test_flags(cli: RunCli, talker_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for flags, words, code in (
        (["--sessions", file], ("--sessions", "file"), 2),
        (["--sessions", "/proc/none/x"], ("sessions", "/proc/none/x"), None),
        (["--sessions", ""], ("--sessions", "found ''"), 2),
        (
            ["--sessions", tmp_path / "d", "--response-days", "-1"],
            ("--response-days",),
            2,
        ),
    ):
        result = cli("serve", "-m", talker_path, *flags, "--port", 0)
        if code is None:
            assert_fails(result, *words)
        else:
            assert_fails(result, *words, code=code)


def test_variable_and_file(talker_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'sessions = "{tmp_path}/a"\nresponse-days = 2\n')

    for more, env, folder in (
        (["--config", config], {}, "a"),
        ([], {"GEMMAKV_SESSIONS": str(tmp_path / "b")}, "b"),
    ):
        with ServerProcess("-m", talker_path, *more, **env) as server:
            answer = httpx.post(server.url + SESSIONS, json={}, timeout=60)
            assert answer.status_code == 200, answer.text
            server.signal()
            server.end()
        assert [p.name for p in (tmp_path / folder).iterdir()] == [
            "sessions.sqlite3"
        ]
