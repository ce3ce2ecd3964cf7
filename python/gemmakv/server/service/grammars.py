"""The grammars of requests, compiled before they wait for their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from gemmakv.chat._gemma import Gemma
from gemmakv.errors import GemmaKVError
from gemmakv.generation._requests import requests_of
from gemmakv.server.service.threads import GRAMMAR_THREADS, Threads


class Grammars:
    """The compiler of a service's grammars.

    A tenant has one compiled at a time, so that none keeps the others waiting.
    """

    def __init__(
        self,
        gemma: Gemma,
        threads: Threads,
        labels: Sequence[str],
        seconds: float,
    ) -> None:
        """`labels` are those of all tenants; a grammar may take `seconds`."""
        self._model = requests_of(gemma)
        self._threads = threads
        self._seconds = seconds
        at_once = 1 if len(labels) > 1 else GRAMMAR_THREADS
        self._turns = {label: asyncio.Semaphore(at_once) for label in labels}
        # Made here, not in a request; without llguidance requests say so.
        with contextlib.suppress(ValueError, GemmaKVError):
            self._model.compiler.prepare()

    async def compile(
        self, label: str, options: dict[str, Any]
    ) -> Sequence[str]:
        """Compiles the grammar of a tenant's request, and returns the paths of
        what it does not enforce. Raises RequestError.
        """
        async with self._turns[label]:
            return await self._threads.run_grammars(
                self._model.compile, options, self._seconds
            )
