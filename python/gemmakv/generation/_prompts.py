"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.text import check_unicode
from gemmakv.cache._kv_cache import KVCache
from gemmakv.errors import ArgumentError, brief, unexpected
from gemmakv.models._config import ModelConfig
from gemmakv.tokenizers._tokenizer import Tokenizer, with_bos

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
TokenArray = npt.NDArray[np.int32]
_BOOLS = {bool, np.bool_}


def prompt_ids(
    name: str,
    prompt: Prompt,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    parse_special: bool,
) -> tuple[TokenArray, bool]:
    """Encodes a prompt: int32 [n], and whether the first one is a BOS that is
    for an empty conversation alone.

    A text gets such a BOS; token ids are taken as they are. Raises ValueError
    that begins with `name` for what is no prompt, or one that the model cannot
    read.
    """
    if not isinstance(prompt, str):
        kind = "" if tokenizer is None else "a text or "
        return token_ids(name, prompt, config.vocab_size, kind), False
    check_unicode(name, prompt)
    if tokenizer is None and prompt:
        raise ValueError(
            f"{name}: this model has no tokenizer (a folder needs a "
            "tokenizer.model or tokenizer.json); expected token ids, "
            "found a str"
        )
    ids = [] if tokenizer is None else tokenizer.encode(prompt, parse_special)
    if tokenizer is not None and ids and max(ids) >= config.vocab_size:
        # Possible for control tokens only: `loading.give_tokenizer`.
        raise ValueError(
            f"{name}: {brief(tokenizer.piece_of(max(ids)))} is token "
            f"{max(ids)}, which the model has no row for; expected token ids "
            f"in [0, {config.vocab_size})"
        )
    whole = with_bos(ids, config.bos_id)
    return np.array(whole, np.int32), len(whole) > len(ids)


def check_cache(name: str, cache: object) -> KVCache:
    """Gives `cache`, a conversation. Raises ArgumentError."""
    if not isinstance(cache, KVCache):
        raise unexpected(name, "a KVCache", cache)
    return cache


def token_ids(
    name: str, tokens: Any, vocab_size: int, beside: str = ""
) -> TokenArray:
    """Checks token ids: int32 [n], n > 0.

    Raises ArgumentError that names `name` for anything else; for what holds no
    ids it says what does `beside` them.
    """

    def bad(found: object, shown: str, beside: str = beside) -> ArgumentError:
        expected = f"{beside}a sequence of token ids in [0, {vocab_size})"
        return ArgumentError(name, expected, found, shown=shown)

    if isinstance(tokens, (str, bytes, bytearray)):
        raise bad(tokens, type(tokens).__name__)
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        raise bad(tokens, brief(tokens)) from None
    if ids.ndim != 1:
        raise bad(tokens, brief(tokens))
    if ids.size == 0:
        raise bad(tokens, "none")
    if ids.dtype.kind not in "iu":
        raise bad(tokens, f"values of type {ids.dtype}")
    if isinstance(tokens, (list, tuple)) and _BOOLS & set(map(type, tokens)):
        # Among integers NumPy takes them for 0 and 1.
        at = [type(one) in _BOOLS for one in tokens].index(True)
        raise bad(tokens[at], f"{brief(tokens[at])} at index {at}", "")
    out = (ids < 0) | (ids >= vocab_size)
    if out.any():
        at = int(out.argmax())
        raise bad(int(ids[at]), f"{int(ids[at])} at index {at}", "")
    return np.ascontiguousarray(ids, np.int32)
