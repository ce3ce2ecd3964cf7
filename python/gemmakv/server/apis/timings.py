"""The time of a continuation, in llama-server's form."""

from __future__ import annotations

from gemmakv.server.service.events import Progress


def timings(
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    prefill_s: float,
    decode_s: float,
    drafted: int = 0,
    accepted: int = 0,
) -> dict[str, float]:
    """Gives the counts and times of a continuation. `prompt_n` counts the
    tokens of the prompt that were computed, `cache_n` the others. What did not
    run has the rate 0. Where tokens were guessed, `draft_n` and
    `draft_n_accepted` say how many.
    """
    computed = prompt_tokens - cached_tokens
    guesses = {"draft_n": drafted, "draft_n_accepted": accepted}
    return {
        "cache_n": cached_tokens,
        **_rate("prompt", computed, prefill_s),
        **_rate("predicted", completion_tokens, decode_s),
        **(guesses if drafted else {}),
    }


def prompt_progress(event: Progress) -> dict[str, dict[str, int]]:
    """Gives the part of the prompt that is computed, in llama-server's form."""
    return {
        "prompt_progress": {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
            "time_ms": round(event.seconds * 1e3),
        }
    }


def _rate(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }
