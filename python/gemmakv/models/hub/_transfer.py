"""A download that continues after it broke off, also in a later process."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from gemmakv._support.locks import lock
from gemmakv._support.progress import Callback
from gemmakv._support.sizes import in_bytes
from gemmakv.errors import CorruptFile, one_line
from gemmakv.models.hub._errors import (
    describe_answer,
    disk_full,
    may_pass,
    network_errors,
    status_of,
    summary,
    wrong_answer,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 1 << 18
_PARTIAL_CONTENT = 206
_PAUSES_S = (1, 2, 4, 8)  # before each further try without a byte between


def download(
    name: str,
    url: str,
    blob: Path,
    size: int | None,
    progress: Callback | None,
) -> None:
    """Makes the file `blob` of `size` bytes from `url`.

    What arrives is kept in a file beside it until all is there. If the name
    of `blob` is a SHA256 or a hash of Git, the content must have it. Of two
    processes one downloads; the other waits and uses the result. Raises
    OSError or CorruptFile; what `progress` raises passes through.
    """
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.gemmakv.incomplete")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    # Unbuffered: what failed to be written is not tried again at the end.
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        lock(file.fileno())
        if blob.exists():
            partial.unlink(missing_ok=True)
            return
        start = file.seek(0, os.SEEK_END)
        if size is not None and start > size:
            start = file.seek(0)
            file.truncate()
        check_space(name, blob.parent, start, size)
        _transfer(name, url, file, start, size, progress)
        _check_content(name, file, blob.name)
        os.fsync(file.fileno())
        os.replace(partial, blob)


def check_space(
    name: str, folder: Path, start: int, size: int | None
) -> None:
    """Raises OSError if `folder` cannot take `size` bytes, of which it has
    `start`.
    """
    if size is None:
        return
    free = shutil.disk_usage(folder).free
    if free < size - start:
        more = in_bytes(size - start)
        raise disk_full(name, f"no room in {folder}: {more} more needed")


def _transfer(
    name: str,
    url: str,
    file: FileIO,
    start: int,
    size: int | None,
    progress: Callback | None,
) -> None:
    """Makes `file` the bytes of `url`, of which it has the first `start`."""
    done = furthest = start
    failures = 0  # in a row, without a byte that is new
    while size is None or done < size:
        try:
            for offset, chunk in _stream(url, done):
                if offset == 0:
                    _check_answer(name, url, chunk, size)
                done = _write(name, file, offset, chunk)
                if done > furthest:
                    furthest = done
                    failures = 0
                if progress is not None and size is not None:
                    progress(min(done, size), size)
            if size is None or done >= size:
                break
            raise _Broken(EOFError("the reply ended early"))
        except _Broken as broken:
            [error] = broken.args
            status = status_of(error)
            if not may_pass(status):
                reason = f"{_host(url)} answers HTTP {status} for the file"
                raise wrong_answer(name, reason) from None
            if failures == len(_PAUSES_S):
                of = "" if size is None else f" of {in_bytes(size)}"
                raise ConnectionAbortedError(
                    errno.ECONNABORTED,
                    f"the download broke off after {in_bytes(done)}{of} "
                    f"({summary(error)}); the same command again continues "
                    "from there",
                    name,
                ) from None
            time.sleep(_PAUSES_S[failures])
            failures += 1


def _check_answer(name: str, url: str, start: bytes, size: int | None) -> None:
    """Raises OSError if a reply that begins so is not the file of `size`
    bytes, but something that servers say in its place.
    """
    if size is None or len(start) == size:
        return  # some models' files are JSON, too
    came = describe_answer(start)
    if came is not None:
        raise wrong_answer(name, f"{_host(url)} sends {came} for the file")


def _host(url: str) -> str:
    return "://".join(urllib.parse.urlsplit(url)[:2])


def _write(name: str, file: FileIO, offset: int, data: bytes) -> int:
    """Writes at the end of `file`, cut to `offset`; gives its new length."""
    try:
        if file.tell() != offset:
            file.seek(offset)
            file.truncate()
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise disk_full(
            name,
            f"the download cannot be written after {in_bytes(file.tell())}: "
            + one_line(error),
            error.errno or errno.EIO,
        ) from None
    return offset + len(data)


class _Broken(Exception):
    """A reply that ended early, or none; its argument is the error."""


def _stream(url: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Reads the bytes of `url` from `start` on, with their offsets; from 0 on
    if the server cannot start elsewhere. Raises _Broken.
    """
    utils: Any = importlib.import_module("huggingface_hub.utils")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    constants = importlib.import_module("huggingface_hub.constants")
    headers = utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    if start > 0:
        headers["Range"] = f"bytes={start}-"
    options = {
        "headers": headers,
        "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
    }
    try:
        session = utils.get_session()
        if callable(getattr(session, "stream", None)):
            opened = session.stream("GET", url, **options)
        else:  # huggingface_hub before version 1.0
            opened = session.get(url, stream=True, **options)
        with opened as reply:
            utils.hf_raise_for_status(reply)
            offset = start if reply.status_code == _PARTIAL_CONTENT else 0
            read = getattr(reply, "iter_bytes", None) or reply.iter_content
            for chunk in read(_CHUNK_BYTES):
                yield offset, chunk
                offset += len(chunk)
    except network_errors(errors) as error:
        raise _Broken(error) from None


def _check_content(name: str, file: FileIO, expected: str) -> None:
    """Compares the content's hash with the hub's, if its kind is known."""
    if _SHA256.fullmatch(expected):
        kind, digest = "SHA256", hashlib.sha256()
    elif _GIT_SHA1.fullmatch(expected):
        # A small file is an object of Git, whose hash begins with a header.
        kind, digest = "Git's SHA1", hashlib.sha1()
        digest.update(b"blob %d\0" % file.seek(0, os.SEEK_END))
    else:
        return
    file.seek(0)
    hashlib.file_digest(file, lambda: digest)
    if digest.hexdigest() == expected:
        return
    file.seek(0)
    file.truncate()  # nothing of it can be trusted
    raise CorruptFile(
        f"{name}: expected {kind} {expected}, found {digest.hexdigest()} in "
        "what was downloaded; it was discarded: try again"
    )
