#!/usr/bin/env python3
"""Checks that CMake builds every C++ source and test that is on disk.

Prints each file under cpp/ and tests/cpp/ that DECLARED, the list that CMake
wrote, does not name, and exits with 1 if there is one. The reverse, a declared
file that is missing, is an error of CMake's own.

Usage: check_sources.py ROOT DECLARED
"""

import sys
from pathlib import Path


def undeclared(root, declared):
    """Returns the sources under `root` that are not in the set `declared`."""
    root = Path(root)
    on_disk = {
        path.relative_to(root).as_posix()
        for folder in ("cpp", "tests/cpp")
        for path in (root / folder).rglob("*.cc")
    }
    return sorted(on_disk - set(declared))


def main():
    root, declared = sys.argv[1:]
    missing = undeclared(root, Path(declared).read_text().splitlines())
    for path in missing:
        print(f"{path}: on disk, but no CMakeLists.txt builds it")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
