"""From what a user names to an engine that runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from gemmakv import _core
from gemmakv._support.files import StrPath
from gemmakv._support.progress import Callback
from gemmakv.errors import MismatchError
from gemmakv.models import _packed as packed
from gemmakv.models._forms import describe_parts, parts_beside
from gemmakv.models._info import ModelInfo, check_suppressed, info_of_gguf
from gemmakv.models._packed import PackedWeights
from gemmakv.models._split import parts_of
from gemmakv.tokenizers._directory import tokenizer_of_folder
from gemmakv.tokenizers._gguf import pieces_of_gguf, tokenizer_of_gguf
from gemmakv.tokenizers._tokenizer import Tokenizer, set_ends

if TYPE_CHECKING:
    from gemmakv.models.huggingface import ModelFolder

# threads, progress, folder of packed weights, quantize, profile, pin_threads
_How = tuple[int, Callback | None, bytes, str, bool, bool]

# How long weights are checked without a look at what else is to be done.
_CHECK_S = 0.002


class PartialModelWarning(UserWarning):
    """A model was loaded that is not whole: without parts that are not
    supported yet, or with fields other than those of the published model that
    it looks like.
    """


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The parts of a `Gemma`."""

    engine: _core.Engine
    tokenizer: Tokenizer | None
    info: ModelInfo
    packed_weights: PackedWeights


def load(
    path: str,
    threads: int,
    progress: Callback | None,
    packed_cache: bool | StrPath,
    quantize: str,
    profile: bool = False,
    pin_threads: bool = False,
) -> Loaded:
    """Loads a GGUF file or a model directory.

    `threads` 0 means all, `quantize` "" that weights stay as they are.
    """
    model = None
    if os.path.isdir(path):
        # Later: a start from a GGUF file does not need it.
        from gemmakv.models.huggingface import ModelFolder

        model = ModelFolder.open(path)
    files = parts_of(path) if model is None else model.files
    folder, report = packed.choose_folder(
        packed_cache, sum(map(os.path.getsize, files))
    )
    encoded = b"" if folder is None else os.fsencode(folder)
    how = (threads, progress, encoded, quantize, profile, pin_threads)
    if model is None:
        file = _core.GgufFile(os.fsencode(path))
        engine, tokenizer = _load_gguf(path, file, how)
        info = info_of_gguf(path, file, engine.config.bidirectional)
        left_out = parts_beside(name for name, *_ in file.tensors())
        del file
    else:
        engine, tokenizer = _load_folder(path, model, how)
        info, left_out = model.info, model.left_out
    _core.trim_heap()
    if tokenizer is not None:
        set_ends(tokenizer, engine.config.bos_id, engine.config.eos_ids)
    warn_of_parts(path, left_out, stacklevel=4)
    check_suppressed(info, path, engine.config.vocab_size)
    if folder is not None:
        report = _packed_report(engine)
        packed.note_use(report, path, quantize)
        # A folder of the user's own choice is the user's to keep.
        if report.state == "written" and packed_cache is True:
            with contextlib.suppress(OSError):
                packed.expire(folder, keep=report.path)
    config = engine.config
    different = describe_differences(config)
    if different:
        warnings.warn(f"{path}: {different}", PartialModelWarning, stacklevel=3)
    if config.bidirectional and not (config.dense_dim or config.embedding_dim):
        warnings.warn(
            f"{path}: loaded without the products after the mean (2_Dense, "
            "3_Dense), which it does not hold: its vectors are not those of "
            "EmbeddingGemma as published",
            PartialModelWarning,
            stacklevel=3,
        )
    return Loaded(engine, tokenizer, info, report)


def describe_differences(config: _core.ModelConfig) -> str:
    """Says in one line how a model differs from the published one that has as
    many layers, heads and hidden values; "" if there is none, or nothing
    differs.
    """
    name, fields = _core.compare_with_named(config)
    found = [
        f"{field}{'' if layer is None else f' of layer {layer}'} is {value}, "
        f"expected {expected}"
        for field, layer, value, expected in fields
    ]
    if not found:
        return ""
    return f"the model looks like {name}, but: " + "; ".join(found)


