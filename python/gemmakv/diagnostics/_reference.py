"""A model's logits beside those that transformers computes of its weights.

    report = gemmakv.verify.against("gemma-3-1b", "path/to/gemma-3-1b")
    print(report.mean_kl, report.same_top)

The tokens are what the model itself writes, by a seed: nothing has to be
brought along, and they are of any length.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.arguments import QuantizeType, choice, integer
from gemmakv._support.files import StrPath
from gemmakv._support.progress import Progress, as_callback
from gemmakv.cache._kv_cache import KV_DTYPES, KvDtype, create_kv_cache
from gemmakv.chat._gemma import Gemma
from gemmakv.errors import one_line, unexpected
from gemmakv.generation._scores import log_softmax

_TOKENS = 256
_SHOWN = 8  # of the positions that differ
_CHUNK = 64  # positions at once: in float64 134 MB of 262,144 logits
_NEEDED = ("torch", "transformers")

Logits = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A position whose most likely token is another one.

    Attributes:
      position: of the token before it.
      before: text of the tokens before it, the last of them.
      reference: text of the reference's most likely token.
      reference_probability: of that token, by the reference.
      found: text of this model's most likely token.
      found_probability: of that token, by the reference.
    """

    position: int
    before: str
    reference: str
    reference_probability: float
    found: str
    found_probability: float


@dataclasses.dataclass(frozen=True)
class ReferenceReport:
    """The result of `against`.

    Attributes:
      model: as it was given.
      reference: as it was given.
      versions: of the packages that computed the reference.
      quantize: as it was given.
      kv_dtype: how keys and values were stored.
      tokens: how many were compared.
      sliding_window: in tokens; 0: none.
      mean_kl: of KL(reference || model), in nats, over all positions.
      max_kl: the largest.
      max_kl_position: where that is.
      same_top: share of positions with the same most likely token.
      max_difference: of any logit, divided by the range of the reference's
        logits at that position.
      differences: the first positions with another most likely token.
    """

    model: str
    reference: str
    versions: dict[str, str]
    quantize: str | None
    kv_dtype: str
    tokens: int
    sliding_window: int
    mean_kl: float
    max_kl: float
    max_kl_position: int
    same_top: float
    max_difference: float
    differences: list[Difference]


def against(
    model: StrPath,
    reference: StrPath,
    *,
    tokens: int | None = None,
    kv_dtype: KvDtype = "f32",
    threads: int | None = None,
    quantize: QuantizeType | None = None,
    progress: Progress = None,
) -> ReferenceReport:
    """Compares logits with those of transformers, in float32.

    Args:
      model: as for `Gemma.load`.
      reference: what transformers loads: a directory with a config.json, or a
        GGUF file of an architecture that it reads. The same weights, or those
        that `model` was made from.
      tokens: how many to compare; default 256. They are sampled from the model
        (seed 0, temperature 1), after its beginning-of-sequence token.
      kv_dtype: how keys and values are stored: "f32", "bf16" or "int8".
      threads: of both; default: as for `Gemma.load`.
      quantize: as for `Gemma.load`.
      progress: callable(done, total) in steps, or True for a line on stderr.

    Needs torch and transformers, memory for the weights in float32, and 8 bytes
    for each token of the vocabulary at each position (537 MB for 256 of Gemma
    3). Raises ModuleNotFoundError naming what is missing, ValueError, what
    `Gemma.load` raises, and OSError for a reference that cannot be loaded.
    """
    choice("kv_dtype", kv_dtype, KV_DTYPES)
    count = _TOKENS if tokens is None else integer("tokens", tokens)
    _check_packages()
    place = _place_of(reference)
    callback = as_callback(progress, "comparing") or _silent
    callback(0, 4)
    gemma = Gemma.load(
        model, threads=threads, quantize=quantize, prefix_cache=False
    )
    limit = gemma.config.context_length
    if not 2 <= count <= limit:
        span = f"2 to {limit} (the model's context)"
        raise unexpected("tokens", span, count)
    ids = _sampled(gemma, count)
    callback(1, 4)
    found = gemma.logits(
        create_kv_cache(gemma.config, count, kv_dtype=kv_dtype),
        ids,
        all_positions=True,
    )
    callback(2, 4)
    expected = _reference_logits(place, ids, gemma.threads)
    if expected.shape != found.shape:
        raise ValueError(
            f"reference: expected logits of {found.shape[1]} tokens, as the "
            f"model has, found {expected.shape[1]}"
        )
    callback(3, 4)
    compared = compare(expected, found)
    report = ReferenceReport(
        model=str(model),
        reference=str(reference),
        versions={name: _version(name) for name in _NEEDED},
        quantize=quantize,
        kv_dtype=kv_dtype,
        tokens=count,
        sliding_window=gemma.config.sliding_window,
        mean_kl=float(compared.kl.mean()),
        max_kl=float(compared.kl.max()),
        max_kl_position=int(compared.kl.argmax()),
        same_top=float((compared.top == compared.found_top).mean()),
        max_difference=float(compared.difference.max()),
        differences=_differences(gemma, ids, compared),
    )
    callback(4, 4)
    return report


