"""`gemmakv embed`: texts as vectors."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import typer

from gemmakv._support.documents import read_bytes
from gemmakv._support.files import write_atomically
from gemmakv.chat._gemma import Gemma
from gemmakv.cli import console
from gemmakv.cli.arguments import (
    MODEL,
    NO_PACKED_CACHE,
    PIN_THREADS,
    QUANTIZE,
    THREADS,
    examples,
    optional_text_of,
    texts_of,
)
from gemmakv.cli.failures import InputError
from gemmakv.errors import unexpected

EXAMPLES = examples(
    'gemmakv embed -m org/repo --prompt query "What is a fork?"',
    "gemmakv embed -m model.gguf --prompt document - < lines.txt",
    "gemmakv embed -m folder --file lines.txt --dim 256 --output v.npy",
)

# Texts that are computed before the first of them is printed.
_PORTION = 256
_STDIN = "stdin"

Row = tuple[int, str, npt.NDArray[np.float32]]


def embed(
    texts: list[str] = typer.Argument(
        None,
        metavar="[TEXT]...",
        callback=texts_of,
        help="The texts; a single - reads one from each line of stdin.",
    ),
    model: str = MODEL,
    file: str | None = typer.Option(
        None, metavar="FILE", help="Read the texts from a file's lines instead."
    ),
    dim: int | None = typer.Option(
        None,
        metavar="N",
        help="Length of the vectors, one that the model was trained for. "
        "Default: the full length.",
    ),
    prompt: str | None = typer.Option(
        None,
        metavar="NAME",
        callback=optional_text_of,
        help="What precedes each text: a name that the model knows, such as "
        "query or document, or a text with {text} in it.",
    ),
    pooling: str | None = typer.Option(
        None,
        metavar="NAME",
        help="For models that write text: use the mean of the hidden states, "
        "or the last.",
    ),
    output: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Write to a file: a NumPy array [texts, dim] if its name ends "
        "with .npy, else JSON lines.",
    ),
    threads: int | None = THREADS,
    pin_threads: bool = PIN_THREADS,
    quantize: str | None = QUANTIZE,
    no_packed_cache: bool = NO_PACKED_CACHE,
) -> None:
    """Make vectors of texts.

    Prints a line of JSON for each text: index, text and embedding, float32
    values of a vector of length 1.
    """
    if (file is not None) == bool(texts):
        found = "both" if texts else "neither"
        raise typer.BadParameter(f"expected texts or --file, found {found}")
    source, target = _input_path(file), _output_path(output)
    with console.Notes() as notes:
        gemma = console.load(
            model,
            threads,
            not no_packed_cache,
            quantize,
            prefix_cache=False,
            pin_threads=pin_threads,
            tell=notes.add,
        )
        rows = _computed(gemma, _texts(texts, source), dim, prompt, pooling)
        _write(rows, target)


def _write(rows: Iterator[Row], target: Path | None) -> None:
    """Writes a line for each row to stdout, or all of them to a file."""
    if target is None:
        for index, text, vector in rows:
            console.write(_line(index, text, vector))
    elif target.suffix == ".npy":
        vectors = [vector for _, _, vector in rows]
        data = io.BytesIO()
        np.save(data, np.stack(vectors))
        write_atomically(target, data.getvalue())
    else:
        lines = "".join(itertools.starmap(_line, rows))
        write_atomically(target, lines.encode())


def _input_path(given: str | None) -> Path | None:
    if given == "":
        raise unexpected("file", "a path", given)
    return None if given is None else Path(given)


def _output_path(given: str | None) -> Path | None:
    """Raises what would be an error once all is computed."""
    if given is None:
        return None
    if given == "":
        raise unexpected("output", "a path", given)
    path = Path(given)
    code = None
    if path.is_dir():
        code = errno.EISDIR
    elif not path.parent.exists():
        code = errno.ENOENT
    elif not path.parent.is_dir():
        code = errno.ENOTDIR
    if code is not None:
        raise OSError(code, os.strerror(code), given)
    return path


def _computed(
    gemma: Gemma,
    texts: Iterator[str],
    dim: int | None,
    prompt: str | None,
    pooling: str | None,
) -> Iterator[Row]:
    index = 0
    while portion := list(itertools.islice(texts, _PORTION)):
        try:
            vectors = gemma.embed(
                portion, dim=dim, prompt=prompt, pooling=pooling
            )
        except ValueError as error:
            raise _counted(error, index) from None
        for text, vector in zip(portion, vectors, strict=True):
            yield index, text, vector
            index += 1


def _counted(error: ValueError, before: int) -> ValueError:
    """An error of one of the texts, by its number among all of them."""
    named = re.match(r"texts\[(\d+)\]: ", str(error))
    if named is None:
        return error
    number = before + int(named[1]) + 1
    return InputError(f"text {number}: {str(error)[named.end() :]}")


def _texts(texts: list[str] | None, file: Path | None) -> Iterator[str]:
    """Gives the texts one by one; raises ValueError naming an empty line."""
    if texts and texts != ["-"]:
        yield from texts
        return
    name, lines = _STDIN, console.lines()
    if file is not None:
        name, lines = str(file), iter(io.BytesIO(read_bytes(file)))
    number = 0
    for number, line in enumerate(lines, 1):
        text = console.prompt_of(f"{name}: line {number}", line)
        if not text:
            raise InputError(
                f"{name}: line {number}: expected a text, found an empty one"
            )
        yield text
    if number == 0:
        raise InputError(f"{name}: expected a text on each line, found none")


def _line(index: int, text: str, vector: npt.NDArray[np.float32]) -> str:
    document = {"index": index, "text": text}
    head = json.dumps(document, ensure_ascii=False)[:-1]
    # Nine digits say which float32 it is.
    numbers = ", ".join(f"{value:.9g}" for value in vector.tolist())
    return f'{head}, "embedding": [{numbers}]}}\n'
