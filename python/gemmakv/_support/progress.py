"""Progress reports of calls that take a while."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gemmakv.errors import unexpected

Progress = Callable[[int, int], object] | bool | None
Callback = Callable[[int, int], object]
Report = Callable[[int, bool], None]  # tokens so far, whether the call is over


def as_callback(progress: Progress, label: str) -> Callback | None:
    """Gives the callable(done, total) that `progress` asks for; None for none.

    True is a line on stderr that begins with `label`.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        return _StderrLine(label)
    if callable(progress):
        return progress
    raise unexpected(
        "progress", "a callable(done, total), True or None", progress
    )


def check_prompt_progress(callback: object) -> Callback | None:
    """Checks the value of `prompt_progress`."""
    if callback is None or callable(callback):
        return callback
    raise unexpected(
        "prompt_progress", "a callable(done, total) or None", callback
    )


class _StderrLine:
    """Rewrites one line on a terminal; elsewhere prints it once, at the end."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 if total <= 0 else min(100, 100 * done // total)
        finished = done >= total
        if percent == self._shown or not (finished or sys.stderr.isatty()):
            return
        self._shown = percent
        start = "\r" if sys.stderr.isatty() else ""
        end = "\n" if finished else ""
        sys.stderr.write(f"{start}{self._label} {percent:3d} %{end}")
        sys.stderr.flush()


def report_to(
    callback: Callback | None, total: int, *, early: bool = False
) -> Report | None:
    """Makes a function that tells `callback` what rises to `total`; None if
    there is nobody to tell.

    A call may be over before `total` tokens, so all of them are told at its
    end; if `early`, also when they are computed.
    """
    if callback is None:
        return None
    reported = -1

    def report(tokens: int, ended: bool) -> None:
        nonlocal reported
        done = total if ended else min(tokens, total if early else total - 1)
        if done > reported:
            reported = done
            callback(done, total)

    return report


def all_reports(*reports: Report | None) -> Report | None:
    """Makes one report of several, of which some are None."""
    listed = [report for report in reports if report is not None]

    def report(tokens: int, ended: bool) -> None:
        for one in listed:
            one(tokens, ended)

    return report if listed else None
