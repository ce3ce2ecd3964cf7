"""Libraries of tools/*.c, which stand before the C library of a process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_TOOLS = Path(__file__).resolve().parents[3] / "tools"
COMPILERS = ("cc", "gcc", "clang")


def why_not() -> str | None:
    """Why none can be built here."""
    if not any(map(shutil.which, COMPILERS)):
        return f"no C compiler ({', '.join(COMPILERS)})"
    return None


def build(name: str, folder: Path) -> Path:
    """Compiles tools/NAME.c in `folder`: what LD_PRELOAD is to be. Raises
    RuntimeError."""
    if reason := why_not():
        raise RuntimeError(reason)
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    library = folder / f"{name}.so"
    done = subprocess.run(
        [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2",
         "-shared", "-fPIC", "-o", library, _TOOLS / f"{name}.c", "-ldl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{compiler}: {done.stderr}")
    return library
