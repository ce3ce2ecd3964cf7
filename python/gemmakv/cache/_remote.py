"""Stores beyond this machine, by URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, urlsplit

from gemmakv import _core
from gemmakv.cache._remote_client import RemoteStore
from gemmakv.cache._remote_objects import open_objects
from gemmakv.cache._remote_redis import open_redis
from gemmakv.errors import brief, unexpected

_LEAST_SECRET = 16
_TIMEOUT_S = 2.0
_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")
_OBJECTS = ("s3", "gs", "az", "file", "memory")


def open_remote(
    remote: str | RemoteStore,
    secret: str | bytes | None = None,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> _core.RemoteStore:
    """The tier of a URL or an object. Nothing is connected to yet.

    Args:
      remote: "redis://[user:password@]host[:port][/db][?ttl=seconds]",
        "rediss://" (TLS), "valkey://", "valkeys://", "unix:///path",
        "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix",
        "file:///folder", or an object with get_many, put_many and has_many.
      secret: of all who share the store, at least 16 bytes; None: whoever can
        write to the store is trusted.
      timeout_s: seconds that a request waits for the store at most.

    Raises ValueError for what is none of these, ImportError for a package that
    is not installed.
    """
    client: Any = (
        _open_url(remote, timeout_s) if isinstance(remote, str) else remote
    )
    return _core.RemoteStore(
        client, secret=_secret_bytes(secret), timeout_s=timeout_s
    )


def _secret_bytes(secret: object) -> bytes:
    if secret is None:
        return b""
    if isinstance(secret, str):
        secret = secret.encode("utf-8", "surrogatepass")
    # What it is stands in no message.
    if not isinstance(secret, bytes):
        raise ValueError(
            "remote_secret: expected a str or bytes, found a "
            + type(secret).__name__
        )
    if len(secret) < _LEAST_SECRET:
        least = f"at least {_LEAST_SECRET} bytes"
        raise unexpected("remote_secret", least, len(secret))
    return secret


def _open_url(url: str, timeout_s: float) -> RemoteStore:
    scheme, separator, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"remote: {error}, in a URL of {scheme!r}") from None
    if not separator or scheme not in _REDIS + _OBJECTS:
        # There may be a password in what follows.
        known = ", ".join(f"{name}://" for name in _REDIS + _OBJECTS)
        found = f"{scheme}://..." if separator else "no scheme"
        raise ValueError(
            f"remote: expected a URL that begins with one of {known}, or an "
            f"object with get_many, put_many and has_many, found {found}"
        )
    if port == 0:
        raise ValueError(
            "remote: expected a port of 1 to 65535, found a URL with port 0"
        )
    if parts.fragment:
        raise ValueError("remote: expected a URL, found one with a fragment")
    if scheme in _REDIS:
        return open_redis(parts, timeout_s)
    _check_objects(parts)
    return open_objects(url, timeout_s)


def _check_objects(parts: SplitResult) -> None:
    if parts.query:
        raise ValueError(
            f"remote: a {parts.scheme}:// URL has no options; regions, "
            "endpoints and credentials come from the environment"
        )
    if parts.scheme in ("file", "memory"):
        if parts.netloc or (parts.scheme == "file" and len(parts.path) < 2):
            raise ValueError(
                f"remote: expected {parts.scheme}:///path, found "
                f"{brief(parts.geturl())}"
            )
    elif not parts.hostname:
        raise ValueError(
            f"remote: expected {parts.scheme}://bucket/prefix, found no bucket"
        )
