#!/usr/bin/env python3
"""Has Clang check who holds which mutex, as base/mutex.h lets the sources say.

Parses each layer under cpp/ but the kernels with -Werror=thread-safety, and
compiles nothing. Exits with 1 if Clang has anything to say, which it prints.

Usage: check_threads.py [CLANG++]
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Batches of CMake's have names of one meaning; these layers do not as a whole.
NAMES_CLASH = ("store", "model", "engine")
LAYERS = (
    "base", "io", "cache", "padded", "store", "model", "engine", "api",
    "bindings",
)  # fmt: skip
FLAGS = (
    "-x", "c++", "-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror",
    "-DGEMMAKV_FAULT_POINTS=1", f"-I{ROOT}/cpp", f"-I{ROOT}/include",
)  # fmt: skip


def batches():
    """Yields lists of sources: a layer, or a file where names clash in it.

    Without kernels, and of the bindings only what needs no Python.
    """
    cpp = ROOT / "cpp"
    for layer in LAYERS:
        paths = sorted(
            path.relative_to(cpp)
            for path in (cpp / layer).rglob("*.cc")
            if "hwy/foreach_target.h" not in path.read_text()
        )
        if layer == "bindings":
            paths = [path for path in paths if path.name == "waker.cc"]
        if layer in NAMES_CLASH:
            yield from ([path] for path in paths)
        else:
            yield paths


def is_right(compiler, paths):
    """Whether Clang finds nothing in a batch; prints what it finds."""
    text = "".join(f'#include "{path.as_posix()}"\n' for path in paths)
    result = subprocess.run([compiler, *FLAGS, "-"], input=text, text=True)
    return result.returncode == 0


def main():
    compiler = sys.argv[1] if len(sys.argv) > 1 else "clang++"
    with ThreadPoolExecutor(2) as pool:
        right = [*pool.map(lambda batch: is_right(compiler, batch), batches())]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
