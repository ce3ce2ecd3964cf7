"""The command line in this process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from unittest import mock


def run_here(
    *arguments: object, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command line that ends before it would need a process of its own:
    a start and the imports take most of a second of a processor.
    """
    from gemmakv.cli import main

    said, errors = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        for _ in range(2)
    )
    given = [str(one) for one in arguments]
    with (
        mock.patch.dict(os.environ, env),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(errors),
    ):
        code = main(given)
    texts = []
    for stream in (said, errors):
        assert isinstance(stream.buffer, io.BytesIO)
        texts.append(stream.buffer.getvalue())
    return subprocess.CompletedProcess(["gemmakv", *given], code, *texts)
