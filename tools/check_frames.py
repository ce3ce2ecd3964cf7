#!/usr/bin/env python3
"""Checks that no function of the core takes much of a thread's stack.

Prints each function of the FILES (libraries, objects, programs) whose frame has
more than --most bytes, as its instructions say, and exits with 1 if there is
one. Stacks of threads may be small: 128 KiB in musl. Exits with 77 where it
cannot tell: without objdump, and for processors other than x86-64.

Usage: check_frames.py [--most BYTES] FILES...
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys

UNKNOWN = 77
MOST = 10 * 1024
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_FRAME = re.compile(r"\tsub +\$0x([0-9a-f]+),%rsp")
# A large frame that is touched page by page: where its end is to be.
_PROBED = re.compile(r"\tlea +-0x([0-9a-f]+)\(%rsp\),%r11")


def frames(lines):
    """Yields (function, bytes of its frame) of what objdump -d prints."""
    function, size = "", 0
    for line in lines:
        if found := _FUNCTION.match(line):
            if size:
                yield function, size
            function, size = found[1], 0
        elif found := _FRAME.search(line) or _PROBED.search(line):
            taken = int(found[1], 16)
            if taken < 1 << 63:  # else it is given back
                size = max(size, taken)
    if size:
        yield function, size


def disassembled(file):
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        yield from run.stdout
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    if platform.machine() != "x86_64" or not shutil.which("objdump"):
        print("no objdump, or none whose instructions are known here")
        return UNKNOWN
    count, good = 0, True
    for file in args.files:
        for function, size in frames(disassembled(file)):
            count += 1
            if size > args.most:
                print(f"{file}: {size} bytes, at most {args.most}: {function}")
                good = False
    if count == 0:
        print("found no frame at all")
    return 0 if good and count else 1


if __name__ == "__main__":
    sys.exit(main())
