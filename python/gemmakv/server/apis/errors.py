"""How each API says what is wrong, and the handlers that answer so."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Scope

from gemmakv.server.apis.call import CALL, Call, JsonResponse
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.prompts import TOO_LONG


class ErrorBody(BaseModel):
    """The error in an answer, in the form of one API."""

    model_config = ConfigDict(extra="allow")


class OpenAIErrorFields(ErrorBody):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: OpenAIErrorFields


class AnthropicErrorFields(ErrorBody):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: str = "error"
    error: AnthropicErrorFields
    request_id: str


class OllamaError(BaseModel):
    error: str


class LlamaErrorFields(ErrorBody):
    code: int
    message: str
    type: str


class LlamaError(BaseModel):
    error: LlamaErrorFields


_OPENAI_TYPES = {
    401: "authentication_error", 403: "permission_error",
    408: "timeout_error", 429: "rate_limit_error", 500: "server_error",
    503: "server_error",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error",
    403: "permission_error", 404: "not_found_error", 405: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip
_LLAMA_TYPES = {
    401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 503: "unavailable_error", 500: "server_error",
}  # fmt: skip
_OVERLOADED = 529  # Anthropic's status for 503
_ANY = "invalid_request_error"


def openai_error(error: RequestError) -> OpenAIError:
    fields = OpenAIErrorFields(
        message=error.message,
        type=_OPENAI_TYPES.get(error.status, _ANY),
        param=error.param,
        code=error.code,
        **error.more,
    )
    return OpenAIError(error=fields)


def anthropic_error(error: RequestError, request_id: str) -> AnthropicError:
    kind = _ANTHROPIC_TYPES.get(error.status, _ANY)
    fields = AnthropicErrorFields(
        type=kind, message=error.message, **error.more
    )
    return AnthropicError(error=fields, request_id=request_id)


def ollama_error(error: RequestError) -> OllamaError:
    return OllamaError(error=error.message)


def llama_error(error: RequestError) -> LlamaError:
    kind = _LLAMA_TYPES.get(error.status, _ANY)
    if error.code == TOO_LONG:
        kind = "exceed_context_size_error"
    fields = LlamaErrorFields(
        code=error.status, message=error.message, type=kind, **error.more
    )
    return LlamaError(error=fields)


def error_model(path: str) -> type[BaseModel]:
    """Gives the model of the errors of a route."""
    if path.startswith("/v1/messages"):
        return AnthropicError
    if path.startswith("/v1/"):
        return OpenAIError
    return OllamaError if path.startswith("/api/") else LlamaError


def error_response(scope: Scope, error: RequestError) -> Response:
    """Makes the answer to a request that is refused, in the form of its API."""
    call: Call = scope[CALL]
    call.rename(error)
    call.reject(error)
    status, model = error.status, error_model(scope["path"])
    content: Any
    if model is AnthropicError or "anthropic-version" in call.headers:
        content = anthropic_error(error, call.request_id)
        status = _OVERLOADED if status == 503 else status
    elif model is OpenAIError:
        content = openai_error(error)
    elif model is OllamaError:
        content = ollama_error(error)
    else:
        content = llama_error(error)
    return JsonResponse(content, status, _headers(error))


def _headers(error: RequestError) -> dict[str, str]:
    found = {}
    if error.retry_after is not None:
        found["retry-after"] = str(error.retry_after)
    elif error.status in (408, 503):
        found["x-should-retry"] = "false"
    if error.status == 401:
        found["www-authenticate"] = "Bearer"
    if error.code == "ambiguous_length":  # what follows may be a part of it
        found["connection"] = "close"
    return found
