"""Object stores as a remote store: what obstore knows."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gemmakv._support.extras import import_extra
from gemmakv.cache._remote_client import CHUNK_BYTES
from gemmakv.errors import one_line

_AT_ONCE = 32
_T = TypeVar("_T")


def open_objects(url: str, timeout_s: float) -> _Objects:
    """A client of the store. Raises ValueError, ImportError."""
    obstore = import_extra("obstore", "objects", "remote:", ImportError)
    importlib.import_module("obstore.store")
    arguments: dict[str, Any] = {}
    if url.startswith("file:"):
        arguments = {"mkdir": True}
    elif not url.startswith("memory:"):
        limit = datetime.timedelta(seconds=timeout_s)
        arguments = {
            "client_options": {
                "timeout": limit,
                "connect_timeout": limit,
                # These replace what the environment says of the client.
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower()
                in ("1", "true"),
            },
            "retry_config": {"max_retries": 0, "retry_timeout": limit},
        }
    try:
        store = obstore.store.from_url(url, **arguments)
    except Exception as error:  # its own errors have no base but this
        raise ValueError(f"remote: {one_line(error)}") from error
    return _Objects(obstore, store)


def _path(key: str) -> str:
    # "gkv1:SALT:NAME:1" is gkv1/SALT/NAME.1
    return "/".join(key.split(":", 2)).replace(":", ".")


class _Objects:
    """Asks for several objects at a time."""

    def __init__(self, obstore: Any, store: Any) -> None:
        self._obstore = obstore
        self._store = store

    def _all(
        self, one: Callable[[Any], Awaitable[_T]], items: list[Any]
    ) -> list[_T]:
        async def run() -> list[_T]:
            slots = asyncio.Semaphore(_AT_ONCE)
            failed: list[Exception] = []

            async def bounded(item: Any) -> Any:
                async with slots:
                    if failed:
                        return None
                    try:
                        return await one(item)
                    except Exception as error:
                        failed.append(error)

            # Nothing is cancelled: obstore would find its loop closed. The
            # store's own time-outs end each request.
            results = await asyncio.gather(*map(bounded, items))
            if failed:
                raise failed[0]
            return results

        return asyncio.run(run())

    def get_many(self, keys: list[str]) -> list[bytes | memoryview | None]:
        async def get(key: str) -> Any:
            try:
                found = await self._obstore.get_async(self._store, _path(key))
                if found.meta["size"] > CHUNK_BYTES:
                    return b""  # there, and no value of ours
                return await found.bytes_async()
            except FileNotFoundError:
                return None

        return self._all(get, keys)

    def put_many(self, items: list[tuple[str, memoryview]]) -> None:
        async def put(item: tuple[str, memoryview]) -> None:
            await self._obstore.put_async(
                self._store, _path(item[0]), item[1], use_multipart=False
            )

        self._all(put, items)

    def has_many(self, keys: list[str]) -> list[bool]:
        async def has(key: str) -> bool:
            try:
                await self._obstore.head_async(self._store, _path(key))
            except FileNotFoundError:
                return False
            return True

        return self._all(has, keys)

    def delete_many(self, keys: list[str]) -> None:
        async def delete(key: str) -> None:
            try:
                await self._obstore.delete_async(self._store, _path(key))
            except FileNotFoundError:
                return

        self._all(delete, keys)

    def delete_some(self, prefix: str) -> bool:
        stream = self._obstore.list(
            self._store, _path(prefix).rstrip("/."), chunk_size=_AT_ONCE
        )
        paths = [found["path"] for found in next(iter(stream), [])]
        if paths:
            self._obstore.delete(self._store, paths)
        return bool(paths)
