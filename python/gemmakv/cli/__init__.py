"""The command line: `gemmakv COMMAND`."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from gemmakv._support import interrupts
from gemmakv._support.extras import install_command
from gemmakv.errors import GemmaKVError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPT = 130  # 128 + SIGINT, as shells have it
EXIT_PIPE = 141  # 128 + SIGPIPE
_PACKAGES = ("pydantic", "rich", "typer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and gives its exit code; errors are one line on stderr."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:  # another one, as the first ended the command
        if arguments is None:
            interrupts.exit_at_them()
        return EXIT_INTERRUPT


def _main(arguments: Sequence[str] | None) -> int:
    _prepare_streams()
    if sys.stdout is None:
        return fail("stdout is closed, so nothing could be shown")
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except MemoryError:
        return fail("out of memory")
    except (GemmaKVError, ValueError, OSError) as error:
        return fail(describe(error))
    finally:
        if arguments is None:
            interrupts.exit_at_them()


def _run(arguments: list[str]) -> int:
    interrupts.raise_them()
    try:
        from gemmakv.cli.app import run
        from gemmakv.cli.console import ReaderGone
    except ImportError as error:
        if (error.name or "").split(".")[0] not in _PACKAGES:
            raise
        return fail(
            f"the command line needs the package {error.name}; install it "
            f"with: {install_command('cli')}",
        )
    # The hub's library would say in several lines that it tries again.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except (ReaderGone, BrokenPipeError):
        # The reader has gone. Python would complain again when it flushes
        # stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _prepare_streams() -> None:
    """Makes output that no encoding refuses, also where a stream is closed."""
    warnings.showwarning = _show_warning
    for descriptor in range(3):  # else the next file would take its place
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def describe(error: BaseException) -> str:
    """Gives one line for an error."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename
        text = error.strerror
        if name is not None:
            text = f"{os.fsdecode(name) or repr('')}: {text}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Reports a warning as one line on stderr."""
    line = " ".join(str(message).split())
    sys.stderr.write(f"gemmakv: warning: {line}\n")


def fail(message: str, code: int = EXIT_FAILURE) -> int:
    """Reports one line on stderr; gives the exit code."""
    line = f"gemmakv: error: {message}\n"
    sys.stderr.write(line.encode("utf-8", "replace").decode("utf-8"))
    sys.stderr.flush()
    return code
