"""Keys, hosts, origins, limits, and bodies that nobody should send."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.settings import Limits, Settings, checked_keys, read_keys
from support.asgi import (
    NAME,
    USER,
    Exchange,
    get,
    in_loop,
    make_app,
    post,
)
from support.extras import needs

CHAT = "/v1/chat/completions"
SAID = {"model": NAME, "messages": USER, "max_tokens": 2, "seed": 1}
PATHS = (
    CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize",
    "/apply-template",
)  # fmt: skip


@pytest.fixture
def keyed(shared: gemmakv.Gemma) -> App:
    return make_app(shared, api_keys=("first", "second"), max_model_len=4096)


@pytest.mark.parametrize("where", ["header", "line"])
def test_a_head_that_is_too_large(shared: gemmakv.Gemma, where: str) -> None:
    app = make_app(shared)
    path, headers = "/v1/models", {"x-much": "x" * 40_000}
    if where == "line":
        path, headers = path + "?" + "x" * 40_000, {}
    answer = get(app, path, **headers)
    assert answer.status_code == 431
    assert "32768 bytes" in answer.json()["error"]["message"]


def test_two_lengths_of_a_body_are_none(shared: gemmakv.Gemma) -> None:
    """Of a proxy and a server that believe different ones, one takes a part
    of a body for the next request.
    """
    answer = post(
        make_app(shared), CHAT, SAID, **{"transfer-encoding": "chunked"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "ambiguous_length"
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("seed", [10**29, 1 << 64, -(1 << 63) - 1])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/api/chat",
                                  "/completion"])
def test_a_seed_of_many_digits_is_not_taken_for_another(
    shared: gemmakv.Gemma, path: str, seed: int
) -> None:
    body: dict[str, Any] = {**SAID, "seed": seed, "prompt": "x"}
    name = "seed"
    if path == "/v1/responses":
        body = {"input": "x", "seed": seed}
    if path == "/api/chat":
        body, name = {**body, "options": {"seed": seed}}, "options.seed"
    answer = post(make_app(shared), path, body)
    assert answer.status_code == 400
    found = answer.json()["error"]
    message = found if isinstance(found, str) else found["message"]
    assert message.startswith(f"{name}: expected an integer"), message


# Keys.


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first"},
        {"authorization": "bearer  second"},
        {"x-api-key": "second"},
    ],
)
def test_with_a_key(keyed: App, headers: dict[str, str]) -> None:
    assert post(keyed, CHAT, SAID, **headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer firs"},
        {"authorization": "Bearer first2"},
        {"authorization": "Basic first"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST"},
    ],
)
def test_without_one(keyed: App, headers: dict[str, str]) -> None:
    response = post(keyed, CHAT, SAID, **headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first" not in response.text
    for path in ("/metrics", "/props", "/v1/models", "/api/tags", "/nope"):
        assert get(keyed, path, **headers).status_code == 401
    # In each API's own form.
    found = post(keyed, "/v1/messages", SAID, **headers).json()
    assert found["error"]["type"] == "authentication_error"
    assert isinstance(post(keyed, "/api/chat", SAID).json()["error"], str)
    for path in ("/health", "/health/live", "/"):
        assert get(keyed, path).status_code == 200


def test_keys_are_tenants(keyed: App, shared: gemmakv.Gemma) -> None:
    long = {
        **SAID,
        "messages": [{"role": "user", "content": "yet another text " * 90}],
    }

    def cached(key: str) -> int:
        found = post(keyed, CHAT, long, **{"x-api-key": key}).json()
        count: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    shared.chat(long["messages"], max_tokens=2)  # of no tenant
    assert cached("first") == 0
    assert cached("second") == 0
    assert cached("first") > 0
    text = get(keyed, "/metrics", **{"x-api-key": "first"}).text
    assert 'gemmakv_completion_tokens_total{key="1"} 4' in text
    assert 'gemmakv_completion_tokens_total{key="2"} 2' in text


def test_the_salt_is_no_hash_of_the_key(shared: gemmakv.Gemma) -> None:
    one, two = (make_app(shared, api_keys=("k",)).service for _ in "12")
    assert one is not None and two is not None
    assert one._tenants.keys().isdisjoint(two._tenants.keys())


def test_key_files(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one \ntwo\n")
    assert read_keys(path) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="api_key_file: .*none"):
        read_keys(path)
    path.write_text("one\n\ntwo words\n")
    with pytest.raises(ValueError, match="keys: line 3: "):
        read_keys(path)
    assert checked_keys(["a", "b", "a"]) == ("a", "b")
    for bad in ("", "a b", "\u00e9", "a\n"):
        with pytest.raises(ValueError, match="^api_key: "):
            checked_keys([bad])


def test_what_is_empty_is_nobodys(shared: gemmakv.Gemma) -> None:
    """A request without a key would have had an empty one's."""
    with pytest.raises(ValueError, match="^api_key: "):
        Settings((NAME,), api_keys=("a", ""))
    app = make_app(shared, max_model_len=256)
    assert app.service is not None
    tenant = app.service.tenant(None)
    assert tenant is not None and tenant.narrow(None) is tenant
    with pytest.raises(ValueError, match="^cache_salt: "):
        tenant.narrow("")
    found = post(app, CHAT, {**SAID, "cache_salt": ""})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "cache_salt"


