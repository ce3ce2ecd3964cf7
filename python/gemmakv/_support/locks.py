"""Locks between processes. The system drops them when a process dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gemmakv._support.files import StrPath


def lock(descriptor: int, wait: bool = True) -> bool:
    """Locks an open file, for as long as it is open. False: another holder
    has it, and `wait` is False.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: StrPath) -> Iterator[None]:
    """Holds the lock of a file, which is made if need be, for the body."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)
