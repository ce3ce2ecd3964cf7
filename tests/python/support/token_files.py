"""Session files of version 3, which earlier versions wrote into stores."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from gemmakv import Session

_HEADER = struct.Struct("<8sIIQQ")


def token_file(session: Session, ids: Any = None) -> bytes:
    """The file of a session whose keys and values are in the prefix cache;
    with other token ids, if there are any.
    """
    state = session._published()
    ids = state.tokens.ids if ids is None else ids
    part = bytes.fromhex(state.tokens.fingerprint) + ids.astype("<i4").tobytes()
    part += hashlib.sha256(part).digest()
    data = session.to_bytes()
    magic, _, zero, size, _ = _HEADER.unpack_from(data)
    head = _HEADER.pack(magic, 3, zero, size, len(part))
    head += data[_HEADER.size : _HEADER.size + size]
    return head + hashlib.sha256(head).digest() + part
