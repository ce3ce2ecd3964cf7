"""Redis and Valkey as a remote store."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote

from gemmakv._support.extras import import_extra
from gemmakv.cache._remote_client import CHUNK_BYTES
from gemmakv.errors import brief

_WEEK_S = 7 * 24 * 3600
_SCANNED = 1000
# "0" or "1" for each key: hundreds of commands and replies take longer to
# write and to read than to carry.
_HAS = """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('EXISTS', key) end
return table.concat(found)
"""


def open_redis(url: SplitResult, timeout_s: float) -> _Redis:
    """A client of the server. Raises ValueError, ImportError."""
    arguments: dict[str, Any] = {}
    database = url.path.strip("/")
    options = parse_qs(url.query, keep_blank_values=True)
    if url.scheme == "unix":
        if url.netloc or not database:
            raise ValueError("remote: expected unix:///path/of/the/socket")
        arguments["unix_socket_path"] = unquote(url.path)
        database = options.pop("db", [""])[-1]
    else:
        if not url.hostname:
            raise ValueError(
                f"remote: expected {url.scheme}://host:port/db, found no host"
            )
        arguments["host"] = url.hostname
        arguments["port"] = url.port or 6379
        arguments["ssl"] = url.scheme in ("rediss", "valkeys")
    if arguments.get("ssl") and "ssl_ca_certs" in options:
        arguments["ssl_ca_certs"] = options.pop("ssl_ca_certs")[-1]
    ttl_s = _whole("ttl", options.pop("ttl", [str(_WEEK_S)])[-1], "seconds")
    if options:
        raise ValueError(
            "remote: the URL has the option "
            f"{brief(next(iter(options)))}, expected ttl"
        )
    if database:
        arguments["db"] = _whole("db", database, "a number")
    if url.username:
        arguments["username"] = unquote(url.username)
    if url.password:
        arguments["password"] = unquote(url.password)
    redis = import_extra("redis", "redis", "remote:", ImportError)
    return _Redis(redis, arguments, timeout_s, ttl_s)


def _whole(name: str, text: str, expected: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(
            f"remote: {name} of the URL: expected {expected}, found "
            + brief(text)
        )
    return int(text)


class _Redis:
    """One connection for each thread that is in a call."""

    def __init__(
        self,
        redis: Any,
        arguments: dict[str, Any],
        timeout_s: float,
        ttl_s: int,
    ) -> None:
        self._redis = redis.Redis(
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A connection that the server closed meanwhile is made once more.
            retry=redis.retry.Retry(
                redis.backoff.NoBackoff(),
                1,
                supported_errors=(redis.exceptions.ConnectionError,),
            ),
            protocol=2,
            **arguments,
        )
        self._error = redis.exceptions.ResponseError
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s or None
        self._cursors: dict[str, int] = {}
        self._scripts = True

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return list(pipe.execute(raise_on_error=False))

    def get_many(self, keys: list[str]) -> list[bytes | None]:
        # Whatever is there, no more than a byte too much is sent.
        commands: list[tuple[Any, ...]] = [
            ("GETRANGE", key, 0, CHUNK_BYTES) for key in keys
        ]
        if self._ttl_s is not None:
            commands += [("EXPIRE", key, self._ttl_s) for key in keys]
        return [
            self._value(reply) for reply in self._run(commands)[: len(keys)]
        ]

    def _value(self, reply: Any) -> bytes | None:
        if isinstance(reply, bytes):
            return reply or None
        if isinstance(reply, self._error) and "WRONGTYPE" in str(reply):
            return b"?"  # there, and no value of ours
        raise _as_error(reply)

    def put_many(self, items: list[tuple[str, memoryview]]) -> None:
        end = () if self._ttl_s is None else ("EX", self._ttl_s)
        for reply in self._run([("SET", *item, *end) for item in items]):
            if reply is not True and reply not in (b"OK", "OK"):
                raise _as_error(reply)

    def has_many(self, keys: list[str]) -> list[bool]:
        if self._scripts:
            try:
                found = self._redis.eval(_HAS, len(keys), *keys)
            except self._error:  # no right to, or keys of several servers
                self._scripts = False
            else:
                if not (isinstance(found, bytes) and len(found) == len(keys)):
                    raise _as_error(found)
                return [digit == 0x31 for digit in found]
        replies = self._run([("EXISTS", key) for key in keys])
        for reply in replies:
            if not isinstance(reply, int):
                raise _as_error(reply)
        return [reply == 1 for reply in replies]

    def delete_many(self, keys: list[str]) -> None:
        self._redis.unlink(*keys)

    def delete_some(self, prefix: str) -> bool:
        # Goes on where the last call stopped, and stops in time.
        until = time.monotonic() + self._timeout_s / 4
        cursor = self._cursors.pop(prefix, 0)
        while True:
            cursor, keys = self._redis.scan(cursor, prefix + "*", _SCANNED)
            if keys:
                self._redis.unlink(*keys)
            if cursor == 0:
                return False
            if time.monotonic() > until:
                self._cursors[prefix] = cursor
                return True


def _as_error(reply: object) -> Exception:
    if isinstance(reply, Exception):
        return reply
    return ValueError(f"the server replied {brief(reply)}")
