"""Tokenizers of SentencePiece models."""

from __future__ import annotations

from functools import cached_property

from gemmakv._support.text import is_unicode
from gemmakv.errors import CorruptFile, one_line, unexpected
from gemmakv.tokenizers._tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """The vocabulary of a SentencePiece model, run by that library."""

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        """`model` is a serialized SentencePiece ModelProto; errors call it
        `name`. Raises ArgumentError for what is no bytes, as a path, and
        CorruptFile if it is not a sound one.
        """
        if not isinstance(model, bytes):
            raise unexpected("model", "the bytes of a model", model)
        # Later: a GGUF file's vocabulary does without.
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CorruptFile(
                f"{name}: SentencePiece rejects the vocabulary: "
                + one_line(error)
            ) from None
        super().__init__(int(self._processor.get_piece_size()))

    def id_of(self, piece: str) -> int | None:
        if not isinstance(piece, str) or not is_unicode(piece):
            return None
        token = int(self._processor.piece_to_id(piece))
        return token if self._processor.id_to_piece(token) == piece else None

    def _piece(self, token: int) -> str:
        return str(self._processor.id_to_piece(token))

    def _encode_plain(self, text: str) -> list[int]:
        return [int(token) for token in self._processor.encode(text)]

    def _is_byte(self, token: int) -> bool:
        return bool(self._processor.is_byte(token))

    # Tables that only some calls need; each takes 50 to 150 ms.

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

    @cached_property
    def _silent(self) -> frozenset[int]:
        is_control = self._processor.is_control
        is_unused = self._processor.is_unused
        return frozenset(
            i for i in range(self.vocab_size) if is_control(i) or is_unused(i)
        ) | {int(self._processor.unk_id())}
