"""What speculation brings: replies with it and without, in turn.

    python tools/bench/speculation.py [MODEL] [--runs 3] [--tokens 120]
    python tools/bench/speculation.py MODEL --draft SMALLER

The prompts are those of speculation_prompts.json: 30 whose replies repeat what
is there (edits of code, quotations, rows of JSON), and texts that people
wrote, which are replayed: whatever the model would say, it says what they
wrote, since greedy replies of a small model often end in loops. Others are new
text, sampled.

A ratio is the decoding time without over the time with it, of two calls that
follow each other, which give the same tokens; those of processor time say more
where others use the machine. A reply counts as a loop if its last 40 tokens
repeat with a period of at most 20. Of several kinds the mean of mixed work is
printed, too, in which each kind counts alike. With --batch, so many
conversations decode at the same time; with --context, each behind so many
tokens of other text.

Lookup finds what a text says itself: the same text in turn would otherwise be
known from the turn before. With --shared, replies are those of a session whose
sibling has said the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import gemmakv

PROMPTS = Path(__file__).with_name("speculation_prompts.json")
OTHER_TEXT = PROMPTS.parents[1] / "quality" / "texts" / "english.txt"
NEW = {
    "story": "Once upon a time, in a land of glass mountains, a young fox",
    "numbers": "Random words: lamp, seven, otter, quartz, violin, mustard,",
    "letter": "Dear Sir,\n\nI write to you because last Tuesday",
}
Ratio = tuple[float, float]  # of time, of processor time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gemma-3-270m")
    parser.add_argument("--draft", help="speculate by this model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--shared", action="store_true",
                        help="guess from sibling sessions, too")  # fmt: skip
    parser.add_argument("--kinds", help="only these, with commas")
    parser.add_argument("--every", type=int, default=1,
                        help="one prompt of so many")  # fmt: skip
    arguments = parser.parse_args()
    draft = None
    if arguments.draft:
        draft = gemmakv.Gemma.load(
            arguments.draft, prefix_cache=False, threads=arguments.threads
        )
    gemma = gemmakv.Gemma.load(
        arguments.model, prefix_cache=False, draft=draft,
        threads=arguments.threads,
    )  # fmt: skip
    texts = json.loads(PROMPTS.read_text())
    texts += [
        {"kind": "new", "name": name, "prompt": text}
        for name, text in NEW.items()
    ]
    kinds = arguments.kinds.split(",") if arguments.kinds else None
    found: dict[str, list[Ratio]] = {}
    prompts: dict[str, list[Ratio]] = {}  # by kind, the medians of each
    loops_of: dict[str, list[bool]] = {}
    for kind in dict.fromkeys(text["kind"] for text in texts):
        if kinds and kind not in kinds:
            continue
        ratios: list[Ratio] = []
        loops = []
        for text in [t for t in texts if t["kind"] == kind][:: arguments.every]:
            more, loop = _compare(gemma, text, arguments)
            ratios += more
            loops += [loop]
            prompts.setdefault(kind, []).append(
                tuple(map(statistics.median, zip(*more)))  # type: ignore[arg-type]
            )
        found[kind] = ratios
        loops_of[kind] = loops
        _print(f"{kind}: all", ratios)
        print(f"  loops: {sum(loops)} of {len(loops)}", flush=True)
    repeats = [
        ratio
        for kind in ("code edit", "quotation", "JSON")
        for ratio in found.get(kind, [])
    ]
    if repeats:
        _print("where text repeats", repeats)
    if len(found) > 1:
        _print_mixed(prompts, loops_of)


def _compare(
    gemma: gemmakv.Gemma, text: dict[str, str], arguments: argparse.Namespace
) -> tuple[list[Ratio], bool]:
    """The ratios of each run, and whether the reply is a loop."""
    said = gemmakv.create_kv_cache(gemma.config)
    if arguments.context:
        before = OTHER_TEXT.read_text("utf-8")
        ids = gemma.tokenizer.encode(before)  # type: ignore[union-attr]
        ids = ids * (1 + arguments.context // len(ids))
        gemma.prefill(said, [2, *ids[: arguments.context]])
    gemma.prefill(said, text["prompt"])
    options: dict[str, Any] = {
        "max_tokens": arguments.tokens,
        "ignore_eos": True,
        "temperature": arguments.temperature,
        "prefix_cache": "on" if arguments.shared else "off",
    }
    if text["kind"] == "new":
        options["temperature"] = 1.0
    if text["kind"] == "replayed":
        options |= _replay(gemma, len(said), text["continues"])
    how_on = "draft" if arguments.draft else "lookup"
    ratios = []
    drafted = accepted = sampled = 0
    for run in range(arguments.runs):
        seconds = {}
        tokens = {}
        order = ("off", how_on) if run % 2 == 0 else (how_on, "off")
        for how in order:
            caches = [said.fork() for _ in range(arguments.batch)]
            begin = time.perf_counter(), time.process_time()
            rows = gemma.generate_batch(
                caches,
                [""] * arguments.batch,
                seed=[run * 100 + i for i in range(arguments.batch)],
                speculate=how,
                **options,
            )
            seconds[how] = (
                time.perf_counter() - begin[0],
                time.process_time() - begin[1],
            )
            tokens[how] = [row.token_ids for row in rows]
            drafted += sum(row.usage.drafted for row in rows)
            accepted += sum(row.usage.accepted for row in rows)
            if how != "off":
                sampled += sum(row.usage.completion_tokens for row in rows)
        if tokens["off"] != tokens[how_on]:
            raise SystemExit(f"{text['name']}: the tokens differ")
        off, on = seconds["off"], seconds[how_on]
        ratios.append((off[0] / on[0], off[1] / on[1]))
    _print(f"{text['kind']}: {text['name']}", ratios)
    print(f"  {drafted} of {sampled} tokens drafted, {accepted} accepted")
    return ratios, _is_loop(tokens["off"][0])


def _print_mixed(
    prompts: dict[str, list[Ratio]], loops: dict[str, list[bool]]
) -> None:
    """The mean of mixed work: kinds count alike, however many prompts each
    has; the range is that of the prompts.
    """
    words = []
    for at in (0, 1):
        each = {k: [ratio[at] for ratio in v] for k, v in prompts.items()}
        mean = statistics.mean(map(statistics.mean, each.values()))
        low, high = min(map(min, each.values())), max(map(max, each.values()))
        words.append(f"mean {mean:.2f}x ({low:.2f} to {high:.2f})")
    own = [loop for k, v in loops.items() if k != "replayed" for loop in v]
    print(
        f"mixed work, {len(prompts)} kinds, "
        f"{sum(map(len, prompts.values()))} prompts: {words[0]}, "
        f"processor {words[1]}; loops: {sum(own)} of {len(own)} replies "
        "that are not replayed",
        flush=True,
    )


def _replay(gemma: gemmakv.Gemma, begin: int, text: str) -> dict[str, Any]:
    """Options that have a conversation of `begin` tokens go on so."""
    tokenizer = gemma.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)

    def force(token_ids: Any, logits: Any) -> None:
        logits[ids[len(token_ids) - begin]] = 1e9

    return {"logits_processor": force, "max_tokens": min(len(ids), 300)}


def _is_loop(ids: list[int]) -> bool:
    tail = ids[-40:]
    return len(tail) == 40 and any(
        tail[period:] == tail[:-period] for period in range(1, 21)
    )


def _print(name: str, ratios: list[Ratio]) -> None:
    words = [
        f"{statistics.median(all):.2f}x (mean {statistics.mean(all):.2f}, "
        f"{min(all):.2f} to {max(all):.2f})"
        for all in zip(*ratios)
    ]
    print(f"{name:34} {words[0]}, processor {words[1]}", flush=True)


if __name__ == "__main__":
    main()
