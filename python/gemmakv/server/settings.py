"""The settings of a server, which the operator decides."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from gemmakv._support.arguments import choice, integer, number

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")
LOG_FORMATS = ("text", "json")
_MOST_KEYS = 10_000
_MOST_S = 1e7


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may ask for; more is a 4xx.

    Attributes:
      body_bytes: of a request's body.
      json_depth: lists and objects in each other.
      json_values: in all lists and objects of a body: each takes time on the
        event loop, a microsecond or two.
      messages: of a conversation.
      rows: continuations of a request: prompts times `n`.
      stop: stop strings.
      top_logprobs: likeliest tokens of a place.
      header_bytes: of a request's line and headers.
      body_s: seconds that the body may take.
      unread_s: seconds that a stream waits for its client to read.
      last_s: seconds for answers to be sent when the drain is over.
      compile_s: seconds of a processor that a grammar may take to compile;
        ordinary ones take milliseconds.
    """

    body_bytes: int = 8 << 20
    json_depth: int = 64
    json_values: int = 1 << 19
    messages: int = 4096
    rows: int = 16
    stop: int = 16
    top_logprobs: int = 20
    header_bytes: int = 32 << 10
    body_s: float = 60.0
    unread_s: float = 60.0
    last_s: float = 5.0
    compile_s: float = 4.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                number(field.name, value, 0.001, _MOST_S)
            else:
                integer(field.name, value, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one server. Raises ValueError naming a bad one.

    Attributes:
      served_model_name: names that requests may call the model by; the first
        is the one in answers.
      host, port: where it listens; port 0 takes a free one. A host with a
        slash is the path of a Unix socket, which has no port.
      api_keys: of tenants; with none, everybody is served.
      max_connections: open connections beyond which requests are answered
        with 503; None: as many as come.
      max_queue: requests that may wait.
      max_queue_tokens: tokens of their prompts that are to be computed; None:
        as many as come.
      max_running: continuations that run at once.
      max_model_len: tokens of a prompt and its continuation; None: the
        model's context.
      kv_cache_memory: bytes of keys and values of all that runs; None: what
        there is.
      default_max_tokens: where a request says nothing; None: as each API has
        it.
      default_temperature: where a request says nothing; None: the model's
        own, else 1.
      default_seed: where a request says nothing; None: each request draws one.
      request_timeout: seconds from a request's arrival to the end of its
        answer; None: none.
      drain_timeout: seconds for what runs when the server is told to stop.
      cors_origin: origins whose pages may use the server; "*" is any.
      allowed_host: names that a Host header may say, beside addresses,
        localhost and `host`; "*" is any.
      insecure: whether an address other than loopback may go without keys.
      page: whether there is a page at /.
      ping_s: seconds of silence after which a stream sends a ping; 0: it
        sends none.
      cache_secret: separates API keys in a prefix cache that outlives the
        server; b"": each start draws one.
      version: of this program, for clients that ask.
    """

    served_model_name: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_connections: int | None = None
    max_queue: int = 64
    max_queue_tokens: int | None = None
    max_running: int = 16
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    default_max_tokens: int | None = None
    default_temperature: float | None = None
    default_seed: int | None = None
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    insecure: bool = False
    page: bool = True
    ping_s: float = 15.0
    cache_secret: bytes = dataclasses.field(default=b"", repr=False)
    version: str = ""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        integer("port", self.port, 0, 65535)
        integer("max_queue", self.max_queue, 0)
        integer("max_running", self.max_running, 1)
        for name, least in (
            ("max_model_len", 2), ("kv_cache_memory", 1),
            ("default_max_tokens", 1), ("max_queue_tokens", 1),
            ("max_connections", 1),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), least)
        if self.request_timeout is not None:
            number("request_timeout", self.request_timeout, 0.001, _MOST_S)
        number("drain_timeout", self.drain_timeout, 0, _MOST_S)
        number("ping_s", self.ping_s, 0, _MOST_S)
        checked_keys(self.api_keys)  # one without any would be everybody's
        if not self.served_model_name or not all(self.served_model_name):
            raise ValueError("served_model_name: expected a name, found none")
        for origin in self.cors_origin:
            if origin != "*" and "://" not in origin:
                raise ValueError(
                    "cors_origin: expected an origin as https://example.org, "
                    f"or *, found {origin!r}"
                )
        if not self.api_keys and not self.insecure and not self.is_local:
            raise ValueError(
                f"host: {self.host!r} is reachable by others; expected API "
                "keys (--api-key-file) with it, or --insecure"
            )

    @property
    def is_path(self) -> bool:
        """Whether `host` is the path of a Unix socket."""
        return "/" in self.host

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host in _LOOPBACK_NAMES or self.is_path:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_keys(path: str | os.PathLike[str]) -> list[str]:
    """Reads the API keys of a file, one a line. Empty lines and those that
    begin with # do not count. Raises OSError that names the option, or
    ValueError if there are no keys, or for one that no header can hold.
    """
    keys: list[str] = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise OSError(
            f"api_key_file: {os.fspath(path)}: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"api_key_file: {os.fspath(path)}: expected UTF-8 text"
        ) from None
    for place, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            where = f"api_key_file: {os.fspath(path)}: line {place}"
            keys += checked_keys([line], where)
    if not keys:
        raise ValueError(
            f"api_key_file: {os.fspath(path)}: expected a key a line, found "
            "none"
        )
    if len(keys) > _MOST_KEYS:
        raise ValueError(
            f"api_key_file: {os.fspath(path)}: expected at most {_MOST_KEYS} "
            f"keys, found {len(keys)}"
        )
    return keys


def checked_keys(
    keys: Sequence[str], where: str = "api_key"
) -> tuple[str, ...]:
    """Gives keys without repeats. Raises ValueError that begins with `where`
    for a key that no header can hold.
    """
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"{where}: expected printable ASCII without spaces, found a "
                f"key of {len(key)} characters that is not"
            )
    return tuple(dict.fromkeys(keys))


def log_format(value: str) -> str:
    """Checks the name of a log format. Raises ValueError."""
    return choice("log_format", value, LOG_FORMATS)
