"""The route that CONTRIBUTING.md adds, as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gemmakv.server.app import App

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def module_of(name: str, code: str, patch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(name)
    patch.setitem(sys.modules, name, module)
    exec(compile(code, PAGE, "exec"), vars(module))
    return module


def test_its_route_passes_its_test(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text("utf-8")
    route, test = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made = module_of("gemmakv.server.apis.repeat", route, monkeypatch)
    app.include_router(made.ROUTER)
    tests = module_of("test_repeat", test, monkeypatch)
    tests.test_a_text_comes_back(app)
    [mark] = tests.test_bad_fields_are_named.pytestmark
    for body, param in mark.args[1]:
        tests.test_bad_fields_are_named(app, body, param)
