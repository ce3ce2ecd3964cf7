"""A server that plays the Hugging Face hub, for tests.

    with FakeHub() as hub:
        hub.add("org/repo", {"m.gguf": data})
        ... HF_ENDPOINT=hub.url ...

Files redirect to a second port, as the hub's large ones do to where they are
stored; there an Authorization header is an error. `hub.requests` lists what
was asked; `hub.cut_after` ends replies early, and `hub.holds_after` has them
stand still.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test_token"
SMALL_BYTES = 1 << 16  # of files that are kept with the history


@dataclasses.dataclass
class Repo:
    files: dict[str, bytes]
    revisions: dict[str, str]  # branch or tag: commit
    gated: bool = False
    private: bool = False
    direct: bool = False  # small files come without a redirect


@dataclasses.dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    bytes_sent: int = 0


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Says nothing: clients that hang up are part of the tests."""


class FakeHub:
    """Serves while entered, on two ports of this machine."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.cut_after: list[int] = []  # bytes of the next replies
        self.failing: int | None = None  # status of every reply
        self.ignores_range = False
        self.damage = False  # the content is not what its hash says
        self.bytes_per_s: float | None = None
        self.holds_after: int | None = None  # bytes of each reply
        self._servers = [self._serve(_HubHandler), self._serve(_FileHandler)]

    def _serve(self, kind: type[BaseHTTPRequestHandler]) -> Any:
        server = _Server(("127.0.0.1", 0), kind)
        server.hub = self  # type: ignore[attr-defined]
        server.daemon_threads = True
        threading.Thread(
            target=server.serve_forever, args=(0.02,), daemon=True
        ).start()
        return server

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuses connections from now on."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def file_url(self) -> str:
        # Another host name too, as with the real hub.
        return f"http://localhost:{self._servers[1].server_address[1]}"

    def add(
        self, name: str, files: dict[str, bytes], **traits: bool
    ) -> Repo:
        commit = hashlib.sha1(name.encode()).hexdigest()
        repo = Repo(files, {"main": commit, commit: commit}, **traits)
        self.repos[name] = repo
        return repo

    def downloads(self) -> list[Request]:
        """The requests for the content of files."""
        return [r for r in self.requests if r.path.startswith("/blob/")]

    def content(self, sha256: str) -> bytes | None:
        for repo in self.repos.values():
            for data in repo.files.values():
                if hashlib.sha256(data).hexdigest() == sha256:
                    return data
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> FakeHub:
        return self.server.hub

    def begin(self) -> Request:
        request = Request(
            self.command,
            urllib.parse.unquote(self.path),
            self.headers.get("Range"),
            self.headers.get("Authorization"),
        )
        self.hub.requests.append(request)
        return request

    def reply(
        self,
        request: Request,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
        size: int | None = None,
    ) -> None:
        request.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header(
            "Content-Length", str(len(body) if size is None else size)
        )
        self.end_headers()
        if self.command == "HEAD":
            return
        step = 1 << 16
        for begin in range(0, len(body), step):
            part = body[begin : begin + step]
            self.wfile.write(part)
            request.bytes_sent += len(part)
            if self.hub.bytes_per_s is not None:
                self.wfile.flush()
                # A line of that rate.
                time.sleep(len(part) / self.hub.bytes_per_s)
            while request.bytes_sent >= (self.hub.holds_after or math.inf):
                time.sleep(0.01)  # the test lets go
        if size is not None and len(body) < size:
            self.wfile.flush()
            self.close_connection = True

    def fail(
        self, request: Request, status: int, code: str = "", text: str = ""
    ) -> None:
        headers = {}
        if code:
            headers["X-Error-Code"] = code
        if text:
            headers["X-Error-Message"] = text
        self.reply(request, status, headers, b"{}")


class _HubHandler(_Handler):
    """/api/models/ORG/REPO/revision/REV and /ORG/REPO/resolve/REV/FILE."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        request = self.begin()
        if self.hub.failing is not None:
            self.fail(request, self.hub.failing)
            return
        path, _, query = self.path.partition("?")
        parts = [urllib.parse.unquote(p) for p in path.split("/")[1:]]
        is_api = parts[:2] == ["api", "models"]
        if is_api:
            parts = parts[2:]
        if len(parts) < 2:
            self.fail(request, 404)
            return
        name = "/".join(parts[:2])
        repo = self.hub.repos.get(name)
        token = request.token
        if token is not None and token != f"Bearer {TOKEN}":
            self.fail(
                request, 401, "",
                "Invalid credentials in Authorization header",
            )
            return
        if repo is None or (repo.private and token is None):
            # The hub does not tell strangers what exists.
            status = 404 if token else 401
            self.fail(request, status, "RepoNotFound", "Repository not found")
            return
        revision = parts[3] if len(parts) > 3 else "main"
        commit = repo.revisions.get(revision)
        if commit is None:
            self.fail(request, 404, "RevisionNotFound", "Invalid rev id")
        elif is_api:
            self._describe(request, name, repo, commit, "blobs" in query)
        elif repo.gated and token is None:
            self.fail(request, 401, "GatedRepo", "Access is restricted")
        elif repo.gated:
            self.fail(request, 403, "GatedRepo", "You are not authorized")
        else:
            self._resolve(request, repo, commit, "/".join(parts[4:]))

    def _describe(
        self, request: Request, name: str, repo: Repo, commit: str,
        sizes: bool,
    ) -> None:
        siblings = [
            {"rfilename": file} | ({"size": len(data)} if sizes else {})
            for file, data in repo.files.items()
        ]
        document = {
            "_id": "0" * 24,
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }
        self.reply(
            request,
            200,
            {"Content-Type": "application/json"},
            json.dumps(document).encode(),
        )

    def _resolve(
        self, request: Request, repo: Repo, commit: str, file: str
    ) -> None:
        data = repo.files.get(file)
        if data is None:
            self.fail(request, 404, "EntryNotFound", "Entry not found")
            return
        if repo.direct and len(data) < SMALL_BYTES:
            blob = b"blob %d\0" % len(data) + data
            headers = {
                "X-Repo-Commit": commit,
                "ETag": f'"{hashlib.sha1(blob).hexdigest()}"',
            }
            body = bytes(len(data)) if self.hub.damage else data
            self.reply(request, 200, headers, body)
            return
        sha256 = hashlib.sha256(data).hexdigest()
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(len(data)),
            "ETag": '"pointer"',
            "Accept-Ranges": "bytes",
            "Location": f"{self.hub.file_url}/blob/{sha256}",
        }
        self.reply(request, 302, headers)


class _FileHandler(_Handler):
    """/blob/SHA256, with ranges."""

    def do_GET(self) -> None:
        request = self.begin()
        if request.token is not None:
            self.fail(request, 400, "", "two ways to sign in")
            return
        data = self.hub.content(request.path.rsplit("/", 1)[-1])
        if data is None or self.hub.failing is not None:
            self.fail(request, self.hub.failing or 404)
            return
        if self.hub.damage:
            data = bytes(len(data))
        start = 0
        headers = {"Content-Type": "application/octet-stream"}
        if request.range is not None and not self.hub.ignores_range:
            start = int(request.range.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = (
                f"bytes {start}-{len(data) - 1}/{len(data)}"
            )
        body = data[start:]
        size = len(body)
        if self.hub.cut_after:
            body = body[: self.hub.cut_after.pop(0)]
        status = 206 if "Content-Range" in headers else 200
        self.reply(request, status, headers, body, size)
