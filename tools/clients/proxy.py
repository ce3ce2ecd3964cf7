"""A proxy between a client and the server, which makes a small model act.

Gemma 3 270M calls no tool by itself and does not end its replies. So the proxy
changes requests in which the model may choose:

- If one of the tools is in `CALLS` and was not called yet, the request demands
  this call with these arguments (`tool_choice`, and the tool's schema). What
  the client sent goes to the server before, for one token, so that the server
  also has to take it as it is; if that is refused, the client gets the refusal.
- If the prompt asks in words for JSON with a `city`, as the scripts' clients do
  whose way this is, the reply gets this form, likewise after what was sent.
- After the last of these calls the reply has to be a text (`tool_choice`).
- A reply of text ends after its first word (`stop`). It has at most `MOST`
  tokens; calls and JSON have four times as many.

Before requests of more than `LARGE` bytes nothing is sent, and what follows a
result goes as it is: prompts of agents take minutes.

Ollama's API cannot demand a call: there the model is shown two earlier calls,
and copies them.

The proxy keeps each refusal (`errors`) and, if given a folder, each request.
"""

from __future__ import annotations

import copy
import http.client
import json
import re
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Tools with the arguments that they are called with, in this order: those of
# our scripts, of frameworks at the end of their loops, of coding agents.
CALLS: Mapping[str, Mapping[str, Any]] = {
    "rain": {"city": "Rome"},
    "Trip": {"city": "Rome"},
    "json": {"city": "Rome"},
    "final_answer": {"answer": "3 mm"},
    "Read": {"file_path": "/notes.txt"},
    "read": {"path": "/notes.txt"},
    "read_file": {"file_path": "/notes.txt"},
    "exec_command": {"cmd": "cat /notes.txt"},
    "shell": {"command": ["cat", "/notes.txt"]},
}  # fmt: skip
FORM = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MOST = 32  # tokens of a text
LARGE = 30_000  # bytes of a request

_CHAT, _RESPONSES = "/chat/completions", "/responses"
_MESSAGES, _OLLAMA = "/messages", "/api/chat"
_FREE = (None, "auto", "none", {"type": "auto"}, {"type": "none"})
_APIS = (_CHAT, _RESPONSES, _MESSAGES, _OLLAMA)
_Body = dict[str, Any]


