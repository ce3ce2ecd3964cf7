#!/usr/bin/env python3
"""Whether a key can tell by time, or by counts, what another key has asked.

    python tools/tenant_timing.py [--model MODEL.gguf] [--rounds 60]

A server with two keys. Each round, in an order of its own: the victim asks a
new prompt; then the spy asks that prompt, a prompt that nobody has asked, and,
as a control, one that it has asked itself. The spy times its first token, and
reads how many tokens were cached. Prompts are random, and as long as each
other.

Exits with 1 if the spy is told of cached tokens that are not its own, or if its
times for the victim's prompts differ from those for new ones: a two-sided
permutation test of the difference of their means, over rounds, with p below
0.001. Exits with 2 if the control is not told apart likewise, one-sided: then
times say nothing here. Without --model a tiny random one is written, as the
tests do (needs their packages).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

from support.server_process import ServerProcess

VICTIM, SPY = "victim-key", "spy-key"
_SIGNIFICANT = 0.001
_PERMUTATIONS = 20_000


def ask(http: httpx.Client, key: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the cached tokens that are told."""
    body = {
        "prompt": prompt, "max_tokens": 2, "temperature": 0,
        "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    first, cached = None, -1
    begin = time.perf_counter()
    with http.stream(
        "POST", "/v1/completions", json=body, headers=headers
    ) as response:
        if response.status_code != 200:
            response.read()
            raise RuntimeError(f"{response.status_code}: {response.text[:200]}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            if first is None:
                first = time.perf_counter() - begin
            usage = json.loads(line[6:]).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    if first is None or cached < 0:
        raise RuntimeError("a stream without tokens, or without its usage")
    return first, cached


def p_value(differences: list[float], rng: random.Random) -> float:
    """How often signs at random give a mean as far from 0, on either side."""
    found = abs(statistics.fmean(differences))
    count = sum(
        abs(statistics.fmean(rng.choice((-1, 1)) * d for d in differences))
        >= found
        for _ in range(_PERMUTATIONS)
    )
    return (count + 1) / (_PERMUTATIONS + 1)


def measure(args: argparse.Namespace, url: str) -> int:
    rng = random.Random(args.seed)

    def prompt() -> list[int]:
        return [rng.randrange(300, 350) for _ in range(args.tokens)]

    times: dict[str, list[float]] = {"victim's": [], "new": [], "own": []}
    leaks = 0
    with httpx.Client(base_url=url, timeout=120) as http:
        for number in range(args.rounds + 3):
            prompts = {name: prompt() for name in times}
            ask(http, VICTIM, prompts["victim's"])
            ask(http, SPY, prompts["own"])
            for name in rng.sample(list(times), len(times)):
                seconds, cached = ask(http, SPY, prompts[name])
                if name != "own" and cached:
                    leaks += 1
                    print(f"{name} prompt: told of {cached} cached tokens")
                if number >= 3:  # the first ones warm up
                    times[name].append(seconds)
    for name, found in times.items():
        print(
            f"{name:9} median {1e3 * statistics.median(found):8.3f} ms, mean "
            f"{1e3 * statistics.fmean(found):8.3f} ms, {len(found)} times"
        )

    def against_new(name: str) -> list[float]:
        pairs = zip(times[name], times["new"], strict=True)
        return [one - new for one, new in pairs]

    control = against_new("own")
    told_apart = (
        statistics.fmean(control) < 0
        and p_value(control, rng) / 2 < _SIGNIFICANT
    )
    p = p_value(against_new("victim's"), rng)
    print(f"the victim's against new ones: p = {p:.4f}; leaks: {leaks}")
    if leaks or p < _SIGNIFICANT:
        return 1
    if not told_apart:
        print("its own prompts were not told apart: no time says anything")
        return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from support import tiny_gguf

            args.model = tiny_gguf.write_talker(Path(folder) / "tiny.gguf")
        with ServerProcess(
            "-m", args.model, "--max-model-len", 4096,
            "--api-key", VICTIM, "--api-key", SPY,
        ) as server:  # fmt: skip
            return measure(args, server.url)


if __name__ == "__main__":
    sys.exit(main())
