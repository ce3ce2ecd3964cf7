"""What a grammar costs, and what it saves where it forces text.

    python tools/bench/grammar.py [MODEL] [--runs 5] [--conversations 1,8,32]

First, what masks take: batches of so many conversations with a grammar and
without, in turn, a token a step. Masks are computed on a thread of their own
while the model runs; what a step waits for them behind that is their cost, of
which the engine's own clock tells. Masks are timed where they are asked for,
too: more of them at a time take longer, until they take longer than the step.

Then, what forced text saves: JSON of schemas, each reply without guesses, with
those of what the conversation says alone, and with those that the grammar
forces, too, in turn. All say the same tokens, which is checked. A token that
was guessed saves a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import gemmakv
from gemmakv.generation import _constraints
from gemmakv.generation._requests import requests_of

_FIELDS: dict[str, Any] = {
    "title": {"type": "string", "maxLength": 60},
    "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
    "tags": {"type": "array", "maxItems": 8,
             "items": {"type": "string", "maxLength": 20}},
    "score": {"type": "number", "minimum": 0, "maximum": 10},
    "text": {"type": "string"},
}  # fmt: skip
FILM = {
    "type": "object",
    "properties": _FIELDS,
    "required": ["title", "year", "tags", "score", "text"],
    "additionalProperties": False,
}  # fmt: skip
_LINE = {
    "type": "object",
    "properties": {
        "article_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "description": {"type": "string", "maxLength": 40},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit_price_in_cents": {"type": "integer", "minimum": 1,
                                "maximum": 99999},
    },
    "required": ["article_number", "description", "quantity",
                 "unit_price_in_cents"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "a film": {
        **FILM,
        "properties": {
            **_FIELDS,
            "score": {"type": "integer", "minimum": 0, "maximum": 10},
            "text": {"type": "string", "maxLength": 120},
        },
    },
    "a bill": {
        "type": "object",
        "properties": {
            "bill_to": {"type": "string", "maxLength": 40},
            "currency": {"enum": ["EUR", "USD", "GBP"]},
            "lines": {"type": "array", "items": _LINE, "minItems": 3,
                      "maxItems": 3},
            "paid": {"type": "boolean"},
        },
        "required": ["bill_to", "currency", "lines", "paid"],
        "additionalProperties": False,
    },
    "a call": {
        "type": "object",
        "properties": {
            "name": {"const": "get_current_weather_forecast"},
            "arguments": {
                "type": "object",
                "properties": {
                    "city_and_country": {"type": "string", "maxLength": 30},
                    "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                    "number_of_days": {"type": "integer", "minimum": 1,
                                       "maximum": 14},
                },
                "required": ["city_and_country", "temperature_unit",
                             "number_of_days"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    "a verdict": {
        "type": "object",
        "properties": {
            "explanation": {"type": "string", "maxLength": 200},
            "is_spam": {"type": "boolean"},
        },
        "required": ["explanation", "is_spam"],
        "additionalProperties": False,
    },
}  # fmt: skip
WAYS = ("off", "lookup", "forced")


class Timed:
    """Times calls of the matchers, while it is entered."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.asks_forced = True
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Timed:
        for name in ("compute_mask", "forced_tokens"):
            self._originals[name] = getattr(_constraints.Matcher, name)
            setattr(_constraints.Matcher, name, self._timed(name))
        return self

    def __exit__(self, *_: Any) -> None:
        for name, original in self._originals.items():
            setattr(_constraints.Matcher, name, original)

    def _timed(self, name: str) -> Any:
        original = self._originals[name]

        def timed(matcher: Any, *given: Any) -> Any:
            if name == "forced_tokens" and not self.asks_forced:
                given = (*given[:-1], 0)
            begin = time.perf_counter()
            try:
                return original(matcher, *given)
            finally:
                self.seconds.append(time.perf_counter() - begin)

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--conversations", default="1,8,32")
    parser.add_argument("--only", choices=["masks", "forced"])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    gemma = gemmakv.Gemma.load(
        arguments.model, prefix_cache=False, profile=True,
        threads=arguments.threads,
    )  # fmt: skip
    grammar = gemmakv.Grammar.json_schema(FILM)
    begin = time.perf_counter()
    requests_of(gemma).compiler.prepare()
    prepared = time.perf_counter() - begin
    begin = time.perf_counter()
    requests_of(gemma).compiler.compile("grammar", grammar)
    compiled = time.perf_counter() - begin
    print(
        f"load average {os.getloadavg()[0]:.1f}; vocabulary {prepared:.2f} s, "
        f"grammar {compiled * 1e3:.1f} ms"
    )
    for count in map(int, arguments.conversations.split(",")):
        if arguments.only != "forced":
            _masks(gemma, grammar, count, arguments)
    if arguments.only != "masks":
        _forced(gemma, arguments.runs)


