"""Vectors of texts: OpenAI's embeddings and Ollama's."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gemmakv.server.apis.http import Call
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.requests import EmbedRequest

_TEXTS = 2048  # the original's limit
_FORMATS = ("float", "base64")


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """`prompt` is ours: a name of the model's, or a text with {text}."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None
    prompt: str | None = None


class Embedding(msgspec.Struct):
    """`embedding`: numbers, or base64 of their float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddings(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingBody(msgspec.Struct, kw_only=True):
    model: str
    prompt: str | None = None


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


async def embeddings(call: Call) -> None:
    body, _ = await call.json(EmbeddingsBody)
    call.check_model(body.model)
    _require(call)
    kind = body.encoding_format or "float"
    if kind not in _FORMATS:
        raise invalid(
            "encoding_format",
            f"expected {' or '.join(_FORMATS)}, found {kind[:40]!r}",
        )
    vectors, tokens = await call.chat.embed(
        EmbedRequest(
            tenant=call.owner,
            texts=_texts(body.input),
            dim=body.dimensions,
            prompt=body.prompt,
            names={"texts": "input", "dim": "dimensions"},
            arrived=call.arrived,
        )
    )
    await call.answer(
        EmbeddingList(
            [
                Embedding(index, _encoded(vector, kind))
                for index, vector in enumerate(vectors)
            ],
            call.name,
            EmbeddingUsage(tokens, tokens),
        )
    )


async def ollama_embed(call: Call) -> None:
    body, _ = await call.json(OllamaEmbedBody)
    call.check_model(body.model)
    _require(call)
    given = body.input
    texts: list[str] = [given] if isinstance(given, str) else given or []
    # What only has the model loaded.
    if not texts or given == "":
        await call.answer(OllamaEmbeddings(body.model, []))
        return
    vectors, tokens = await call.chat.embed(
        EmbedRequest(
            tenant=call.owner,
            texts=_limited(texts),
            dim=body.dimensions,
            truncate=body.truncate is not False,
            names={"texts": "input", "dim": "dimensions"},
            arrived=call.arrived,
        )
    )
    await call.answer(
        OllamaEmbeddings(
            body.model,
            vectors.tolist(),
            total_duration=int(1e9 * (time.monotonic() - call.arrived)),
            prompt_eval_count=tokens,
        )
    )


async def ollama_embeddings(call: Call) -> None:
    body, _ = await call.json(OllamaEmbeddingBody)
    call.check_model(body.model)
    _require(call)
    if not body.prompt:
        await call.answer(OllamaEmbedding([]))
        return
    vectors, _ = await call.chat.embed(
        EmbedRequest(
            tenant=call.owner,
            texts=[body.prompt],
            truncate=True,
            names={"texts[0]": "prompt"},
            arrived=call.arrived,
        )
    )
    await call.answer(OllamaEmbedding(vectors[0].tolist()))


def _require(call: Call) -> None:
    if call.chat.gemma.config.bidirectional:
        return
    raise RequestError(
        400,
        f"model: expected one that gives embeddings, found {call.name!r}, "
        "which writes text",
        param="model",
        code="model_not_supported",
    )


def _texts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """One text or several, as such or as token ids."""
    if isinstance(given, str):
        return [given]
    kinds = {type(entry) for entry in given}
    if kinds == {int}:
        return [given]
    if len(kinds) > 1:
        raise invalid(
            "input", "expected texts or token ids, found both in one list"
        )
    return _limited(given)


def _limited(texts: Sequence[Any]) -> Sequence[Any]:
    if not 1 <= len(texts) <= _TEXTS:
        raise invalid(
            "input", f"expected 1 to {_TEXTS} texts, found {len(texts)}"
        )
    return texts


def _encoded(
    vector: npt.NDArray[np.float32], kind: str
) -> list[float] | str:
    if kind == "float":
        floats: list[float] = vector.tolist()
        return floats
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
