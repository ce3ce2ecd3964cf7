"""The package uses the public parts of the libraries of the command line."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest

import gemmakv.cli

pytest.importorskip("prompt_toolkit", reason="the extra `cli` is not there")
PRIVATE = re.compile("_[a-z]")
USED = re.compile(  # of an object, defined or set by its class
    r"(?:\b(?:self|cls|super\(\))\.|\bdef |^    )(_[a-z]\w*)", re.MULTILINE
)
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(gemmakv.cli.__path__, "gemmakv.cli.")
    if "serve" not in module.name  # with the extra `server`
]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "gemmakv"


@pytest.mark.parametrize("module", MODULES, ids=lambda one: one.__name__)
def test_what_is_imported(module: object) -> None:
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        found += [
            name
            for name in names
            if not is_ours(name) and any(map(PRIVATE.match, name.split(".")))
            if not name.startswith("__future__")
        ]
    assert found == []


def classes() -> Iterator[type]:
    """The classes of the command line."""
    for module in MODULES:
        for one in vars(module).values():
            if isinstance(one, type) and one.__module__ == module.__name__:
                yield one


def test_what_subclasses_use() -> None:
    checked = set()
    for one in classes():
        private = set()
        for base in one.__mro__:
            if is_ours(base.__module__) or base.__module__ in (
                "builtins", "typing", "abc", "enum"
            ):
                continue
            checked.add(base.__name__)
            private |= {name for name in vars(base) if PRIVATE.match(name)}
            source = inspect.getsource(base)
            private |= set(re.findall(r"\bself\.(_[a-z]\w*)", source))
        used = set(USED.findall(inspect.getsource(one)))
        assert not used & private, one
    assert "Vt100Parser" in checked
