"""What a server serves whose end never comes."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process

from gemmakv import Gemma
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings


@dataclasses.dataclass
class Stuck:
    """It has its server stopped as soon as it serves, and never closes."""

    settings: Settings
    path: str

    def load(self, check: Callable[[], None]) -> Gemma:
        return Gemma.load(self.path, prefix_cache=False, threads=1)

    def make_service(self, gemma: Gemma, mark: str) -> ChatService:
        supervisor = parent_process()
        assert supervisor is not None and supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGTERM)
        return ChatService(gemma, self.settings)

    def close(self) -> None:
        threading.Event().wait()
