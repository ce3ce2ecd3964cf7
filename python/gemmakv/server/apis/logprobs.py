"""The form of log-probabilities in OpenAI's, Ollama's and llama-server's
APIs.
"""

from __future__ import annotations

import math
from typing import Any

from gemmakv.generation._result import TopLogprobs
from gemmakv.server.service.events import Token
from gemmakv.tokenizers._tokenizer import Tokenizer

_IMPOSSIBLE = -9999.0  # JSON has no infinities


class Logprobs:
    """The maker of the entries of tokens."""

    def __init__(self, tokenizer: Tokenizer, ids: bool = False) -> None:
        """`ids`: whether each says its token's id."""
        self._tokenizer = tokenizer
        self._ids = ids

    def entry(self, token: Token) -> dict[str, Any]:
        """Makes the entry of a token that has a log-probability."""
        assert token.logprob is not None
        top = token.top_logprobs
        return {
            **self._one(token.token_id, token.logprob),
            "top_logprobs": [] if top is None else self._top(top),
        }

    def text(self, token: int) -> str:
        """Gives a token's text, or the name of a control token."""
        data = self._tokenizer.token_bytes[token]
        if not data:
            return self._tokenizer.piece_of(token)
        return data.decode("utf-8", "replace")

    def length(self, token: int) -> int:
        """How many characters of a text a token is; a control token is none."""
        data = self._tokenizer.token_bytes[token]
        return len(data.decode("utf-8", "replace"))

    def top_texts(self, top: TopLogprobs) -> dict[str, float]:
        """Gives the likeliest texts of a place. Of several tokens with the same
        text it has the likeliest.
        """
        found: dict[str, float] = {}
        for token, logprob in zip(top.token_ids, top.logprobs):
            if token >= 0:
                found.setdefault(self.text(int(token)), finite(float(logprob)))
        return found

    def _top(self, top: TopLogprobs) -> list[dict[str, Any]]:
        return [
            self._one(int(token), float(logprob))
            for token, logprob in zip(top.token_ids, top.logprobs)
            if token >= 0
        ]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes[token]
        return {
            **({"id": token} if self._ids else {}),
            "token": self.text(token),
            "logprob": finite(logprob),
            "bytes": list(data),
        }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def has_logprob(token: Token) -> bool:
    return token.token_id >= 0 and token.logprob is not None
