"""The folders of a user, as the XDG specification has them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_CACHE, _DATA = "XDG_CACHE_HOME", "XDG_DATA_HOME"
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def cache_folder() -> Path:
    """For what can be made again. Raises OSError if there is no home."""
    return _user_folder(_CACHE, ".cache")


def data_folder() -> Path:
    """Gives the folder for what is the user's own. Raises OSError if there is
    no home.
    """
    return _user_folder(_DATA, ".local/share")


@contextlib.contextmanager
def in_cache_folder() -> Iterator[None]:
    """Has an error of the body that is one of writing in `cache_folder` say
    which variable chooses another folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            error.strerror = (
                f"{error.strerror}; set {_CACHE} to a folder that can be "
                "written"
            )
        raise


def _user_folder(variable: str, in_home: str) -> Path:
    base = os.environ.get(variable, "")
    if os.path.isabs(base):  # relative ones are to be ignored
        return Path(base, "gemmakv")
    # Path.home() makes / of an empty one.
    if os.path.isabs(os.environ.get("HOME", "/")):
        with contextlib.suppress(RuntimeError):
            return Path.home() / in_home / "gemmakv"
    raise FileNotFoundError(
        errno.ENOENT, f"no home folder; set HOME or {variable}"
    )
