"""Output that is exact on stdout and quiet on stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO, Self

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from gemmakv._support.sizes import in_bytes
from gemmakv._support.text import utf8_text
from gemmakv.cache._prefix import PrefixCache
from gemmakv.chat._gemma import Gemma
from gemmakv.cli.failures import InputError
from gemmakv.models import _catalog as models
from gemmakv.models._aliases import ALIASES

_MAX_TEXT_BYTES = 64 << 20  # far beyond what fits into a context


class ReaderGone(Exception):
    """The reader of stdout has closed it.

    Not an OSError: typer would make exit code 1 of that.
    """


def write(text: str) -> None:
    """Writes text to stdout and flushes: to a terminal as it reads text, else
    as UTF-8, whatever the locale.

    Raises ReaderGone if nobody reads it any more.
    """
    buffer = getattr(sys.stdout, "buffer", None)
    try:
        if buffer is None or sys.stdout.isatty():
            sys.stdout.write(text)
        else:
            sys.stdout.flush()
            buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from None


Tell = Callable[[str], None]  # takes a remark, one line without its end


def write_note(line: str) -> None:
    """Writes a remark to stderr."""
    sys.stderr.write(f"gemmakv: note: {line}\n")


class Notes:
    """Remarks on what is kept on disks, which wait for the first answer.

    `tell` writes the remarks that wait, each one once. The end of a `with`
    block does too, however the block ends: none is lost where there is no
    answer.
    """

    def __init__(self, write: Tell = write_note) -> None:
        self._write = write
        self._waiting: list[str] = []

    def add(self, line: str) -> None:
        self._waiting.append(line)

    def tell(self) -> None:
        while self._waiting:
            self._write(self._waiting.pop(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self.tell()


def stdin() -> BinaryIO:
    """Where stdin's bytes are; ValueError if there is none."""
    if sys.stdin is None:
        raise ValueError("stdin is closed; expected text on it")
    return sys.stdin.buffer


def read_stdin() -> bytes:
    """Reads all of stdin; raises ValueError if it has no end, as `lines`."""
    return _check_size("stdin", stdin().read(_MAX_TEXT_BYTES + 1))


