"""Many questions about one long text, which is computed once.

    python shared_prefix.py document.txt "Who wrote it?" "What is it about?"

The text's keys and values are shared by all forks: memory and time grow with
the questions, not with the text. The answers are computed as one batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gemmakv

QUESTIONS = ["What is a fork?", "What does truncating cost?"]


def ask(
    gemma: gemmakv.Gemma,
    prefix: gemmakv.KVCache,
    questions: list[str],
    max_tokens: int = 32,
) -> list[gemmakv.Generation]:
    """An answer to each question, each on a fork of `prefix`."""
    forks = [prefix.fork() for _ in questions]
    prompts = [f"\n\nQuestion: {text}\nAnswer:" for text in questions]
    return gemma.generate_batch(
        forks, prompts, max_tokens=max_tokens, stop="\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="gemma-3-270m")
    args = parser.parse_args()
    gemma = gemmakv.Gemma.load(args.model)
    prefix = gemmakv.create_kv_cache(gemma.config)

    begin = time.perf_counter()
    gemma.generate(prefix, args.document.read_text("utf-8"), max_tokens=0)
    print(f"{len(prefix)} tokens read in {time.perf_counter() - begin:.2f} s")

    begin = time.perf_counter()
    answers = ask(gemma, prefix, args.questions)
    for question, answer in zip(args.questions, answers):
        print(f"{question} {answer.text.strip()}")
    cached = sum(answer.usage.cached_tokens for answer in answers)
    print(
        f"{len(answers)} answers in {time.perf_counter() - begin:.2f} s; "
        f"{cached} tokens were not computed again"
    )


if __name__ == "__main__":
    main()
