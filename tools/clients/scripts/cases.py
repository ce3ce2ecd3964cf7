"""What the scripts for Python share: the server, and how they say what worked.

What the model says after the result of a tool is its own affair; that the
server takes the result and the client the answer is what counts.

No annotations that are texts here and in the scripts: some clients read those
of a tool.
"""

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

URL = os.environ["CLIENT_URL"]  # without a path
MODEL = os.environ["CLIENT_MODEL"]
KEY = os.environ["CLIENT_KEY"]
QUESTION = "What is the capital of France?"
WEATHER = "How much rain fell in Rome?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
City = Literal["Rome", "Oslo"]


def rain(city: str) -> str:
    """Tells how much rain fell in a city.

    Args:
        city: The city.
    """
    return f"3 mm in {city}"


def _say(name: str, error: str | None) -> None:
    # What clients print may end without an end of its line.
    said = json.dumps({"case": name, "error": error})
    print(f"\n{said}", flush=True)


@contextmanager
def case(name: str) -> Iterator[None]:
    """Prints whether what is in `with` worked, as a line of JSON."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(limit=-6)
        words = " ".join(f"{type(error).__name__}: {error}".split())
        _say(name, words[:300])
    else:
        _say(name, None)


def expect(true: object, said: object = "") -> None:
    if not true:
        raise ValueError(f"not expected: {said!r}")


def city(text: str) -> None:
    """Fails unless the text is JSON of SCHEMA."""
    expect(json.loads(text)["city"] in ("Rome", "Oslo"), text)
