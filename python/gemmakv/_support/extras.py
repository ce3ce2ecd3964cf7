"""Packages of extras, and the commands that install them beside the gemmakv
that runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from gemmakv.errors import GemmaKVError


def install_command(extra: str, pip: str | None = None) -> str:
    """Gives the command that adds an extra, as ".venv/bin/pip install ...".

    It works in any folder: gemmakv is there already, which no package index
    has, so that pip fetches only what the extra needs. `pip` is how the shell
    calls it; None: as `pip_command` finds it.
    """
    return f'{pip or pip_command()} install "gemmakv[{extra}]"'


def lack(what: str, packages: Iterable[str], extra: str) -> str:
    """Says which package `what` needs and does not have; "" if it has all."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            return (
                f"{what} needs the package {name}; install it with: "
                + install_command(extra)
            )
    return ""


def import_extra(
    module: str,
    extra: str,
    what: str,
    kind: type[Exception] = GemmaKVError,
) -> Any:
    """Imports a module of a package that an extra has. Raises an error of
    `kind` that begins with `what` needs it, and says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise kind(
            f"{what} needs the package {module.partition('.')[0]} ({error}); "
            f"install it with: {install_command(extra)}"
        ) from None


def pip_command() -> str:
    """Finds the words that call the pip of this Python in a shell."""
    folder = os.path.dirname(sys.executable or "")
    pip = os.path.join(folder, "pip")
    if not folder or not os.path.exists(pip):
        return f"{shlex.quote(sys.executable or 'python3')} -m pip"
    found = shutil.which("pip")
    if found is not None and os.path.abspath(found) == os.path.abspath(pip):
        return "pip"
    try:
        near = os.path.relpath(pip)
    except OSError:  # the current folder is gone
        near = pip
    return shlex.quote(pip if near.startswith(os.pardir) else near)
