"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.text import check_unicode
from gemmakv.errors import ArgumentError, brief
from gemmakv.models._config import ModelConfig
from gemmakv.tokenizers._tokenizer import Tokenizer, lacks_bos, with_bos

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
TokenArray = npt.NDArray[np.int32]
_BOOLS = {bool, np.bool_}


def prompt_ids(
    name: str,
    prompt: Prompt,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    parse_special: bool,
    bos: bool = True,
) -> TokenArray:
    """int32 [n]; if `bos`, a str has one in front (`with_bos`).

    Raises ValueError that begins with `name` for what is no prompt.
    """
    if not isinstance(prompt, str):
        return token_ids(name, prompt, config.vocab_size)
    check_unicode(name, prompt)
    if prompt and tokenizer is None:
        raise ValueError(
            f"{name}: this model has no tokenizer (a folder needs a "
            "tokenizer.model or tokenizer.json); expected token ids, "
            "found a str"
        )
    ids = tokenizer.encode(prompt, parse_special) if tokenizer else []
    if tokenizer and ids and max(ids) >= config.vocab_size:
        # Possible for control tokens only: `loading.check_vocab_size`.
        raise ValueError(
            f"{name}: {brief(tokenizer.piece_of(max(ids)))} is token "
            f"{max(ids)}, which the model has no row for; expected token ids "
            f"in [0, {config.vocab_size})"
        )
    if bos:
        ids = with_bos(ids, config.bos_id)
    return np.array(ids, np.int32)


def adds_bos(
    prompt: Prompt,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    parse_special: bool,
) -> bool:
    """Whether a prompt gets a BOS in front, for an empty conversation alone:
    a text does that does not begin with one itself.
    """
    return isinstance(prompt, str) and lacks_bos(
        prompt, tokenizer, config.bos_id, parse_special
    )


def token_ids(name: str, tokens: Any, vocab_size: int) -> TokenArray:
    """int32 [n], n > 0, of valid token ids.

    Raises ValueError that begins with `name` for anything else.
    """

    def wrong(shown: str | None = None) -> ArgumentError:
        expected = f"a sequence of token ids in [0, {vocab_size})"
        return ArgumentError(name, expected, tokens, shown=shown)

    if isinstance(tokens, (str, bytes, bytearray)):
        raise wrong(type(tokens).__name__)
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        raise wrong() from None
    if ids.ndim != 1:
        raise wrong()
    if ids.size == 0:
        raise wrong("none")
    if ids.dtype.kind not in "iu":
        raise wrong(f"values of type {ids.dtype}")
    if isinstance(tokens, (list, tuple)) and _BOOLS & set(map(type, tokens)):
        # Among integers NumPy takes them for 0 and 1.
        at = [type(one) in _BOOLS for one in tokens].index(True)
        raise wrong(f"{brief(tokens[at])} at index {at}")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise wrong(f"{int(ids[at])} at index {at}")
    return np.ascontiguousarray(ids, np.int32)
