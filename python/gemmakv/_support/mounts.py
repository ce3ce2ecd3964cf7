"""File systems that folders are on."""

from __future__ import annotations

import os
import re

from gemmakv._support.files import StrPath

_ESCAPED = re.compile(r"\\([0-7]{3})")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph")


def is_on_network(path: StrPath, mounts: str = "/proc/self/mountinfo") -> bool:
    """Says whether a path is on a file system of another machine; False where
    nobody can tell. `mounts`: a file of mounts, as Linux has it.
    """
    kind = file_system_of(path, mounts)
    # What a program in user space serves may be anywhere, too.
    return kind in _NETWORK or kind.startswith("fuse")


def file_system_of(path: StrPath, mounts: str) -> str:
    """Gives the kind of file system, as "ext4"; "" if nobody can tell."""
    place = os.path.realpath(path)
    best = kind = ""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if len(fields) < 5 or not more:
            continue
        point = _ESCAPED.sub(lambda at: chr(int(at[1], 8)), fields[4])
        inside = os.path.join(point, "")
        # Of two at one place the later one is seen.
        if (place + "/").startswith(inside) and len(point) >= len(best):
            best, kind = point, more[0]
    return kind
