"""The routes of embeddings, OpenAI's and Ollama's."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Body, Whole
from gemmakv.server.apis.routing import router
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.requests import EmbedRequest

ROUTER = router()
_TEXTS = 2048  # the original's limit
_NAMES = {"texts": "input", "dim": "dimensions"}

Format = Literal["float", "base64"]


class EmbeddingsBody(Body):
    """`prompt` is ours: a name of the model's, or a text with {text}. Token
    ids are plain integers: there may be very many.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: Whole | None = None
    encoding_format: Format | None = None
    prompt: str | None = None


class Embedding(TypedDict):
    """`embedding`: numbers, or base64 of their float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class OllamaEmbedBody(Body):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Whole | None = None


class EmbedResponse(TypedDict):
    """Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsBody(Body):
    model: str
    prompt: str | None = None


class EmbeddingsResponse(TypedDict):
    embedding: list[float]


@ROUTER.post(
    "/v1/embeddings",
    response_model=CreateEmbeddingResponse,
    summary="OpenAI's embeddings, which a model that writes text refuses",
)
async def embeddings(call: CallDep, body: EmbeddingsBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    _check_embeds(call)
    call.names = _NAMES
    vectors, tokens = await call.service.embed(
        EmbedRequest(
            tenant=call.owner,
            texts=_texts(body.input),
            dim=body.dimensions,
            prompt=body.prompt,
            arrived=call.arrived,
        )
    )
    form = body.encoding_format or "float"
    found: CreateEmbeddingResponse = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(vector, form),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": body.model or call.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JsonResponse(found)


@ROUTER.post(
    "/api/embed",
    response_model=EmbedResponse,
    summary="Ollama's embeddings, which a model that writes text refuses",
)
async def ollama_embed(call: CallDep, body: OllamaEmbedBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    _check_embeds(call)
    call.names = _NAMES
    given = body.input
    texts: list[str] = [given] if isinstance(given, str) else given or []
    found: EmbedResponse = {
        "model": body.model,
        "embeddings": [],
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": 0,
    }
    if texts and given != "":  # the others only have the model loaded
        vectors, found["prompt_eval_count"] = await call.service.embed(
            EmbedRequest(
                tenant=call.owner,
                texts=_limited(texts),
                dim=body.dimensions,
                truncate=body.truncate is not False,
                arrived=call.arrived,
            )
        )
        found["embeddings"] = vectors.tolist()
        found["total_duration"] = int(1e9 * (time.monotonic() - call.arrived))
    return JsonResponse(found)


@ROUTER.post(
    "/api/embeddings",
    response_model=EmbeddingsResponse,
    summary="Their former form, of one text",
)
async def ollama_embeddings(
    call: CallDep, body: OllamaEmbeddingsBody
) -> Response:
    call.takes(body)
    call.check_model(body.model)
    _check_embeds(call)
    call.names = {"texts[0]": "prompt"}
    found: EmbeddingsResponse = {"embedding": []}
    if body.prompt:
        vectors, _ = await call.service.embed(
            EmbedRequest(
                tenant=call.owner,
                texts=[body.prompt],
                truncate=True,
                arrived=call.arrived,
            )
        )
        found["embedding"] = vectors[0].tolist()
    return JsonResponse(found)


def _check_embeds(call: Call) -> None:
    """Raises RequestError for a model that makes no embeddings."""
    if call.service.gemma.config.bidirectional:
        return
    raise RequestError(
        400,
        f"model: expected one that gives embeddings, found {call.model!r}, "
        "which writes text",
        param="model",
        code="model_not_supported",
    )


def _texts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """Gives the texts of a request, each as such or as token ids."""
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
    vector: npt.NDArray[np.float32], form: Format
) -> list[float] | str:
    if form == "float":
        floats: list[float] = vector.tolist()
        return floats
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
