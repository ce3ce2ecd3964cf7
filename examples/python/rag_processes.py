"""Questions about one long text, answered by several processes.

    python rag_processes.py document.txt "Who wrote it?" "What is it about?"

A first process reads the text, and ends. What it computed lies in shared
memory, where all others map it: they compute the question alone, and the keys
and values of the text are in memory once, however many processes there are.
With `--disk FOLDER` they read it from there, also tomorrow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemmakv

QUESTIONS = ["What is it about?", "What is new?", "Who is it for?"]


def report(what: str, usage: gemmakv.Usage, seconds: float) -> None:
    found = ", ".join(
        f"{count} from {tier}" for tier, count in usage.cached.items()
    )
    print(
        f"process {os.getpid()}: {what} ({usage.prompt_tokens} tokens: "
        f"{found or 'none known'}, "
        f"{usage.prompt_tokens - usage.cached_tokens} computed; "
        f"{seconds:.2f} s)",
        flush=True,
    )


def work(
    model: str, tiers: dict[str, Any], document: str, questions: Sequence[str]
) -> None:
    """What one process does; without questions it reads the text alone."""
    with gemmakv.PrefixCache(**tiers) as prefix:
        gemma = gemmakv.Gemma.load(model, prefix_cache=prefix)
        prompts = [f"{document}\n\nQuestion: {q}\nAnswer:" for q in questions]
        for prompt in prompts or [document]:
            begin = time.perf_counter()
            result = gemma.generate(
                gemmakv.create_kv_cache(gemma.config),
                prompt,
                max_tokens=32 if prompts else 0,
                stop="\n",
            )
            report(
                result.text.strip() if prompts else "has read the text",
                result.usage,
                time.perf_counter() - begin,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--model", default="gemma-3-270m")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--shared", help="a folder on a memory file system")
    place.add_argument("--disk", help="a folder on a disk")
    args = parser.parse_args()

    if args.disk:
        tiers = {"disk": args.disk}
    else:
        tiers = {"shared": args.shared or True}
    document = args.document.read_text("utf-8")
    context = multiprocessing.get_context("spawn")
    count = min(args.processes, len(args.questions))
    shares = [args.questions[i::count] for i in range(count)]
    for stage in ([[]], shares):
        processes = [
            context.Process(
                target=work, args=(args.model, tiers, document, share)
            )
            for share in stage
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