@dataclasses.dataclass(frozen=True)
class Compared:
    """Values of each position: float64 [n], and int64 [n] for tokens.

    Attributes:
      kl: KL(reference || found) in nats.
      difference: the largest of a logit, by the range of the reference's.
      top: the reference's most likely token.
      found_top: the other's.
      probability: of `top`, by the reference.
      found_probability: of `found_top`, by the reference.
    """

    kl: npt.NDArray[np.float64]
    difference: npt.NDArray[np.float64]
    top: npt.NDArray[np.int64]
    found_top: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    found_probability: npt.NDArray[np.float64]


def compare(reference: Logits, found: Logits) -> Compared:
    """Compares logits [n, vocab_size]. Raises ValueError for logits that are
    not finite.
    """
    columns: list[list[npt.NDArray[Any]]] = [[] for _ in range(6)]
    for begin in range(0, len(reference), _CHUNK):
        expected = reference[begin : begin + _CHUNK].astype(np.float64)
        other = found[begin : begin + _CHUNK].astype(np.float64)
        for name, values in (("reference", expected), ("model", other)):
            bad = ~np.isfinite(values).all(axis=1)
            if bad.any():
                raise ValueError(
                    f"{name}: expected finite logits, found others at position "
                    f"{begin + int(bad.argmax())}"
                )
        spread = expected.max(axis=1) - expected.min(axis=1)
        most = np.abs(expected - other).max(axis=1)
        log_p, log_q = log_softmax(expected), log_softmax(other)
        p = np.exp(log_p)
        rows = np.arange(len(p))
        top, found_top = expected.argmax(axis=1), other.argmax(axis=1)
        for column, values in zip(
            columns,
            (
                # Rounding may give less than the 0 that it is.
                np.maximum((p * (log_p - log_q)).sum(axis=1), 0),
                most / np.maximum(spread, np.finfo(np.float64).tiny),
                top,
                found_top,
                p[rows, top],
                p[rows, found_top],
            ),
            strict=True,
        ):
            column.append(values)
    return Compared(*(np.concatenate(column) for column in columns))


def _sampled(gemma: Gemma, count: int) -> npt.NDArray[np.int32]:
    """Samples token ids [count] that follow the first token."""
    first = max(gemma.config.bos_id, 0)
    said = gemma.generate(
        create_kv_cache(gemma.config, count),
        np.array([first], np.int32),
        max_tokens=count - 1,
        temperature=1.0,
        seed=0,
        ignore_eos=True,
    )
    return np.array([first, *said.token_ids], np.int32)


def _differences(
    gemma: Gemma, ids: npt.NDArray[np.int32], compared: Compared
) -> list[Difference]:
    def text(tokens: npt.NDArray[Any]) -> str:
        if gemma.tokenizer is None:
            return str(tokens.tolist())
        return gemma.tokenizer.decode(tokens.tolist())

    other = np.flatnonzero(compared.top != compared.found_top)[:_SHOWN]
    return [
        Difference(
            position=int(i),
            before=text(ids[max(0, i - 7) : i + 1]),
            reference=text(compared.top[i : i + 1]),
            reference_probability=float(compared.probability[i]),
            found=text(compared.found_top[i : i + 1]),
            found_probability=float(compared.found_probability[i]),
        )
        for i in other
    ]


def _check_packages() -> None:
    missing = [name for name in _NEEDED if not _can_import(name)]
    if missing:
        raise ModuleNotFoundError(
            f"{' and '.join(missing)}: not installed; comparing with a "
            "reference needs them (pip install torch transformers)",
            name=missing[0],
        )


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _version(name: str) -> str:
    return str(importlib.import_module(name).__version__)


def _place_of(reference: StrPath) -> Path:
    place = Path(os.path.expanduser(reference))
    if place.is_dir() and (place / "config.json").is_file():
        return place
    if place.is_file() and place.suffix == ".gguf":
        return place
    expected = "a directory with a config.json or a file .gguf"
    raise unexpected("reference", expected, str(reference))


def _reference_logits(
    place: Path, ids: npt.NDArray[np.int32], threads: int
) -> Logits:
    """float32 [len(ids), vocab_size]."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    folder = place
    if place.is_file():
        folder, how["gguf_file"] = place.parent, place.name
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    except Exception as error:
        raise OSError(
            f"reference: transformers cannot load {place}: {one_line(error)}"
        ) from error
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model.eval()(input_ids=tokens, use_cache=False).logits[0]
        found: Logits = logits.float().numpy()
        return found


def _silent(done: int, total: int) -> None:
    del done, total
