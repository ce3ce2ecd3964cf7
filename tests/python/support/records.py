"""What chats have said, for tests of stores."""

from __future__ import annotations

from gemmakv import Message

TALK = [
    Message("user", "one"), Message("model", "1"),
    Message("user", "two"), Message("model", "2"),
]  # fmt: skip
