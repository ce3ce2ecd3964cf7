"""Requests and answers as bytes, of clients that do not read in time."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


def request_of(path: str, body: Any, version: str = "1.1") -> bytes:
    """A request, with its body."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def unread(port: int) -> socket.socket:
    """A connection that holds some 100 KiB until its client reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # The sender's buffer goes by the size of packets.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", port))
    return sock


def read_until(sock: socket.socket, text: bytes, data: bytes = b"") -> bytes:
    """Reads on after `data` until `text` is there, and returns all of it.

    One read may take more than what is looked for: the next call brings it.
    """
    while text not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def metric(url: str, name: str) -> float:
    """The sum of a metric's series. For polls: a client of httpx takes 20 ms
    of a processor to be made.
    """
    place = urlsplit(url)
    assert place.hostname is not None
    http = HTTPConnection(place.hostname, place.port, timeout=60)
    http.request("GET", "/metrics")
    lines = http.getresponse().read().decode().splitlines()
    http.close()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((name + " ", name + "{"))
    )
