"""Requests that are refused: whatever the words, they name what they mean."""

from __future__ import annotations

import httpx


def message_of(answer: httpx.Response) -> str:
    """Gives the text of an error in any API's form."""
    said = answer.json()["error"]
    return str(said if isinstance(said, str) else said["message"])


def check_refusal(
    answer: httpx.Response, *parts: object, status: int = 400
) -> str:
    """Checks the status and that the error's text has all the parts: the
    field, what was found, what was expected. Gives the text, which is a line.
    """
    assert answer.status_code == status, answer.text
    message = message_of(answer)
    for part in parts:
        assert str(part) in message, message
    assert "\n" not in message
    return message