def test_addresses() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1"):
        Settings((NAME,), host=host)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ValueError, match="host: .*--insecure"):
            Settings((NAME,), host=host)
        Settings((NAME,), host=host, insecure=True)
        Settings((NAME,), host=host, api_keys=("k",))


# Pages in browsers.


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:8", 200),
        ("[::1]:8000", 200), ("app.localhost", 200), ("evil.example", 403),
        ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("[::1", 403), ("", 403),
    ],
)  # fmt: skip
def test_host(app: App, host: str, status: int) -> None:
    assert get(app, "/health", host=host).status_code == status


def test_allowed_hosts(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, allowed_host=("box.lan",))
    assert get(app, "/health", host="box.lan:80").status_code == 200
    assert get(app, "/health", host="other.lan").status_code == 403
    app = make_app(shared, allowed_host=("*",))
    assert get(app, "/health", host="other.lan").status_code == 200


def test_origins(app: App, shared: gemmakv.Gemma) -> None:
    evil = {"origin": "https://evil.example"}
    response = post(app, CHAT, SAID, **evil)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    assert post(app, CHAT, SAID, origin="null").status_code == 403
    own = {"origin": "http://localhost"}
    assert post(app, CHAT, SAID, **own).status_code == 200
    app = make_app(shared, cors_origin=("https://page.example",))
    page = {"origin": "https://page.example"}
    response = post(app, CHAT, SAID, **page)
    assert response.status_code == 200
    allowed = "access-control-allow-origin"
    assert response.headers[allowed] == page["origin"]
    assert post(app, CHAT, b"", **page).headers[allowed] == page["origin"]
    asked = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    response = in_loop(app, lambda h: h.options(CHAT, headers=asked))
    assert response.status_code == 200
    assert response.headers["access-control-allow-headers"] == "authorization"
    response = in_loop(app, lambda h: h.options(CHAT, headers=evil))
    assert response.status_code == 403


