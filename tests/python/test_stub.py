"""_core.pyi says what the module has, and nothing else."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import gemmakv
from gemmakv import _core

STUB = Path(gemmakv.__file__).parent / "_core.pyi"
BODY = ast.parse(STUB.read_text()).body
CLASSES = {node.name: node for node in BODY if isinstance(node, ast.ClassDef)}
FUNCTIONS = {
    node.name: node for node in BODY if isinstance(node, ast.FunctionDef)
}


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [a.arg for a in arguments if a.arg != "self"]


def _bound_parameters(function: object) -> list[str]:
    """Parameter names in the first line of a bound function's docstring."""
    line = (inspect.getdoc(function) or "").splitlines()[0]
    match = re.search(r"\((.*)\)(?: ->|$)", line)
    assert match, f"no signature in {line!r}"
    depth = 0
    text = ""
    for char in match.group(1):  # drops what stands inside brackets
        depth += (char in "[({") - (char in "])}")
        text += char if depth == 0 else ""
    parts = text.split(",")
    names = [part.split(":")[0].split("=")[0].strip() for part in parts]
    return [n for n in names if n not in ("", "self", "*", "/")]


def test_module_names() -> None:
    module = {
        name
        for name in _public(vars(_core))
        if not inspect.ismodule(getattr(_core, name))
    }
    assert module == set(CLASSES) | set(FUNCTIONS)


@pytest.mark.parametrize("name", CLASSES)
def test_class_members(name: str) -> None:
    stub = {
        node.name if isinstance(node, ast.FunctionDef) else node.target.id
        for node in CLASSES[name].body
        if isinstance(node, ast.FunctionDef)
        or (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
        )
    }
    members = _public(vars(getattr(_core, name)))
    assert members == _public(stub)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_parameters(name: str) -> None:
    bound = _bound_parameters(getattr(_core, name))
    assert bound == _parameters(FUNCTIONS[name])


@pytest.mark.parametrize(
    "owner, node",
    [
        pytest.param(owner, node, id=f"{owner}.{node.name}")
        for owner, cls in CLASSES.items()
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
        and node.name not in ("__len__",)
        and not any(
            isinstance(d, ast.Name) and d.id == "property"
            for d in node.decorator_list
        )
    ],
)
def test_method_parameters(owner: str, node: ast.FunctionDef) -> None:
    bound = _bound_parameters(getattr(getattr(_core, owner), node.name))
    assert bound == _parameters(node)


def test_errors_have_one_base() -> None:
    for name in ("CorruptFile", "MismatchError", "CacheFullError"):
        assert issubclass(getattr(gemmakv, name), gemmakv.GemmaKVError)


def test_public_names_exist() -> None:
    for name in gemmakv.__all__:
        assert getattr(gemmakv, name).__doc__, name


def test_model_types_are_the_core_table() -> None:
    assert [t.value for t in gemmakv.ModelType] == _core.model_type_names()
    assert gemmakv.ModelType.GEMMA3_270M == "gemma3-270m"
    assert str(gemmakv.ModelType.GEMMA3_270M) == "gemma3-270m"
