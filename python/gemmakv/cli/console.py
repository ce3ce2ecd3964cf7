"""Output that is exact on stdout and quiet on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
)


class ReaderGone(Exception):
    """The reader of stdout has closed it.

    Not an OSError: typer would make exit code 1 of that.
    """


def write(text: str) -> None:
    """Writes text to stdout as UTF-8, whatever the locale, and flushes.

    Raises ReaderGone if nobody reads it any more.
    """
    data = text.encode("utf-8", "replace")
    buffer = getattr(sys.stdout, "buffer", None)
    try:
        if buffer is None:
            sys.stdout.write(text)
        else:
            sys.stdout.flush()
            buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


@contextmanager
def load_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr while the body runs; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task: TaskID = bar.add_task("load", total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    with bar:
        yield show