def prompt_of(what: str, data: bytes) -> str:
    """The text of a file or stdin, without the end of its last line.

    Raises ValueError naming `what` and the first byte that is not UTF-8.
    """
    try:
        text = utf8_text(data)
    except ValueError as error:
        raise InputError(f"{what}: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def lines() -> Iterator[bytes]:
    """Lines of stdin, with their ends."""
    number = 1
    while line := stdin().readline(_MAX_TEXT_BYTES + 1):
        yield _check_size(f"line {number} of stdin", line)
        number += 1


def _check_size(what: str, data: bytes) -> bytes:
    if len(data) > _MAX_TEXT_BYTES:
        raise InputError(
            f"{what}: expected at most {_MAX_TEXT_BYTES:,} bytes, found more"
        )
    return data


def render(*parts: RenderableType) -> str:
    """Plain text: the same on a terminal, in a pipe and in a narrow window.

    An empty line precedes each table but the first part.
    """
    out = io.StringIO()
    page = Console(file=out, width=200, highlight=False, markup=False)
    for index, part in enumerate(parts):
        if index and not isinstance(part, str):
            page.print()
        page.print(part)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def table(*columns: str, left: int = 1) -> Table:
    """A table without lines; the first `left` columns hold text."""
    made = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right")
    return made


def facts(document: Mapping[str, object]) -> Table:
    """Names and values in two columns; underscores are spaces."""
    made = Table(box=None, show_header=False, pad_edge=False)
    for key, value in document.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        text = f"{value:,}" if number else str(value)
        made.add_row(key.replace("_", " "), "none" if value is None else text)
    return made


def ask_to_delete(command: str, *lines: str) -> None:
    """Shows what is to be deleted. Raises typer.Abort unless somebody says
    yes, ValueError if there is nobody.
    """
    if not sys.stdin.isatty():
        raise ValueError(
            f"{command}: nobody to ask; --yes deletes without a question"
        )
    for line in lines:
        typer.echo(line, err=True)
    typer.confirm("Delete?", abort=True, err=True)


ShowProgress = Callable[[int, int], None]


def load_progress() -> AbstractContextManager[ShowProgress | None]:
    """A progress bar of bytes, see `work_progress`."""
    return work_progress("loading", DownloadColumn())


def fetch(model: str) -> str:
    """Path of a model's file, with a progress bar if it is not here yet."""
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # The file of an alias is made of what a package brought.
    what = "copying" if model in ALIASES else "downloading"
    with work_progress(what, *columns, at_once=False) as progress:
        return models.resolve(model, progress)


def load(
    model: str,
    threads: int | None = None,
    packed_cache: bool = True,
    quantize: str | None = None,
    prefix_cache: PrefixCache | bool | Callable[[], PrefixCache] = True,
    draft: str | None = None,
    pin_threads: bool = False,
    tell: Tell = write_note,
) -> Gemma:
    """A model, with progress bars for fetching and loading it and its draft.

    A prefix cache that is a function is made once the model is here. `tell`
    takes what there is to say of the file of packed weights.
    """
    path = fetch(model)
    guesses = load_draft(draft, path, threads, packed_cache)
    if callable(prefix_cache):
        prefix_cache = prefix_cache()
    with load_progress() as progress:
        gemma = Gemma.load(
            path,
            threads=threads,
            pin_threads=pin_threads,
            progress=progress,
            packed_cache=packed_cache,
            quantize=quantize,  # type: ignore[arg-type]
            prefix_cache=prefix_cache,
            draft=guesses,
        )
    if gemma.config.target_hidden:
        raise InputError(
            f"{model}: expected a model that writes text, found a drafter: "
            "name the model that it guesses for, with this one as --draft"
        )
    if gemma.tokenizer is None:
        raise InputError(
            f"{model}: expected a model with a tokenizer, found none (a folder "
            "needs a tokenizer.model or tokenizer.json)"
        )
    packed = gemma.packed_weights
    if packed.state == "written":
        tell(
            f"the next start is quicker: packed weights "
            f"({in_bytes(packed.nbytes)}) are kept in "
            f"{os.path.dirname(packed.path or '')}; `gemmakv packed` lists "
            "and deletes them"
        )
    return gemma


def with_sampling_defaults(
    gemma: Gemma, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds what the model's files recommend to options, which take precedence.

    Raises InputError for what they recommend and cannot be: no flag is at
    fault then.
    """
    try:
        return {**gemma.sampling_defaults, **options}
    except ValueError as error:
        raise InputError(f"the model's files recommend {error}") from None


def fetch_draft(draft: str, path: str) -> str:
    """`fetch` of the draft for the model at `path`. Raises ValueError."""
    found = fetch(draft)
    if os.path.samefile(found, path):
        raise ValueError(
            "draft: expected a smaller model, which takes less time, found the "
            f"model itself, {path}"
        )
    return found


def load_draft(
    model: str | None,
    target: str,
    threads: int | None = None,
    packed_cache: bool = True,
) -> Gemma | None:
    """Loads the model of --draft, if any, for the model at `target`."""
    if model is None:
        return None
    path = fetch_draft(model, target)
    with load_progress() as progress:
        return Gemma.load(
            path,
            threads=threads,
            progress=progress,
            packed_cache=packed_cache,
            prefix_cache=False,
        )


@contextmanager
def work_progress(
    what: str, *amounts: ProgressColumn, at_once: bool = True
) -> Iterator[ShowProgress | None]:
    """A progress bar on stderr for the body; None without a terminal.

    Without `at_once` it appears when there is progress to show.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        *(amounts or [MofNCompleteColumn()]),
        console=Console(stderr=True),
        transient=True,
    )
    task: TaskID = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()  # if it has not been

    if at_once:
        bar.start()
    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
