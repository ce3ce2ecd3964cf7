"""What `/set` knows: names, meanings and how a value is typed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

OVERFLOW = ("error", "drop_oldest_turns")
DEFAULT_WORD = "default"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One entry. `default` is what holds where nothing is set."""

    name: str
    help: str
    parse: Callable[[str], object]
    default: object
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """The value that `text` stands for; ValueError says what it may be."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(
                f"{self.name}: expected {error}, found {text!r}; "
                f"/set {self.name} {DEFAULT_WORD} goes back to "
                f"{show(self.default)}"
            ) from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _seed(text: str) -> int | None:
    return None if text == "random" else _integer(text)


def _stop(text: str) -> list[str]:
    r"""One text as it is typed, or a JSON list; \n in either is a newline."""
    if not text.startswith("["):
        return [text.replace("\\n", "\n")]
    try:
        texts = json.loads(text)
    except json.JSONDecodeError:
        raise ValueError('a text or a list as in ["a", "b"]') from None
    if not all(isinstance(one, str) for one in texts):
        raise ValueError('a text or a list as in ["a", "b"]')
    return list(texts)


def _overflow(text: str) -> str:
    if text not in OVERFLOW:
        raise ValueError(" or ".join(OVERFLOW))
    return text


_ALL = (
    Setting("max_tokens", "longest reply, in tokens", _integer, 256),
    Setting(
        "temperature", "0 is greedy, 1 the model's own spread", _number, 0.0
    ),
    Setting("top_k", "sample among the k likeliest; 0 is off", _integer, 0),
    Setting("top_p", "... among those holding this share", _number, 1.0),
    Setting("min_p", "... at least this share of the best", _number, 0.0),
    Setting("repetition_penalty", "above 1 avoids repeats", _number, 1.0),
    Setting("presence_penalty", "subtracted once it occurred", _number, 0.0),
    Setting("frequency_penalty", "... for each time", _number, 0.0),
    Setting("seed", "an integer, or random", _seed, None, ("random",)),
    Setting("stop", 'text that ends a reply, or ["a", "b"]', _stop, None),
    Setting(
        "overflow",
        "when the context is full",
        _overflow,
        "error",
        OVERFLOW,
    ),
)
SETTINGS: Mapping[str, Setting] = {one.name: one for one in _ALL}


def show(value: object) -> str:
    """A value as a person types it."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value), ensure_ascii=False)
    return str(value)
