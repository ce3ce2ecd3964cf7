"""The log of a server, on stderr."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("gemmakv.server")

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SAY_S = 60.0  # between two lines that say the same


class JsonLog(logging.Formatter):
    """Formats a JSON object a line, with the number of the worker if any."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if self._worker is not None:
            said["worker"] = self._worker
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            said |= {k: v for k, v in fields.items() if v not in (None, "")}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def set_up_logs(
    log_format: str, worker: int | None = None, uvicorn: int = logging.ERROR
) -> None:
    """Makes the server and uvicorn log on stderr, uvicorn from the level
    `uvicorn` on: its warnings are about requests.
    """
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonLog(worker))
    else:
        whose = "" if worker is None else f"worker {worker}: "
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {whose}%(message)s")
        )
    for name, level in (
        ("gemmakv.server", logging.INFO),
        ("uvicorn.error", uvicorn),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


class LoopErrors:
    """Handles errors of an event loop that nobody awaits.

    Where a process has no file for another connection, the event loop tries a
    thousand times at once, and again each second: that is one line a minute.
    """

    _said = -_SAY_S

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        number = error.errno if isinstance(error, OSError) else None
        if number not in _FULL or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._said >= _SAY_S:
            self._said = now
            LOG.warning(
                "no connection can be accepted: %s; clients wait until others "
                "go (the limit of open files is that of `ulimit -n`)",
                os.strerror(number or 0),
            )
