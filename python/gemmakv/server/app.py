"""The application: the routes of all APIs, and what requests go through."""

from __future__ import annotations

import difflib
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from gemmakv.server.apis import ROUTERS
from gemmakv.server.apis.errors import error_model, error_response
from gemmakv.server.apis.fields import invalid_field
from gemmakv.server.apis.page import FOLDER
from gemmakv.server.apis.routing import OPEN_TAG, BadBody
from gemmakv.server.middleware import (
    AuthenticationMiddleware,
    DisconnectMiddleware,
    GuardMiddleware,
    LoggingMiddleware,
)
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError
from gemmakv.server.settings import Settings

OPENAPI = "/openapi.json"
_ABOUT = """\
One model over HTTP. Bodies are JSON objects; null is as good as absent, and
fields that no API knows are ignored. `Authorization: Bearer KEY` or `x-api-key`
says whose a request is, where the server has keys. The routes of OpenAI,
Anthropic, Ollama and llama-server read and answer what these APIs do.
"""
_SLASHES = re.compile("//+")
_VERSIONS = re.compile("^/(?:v1/+)+")
_LONGEST_PATH = 60  # characters of a path that is compared with the routes
# Programs on the user's own machine, whose pages may use the server.
_OWN_ORIGINS = re.compile(
    r"https?://(localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(:\d+)?"
    r"|(app|file|tauri|vscode-webview|vscode-file)://.*"
)
_EXPOSED = (
    "x-request-id", "retry-after", "x-should-retry", "x-gemmakv-ignored",
    "x-gemmakv-not-enforced",
)  # fmt: skip


class App(FastAPI):
    """The application of one server.

    Attributes:
      settings: what the operator decided.
      service: the model's; None while the model is loaded.
    """

    def __init__(
        self,
        settings: Settings,
        service: ChatService | None = None,
    ) -> None:
        super().__init__(
            title="gemmakv",
            version="1",
            description=_ABOUT,
            openapi_url=OPENAPI,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            generate_unique_id_function=_operation_id,
            exception_handlers={
                RequestError: _answer_error,
                BadBody: _answer_bad_body,
                RequestValidationError: _answer_invalid,
                HTTPException: self._answer_no_route,
            },
        )
        self.settings = settings
        self.service = service
        for one in ROUTERS:
            self.include_router(one)
        self._routes = [
            route
            for router in ROUTERS
            for route in router.routes
            if isinstance(route, APIRoute)
        ]
        self._exact = {
            route.path for route in self._routes if "{" not in route.path
        } | {OPENAPI}
        self._patterns = [
            route.path_regex for route in self._routes if "{" in route.path
        ]
        open_paths = {
            route.path for route in self._routes if OPEN_TAG in route.tags
        } | {OPENAPI}
        self.add_middleware(DisconnectMiddleware)
        self.add_middleware(
            AuthenticationMiddleware, open_paths=open_paths, folder=FOLDER
        )
        self.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_origin_regex=_OWN_ORIGINS.pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            allow_private_network=True,
        )
        self.add_middleware(GuardMiddleware, site=self, allows=self._allows)
        self.add_middleware(LoggingMiddleware, site=self)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of all routes."""
        if self.openapi_schema is None:
            found = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
            )
            _add_security_and_errors(found)
            self.openapi_schema = found
        return self.openapi_schema

    def route_path(self, path: str) -> str:
        """Gives the path of the route that a path means. The path may have
        slashes that come twice or at the end, and /v1 twice or not at all.
        Other paths, and those of the page's files, stay as they are.
        """
        if path in self._exact or path.startswith(FOLDER):
            return path
        if path[-1:] != "/" and self._matches(path):
            return path
        outer = "/" + path.strip("/")  # names of models may have slashes
        for whole in (outer, _SLASHES.sub("/", outer)):
            whole = _VERSIONS.sub("/v1/", whole)
            for found in (whole, "/v1" + whole):
                if found in self._exact or self._matches(found):
                    return found
        return path

    def _matches(self, path: str) -> bool:
        """Whether a path is that of a route whose path has parameters."""
        return any(pattern.match(path) for pattern in self._patterns)

    def _allows(self, origin: str) -> bool:
        allowed = self.settings.cors_origin
        return (
            "*" in allowed
            or origin in allowed
            or _OWN_ORIGINS.fullmatch(origin) is not None
        )

    async def _answer_no_route(
        self, request: Request, error: Exception
    ) -> Response:
        """Answers what no route takes."""
        assert isinstance(error, HTTPException)
        scope = request.scope
        words, code = "no such route", "not_found"
        headers = {}
        if error.status_code == 404:
            words += self._nearest(scope["path"])
        else:
            allowed = ", ".join(self._methods(scope))
            words, code = f"expected {allowed}", "method_not_allowed"
            headers["allow"] = allowed
        method, path = scope["method"], scope["path"][:100]
        response = error_response(
            scope,
            RequestError(
                error.status_code, f"{method} {path}: {words}", code=code
            ),
        )
        response.headers.update(headers)
        return response

    def _methods(self, scope: Scope) -> list[str]:
        """Lists the methods of all routes with a path."""
        found = {
            method
            for route in self._routes
            if route.matches(scope)[0] is not Match.NONE
            for method in route.methods or ()
        }
        return sorted(found | ({"HEAD"} if "GET" in found else set()))

    def _nearest(self, path: str) -> str:
        """Names the route whose path is most like one that no route has; if
        none is like it, the list of all routes.
        """
        tried = path[:_LONGEST_PATH].lower()
        known = sorted(one for one in self._exact if one != "/")
        found = difflib.get_close_matches(tried, known, 1)
        if not found:
            return f", GET {OPENAPI} lists them all"
        [nearest] = found
        methods = [
            method
            for route in self._routes
            if route.path == nearest
            for method in route.methods or ()
        ]
        return f", the nearest is {' and '.join(methods)} {nearest}"


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request.scope, error)


async def _answer_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return error_response(request.scope, error.error)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    document = error.body
    if any(one["loc"][0] == "query" for one in error.errors()):
        document = dict(request.query_params)
    return error_response(
        request.scope, invalid_field(error.errors(), document)
    )


def _operation_id(route: APIRoute) -> str:
    path = re.sub(r"\{(\w+)(?::\w+)?\}", r"\1", route.path)
    words = re.findall(r"\w+", path)
    method = next(iter(route.methods or ()))
    return "_".join([method.lower(), *words])


def _add_security_and_errors(document: dict[str, Any]) -> None:
    """Says in an OpenAPI document what all routes have in common."""
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        model = error_model(path)
        if model.__name__ not in schemas:
            schema = model.model_json_schema(
                ref_template="#/components/schemas/{model}"
            )
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        ref = {"$ref": f"#/components/schemas/{model.__name__}"}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "What is wrong, and with which field",
                "content": {"application/json": {"schema": ref}},
            }
            open_to_all = OPEN_TAG in operation.pop("tags", ())
            operation["security"] = (
                [] if open_to_all else [{}, {"bearer": []}, {"key": []}]
            )
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }


__all__ = ["OPENAPI", "App"]
