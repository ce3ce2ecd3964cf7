"""Tokenizers of GGUF files."""

from __future__ import annotations

from typing import Any

from gemmakv import _core
from gemmakv.errors import CorruptFile, brief
from gemmakv.tokenizers._added_tokens import Marks
from gemmakv.tokenizers._gguf_pieces import PieceTokenizer
from gemmakv.tokenizers._merges import (
    MergesTokenizer,
    filter_merges,
    fit_rows,
    import_tokenizers,
)
from gemmakv.tokenizers._tokenizer import BYTE_PIECES, SPACE_MARK, Tokenizer

_PREFIX = "tokenizer.ggml."
# Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def tokenizer_of_gguf(path: str, file: _core.GgufFile) -> Tokenizer | None:
    """Reads the tokenizer of the open file at `path`; None for a file that
    holds nothing of one.

    Raises CorruptFile for a vocabulary that is damaged, MismatchError for one
    that is not of Gemma's kinds, GemmaKVError if a package is missing.
    """
    # Merges decide, not scores, in Gemma 4's. The core does not know the text
    # of such tokens.
    if _core.has_merges(file):
        return _merges_tokenizer(path, file)
    return pieces_of_gguf(file)


def pieces_of_gguf(file: _core.GgufFile) -> PieceTokenizer | None:
    """Reads the tokenizer of a file whose vocabulary has scores; None if it
    holds nothing of one.

    Raises CorruptFile for a vocabulary that is damaged, MismatchError for one
    that is not of Gemma's kinds.
    """
    names = file.keys()
    if not any(key.startswith(_PREFIX) for key in names):
        return None
    return PieceTokenizer(_core.PieceEncoder(file))


def _rows_of(file: _core.GgufFile, default: int) -> int:
    """Counts the tokens that have a row in the embedding; `default` of a file
    without one.
    """
    for name, _, _, shape, _ in file.tensors():
        if name == "token_embd.weight" and len(shape) == 2:
            return min(shape[1], default)
    return default


def _merges_tokenizer(path: str, file: _core.GgufFile) -> MergesTokenizer:
    package = import_tokenizers(path)
    keys = set(file.keys())

    def array(name: str, kind: type) -> list[Any]:
        key = _PREFIX + name
        found = file.get(key) if key in keys else None
        if not isinstance(found, list) or set(map(type, found)) - {kind}:
            raise CorruptFile(
                f"{path}: metadata {key}: expected a list of "
                f"{kind.__name__}, found {brief(found)}"
            )
        return found

    pieces, types = array("tokens", str), array("token_type", int)
    if len(types) != len(pieces):
        raise CorruptFile(
            f"{path}: metadata {_PREFIX}token_type has {len(types)} entries, "
            f"expected {len(pieces)}"
        )
    ids = {piece: token for token, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        twice = next(p for i, p in enumerate(pieces) if ids[p] != i)
        raise CorruptFile(
            f"{path}: metadata {_PREFIX}tokens: expected each once, found "
            f"{brief(twice)} again"
        )
    # Converters call some control tokens user-defined, to have them shown.
    marks = Marks({}, {})
    silent = frozenset(
        token
        for token, (piece, kind) in enumerate(zip(pieces, types))
        if kind in (_UNKNOWN, _CONTROL, _UNUSED) or marks.is_control(piece)
    )
    rows = _rows_of(file, len(pieces))
    known, silent = fit_rows(path, ids, silent, rows)
    merges = filter_merges(array("merges", str), known, ids)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    odd = [" ".join(pair) for pair in pairs if len(pair) != 2]
    if odd or not pairs:
        raise CorruptFile(
            f"{path}: metadata {_PREFIX}merges: expected two pieces each, "
            f"found {brief(odd[0] if odd else [])}"
        )
    # The name of a byte is text like any other, whatever a file calls it.
    added = [
        pieces[token]
        for token, kind in enumerate(types)
        if kind == _USER_DEFINED
        and token not in silent
        and pieces[token] not in BYTE_PIECES
    ]

    def make() -> Any:
        library = package.Tokenizer(
            package.models.BPE(
                vocab=known,
                merges=pairs,
                byte_fallback=True,
                fuse_unk=True,
            )
        )
        library.normalizer = package.normalizers.Replace(" ", SPACE_MARK)
        library.add_tokens(
            [package.AddedToken(text, normalized=False) for text in added]
        )
        return library

    return MergesTokenizer(path, ids, silent, make)