def _masks(
    gemma: gemmakv.Gemma,
    grammar: gemmakv.Grammar,
    count: int,
    arguments: argparse.Namespace,
) -> None:
    steps: dict[bool, list[float]] = {True: [], False: []}
    waits: list[float] = []
    sums: list[float] = []
    singles: list[float] = []
    for run in range(arguments.runs):
        for held in (True, False) if run % 2 == 0 else (False, True):
            caches = [
                gemmakv.create_kv_cache(gemma.config) for _ in range(count)
            ]
            before = gemma.profile().decode
            with Timed() as timed:
                gemma.generate_batch(
                    caches,
                    ["A film as JSON: "] * count,
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                    grammar=grammar if held else None,
                    # Not greedy: a grammar takes whole rows of logits anyway.
                    temperature=0.01,
                    seed=list(range(count)),
                    speculate="off",
                )
            spent = gemma.profile().decode - before
            steps[held].append(spent.seconds / spent.steps)
            if held:
                waits.append(spent.parts["masks"] / spent.seconds)
                sums.append(sum(timed.seconds) / spent.steps)
                singles += timed.seconds
    held_s, free_s = (statistics.median(steps[held]) for held in (True, False))
    ratios = [a / b for a, b in zip(steps[True], steps[False])]
    worst = sorted(singles)[int(len(singles) * 0.99)]
    print(
        f"{count:3} conversations: step {free_s * 1e3:.2f} ms without, "
        f"{held_s * 1e3:.2f} ms with a grammar, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f})\n"
        f"    waiting for masks {statistics.median(waits):.2%} of a step "
        f"({min(waits):.2%} to {max(waits):.2%}); a step's masks take "
        f"{statistics.median(sums) * 1e3:.2f} ms beside it; a mask "
        f"{statistics.median(singles) * 1e3:.3f} ms, 99th percentile "
        f"{worst * 1e3:.2f} ms",
        flush=True,
    )


def _forced(gemma: gemmakv.Gemma, runs: int) -> None:
    # (wall, processor) of the time without over the time with.
    ratios: dict[str, list[tuple[float, float]]] = {w: [] for w in WAYS[1:]}
    for name, schema in SCHEMAS.items():
        grammar = gemmakv.Grammar.json_schema(schema)
        requests_of(gemma).compiler.compile("grammar", grammar)
        seconds: dict[str, list[tuple[float, float]]] = {w: [] for w in WAYS}
        steps: dict[str, int] = dict.fromkeys(WAYS, 0)
        tokens = 0
        for run in range(runs):
            said = set()
            for way in WAYS[run % 3 :] + WAYS[: run % 3]:
                cache = gemmakv.create_kv_cache(gemma.config)
                gemma.prefill(cache, f"{name.capitalize()} as JSON: ")
                with Timed() as timed:
                    timed.asks_forced = way == "forced"
                    begin = time.perf_counter(), time.process_time()
                    reply = gemma.generate(
                        cache, "", grammar=grammar, max_tokens=300,
                        temperature=0.8, seed=run, prefix_cache="off",
                        speculate="off" if way == "off" else "lookup",
                    )  # fmt: skip
                    seconds[way].append(
                        (
                            time.perf_counter() - begin[0],
                            time.process_time() - begin[1],
                        )
                    )
                said.add((tuple(reply.token_ids), reply.finish_reason))
                usage = reply.usage
                steps[way] += usage.completion_tokens - usage.accepted
            if len(said) > 1:
                raise SystemExit(f"{name}: the tokens differ")
            tokens += usage.completion_tokens
        print(f"{name}: {tokens / runs:.0f} tokens")
        for way in WAYS[1:]:
            found = [
                (a[0] / b[0], a[1] / b[1])
                for a, b in zip(seconds["off"], seconds[way])
            ]
            ratios[way] += found
            _print(f"  {way}, {steps[way] / runs:.0f} steps", found)
    for way, found in ratios.items():
        _print(f"all, {way}", found)
    print(f"load average {os.getloadavg()[0]:.1f}")


def _print(name: str, ratios: list[tuple[float, float]]) -> None:
    words = [
        f"{statistics.median(all):.2f}x ({min(all):.2f} to {max(all):.2f})"
        for all in zip(*ratios)
    ]
    print(f"{name}: {words[0]}, processor {words[1]}", flush=True)


if __name__ == "__main__":
    main()
