"""What speculation by lookup brings: replies with it and without, in turn.

    python tools/bench/speculation.py [MODEL] [--runs 5] [--tokens 160]

Some prompts are such that their replies repeat what is there already, others
are not. A ratio is the decoding time without over the time with it, of two
calls that follow each other, which give the same tokens; those of processor
time say more where others use the machine. With --batch, so many conversations
decode at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gemmakv

_CODE = '''\
class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner = owner
        self.balance = balance

    def deposit(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError(f"amount is {amount}, expected more than 0")
        self.balance += amount

    def withdraw(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError(f"amount is {amount}, expected more than 0")
        if amount > self.balance:
            raise ValueError(f"amount is {amount}, of {self.balance}")
        self.balance -= amount
'''
_TEXT = """\
The harbour was built in 1862 by the brothers Hansen, who owned two ships and a
small yard at the mouth of the river. Timber came down from the hills in spring,
when the water was high, and was stored in long sheds beside the quay. In winter
the sheds stood empty, and the people of the village mended nets in them. A fire
destroyed the yard in 1891; the quay is still in use.
"""
_ROWS = """\
[
  {"id": 1, "name": "Anna Berg", "city": "Oslo", "active": true, "orders": 4},
  {"id": 2, "name": "Jon Dahl", "city": "Bergen", "active": false, "orders": 0},
  {"id": 3, "name": "Mia Lund", "city": "Oslo", "active": true, "orders": 11},
  {"id": 4, "name": "Per Vik", "city": "Molde", "active": true, "orders": 2},
"""

# Each text and what of it repeats.
REPEATS = {
    "code edit": (
        f"The file account.py:\n\n{_CODE}\n"
        "The same file, with the class renamed to Wallet:\n\n"
        f"{_CODE[:60].replace('Account', 'Wallet')}"
    ),
    "quotation": (
        f"The document says:\n\n{_TEXT}\nThe document, quoted word for word:"
        f"\n\n{_TEXT[:80]}"
    ),
    "JSON": f"Customers:\n\n{_ROWS}",
}
NEW = {
    "story": "Once upon a time, in a land of glass mountains, a young fox",
    "numbers": "Random words: lamp, seven, otter, quartz, violin, mustard,",
    "letter": "Dear Sir,\n\nI write to you because last Tuesday",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    gemma = gemmakv.Gemma.load(arguments.model, prefix_cache=False)
    # Greedy replies of a small model end in loops: new texts are sampled.
    groups: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("repeats", REPEATS, {}),
        ("new", NEW, {"temperature": 1.0}),
    ]
    for group, texts, sampling in groups:
        ratios = []
        for name, text in texts.items():
            ratios += _compare(gemma, f"{group}: {name}", text, sampling,
                               arguments)  # fmt: skip
        _print(f"{group}: all", ratios)


def _compare(
    gemma: gemmakv.Gemma,
    name: str,
    text: str,
    sampling: dict[str, Any],
    arguments: argparse.Namespace,
) -> list[tuple[float, float]]:
    """The ratios of each run: of time, and of processor time."""
    said = gemmakv.create_kv_cache(gemma.config)
    gemma.prefill(said, text)
    ratios = []
    drafted = accepted = sampled = 0
    for run in range(arguments.runs):
        seconds = {}
        tokens = {}
        order = ("off", "lookup") if run % 2 == 0 else ("lookup", "off")
        for how in order:
            begin = time.perf_counter(), time.process_time()
            rows = gemma.generate_batch(
                [said.fork() for _ in range(arguments.batch)],
                [""] * arguments.batch,
                max_tokens=arguments.tokens,
                ignore_eos=True,
                seed=[run * 100 + i for i in range(arguments.batch)],
                speculate=how,
                **sampling,
            )
            seconds[how] = (
                time.perf_counter() - begin[0],
                time.process_time() - begin[1],
            )
            tokens[how] = [row.token_ids for row in rows]
            drafted += sum(row.usage.drafted for row in rows)
            accepted += sum(row.usage.accepted for row in rows)
            if how == "lookup":
                sampled += sum(row.usage.completion_tokens for row in rows)
        if tokens["off"] != tokens["lookup"]:
            raise SystemExit(f"{name}: the tokens differ")
        off, on = seconds["off"], seconds["lookup"]
        ratios.append((off[0] / on[0], off[1] / on[1]))
    _print(name, ratios)
    print(f"  {drafted} of {sampled} tokens drafted, {accepted} accepted")
    return ratios


def _print(name: str, ratios: list[tuple[float, float]]) -> None:
    words = [
        f"{statistics.median(all):.2f}x ({min(all):.2f} to {max(all):.2f})"
        for all in zip(*ratios)
    ]
    print(f"{name:20} {words[0]}, processor {words[1]}", flush=True)


if __name__ == "__main__":
    main()