def _narrowed(schema: _Body, arguments: Mapping[str, Any]) -> _Body:
    """Returns the schema with which these arguments are the only ones."""
    # Agents call the same argument `path`, `file_path`, `filePath`, ...
    known = schema.get("properties") or dict(arguments)
    places = [
        name if name in known else next(iter(known)) for name in arguments
    ]
    values = dict(zip(places, arguments.values(), strict=True))
    return {
        "type": "object",
        "properties": {name: {"enum": [v]} for name, v in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }


def _called(body: _Body) -> set[str]:
    """Returns the names in calls of the conversation, also where an agent tells
    them as text.
    """
    said = body.get("messages") or body.get("input")
    told = [
        one for one in (said if isinstance(said, list) else [])
        if one.get("role") not in ("system", "developer")
    ]  # fmt: skip
    words = json.dumps(told).replace("\\", "").replace("'", '"')
    return set(re.findall(r'"name": ?"([^"]+)"', words))


def _tool_of(tool: _Body, api: str) -> tuple[_Body, str]:
    """Returns the part with the name, and the name of the schema's field."""
    if api in (_CHAT, _OLLAMA):
        return tool.get("function") or {}, "parameters"
    return tool, "input_schema" if api == _MESSAGES else "parameters"


def _demands(body: _Body, api: str) -> bool:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("type")
    return choice not in (None, "auto", "required", "any")


def with_call(body: _Body, api: str) -> _Body | None:
    """Returns the request that demands the next call, if there is one."""
    if _demands(body, api):
        return None
    past = _called(body)
    for name, arguments in CALLS.items():
        for index, tool in enumerate(body.get("tools") or []):
            part, field = _tool_of(tool, api)
            # semantic-kernel's have the name of a plugin in front.
            known = part.get("name") or ""
            if known.rpartition("-")[2] != name or known in past:
                continue
            changed = copy.deepcopy(body)
            if api == _OLLAMA:
                said = json.dumps({"name": known, "arguments": arguments})
                call = f"<tool_call>\n{said}\n</tool_call>"
                again = {"role": "user", "content": "Again."}
                changed["messages"] += [
                    {"role": "assistant", "content": call}, again,
                ] * 2  # fmt: skip
                return changed
            for form in ("response_format", "text", "output_config"):
                changed.pop(form, None)
            part, _ = _tool_of(changed["tools"][index], api)
            part[field] = _narrowed(part.get(field) or {}, arguments)
            part.pop("strict", None)
            changed["tool_choice"] = {
                _CHAT: {"type": "function", "function": {"name": known}},
                _RESPONSES: {"type": "function", "name": known},
                _MESSAGES: {"type": "tool", "name": known},
            }[api]
            return changed
    return None


def with_form(body: _Body, api: str) -> _Body | None:
    """Returns the request that demands JSON, if its words do."""
    words = json.dumps(body).replace("\\", "")
    form = body.get("response_format") or body.get("format")
    form = form or (body.get("text") or {}).get("format") or "text"
    kind = form.get("type") if isinstance(form, dict) else form
    if not re.search('["`]city["`]', words) or body.get("tools"):
        return None
    if kind not in ("text", "json_object", "json"):
        return None
    named = {"name": "form", "schema": FORM}
    anthropic = {"format": {"type": "json_schema", "schema": FORM}}
    return {**body, **{
        _CHAT: {"response_format": {"type": "json_schema",
                                    "json_schema": named}},
        _RESPONSES: {"text": {"format": {"type": "json_schema", **named}}},
        _MESSAGES: {"output_config": anthropic},
        _OLLAMA: {"format": FORM},
    }[api]}  # fmt: skip


def with_text(body: _Body, api: str) -> _Body | None:
    """Returns the request without another call, if all have been made."""
    if api == _OLLAMA or not body.get("tools") or not _written(body, api):
        return None
    none = {"type": "none"} if api == _MESSAGES else "none"
    return {**body, "tool_choice": none} if _called(body) else None


def _limits(api: str) -> tuple[str, str]:
    return {
        _CHAT: ("stop", "max_tokens"),
        _RESPONSES: ("stop", "max_output_tokens"),
        _MESSAGES: ("stop_sequences", "max_tokens"),
        _OLLAMA: ("stop", "num_predict"),
    }[api]


def _written(body: _Body, api: str) -> bool:
    """Returns whether the reply is text of no certain form."""
    form = body.get("response_format") or body.get("format")
    form = form or body.get("output_format")
    form = form or (body.get("output_config") or {}).get("format")
    form = form or (body.get("text") or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "text":
        form = None
    choice = body.get("tool_choice")
    return not form and choice in _FREE


def with_end(body: _Body, api: str, called: bool) -> _Body:
    """Returns the request with an end to its text, unless it is `called`."""
    stop, most = _limits(api)
    changed = copy.deepcopy(body)
    place = changed.setdefault("options", {}) if api == _OLLAMA else changed
    if _written(body, api) and not called:
        place.setdefault(stop, ["\n", " "])
    if api == _CHAT and "max_completion_tokens" in place:
        most = "max_completion_tokens"
    limit = MOST if _written(body, api) else 4 * MOST
    if not 0 < (place.get(most) or 0) <= limit:
        place[most] = limit
    if api in (_CHAT, _RESPONSES):  # agents take no empty text for a reply
        place.setdefault("min_tokens", 2)
    return changed


def _probe(body: _Body, api: str) -> _Body:
    _, most = _limits(api)
    probe = {**body, "stream": False}
    probe.pop("stream_options", None)
    probe.pop("max_completion_tokens", None)
    if api == _OLLAMA:
        probe["options"] = {**body.get("options", {}), most: 1}
    else:
        probe[most] = 1
    if api == _RESPONSES:
        probe["store"] = False
    return probe


def _line(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return f"{status} {' '.join(text.split())}"[:300]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients may go at any time."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Proxy:
    """A proxy of the server at `host` and `port`; `with` ends it."""

    def __init__(self, port: int, folder: Path | None = None) -> None:
        self.errors: list[str] = []
        self._folder = folder
        self._lock = threading.Lock()
        self._number = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_any(self) -> None:
                proxy._handle(self, port)

            do_GET = do_POST = do_DELETE = do_HEAD = do_any

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def taken_errors(self) -> list[str]:
        """Returns the refusals since the last call of this."""
        with self._lock:
            taken, self.errors = self.errors, []
        return taken

    def _keep(self, path: str, given: bytes, status: int) -> None:
        if self._folder is None:
            return
        with self._lock:
            self._number += 1
            name = f"{self._number:03}{path.split('?')[0].replace('/', '_')}"
        (self._folder / f"{name}.{status}.json").write_bytes(given)

    def _handle(self, client: BaseHTTPRequestHandler, port: int) -> None:
        length = int(client.headers.get("content-length") or 0)
        given = client.rfile.read(length)
        path = client.path
        sent = [given]
        api = next((a for a in _APIS if path.split("?")[0].endswith(a)), None)
        if client.command == "POST" and api is not None:
            try:
                body = json.loads(given)
            except ValueError:
                body = None
            if isinstance(body, dict):
                large = len(given) > LARGE
                called = with_call(body, api)
                directed = called
                if not large:
                    directed = called or with_form(body, api)
                    directed = directed or with_text(body, api)
                if directed is not None and not large:
                    sent.insert(0, json.dumps(_probe(body, api)).encode())
                changed = with_end(directed or body, api, called is not None)
                sent[-1] = json.dumps(changed).encode()
        dropped = ("host", "content-length", "connection", "transfer-encoding",
                   "accept-encoding")  # fmt: skip
        headers = {k: v for k, v in client.headers.items()
                   if k.lower() not in dropped}  # fmt: skip
        for index, one in enumerate(sent):
            server = http.client.HTTPConnection("127.0.0.1", port)
            try:
                server.request(client.command, path, one, headers)
                answer = server.getresponse()
                last = index == len(sent) - 1
                if answer.status >= 400:
                    text = answer.read()
                    with self._lock:
                        self.errors.append(
                            f"{path.split('?')[0]}: "
                            f"{_line(answer.status, text)}"
                        )
                    self._keep(path, given, answer.status)
                    self._give(client, answer, [text])
                    return
                if last:
                    self._keep(path, given, answer.status)
                    self._give(client, answer, iter(answer.read1, b""))
                else:
                    answer.read()
            except (BrokenPipeError, ConnectionResetError):
                client.close_connection = True
                return
            finally:
                server.close()

    def _give(
        self,
        client: BaseHTTPRequestHandler,
        answer: http.client.HTTPResponse,
        pieces: Any,
    ) -> None:
        client.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in (
                "content-length", "transfer-encoding", "connection", "date",
                "server",
            ):  # fmt: skip
                client.send_header(name, value)
        client.send_header("transfer-encoding", "chunked")
        client.end_headers()
        for piece in pieces:
            client.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            client.wfile.flush()
        client.wfile.write(b"0\r\n\r\n")
