"""The files of the page at /, over HTTP. What a browser makes of them is in
test_page.py: while Playwright runs, its thread has a loop that these need.
"""

from __future__ import annotations

import re
from importlib import resources

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import get, in_loop, make_app, post

FILES = {
    one.name: one.read_text("utf-8")
    for one in resources.files("gemmakv.server").joinpath("page").iterdir()
}
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def test_files_need_no_key(keyed: App, shared: gemmakv.Gemma) -> None:
    loading = make_app(shared)
    loading.service = None
    for app in (keyed, loading):
        for path in ("/", *(f"/page/{name}" for name in FILES)):
            answer = get(app, path)
            assert answer.status_code == 200
            assert answer.text == FILES[path.rpartition("/")[2] or "index.html"]
    assert get(keyed, "/v1/models").status_code == 401


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_headers(kept: App, path: str, kind: str) -> None:
    answer = get(kept, path)
    assert answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    tag = answer.headers["etag"]
    for asked in (tag, f'"x", W/{tag}', "*"):
        again = get(kept, path, **{"if-none-match": asked})
        assert again.status_code == 304 and not again.content
        assert again.headers["etag"] == tag
        assert again.headers["content-security-policy"] == policy
    assert get(kept, path, **{"if-none-match": '"x"'}).text == answer.text
    head = in_loop(kept, lambda http: http.head(path))
    assert head.status_code == 200 and not head.content
    assert head.headers["content-length"] == str(len(answer.content))
    assert post(kept, path, {}).status_code == 405


def test_no_page(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, page=False)
    assert get(app, "/").text == "gemmakv is running\n"
    assert get(app, "/page/main.js").status_code == 404


def test_files_keep_the_policy() -> None:
    """Nothing inline, nothing of other sites, no markup made of texts."""
    index = FILES["index.html"]
    assert not re.search(
        r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", index
    )
    for name, text in FILES.items():
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[\w-]+\.\w", text), name
    for name in SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b"
            r"|DOMParser|new Function|setAttribute\(.style",
            FILES[name],
        ), name
    assert "main.js" in FILES and "page.css" in FILES


def test_what_it_asks_for_is_there() -> None:
    paths = re.findall(r'(?:src|href)="(page/[^"]+)"', FILES["index.html"])
    paths += [
        "page/" + one
        for name in SCRIPTS
        for one in re.findall(r'from "\./([^"]+)"', FILES[name])
    ]
    assert len(set(paths)) == len(FILES) - 1
    assert {path.removeprefix("page/") for path in paths} <= FILES.keys()
    ids = set(re.findall(r'\bid="([^"]+)"', FILES["index.html"]))
    for name in SCRIPTS:
        wanted = set(re.findall(r'\$\("([^"]+)"\)', FILES[name]))
        assert wanted <= ids, name
