"""The request that a route answers, and the JSON of answers."""

from __future__ import annotations

import dataclasses
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic_core
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from gemmakv.errors import brief
from gemmakv.server.apis.fields import Body
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.requests import ChatRequest, Tenant
from gemmakv.server.settings import Settings

CALL = "gemmakv.call"  # in a scope: its `Call`
_HEADER_BYTES = 1_000  # of a list of fields
_IN_HEADERS = ".[]$_~/-"  # beside letters and digits


def to_json(content: Any) -> bytes:
    """Writes JSON of anything that pydantic knows. Numbers that are not finite
    become null.
    """
    return pydantic_core.to_json(content, inf_nan_mode="null")


class JsonResponse(Response):
    """A response with the JSON of anything that pydantic knows."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


@dataclasses.dataclass
class Call:
    """A request and its answer. A middleware makes it before the route is
    known, and the route gets it as a dependency.

    Attributes:
      request_id: the id of the request in answers, logs and errors.
      running: the service, or None while the model is loaded.
      tenant: who sent the request; None before that is known.
      arrived: time.monotonic() when the request came.
      status: the status of the answer; 0 before it began.
      names: the client's names for fields, by the library's.
      ignored: the fields that are ignored.
      request: the request to the model, once that is known.
      error: why it failed, also after the answer began; None if it did not.
    """

    scope: Scope
    settings: Settings
    headers: Headers
    request_id: str
    running: ChatService | None = None
    tenant: Tenant | None = None
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    status: int = 0
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Sequence[str] = ()
    request: ChatRequest | None = None
    error: RequestError | None = None

    @property
    def service(self) -> ChatService:
        """The service. Raises RequestError while the model is loaded."""
        if self.running is None:
            raise loading()
        return self.running

    @property
    def owner(self) -> Tenant:
        """The tenant, on routes that ask for a key."""
        assert self.tenant is not None
        return self.tenant

    def owner_of(self, salt: str | None) -> Tenant:
        """Gives the tenant with the part of the cache for a request's salt."""
        return self.owner.narrow(salt)

    @property
    def served(self) -> list[str]:
        """The model's names, without *, which stands for any name."""
        names = dict.fromkeys(self.settings.served_model_name)
        return [name for name in names if name != "*"] or list(names)

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.served[0]

    def check_model(self, name: str | None) -> None:
        """Raises RequestError for a model that is not served."""
        names = self.settings.served_model_name
        if name is None or name in names or "*" in names:
            return
        if name.endswith(":latest") and name[: -len(":latest")] in names:
            return
        raise RequestError(
            404,
            f"model: {brief(name)} is not served here, expected "
            + " or ".join(names),
            param="model",
            code="model_not_found",
        )

    def takes(self, body: Body) -> None:
        """Notes the fields of a body that are ignored. Raises RequestError for
        a field that asks for what the server does not do.
        """
        self.ignored = body.ignored()

    def more_headers(self) -> dict[str, str]:
        """Gives the headers of the answer that name fields of the request."""
        found = {}
        if self.ignored:
            found["x-gemmakv-ignored"] = _listed(self.ignored)
        left_out = self.request.not_enforced if self.request else ()
        if left_out and self.status < 400:
            found["x-gemmakv-not-enforced"] = _listed(
                [self.name_of(path) for path in left_out]
            )
        return found

    def name_of(self, path: str) -> str:
        """Gives the client's name of a field, or of a part of one."""
        ours = max(
            (one for one in self.names if _leads(one, path)),
            key=len,
            default=None,
        )
        if ours is None:
            return path
        return self.names[ours] + path[len(ours) :]

    def rename(self, error: RequestError) -> None:
        """Makes an error name the field that the client wrote."""
        if not error.param:
            return
        name = self.name_of(error.param)
        if error.message.startswith(error.param):
            error.message = name + error.message[len(error.param) :]
        error.param = name

    def reject(self, error: RequestError) -> None:
        """Counts a request that is refused, and keeps why for the log."""
        self.error = error
        if self.running is not None:
            reason = error.code or str(error.status)
            self.running.counts.rejected.labels(reason=reason).inc()


def call_of(request: Request) -> Call:
    """Gives the call of a request: the dependency of all routes."""
    call: Call = request.scope[CALL]
    return call


CallDep = Annotated[Call, Depends(call_of)]


def loading() -> RequestError:
    """Makes the error of a request that comes while the model is loaded."""
    return RequestError(
        503, "Loading model", code="model_loading", retry_after=2
    )


def _leads(name: str, path: str) -> bool:
    """Says whether a path is that of a field, or of a part of it."""
    return path == name or path.startswith((name + ".", name + "["))


def _listed(paths: Sequence[str]) -> str:
    """Lists as many fields as a header has room for. Characters that it
    cannot hold are written as in a URL.
    """
    shown: list[str] = []
    room = _HEADER_BYTES
    for path in paths:
        one = urllib.parse.quote(path, _IN_HEADERS)
        room -= len(one) + 2
        if room < 0:
            shown.append(f"{len(paths) - len(shown)} more")
            break
        shown.append(one)
    return ", ".join(shown)
