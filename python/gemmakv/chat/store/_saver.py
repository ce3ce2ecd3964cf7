"""Writes session files while the chat goes on."""

from __future__ import annotations

import threading
from typing import Protocol

from gemmakv.chat.store._protocol import SaveTo


class Writer(Protocol):
    """A store, as far as its session files go."""

    def write_session(self, id: str, save: SaveTo) -> None:
        """Has `save` write the session file."""


class Saver:
    """Has the newest state of each session written, on a thread of its own.

    A write that is overtaken by a newer one before it began is dropped.
    """

    def __init__(self, store: Writer) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: dict[str, SaveTo] = {}
        self._writing: str | None = None
        self._closing = False
        self._failures: dict[str, Exception] = {}
        self._thread = threading.Thread(
            target=self._run, name="gemmakv-saver", daemon=True
        )
        self._thread.start()

    def submit(self, id: str, save: SaveTo) -> None:
        """Has `save` write the session file of `id`."""
        with self._changed:
            self._waiting[id] = save
            self._changed.notify_all()

    def drop(self, id: str) -> None:
        """Returns when nothing of `id` will be written any more."""
        with self._changed:
            self._waiting.pop(id, None)
            self._changed.wait_for(lambda: self._writing != id)

    def wait(self) -> None:
        """Returns when everything is written (or has failed)."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._waiting and self._writing is None
            )

    def take_failures(self) -> dict[str, Exception]:
        """What went wrong since the last call, by id."""
        with self._changed:
            failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """Writes what is waiting and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: bool(self._waiting) or self._closing
                )
                if not self._waiting:
                    return
                id = next(iter(self._waiting))
                save = self._waiting.pop(id)
                self._writing = id
            try:
                self._store.write_session(id, save)
            except Exception as error:  # the others are to be written still
                with self._changed:
                    self._failures[id] = error
            del save  # it holds a fork of the cache
