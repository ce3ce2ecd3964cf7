#!/usr/bin/env python3
"""Checks the include rules between the layers under cpp/.

A layer includes only from itself and from layers below it; every quoted
include names a file relative to cpp/ or include/ (or a Highway header); only
the bindings know Python; only base/mutex.* has mutexes of the standard library
and what waits on them, since its own know of fork(). What is installed,
include/gemmakv/, includes only itself and the standard library. Prints each
violation and exits with 1 if there is one.

Usage: check_layers.py [ROOT]
"""

import re
import sys
from pathlib import Path

# Layer -> the layers it may include from, besides itself.
BELOW = {
    "base": set(),
    "io": {"base"},
    "ops": {"base"},
    "cache": {"base", "io", "ops"},
    "padded": {"base", "io", "ops", "cache"},
    "store": {"base", "io", "ops", "cache"},
    "model": {"base", "io", "ops", "cache"},
    "engine": {"base", "io", "ops", "cache", "store", "model"},
    "api": {"base", "io", "ops", "cache", "store", "model", "engine"},
    "bindings": {
        "base", "io", "ops", "cache", "padded", "store", "model", "engine"
    },
}
SUFFIXES = {".h", ".cc"}
PUBLIC = "gemmakv"

_QUOTED = re.compile(
    r'^\s*#\s*(?:include|define\s+HWY_TARGET_INCLUDE)\s+"([^"]+)"'
)
_STANDARD = re.compile(r"^\s*#\s*include\s*<[a-z_]+>")
_PYTHON = re.compile(r"^\s*#\s*include\s*[<\"](pybind11/|Python\.h)")
_STANDARD_MUTEX = re.compile(r"\bstd::(\w*mutex|condition_variable\w*)\b")


def check_line(line, layer, cpp):
    """Returns what is wrong with one line of a source of `layer`, or None."""
    if _PYTHON.match(line):
        return None if layer == "bindings" else "only bindings may know Python"
    match = _QUOTED.match(line)
    if not match or match[1].startswith("hwy/"):
        return None
    target = match[1]
    if target.split("/")[0] == PUBLIC:
        exists = (cpp.parent / "include" / target).is_file()
        return None if exists else f'"{target}" is not a file under include/'
    if not (cpp / target).is_file():
        return f'"{target}" is not a file under cpp/'
    target_layer = target.split("/")[0]
    if target_layer != layer and target_layer not in BELOW[layer]:
        return f'{layer} must not include "{target}"'
    return None


def check_public_line(line, include):
    """The same for one line of a public header."""
    if not re.match(r"^\s*#\s*include", line) or _STANDARD.match(line):
        return None
    match = _QUOTED.match(line)
    if match and match[1].startswith(f"{PUBLIC}/"):
        exists = (include / match[1]).is_file()
        return None if exists else f'"{match[1]}" is not a file under include/'
    return "public headers include only each other and the standard library"


def violations(root):
    """Yields one line of text per violation in the tree `root`."""
    include = Path(root) / "include"
    for path in sorted(path for path in include.rglob("*") if path.is_file()):
        where = path.relative_to(root)
        if path.parent != include / PUBLIC:
            yield f"{where}: only {PUBLIC}/ is public"
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            problem = check_public_line(line, include)
            if problem:
                yield f"{where}:{number}: {problem}"
    cpp = Path(root) / "cpp"
    for path in sorted(cpp.rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        layer = path.relative_to(cpp).parts[0]
        where = path.relative_to(root)
        if layer not in BELOW:
            yield f"{where}: {layer} is not a layer"
            continue
        may_lock = layer == "base" and path.stem == "mutex"
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            problem = check_line(line, layer, cpp)
            if not may_lock and _STANDARD_MUTEX.search(line):
                problem = "expected what base/mutex.h has"
            if problem:
                yield f"{where}:{number}: {problem}"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = list(violations(root))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
