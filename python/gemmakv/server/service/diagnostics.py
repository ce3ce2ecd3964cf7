"""Anthropic's diagnostics: why a prompt had less of the cache than the one
before it, as its client is told.
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
    """What a prompt was made of, without what it says.

    Attributes:
      model: as the request called it.
      system, tools: hashes.
      messages: a hash of each.
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
    """Fingerprints of the last prompts, by whose they were and the ids of
    their answers. In this process's memory: others know other ones.
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
        """The `cache_miss_reason` of a prompt after that of the answer `id`;
        None if the one goes on from the other.
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
    """Of what JSON can say."""
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
