"""`gemmakv generate`: completes one prompt."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import typer

import gemmakv
from gemmakv.cli import console, prefix_flags
from gemmakv.cli.arguments import (
    DRAFT,
    MODEL,
    NO_PACKED_CACHE,
    PIN_THREADS,
    QUANTIZE,
    SAMPLING_DEFAULTS,
    THREADS,
    check_capacity_tokens,
    check_draft,
    check_kv_dtype,
    examples,
    text_of,
)
from gemmakv.cli.option_flags import with_options
from gemmakv.options import GenerationOptions

EXAMPLES = examples(
    'gemmakv generate -m gemma-3-270m "The capital of France is"',
    "gemmakv generate -m gemma-3-270m --max-tokens 64 - < prompt.txt",
    'gemmakv generate -m model.gguf --temperature 0.8 --seed 7 "Once upon"',
    'gemmakv generate -m org/repo --json "Two plus two is" | jq .text',
)


@with_options(chat=False)
def generate(
    prompt: str = typer.Argument(
        ...,
        metavar="PROMPT",
        callback=text_of,
        help="Text to continue; - reads it from stdin (less one newline).",
    ),
    model: str = MODEL,
    no_echo: bool = typer.Option(
        False, "--no-echo", help="Print the completion only."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object at the end instead."
    ),
    capacity_tokens: int | None = typer.Option(
        None,
        metavar="N",
        callback=check_capacity_tokens,
        help="Most tokens of the conversation. Default: the model's context.",
    ),
    kv_dtype: str = typer.Option(
        "bf16",
        metavar="TYPE",
        callback=check_kv_dtype,
        help="How keys and values are stored: f32, bf16 or int8.",
    ),
    threads: int | None = THREADS,
    pin_threads: bool = PIN_THREADS,
    quantize: str | None = QUANTIZE,
    draft: str | None = DRAFT,
    no_packed_cache: bool = NO_PACKED_CACHE,
    sampling_defaults: bool = SAMPLING_DEFAULTS,
    prefix_cache_ram: str | None = prefix_flags.RAM,
    prefix_cache_shared: str | None = prefix_flags.SHARED,
    prefix_cache_disk: str | None = prefix_flags.DISK,
    prefix_cache_remote: str | None = prefix_flags.REMOTE,
    **options: Any,
) -> None:
    """Continue a text.

    Prints the prompt and its completion on stdout as it comes, and nothing
    else there. Greedy unless --temperature says otherwise.
    """
    if not as_json and (options.keys() & {"logprobs", "top_logprobs"}):
        raise typer.BadParameter("--logprobs and --top-logprobs need --json")
    check_draft(options.get("speculate"), draft)
    text = prompt
    if prompt == "-":
        text = console.prompt_of("stdin", console.read_stdin())
    with console.Notes() as notes:
        prefix = prefix_flags.open_prefix_cache(
            prefix_cache_ram,
            prefix_cache_shared,
            prefix_cache_disk,
            prefix_cache_remote,
            tell=notes.add,
        )
        gemma = console.load(
            model,
            threads,
            not no_packed_cache,
            quantize,
            prefix,
            draft,
            pin_threads,
            notes.add,
        )
        if sampling_defaults:
            options = console.with_sampling_defaults(gemma, options)
        GenerationOptions.check(options, gemma.config.vocab_size)
        cache = gemmakv.create_kv_cache(
            gemma,
            capacity_tokens,
            kv_dtype,  # type: ignore[arg-type]
        )
        if as_json:
            generation = gemma.generate(cache, text, **options)
            console.write(_to_json(text, generation) + "\n")
            return
        with gemma.stream(cache, text, **options) as stream:
            _write(stream, "" if no_echo else text)


def _write(stream: gemmakv.Stream, before: str) -> None:
    """Writes a text and, as it comes, what follows it; ends the line."""
    if before:
        console.write(before)
    try:
        for piece in stream:
            if piece.text:
                console.write(piece.text)
    except BaseException:  # Ctrl-C above all: the line ends here
        with contextlib.suppress(console.ReaderGone):
            console.write("\n")
        raise
    console.write("\n")


def _to_json(prompt: str, generation: gemmakv.Generation) -> str:
    usage, timings = generation.usage, generation.timings
    document: dict[str, Any] = {
        "prompt": prompt,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "usage": vars(usage),
        "timings": vars(timings),
    }
    if generation.logprobs is not None:
        document["logprobs"] = [_number(p) for p in generation.logprobs]
    top = generation.top_logprobs
    if top is not None:
        document["top_logprobs"] = [
            [
                {"token_id": int(id), "logprob": _number(p)}
                for id, p in zip(ids, row)
            ]
            for ids, row in zip(top.token_ids, top.logprobs)
        ]
    return json.dumps(document, ensure_ascii=False)


def _number(value: float) -> float | None:
    """JSON has no infinities."""
    return float(value) if math.isfinite(value) else None
