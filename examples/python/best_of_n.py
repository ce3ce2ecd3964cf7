"""The best of several answers, sampled from forks of one prompt.

    python best_of_n.py "The three largest oceans are" --n 8

The prompt is computed once; each answer is a fork of it, and all are sampled
in the same steps. An answer's score is the mean log-probability of its tokens.
"""

from __future__ import annotations

import argparse

import gemmakv


def best_of_n(
    gemma: gemmakv.Gemma, prompt: str, n: int, max_tokens: int = 32
) -> list[tuple[float, gemmakv.Generation]]:
    """(score, answer) of each sample, the best first."""
    cache = gemmakv.create_kv_cache(gemma.config)
    answers = gemma.generate(
        cache,
        prompt,
        n=n,
        max_tokens=max_tokens,
        temperature=0.9,
        seed=0,
        stop="\n",
        logprobs=True,
    )
    scored = []
    for answer in answers:
        assert answer.logprobs is not None
        scored.append((float(answer.logprobs.mean()), answer))
    return sorted(scored, key=lambda pair: pair[0], reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="A good name for a cat is")
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--n", type=int, default=8)
    args = parser.parse_args()
    gemma = gemmakv.Gemma.load(args.model)
    for score, answer in best_of_n(gemma, args.prompt, args.n):
        print(f"{score:7.3f}  {answer.text.strip()}")


if __name__ == "__main__":
    main()
