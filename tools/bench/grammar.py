"""What a grammar's masks take, as a share of the model's steps.

    python tools/bench/grammar.py MODEL [--runs 5]

Each run generates the same number of tokens with and without a grammar, in
turn; masks are timed where the engine asks for them. A mask that takes less
than the step beside it costs the step nothing but the other thread's time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gemmakv
from gemmakv.generation import _constraints

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "maxItems": 8,
                 "items": {"type": "string", "maxLength": 20}},
        "score": {"type": "number", "minimum": 0, "maximum": 10},
        "text": {"type": "string"},
    },
    "required": ["title", "year", "tags", "score", "text"],
    "additionalProperties": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    gemma = gemmakv.Gemma.load(
        arguments.model, prefix_cache=False, speculate="off"
    )
    grammar = gemmakv.Grammar.json_schema(SCHEMA)
    masks: list[float] = []
    original = _constraints.Matcher.compute_mask

    def timed(self: Any, *given: Any) -> bool:
        begin = time.perf_counter()
        try:
            return original(self, *given)
        finally:
            masks.append(time.perf_counter() - begin)

    _constraints.Matcher.compute_mask = timed  # type: ignore[method-assign]
    begin = time.perf_counter()
    gemma._compiler.prepare()
    prepared = time.perf_counter() - begin
    begin = time.perf_counter()
    gemma._compiler.compile("grammar", grammar)
    compiled = time.perf_counter() - begin
    steps: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(arguments.runs):
        for held in (True, False):
            said = gemma.generate(
                gemmakv.create_kv_cache(gemma.config),
                "A film as JSON: ",
                max_tokens=arguments.tokens,
                ignore_eos=True,
                grammar=grammar if held else None,
                logits_processor=None,
                temperature=0.01,
                seed=1,
            )
            count = len(said.token_ids) - 1
            steps[held].append(said.timings.decode_s / count)
    held_ms, free_ms = (
        statistics.median(steps[held]) * 1e3 for held in (True, False)
    )
    mask_ms = statistics.median(masks) * 1e3
    worst_ms = sorted(masks)[int(len(masks) * 0.99)] * 1e3
    print(f"vocabulary {prepared:.2f} s, grammar {compiled * 1e3:.1f} ms")
    print(f"step: {free_ms:.2f} ms without, {held_ms:.2f} ms with a grammar")
    print(f"mask: median {mask_ms:.2f} ms ({mask_ms / free_ms:.1%} of a step), "
          f"99th percentile {worst_ms:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
