"""Single-process measurements of vs_llama.py, each in a fresh interpreter.

    one_shot.py first-token gemmakv|llama.cpp MODEL THREADS
    one_shot.py memory gemmakv MODEL THREADS

first-token prints the seconds from the load call to the first greedy token of
a short prompt; imports are done before. memory generates 128 tokens after a
prompt of 2,048 and leaves the peak to whoever waits for the process.
"""

from __future__ import annotations

import pathlib
import sys
import time

PROMPT = "The ferry left at ten past six, and"
HERE = pathlib.Path(__file__).resolve().parent


def first_token_gemmakv(model: str, threads: int) -> float:
    import gemmakv

    begin = time.perf_counter()
    gemma = gemmakv.Gemma.load(
        model, threads=threads, prefix_cache=False, speculate="off")
    cache = gemmakv.create_kv_cache(gemma.config, capacity_tokens=512)
    gemma.generate(cache, PROMPT, max_tokens=1)
    return time.perf_counter() - begin


def first_token_llama(model: str, threads: int) -> float:
    sys.path.insert(0, str(HERE.parent / "quality"))
    import llama_cpp  # noqa: F401  (its import is not part of the time)

    import backends

    begin = time.perf_counter()
    llama = backends.Llama(model, threads=threads, context=512)
    ids = [2, *llama.tokenize(PROMPT)]
    llama.decode(ids, 0, all_positions=False).argmax()
    return time.perf_counter() - begin


def generate_long(model: str, threads: int) -> None:
    import gemmakv

    text = (HERE.parent / "quality" / "texts" / "english.txt").read_text(
        "utf-8")
    gemma = gemmakv.Gemma.load(
        model, threads=threads, prefix_cache=False, speculate="off")
    cache = gemmakv.create_kv_cache(gemma.config, capacity_tokens=2304)
    ids = [2, *gemma.tokenizer.encode(text)][:2048]
    gemma.generate(cache, ids, max_tokens=128)


def main() -> None:
    what, engine, model, threads = sys.argv[1:]
    if what == "memory":
        generate_long(model, int(threads))
    elif engine == "gemmakv":
        print(first_token_gemmakv(model, int(threads)))
    else:
        print(first_token_llama(model, int(threads)))


if __name__ == "__main__":
    main()
