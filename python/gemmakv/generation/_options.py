"""Keywords of generation: one table for `generate`, `stream` and batches."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from gemmakv import _core
from gemmakv._support.progress import Progress
from gemmakv.errors import brief

Stop = str | Sequence[str] | None
LogitBias = Mapping[int, float] | None

DEFAULT_MAX_TOKENS = 256


class Options(TypedDict, total=False):
    """Keywords of `generate` and `stream`, with their defaults.

    max_tokens: tokens to sample at most (256).
    temperature: 0.0 is greedy; else probabilities are proportional to
      exp(logit / temperature) (0.0).
    top_k: samples among the k most probable tokens only; 0 is off (0).
    top_p: ... among the most probable ones that hold this mass (1.0: off).
    min_p: ... among those at least this fraction of the most probable one's
      probability (0.0: off).
    repetition_penalty: divides positive and multiplies negative logits of
      tokens of the conversation (1.0: off).
    presence_penalty: subtracted from the logit of each sampled token (0.0).
    frequency_penalty: subtracted as often as the token was sampled (0.0).
    logit_bias: token id -> number added to its logit; -inf bans it ({}).
    seed: integer in [0, 2**64); None draws one, reported by the result (None).
    stop: text or texts that end the completion; cut from its text (None).
    logprobs: whether to report log-probabilities (False).
    parse_special: whether the strings of control tokens in a str prompt mean
      the tokens; else they are ordinary text (False).
    progress: callable(done, total) in tokens, or True for a line on stderr.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: LogitBias
    seed: int | None
    stop: Stop
    logprobs: bool
    parse_special: bool
    progress: Progress


class BatchOptions(TypedDict, total=False):
    """As `Options`; each but `progress` is one value for all rows or a list
    with one value per row. A list of str is one `stop` for all rows; one per
    row is a list of lists (or of None).
    """

    max_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: LogitBias | Sequence[LogitBias]
    seed: int | None | Sequence[int | None]
    stop: Stop | Sequence[Stop]
    logprobs: bool | Sequence[bool]
    parse_special: bool | Sequence[bool]
    progress: Progress


def _to_int(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{name}: expected an integer, found {brief(value)}"
        ) from None
    return number


def to_count(name: str, value: object) -> int:
    number = _to_int(name, value)
    if not 0 <= number < 1 << 31:
        raise ValueError(
            f"{name}: expected an integer of at least 0, found {number}"
        )
    return number


def _to_float(name: str, value: object) -> float:
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name}: expected a number, found {brief(value)}"
        ) from None
    if math.isnan(number):
        raise ValueError(f"{name}: expected a number, found nan")
    return number


def _to_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"{name}: expected True or False, found {brief(value)}"
        )
    return value


def _to_seed(name: str, value: object) -> int | None:
    if value is None:
        return None
    number = _to_int(name, value)
    if not 0 <= number < 1 << 64:
        raise ValueError(
            f"{name}: expected an integer in [0, 2**64), found {number}"
        )
    return number


def _to_logit_bias(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name}: expected a mapping of token ids to numbers, found "
            f"{brief(value)}"
        )
    return {
        to_count(f"{name} key", token): _to_float(f"{name}[{token!r}]", bias)
        for token, bias in value.items()
    }


def _to_stop(name: str, value: object) -> list[bytes]:
    texts = [] if value is None else [value]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        texts = list(value)
    stops = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"{name}: expected a str that is not empty, or a list of "
                f"them, found {brief(text)}"
            )
        try:
            stops.append(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise ValueError(
                f"{name}: {brief(text)} holds a lone surrogate, which is not "
                "Unicode text"
            ) from None
    return stops


_CONVERTERS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": to_count,
    "temperature": _to_float,
    "top_k": to_count,
    "top_p": _to_float,
    "min_p": _to_float,
    "repetition_penalty": _to_float,
    "presence_penalty": _to_float,
    "frequency_penalty": _to_float,
    "logit_bias": _to_logit_bias,
    "seed": _to_seed,
    "stop": _to_stop,
    "logprobs": _to_bool,
    "parse_special": _to_bool,
}


def split_rows(
    keywords: Mapping[str, object], rows: int, batch: bool
) -> list[dict[str, Any]]:
    """Converted options of each row; absent ones are left out.

    Raises ValueError naming the option that is bad, TypeError for a keyword
    that is none.
    """
    result: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, value in keywords.items():
        if name == "progress":
            continue
        convert = _CONVERTERS.get(name)
        if convert is None:
            raise TypeError(
                f"unexpected keyword {name!r}; known: "
                + ", ".join([*_CONVERTERS, "progress"])
            )
        if batch and _is_per_row(name, value):
            values = list(value)  # type: ignore[call-overload]
            if len(values) != rows:
                raise ValueError(
                    f"{name}: expected one value or a list of {rows} (one per "
                    f"row), found {len(values)}"
                )
            for i, one in enumerate(values):
                result[i][name] = convert(f"{name}[{i}]", one)
        else:
            converted = convert(name, value)
            for row in result:
                row[name] = converted
    return result


def _is_per_row(name: str, value: object) -> bool:
    if isinstance(value, (str, bytes, Mapping)):
        return False
    if isinstance(value, Sequence) and name == "stop":
        return not all(isinstance(one, str) for one in value)
    # NumPy arrays are no Sequence, but serve as a list.
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def core_options(
    row: Mapping[str, Any], eos_ids: Sequence[int]
) -> _core.GenerateOptions:
    """The core's options of one row of `split_rows`."""
    keywords = {k: v for k, v in row.items() if k != "parse_special"}
    return _core.GenerateOptions(eos_ids=list(eos_ids), **keywords)
