"""The page at /, and the files that it is made of. They hold no secret."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from importlib import resources

from gemmakv.server.apis.http import Call
from gemmakv.server.service.errors import RequestError

FOLDER = "/page/"
_INDEX = "index.html"
_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing of other sites, nothing that stands in the page or in a text, and no
# text that becomes markup.
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


async def index(call: Call) -> None:
    if call.settings.page:
        await _answer(call, _INDEX)
    else:  # some clients look whether anything is here
        await call.answer("gemmakv is running\n")


async def file(call: Call) -> None:
    await _answer(call, call.scope["path_params"]["file"])


async def _answer(call: Call, name: str) -> None:
    found = _files().get(name) if call.settings.page else None
    if found is None:
        raise RequestError(
            404, f"page: there is no file {name[:60]!r}", code="not_found"
        )
    asked = call.headers.get("if-none-match", "")
    tags = [tag.strip().removeprefix("W/") for tag in asked.split(",")]
    if found.headers["etag"] in tags or "*" in tags:
        await call.answer("", 304, found.headers)
    else:
        await call.answer(found.text, headers=found.headers)


@functools.cache
def _files() -> dict[str, _File]:
    """Of the package's folder `page`, by name. What is not in it by name
    cannot be asked for.
    """
    found = {}
    for one in resources.files("gemmakv.server").joinpath("page").iterdir():
        kind = _KINDS.get(one.name.rpartition(".")[2])
        if kind is None:
            continue
        data = one.read_bytes()
        tag = hashlib.sha256(data).hexdigest()[:32]
        found[one.name] = _File(
            data.decode("utf-8"),
            {**_HEADERS, "content-type": kind, "etag": f'"{tag}"'},
        )
    return found
