#!/usr/bin/env python3
"""Checks that CMake builds every C++ source and test that is on disk, and that
few sources know the operating system.

Prints each file under cpp/ and tests/cpp/ that DECLARED, the list that CMake
wrote, does not name, and each include of a header of the operating system where
it does not belong: files are the matter of cpp/io, threads and processes of the
files of cpp/base in SYSTEM. Exits with 1 if there is one. The reverse, a
declared file that is missing, is an error of CMake's own.

Usage: check_sources.py ROOT DECLARED
"""

import re
import sys
from pathlib import Path

# What may include headers of the system.
SYSTEM = (
    "cpp/io/",
    "cpp/base/heap_trim.",
    "cpp/base/inside_step.",
    "cpp/base/mutex.",
    "cpp/base/own_process.",
    "cpp/base/process.",
    "cpp/base/processors.",
    "cpp/base/thread_pool.",
    "cpp/base/time.",
)
# What is of the compiler, the processor or a library instead.
_OTHERS = (
    "Python.h", "cpuid.h", "cxxabi.h", "hwy/", "pybind11/", "xmmintrin.h"
)

_INCLUDE = re.compile(r"^\s*#\s*include\s*<([^>]+\.h)>")


def undeclared(root, declared):
    """Returns the sources under `root` that are not in the set `declared`."""
    root = Path(root)
    on_disk = {
        path.relative_to(root).as_posix()
        for folder in ("cpp", "tests/cpp")
        for path in (root / folder).rglob("*.cc")
    }
    return sorted(on_disk - set(declared))


def system_includes(root):
    """Yields one line of text per include of the system out of place."""
    root = Path(root)
    paths = [*(root / "cpp").rglob("*"), *(root / "include").rglob("*")]
    for path in sorted(path for path in paths if path.suffix in {".cc", ".h"}):
        where = path.relative_to(root).as_posix()
        if where.startswith(SYSTEM):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match and not match[1].startswith(_OTHERS):
                yield f"{where}:{number}: <{match[1]}> is of the system"


def main():
    root, declared = sys.argv[1:]
    missing = undeclared(root, Path(declared).read_text().splitlines())
    found = [
        f"{path}: on disk, but no CMakeLists.txt builds it" for path in missing
    ]
    found += system_includes(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
