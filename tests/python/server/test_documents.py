"""What the pages for operators name is there: metrics, flags, variables."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gemmakv.server.apis.page import FOLDER
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, post
from support.command import RunCli

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("clients.md", "deployment.md", "http-api.md", "server.md")
# Of other programs.
FOREIGN = {
    "--auth-type", "--cpus", "--cpuset-cpus", "--create-home", "--find-links",
    "--from",
    "--home-dir", "--interval", "--memory", "--no-cache-dir", "--no-deps",
    "--no-stream", "--now", "--openai-api-key", "--openai-base-url",
    "--provider", "--rm", "--schema", "--shm-size",
    "--skip-git-repo-check", "--start-period", "--stop-timeout", "--system",
    "--timeout", "--uid", "--unix-socket",
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
METRIC = re.compile(r"\bgemmakv_[a-z_]+")
SERIES = re.compile(r"(gemmakv_\w+)(?:\{(.*)\})? \S+")
GROUPED = re.compile(r"by \(([^)]*)\)\s*\(.*?(gemmakv_[a-z_]+)")


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def expressions() -> list[str]:
    board = json.loads(page("grafana-dashboard.json"))
    return [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.fixture
def labels(app: App) -> dict[str, set[str]]:
    """The labels of each metric that has counted."""
    body: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 2}
    for _ in range(2):
        assert post(app, "/v1/chat/completions", body).status_code == 200
    refused = {**body, "audio": {"voice": "a"}}
    assert post(app, "/v1/chat/completions", refused).status_code == 400
    text = get(app, "/metrics").text
    found: dict[str, set[str]] = {
        name: set() for name in re.findall(r"# TYPE (\S+)", text)
    }
    for name, said in SERIES.findall(text):
        names = set(re.findall(r"(\w+)=", said))
        found.setdefault(name, set()).update(names)
    return found


def test_metrics_are_served(labels: dict[str, set[str]]) -> None:
    exprs = expressions()
    named = set(METRIC.findall("\n".join([*exprs, page("deployment.md")])))
    assert len(named) > 15
    assert named <= set(labels)
    shown = set(METRIC.findall("\n".join(exprs)))
    base = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    kinds = {re.sub("_(bucket|sum|count)$", "", name) for name in labels}
    assert base == kinds, "the dashboard leaves none out"
    assert kinds <= named, "nor does the table"


def test_dashboard_groups_by_labels_that_exist(
    labels: dict[str, set[str]],
) -> None:
    checked = 0
    for expr in expressions():
        for by, name in GROUPED.findall(expr):
            if labels[name]:  # it has counted
                assert {by} <= labels[name], expr
                checked += 1
    assert checked > 10


@pytest.fixture(scope="module")
def known_flags(cli: RunCli) -> set[str]:
    """The flags that `gemmakv serve --help` names."""
    found = set(FLAG.findall(cli("serve", "--help").stdout.decode()))
    assert "--max-queue" in found
    return found


def test_flags_are_known(known_flags: set[str], cli: RunCli) -> None:
    others = set(FLAG.findall(cli("info", "--help").stdout.decode()))
    for name in PAGES:
        named = set(FLAG.findall(page(name)))
        assert named & known_flags, name
        assert named - known_flags - others <= FOREIGN, name


def test_variables_and_keys_are_known(known_flags: set[str]) -> None:
    text = page("deployment.md")
    # Those of the build are named with pip's -C.
    variables = set(re.findall(r"(?<!define\.)\bGEMMAKV_[A-Z_]+", text))
    assert len(variables) > 4
    toml = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert toml is not None
    keys = set(tomllib.loads(toml[1]))
    keys |= {v.removeprefix("GEMMAKV_").lower() for v in variables}
    assert {"--" + key.replace("_", "-") for key in keys} <= known_flags


def test_every_route_is_in_the_reference(app: App) -> None:
    text = page("http-api.md")
    for path in app.openapi()["paths"]:
        named = re.sub(r"\{\w+\}", "[A-Z]+", path)
        found = re.search(f"`([A-Z]+ )?{named}`", text)
        assert found or path.startswith(FOLDER), path
