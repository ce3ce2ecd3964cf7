"""`gemmakv generate`: completes one prompt."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Any

import typer

import gemmakv
from gemmakv.cli import console
from gemmakv.cli.arguments import MODEL, QUANTIZE, THREADS, examples
from gemmakv.generation._options import Options

EXAMPLES = examples(
    'gemmakv generate -m gemma-3-270m "The capital of France is"',
    "gemmakv generate -m gemma-3-270m --max-tokens 64 - < prompt.txt",
    "gemmakv generate -m model.gguf --temperature 0.8 --seed 7 "
    '"Once upon"',
    'gemmakv generate -m org/repo --json "Two plus two is" | jq .text',
)


def generate(
    prompt: str = typer.Argument(
        ...,
        metavar="PROMPT",
        help="Text to continue; - reads it from stdin (less one newline).",
    ),
    model: str = MODEL,
    max_tokens: int = typer.Option(
        256, metavar="N", help="Tokens to sample at most."
    ),
    temperature: float = typer.Option(
        0.0, metavar="X", help="0 is greedy: always the likeliest token."
    ),
    top_k: int = typer.Option(
        0, metavar="N", help="Keep the N likeliest; 0 is off."
    ),
    top_p: float = typer.Option(
        1.0, metavar="X", help="Keep this probability mass."
    ),
    min_p: float = typer.Option(
        0.0,
        metavar="X",
        help="Keep tokens of at least this share of the likeliest.",
    ),
    repetition_penalty: float = typer.Option(
        1.0, metavar="X", help="Of every token of the text; 1 is off."
    ),
    presence_penalty: float = typer.Option(
        0.0, metavar="X", help="Of tokens that were sampled; 0 is off."
    ),
    frequency_penalty: float = typer.Option(
        0.0, metavar="X", help="The same, as often as they were; 0 is off."
    ),
    logit_bias: list[str] | None = typer.Option(
        None,
        metavar="ID=NUMBER",
        help="Add to a token's logit (-inf bans it); repeatable.",
    ),
    seed: int | None = typer.Option(
        None, metavar="N", help="Default: a random one."
    ),
    stop: list[str] | None = typer.Option(
        None, metavar="TEXT", help="End before this text; repeatable."
    ),
    logprobs: bool = typer.Option(
        False, "--logprobs", help="Report log-probabilities (needs --json)."
    ),
    parse_special: bool = typer.Option(
        False,
        "--parse-special",
        help="Strings of control tokens in the prompt mean the tokens.",
    ),
    no_echo: bool = typer.Option(
        False, "--no-echo", help="Print the completion only."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object at the end instead."
    ),
    capacity_tokens: int | None = typer.Option(
        None,
        metavar="N",
        help="Limit of the conversation; default: the model's context.",
    ),
    kv_dtype: str = typer.Option(
        "bf16",
        metavar="TYPE",
        help="How keys and values are stored: f32, bf16 or int8.",
    ),
    threads: int | None = THREADS,
    quantize: str | None = QUANTIZE,
    no_packed_cache: bool = typer.Option(
        False,
        "--no-packed-cache",
        help="Keep no file of packed weights for the next start.",
    ),
) -> None:
    """Continue a text.

    Prints the prompt and its completion on stdout as it comes, and nothing
    else there. Greedy unless --temperature says otherwise.
    """
    if logprobs and not as_json:
        raise typer.BadParameter("--logprobs needs --json")
    options: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _parse_logit_bias(logit_bias or []),
        "seed": seed,
        "stop": stop or None,
        "logprobs": logprobs,
        "parse_special": parse_special,
    }
    text = _read_stdin() if prompt == "-" else prompt
    gemma = console.load(model, threads, not no_packed_cache, quantize)
    cache = gemmakv.create_kv_cache(gemma.config, capacity_tokens, kv_dtype)
    if as_json:
        generation = gemma.generate(cache, text, **options)
        console.write(_to_json(text, generation) + "\n")
        return
    with gemma.stream(cache, text, **options) as stream:
        if not no_echo:
            console.write(text)
        try:
            for piece in stream:
                if piece.text:
                    console.write(piece.text)
        except BaseException:  # Ctrl-C above all: the line ends here
            with contextlib.suppress(console.ReaderGone):
                console.write("\n")
            raise
        console.write("\n")


def _read_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"stdin: expected UTF-8, found byte 0x{data[error.start]:02X} at "
            f"offset {error.start}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _parse_logit_bias(items: list[str]) -> dict[int, float]:
    bias = {}
    for item in items:
        token, _, number = item.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise ValueError(
                "logit_bias: expected ID=NUMBER (as in 42=-inf), found "
                f"{item!r}"
            ) from None
    return bias


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
        # JSON has no infinities.
        document["logprobs"] = [
            float(p) if math.isfinite(p) else None for p in generation.logprobs
        ]
    return json.dumps(document, ensure_ascii=False)