# Bodies.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body, words",
    [
        (b"", ("body: ", "JSON")),
        (b"{", ("body: ", "JSON")),
        (b"[]", ("body: ", "JSON object")),
        (b"null", ("body: ", "JSON object")),
        (b'{"a": "\xff"}', ("body: ", "UTF-8", "0xFF")),
        (b'{"a": NaN}', ("a: ", "NaN")),
        (b'{"a": {"b": [1, -Infinity]}}', ("a.b[1]: ", "-Infinity")),
        (b'{"a": 1e999}', ("a: ", "1e999")),
        (b'{"a": ' + b"9" * 5000 + b"}", ("a: ", "64 bits")),
        (b'{"abc": 1, "abc": 2}', ("abc: ", "twice")),
        (b'{"a": "\\ud800"}', ("a: ", "surrogate")),
        (b'{"a": ["\\udc00"]}', ("a[0]: ", "surrogate")),
        (b'{"a":' * 65 + b"1" + b"}" * 65, ("in each other",)),
        (b'{"a":' + b"[" * 500_000, ("in each other",)),
    ],
)
def test_bad_bodies(
    app: App, path: str, body: bytes, words: tuple[str, ...]
) -> None:
    response = post(app, path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert all(word in message for word in words), message


def test_a_body_of_many_small_values(shared: gemmakv.Gemma) -> None:
    """Each takes time on the event loop: 8 MiB of them held up everybody for
    seconds.
    """
    limits = Limits(json_values=100)
    app = make_app(shared, limits=limits)
    body: dict[str, Any] = {"messages": USER, "max_tokens": 2}
    body["zzz"] = list(range(97))
    assert post(app, CHAT, body).status_code == 200
    body["zzz"].append(1)
    found = post(app, CHAT, body)
    assert found.status_code == 400
    assert "100 values" in found.json()["error"]["message"]
    # Commas of texts are none.
    body["zzz"] = ',"[],' * 1000
    assert post(app, CHAT, body).status_code == 200
    many = b'{"messages": [' + b"{}," * 2_700_000 + b"{}]}"
    found = post(make_app(shared), CHAT, many)
    assert "524288 values" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_too_many_prompts_are_not_read(
    app: App, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """They were all made tokens before they were counted."""
    assert app.service is not None

    def fail(*_: object) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(app.service.prompts, "text_ids", fail)
    found = post(app, path, {"prompt": ["a"] * 17})
    assert found.status_code == 400
    assert "16" in found.text and "17" in found.text


def test_text_is_no_structure(app: App) -> None:
    text = '[{"[' * 100 + '\\"' + "]" * 100
    found = post(app, "/tokenize", {"content": text})
    assert found.status_code == 200


def test_too_large(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, limits=Limits(body_bytes=1000))
    body = {**SAID, "user": "x" * 1000}
    response = post(app, CHAT, body)
    assert response.status_code == 413
    assert post(app, "/v1/messages", body).json()["error"]["type"] == (
        "request_too_large"
    )

    async def main() -> None:  # without a length, it shows on the way
        exchange = Exchange(app, CHAT, json.dumps(body).encode())
        await exchange.done()
        assert exchange.status == 413

    asyncio.run(main())


def test_slow_body(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, limits=Limits(body_s=0.05))

    async def main() -> None:
        exchange = Exchange(app, CHAT, b"")
        exchange._incoming.get_nowait()
        exchange._incoming.put_nowait(
            {"type": "http.request", "body": b"{", "more_body": True}
        )
        await exchange.done()
        assert exchange.status == 408
        assert b"body: expected all of it" in exchange.data

    asyncio.run(main())


def test_limits_of_requests(shared: gemmakv.Gemma) -> None:
    app = make_app(
        shared, limits=Limits(messages=3, rows=2, stop=1, top_logprobs=1)
    )
    talk = [*USER, {"role": "assistant", "content": "x"}, *USER, *USER]
    for fields, words in (
        ({"messages": talk}, ("messages", "3", "4")),
        ({"n": 3}, ("n", "2")),
        ({"stop": ["a", "b"]}, ("stop", "1")),
        ({"logprobs": True, "top_logprobs": 2}, ("top_logprobs", "1")),
    ):
        response = post(app, CHAT, {**SAID, **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == words[0]
        assert all(word in error["message"] for word in words), error


def test_bad_settings() -> None:
    for fields in (
        {"port": 70000}, {"max_queue": -1}, {"max_running": 0},
        {"max_model_len": 1}, {"request_timeout": 0.0},
        {"drain_timeout": -1.0}, {"cors_origin": ("example.org",)},
        {"default_max_tokens": 0},
    ):  # fmt: skip
        [name] = fields
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            Settings((NAME,), **fields)  # type: ignore[arg-type]


def test_settings_that_the_model_cannot_have(shared: gemmakv.Gemma) -> None:
    with pytest.raises(ValueError, match="^default_temperature: expected"):
        make_app(shared, default_temperature=-1.0)
    with pytest.raises(ValueError, match="^max_model_len: expected at most"):
        make_app(shared, max_model_len=1 << 30)


def test_the_log_says_what_was_wrong(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "x"}]
    more = {"stream": True, "stream_options": {"\n": 1}}
    bad: list[dict[str, Any]] = [{"best_of": 3}, {"temperature": -1}, more]
    with caplog.at_level("INFO", logger="gemmakv.server"):
        for body in bad:
            post(app, "/v1/chat/completions", {"messages": messages, **body})
    ends = [one.message.partition(" error ")[2] for one in caplog.records]
    assert ends[:2] == ["unsupported_field best_of", "temperature"]
    assert "\n" not in ends[2] and ends[2].endswith("%0A")
    fields = [vars(one)["fields"] for one in caplog.records]
    assert (fields[0]["code"], fields[0]["param"]) == tuple(ends[0].split())


def test_injected_log_lines(app: App, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gemmakv.server"):
        get(app, "/no%0Asuch%0D")
    assert [r for r in caplog.messages if "/no%0Asuch%0D 404" in r]
    assert not any("\n" in r or "\r" in r for r in caplog.messages)
    response = get(app, "/health", **{"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response = get(app, "/health", **{"x-request-id": "a b"})
    assert response.headers["x-request-id"].startswith("req_")


# Anything at all.

FIELDS = [
    "messages", "prompt", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "n", "stop", "seed", "logit_bias", "temperature",
    "top_p", "logprobs", "top_logprobs", "tools", "response_format",
    "system", "stop_sequences", "options", "format", "content", "tokens",
    "with_pieces", "echo", "deadline", "top_k", "min_tokens",
    "stop_token_ids", "prefix_cache", "ignore_eos", "model", "raw",
]  # fmt: skip


def values() -> Any:
    """Strategies for what a field may hold."""
    from hypothesis import strategies as st

    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([NAME, "user", "assistant", "text", "x" * 5000]),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["role", "content", "type", "text", "a"]),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=8,
    )


@pytest.mark.slow
@needs("hypothesis")
def test_never_a_500(app: App) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=150, deadline=None)
    @given(
        path=st.sampled_from(PATHS),
        fields=st.dictionaries(st.sampled_from(FIELDS), values(), max_size=4),
        base=st.booleans(),
    )
    def check(path: str, fields: dict[str, Any], base: bool) -> None:
        body = {"max_tokens": 2, "prompt": "x", "content": "x", **SAID}
        if "options" not in fields:
            body["options"] = {"num_predict": 2}
        text = json.dumps({**(body if base else {}), **fields})
        response = post(app, path, text.encode())
        assert response.status_code in (200, 400, 404), response.text

    check()


@needs("hypothesis")
def test_cut_and_changed_bodies(app: App) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), path=st.sampled_from(PATHS))
    def check(data: Any, path: str) -> None:
        body = bytearray(
            json.dumps({**SAID, "prompt": "x", "content": "x"}), "utf8"
        )
        at = data.draw(st.integers(0, len(body) - 1))
        if data.draw(st.booleans()):
            body[at] = data.draw(st.integers(0, 255))
        else:
            del body[at:]
        response = post(app, path, bytes(body))
        assert response.status_code in (200, 400, 404), response.text

    check()


@pytest.mark.parametrize("method, path, allowed", [
    ("PUT", "/v1/sessions", "GET, HEAD, POST"),
    ("PATCH", "/v1/sessions/sess_1", "DELETE, GET, HEAD, POST"),
    ("GET", "/v1/chat/completions", "POST"),
])
def test_another_method_is_told_all_that_there_are(
    app: App, method: str, path: str, allowed: str
) -> None:
    response = in_loop(app, lambda http: http.request(method, path))
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    message = response.json()["error"]["message"]
    assert path in message and allowed in message


def test_a_compressed_body_is_refused_as_such(app: App) -> None:
    body = gzip.compress(b'{"content": "a"}')
    packed = post(app, "/tokenize", body, **{"content-encoding": "gzip"})
    assert packed.status_code == 415
    message = packed.json()["error"]["message"]
    assert message.startswith("content-encoding: ") and "'gzip'" in message
    plain = post(
        app, "/tokenize", {"content": "a"}, **{"content-encoding": "identity"}
    )
    assert plain.status_code == 200


@pytest.mark.parametrize("body, message", [
    (b"", "offset 0"),
    (b'{"a":"\x00"}', "offset 6"),
    (b'{"a" 1}', "offset 5"),
    (b"\xef\xbb\xbf{}", "offset 0"),
])
def test_what_is_no_json_is_said_in_words(
    app: App, body: bytes, message: str
) -> None:
    error = post(app, "/tokenize", body).json()["error"]
    assert error["message"].startswith("body: ")
    assert error["message"].endswith(message)


def test_token_ids_that_are_none_are_named_once(app: App) -> None:
    error = post(app, "/detokenize", {"tokens": [-1]}).json()["error"]
    assert error["message"].startswith("tokens: expected a token id in [0, ")
