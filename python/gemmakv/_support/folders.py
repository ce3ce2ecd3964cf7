"""The folders of a user, as the XDG specification has them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def cache_folder() -> Path:
    """For what can be made again. Raises OSError if there is no home."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """For what is the user's own. Raises OSError if there is no home."""
    return _user_folder("XDG_DATA_HOME", ".local/share")


def _user_folder(variable: str, in_home: str) -> Path:
    base = os.environ.get(variable, "")
    if os.path.isabs(base):  # relative ones are to be ignored
        return Path(base, "gemmakv")
    try:
        return Path.home() / in_home / "gemmakv"
    except RuntimeError:
        raise FileNotFoundError(
            errno.ENOENT, f"no home folder; set HOME or {variable}"
        ) from None
