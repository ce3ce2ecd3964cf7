"""Anthropic's diagnostics: why the cache had less of a prompt than of the one
before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

_MOST = 4096  # prompts that are remembered
_MOST_MESSAGES = 1 << 20  # of all of these


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The hashes of the parts of a prompt.

    Attributes:
      model: the model's name in the request.
      system, tools: the hash of each.
      messages: the hash of each message.
    """

    model: str
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class _Known:
    fingerprint: Fingerprint
    prompt_tokens: int


class Diagnostics:
    """The fingerprints of the last prompts, by tenant and id of the answer.
    They are in this process's memory: other workers know other ones.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._messages = 0

    def note(
        self, owner: str, id: str, made_of: Fingerprint, prompt_tokens: int
    ) -> None:
        """Remembers a prompt; the oldest ones make room."""
        self._known[owner, id] = _Known(made_of, prompt_tokens)
        self._messages += len(made_of.messages)
        while len(self._known) > _MOST or self._messages > _MOST_MESSAGES:
            _, oldest = self._known.popitem(last=False)
            self._messages -= len(oldest.fingerprint.messages)

    def reason(
        self, owner: str, id: str, made_of: Fingerprint
    ) -> dict[str, Any] | None:
        """Gives the `cache_miss_reason` of a prompt after that of the answer
        `id`; None if the prompt continues that one.
        """
        known = self._known.get((owner, id))
        if known is None:
            return {"type": "previous_message_not_found"}
        before = known.fingerprint
        for name in ("model", "system", "tools"):
            if getattr(before, name) != getattr(made_of, name):
                return _missed(name, known.prompt_tokens)
        if made_of.messages[: len(before.messages)] != before.messages:
            return _missed("messages", known.prompt_tokens)
        return None


def fingerprint(
    model: str,
    system: object,
    tools: object,
    messages: Sequence[object],
) -> Fingerprint:
    """Makes the fingerprint of a prompt, whose parts JSON can hold."""
    return Fingerprint(
        model,
        _hash(system),
        _hash(tools),
        tuple(_hash(message) for message in messages),
    )


def _missed(what: str, tokens: int) -> dict[str, Any]:
    return {"type": f"{what}_changed", "cache_missed_input_tokens": tokens}


def _hash(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
