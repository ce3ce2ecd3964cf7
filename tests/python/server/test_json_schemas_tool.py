"""tools/json_schemas.py: where it finds schemas, and what it makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support.tools import tool

pytest.importorskip("llguidance", reason="the extra `grammar` is not there")
pytest.importorskip("jsonschema")
pytest.importorskip("pydantic")

json_schemas = tool("json_schemas")
MODULE = """
import msgspec, pydantic, typing, typing_extensions
class Plain: pass
class Wire(msgspec.Struct):
    city: typing.Literal["Rome", "Oslo"]
class Model(pydantic.BaseModel):
    days: typing.Literal[1, 2]
class Param(typing_extensions.TypedDict):
    wet: bool
"""
RAIN = {"type": "object", "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "some_types_of_a_test"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(MODULE)
    (folder / "__main__.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize("params, expected", [
    (False, {"Wire", "Model"}), (True, {"Wire", "Model", "Param"}),
])  # fmt: skip
def test_types(package: str, params: bool, expected: set[str]) -> None:
    found = {
        name.rpartition(".")[2]: schema
        for name, schema, _ in json_schemas.of_types([package], params)
    }
    assert found.keys() == expected
    assert "Rome" in json.dumps(found["Wire"])


def test_files(tmp_path: Path) -> None:
    files = {
        "tools.json": {"tools": [
            {"name": "rain", "description": "x", "inputSchema": RAIN},
            {"type": "function", "function": {
                "name": "snow", "parameters": RAIN}},
        ]},
        "schema.json": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "string"},
        "none.json": {"type": "object", "properties": {"a": "text"}},
        "broken.json": "{",
    }  # fmt: skip
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name).write_text(text)
    found = dict(
        (name, schema)
        for name, schema, _ in json_schemas.of_files(sorted(tmp_path.iterdir()))
    )
    assert found["schema.json"]["type"] == "string"
    names = {name.rpartition(".")[2] for name in found}
    assert {"rain", "snow"} <= names
    assert not any(name.startswith(("none", "broken")) for name in found)


@pytest.mark.parametrize("schema, count", [
    (RAIN, "outputs"), ({"type": "object", "not": {}}, "refused"),
])  # fmt: skip
def test_outputs_validate(
    shared: gemmakv.Gemma, schema: Any, count: str
) -> None:
    report = json_schemas.Report(False)
    json_schemas.Checked(shared, 2).check(report, "x", schema, [])
    assert report.counts[count] and not report.bad


SERVER = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    if said["method"] == "notifications/initialized":
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/x"}))
        continue
    result = {}
    if said["method"] == "tools/list":
        more = said["params"].get("cursor") is None
        name = "rain" if more else "snow"
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}}]}
        if more:
            result["nextCursor"] = "2"
    print(json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": result}),
          flush=True)
"""


def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    found = list(json_schemas.of_mcp(f"{sys.executable} {file}"))
    assert [name.rpartition(" ")[2] for name, _, _ in found] == ["rain", "snow"]
    assert all(schema == {"type": "object"} for _, schema, _ in found)
