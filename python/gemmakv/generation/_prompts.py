"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.text import check_unicode
from gemmakv.errors import brief
from gemmakv.models._config import ModelConfig
from gemmakv.tokenizers._tokenizer import Tokenizer

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
    """int32 [n]; a str gets BOS in front if `adds_bos` says so and `bos` is
    true.

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
    if bos and adds_bos(prompt, config, tokenizer, parse_special):
        ids.insert(0, config.bos_id)
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
    if not isinstance(prompt, str) or config.bos_id < 0:
        return False
    if not parse_special or tokenizer is None:
        return True
    name = tokenizer.piece_of(config.bos_id)
    spelled = prompt.startswith(name)
    return not spelled or tokenizer.encode(name, True) != [config.bos_id]


def token_ids(name: str, tokens: Any, vocab_size: int) -> TokenArray:
    """int32 [n], n > 0, of valid token ids.

    Raises ValueError that begins with `name` for anything else.
    """
    expected = (
        f"{name}: expected a sequence of token ids in [0, {vocab_size})"
    )
    if isinstance(tokens, (str, bytes, bytearray)):
        raise ValueError(f"{expected}, found {type(tokens).__name__}")
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{expected}, found {brief(tokens)}") from None
    if ids.ndim != 1:
        raise ValueError(f"{expected}, found {brief(tokens)}")
    if ids.size == 0:
        raise ValueError(f"{expected}, found none")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{expected}, found values of type {ids.dtype}")
    if isinstance(tokens, (list, tuple)) and _BOOLS & set(map(type, tokens)):
        # Among integers NumPy takes them for 0 and 1.
        at = [type(one) in _BOOLS for one in tokens].index(True)
        raise ValueError(f"{expected}, found {brief(tokens[at])} at index {at}")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"{expected}, found {int(ids[at])} at index {at}")
    return np.ascontiguousarray(ids, np.int32)
