"""The page at /, and the files that it is made of. They hold no secret."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from importlib import resources

from starlette.responses import PlainTextResponse, Response

from gemmakv.server.apis.call import Call, CallDep
from gemmakv.server.apis.routing import OPEN, router
from gemmakv.server.service.errors import RequestError

FOLDER = "/page/"
ROUTER = router(**OPEN)
_INDEX = "index.html"
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page loads nothing from other sites, runs no code that is inside markup,
# and makes no markup of texts.
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",  # it is asked for again, by its ETag
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclasses.dataclass(frozen=True)
class _File:
    text: str
    headers: dict[str, str]


@ROUTER.get("/", summary="A page to chat, in a browser")
async def index(call: CallDep) -> Response:
    if call.settings.page:
        return _answer(call, _INDEX)
    # Some clients look whether anything is here.
    return PlainTextResponse("gemmakv is running\n")


@ROUTER.get(
    FOLDER + "{file}", summary="What the page is made of: styles, scripts"
)
async def page_file(call: CallDep, file: str) -> Response:
    return _answer(call, file)


def _answer(call: Call, name: str) -> Response:
    found = _files().get(name) if call.settings.page else None
    if found is None:
        raise RequestError(
            404, f"page: there is no file {name[:60]!r}", code="not_found"
        )
    asked = call.headers.get("if-none-match", "")
    tags = [tag.strip().removeprefix("W/") for tag in asked.split(",")]
    if found.headers["etag"] in tags or "*" in tags:
        return Response(status_code=304, headers=found.headers)
    return Response(found.text, headers=found.headers)


@functools.cache
def _files() -> dict[str, _File]:
    """Reads the files of the package's folder `page`, by name. No request
    reaches another file.
    """
    found = {}
    for one in resources.files("gemmakv.server").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(one.name.rpartition(".")[2])
        if media_type is None:
            continue
        data = one.read_bytes()
        tag = hashlib.sha256(data).hexdigest()[:32]
        found[one.name] = _File(
            data.decode("utf-8"),
            {**_HEADERS, "content-type": media_type, "etag": f'"{tag}"'},
        )
    return found
