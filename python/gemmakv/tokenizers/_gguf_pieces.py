"""The SentencePiece vocabulary of a GGUF file, run by the core."""

from __future__ import annotations

from functools import cached_property

from gemmakv import _core
from gemmakv._support.text import is_unicode
from gemmakv.tokenizers._tokenizer import Tokenizer


class PieceTokenizer(Tokenizer):
    """The same ids as that library's, without its tables, which take longer
    to make than all else of a load.
    """

    def __init__(self, encoder: _core.PieceEncoder) -> None:
        self._encoder = encoder
        super().__init__(len(encoder))

    def id_of(self, piece: str) -> int | None:
        if not isinstance(piece, str) or not is_unicode(piece):
            return None
        token = self._encoder.find(piece)
        return None if token < 0 else token

    def _piece(self, token: int) -> str:
        return self._encoder.piece(token)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    def _is_byte(self, token: int) -> bool:
        return self._encoder.is_byte(token)

    # Tables that only some calls need.

    @cached_property
    def _pieces(self) -> list[str]:
        return self._encoder.pieces()

    @cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset(self._encoder.silent())