def _load_folder(
    path: str,
    model: ModelFolder,
    how: _How,
) -> tuple[_core.Engine, Tokenizer | None]:
    # What is soon read goes first: weights may take minutes.
    tokenizer = tokenizer_of_folder(
        Path(path),
        may_add_eos=model.config.bidirectional,
        rows=model.config.vocab_size,
    )
    model.check_tied_head()
    engine = _core.Engine.load_files(
        model.config,
        os.fsencode(path),
        [os.fsencode(file) for file in model.files],
        model.places,
        *how,
    )
    give_tokenizer(engine, tokenizer)
    return engine, tokenizer


def warn_of_parts(source: str, left_out: list[str], stacklevel: int) -> None:
    """Warns of tensors of parts that a model was loaded without, if any."""
    if left_out:
        warnings.warn(
            f"{source}: loaded without {describe_parts(left_out)}",
            PartialModelWarning,
            stacklevel,
        )


def _packed_report(engine: _core.Engine) -> PackedWeights:
    state, file, reason = engine.packed_report
    nbytes = 0
    with contextlib.suppress(OSError):
        nbytes = os.path.getsize(file) if file else 0
    return PackedWeights(state, file or None, reason or None, nbytes)


def _load_gguf(
    path: str,
    file: _core.GgufFile,
    how: _How,
) -> tuple[_core.Engine, Tokenizer | None]:
    # The core finds out at once whether it reads a tokenizer; the others are
    # read before the weights, which may take minutes.
    if _core.has_merges(file):
        tokenizer = tokenizer_of_gguf(path, file)
        engine = _core.Engine.load_gguf(os.fsencode(path), *how)
        give_tokenizer(engine, tokenizer)
    else:
        engine, tokenizer = _load_both(path, file, how)
        if tokenizer is not None:
            _check_vocab_size(tokenizer, engine)
    return engine, tokenizer


def _load_both(
    path: str,
    file: _core.GgufFile,
    how: _How,
) -> tuple[_core.Engine, Tokenizer | None]:
    """Weights, and a tokenizer of SentencePiece, which another thread makes
    meanwhile. The one that is done first checks weights, which their first use
    would have to.
    """
    found: Future[Tokenizer | None] = Future()

    def make_tokenizer() -> None:
        try:
            found.set_result(pieces_of_gguf(file))
        except BaseException as error:
            found.set_exception(error)

    helper = threading.Thread(target=make_tokenizer, name="gemmakv-load")
    try:
        helper.start()
    except RuntimeError:  # the system has no thread
        make_tokenizer()
    try:
        engine = _core.Engine.load_gguf(os.fsencode(path), *how)
        while not found.done() and engine.check_ahead(_CHECK_S):
            pass
    finally:
        if helper.ident is not None:
            helper.join()
    return engine, found.result()


def give_tokenizer(
    engine: _core.Engine, tokenizer: Tokenizer | None
) -> None:
    """Tells an engine that has not read it what the text of each token is.
    Raises MismatchError for the tokenizer of another model.
    """
    if tokenizer is not None:
        _check_vocab_size(tokenizer, engine)
        engine.set_token_bytes(tokenizer.token_bytes)


def _check_vocab_size(tokenizer: Tokenizer, engine: _core.Engine) -> None:
    """Raises MismatchError if text has tokens without rows in the embedding.

    Tokens may be without that no text becomes: those of control, and all that
    the tokenizer of the model's own file leaves out. Embeddings may be padded
    to more rows.
    """
    rows = engine.config.vocab_size
    if tokenizer.vocab_size > rows and any(tokenizer.token_bytes[rows:]):
        raise MismatchError(
            f"tokenizer: found {tokenizer.vocab_size} tokens, expected at "
            f"most the model's {rows}"
        )
