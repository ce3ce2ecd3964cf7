"""The public names of the package, with what they are called with.

    python -m support.public_names > ../golden/public_names.json

was run once: the file says what programs of users call.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

MODULES = (
    "gemmakv",
    "gemmakv.options",
    "gemmakv.templates",
    "gemmakv.verify",
    "gemmakv.chat.store",
)


def parameters(function: Any) -> list[str] | None:
    """Gives them as ["a", "b=", "*", "c=", "**rest"]; "=" stands for a default.

    None if nobody can tell, as with compiled functions.
    """
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    listed = []
    star = False
    for one in found:
        if one.kind is one.KEYWORD_ONLY and not star:
            listed.append("*")
            star = True
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        star = star or mark == "*"
        default = "" if one.default is one.empty else "="
        listed.append(f"{mark}{one.name}{default}")
    return listed


def members(cls: type) -> dict[str, Any]:
    """Gives the public members of a class; None for what is no function."""
    names = {name for name in dir(cls) if not name.startswith("_")}
    for base in cls.__mro__:
        names |= {n for n in vars(base).get("__annotations__", ()) if n[0] != "_"}
    found = {}
    for name in sorted(names):
        member = inspect.getattr_static(cls, name, None)
        bound = isinstance(member, classmethod | staticmethod)
        if bound or inspect.isroutine(member):
            listed = parameters(getattr(cls, name))
            if listed and not bound:
                listed = listed[1:]  # self
            found[name] = {"parameters": listed}
        else:
            found[name] = None
    return found


def describe(thing: Any) -> dict[str, Any]:
    """Says what a public name stands for."""
    if inspect.isclass(thing):
        is_error = issubclass(thing, BaseException | Warning)
        return {
            "parameters": None if is_error else parameters(thing),
            "members": {} if is_error else members(thing),
        }
    if inspect.isroutine(thing):
        return {"parameters": parameters(thing)}
    return {}


def public_names() -> dict[str, dict[str, Any]]:
    """Describes what each public module has, by module and name."""
    found: dict[str, dict[str, Any]] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        found[module] = {
            name: describe(getattr(home, name)) for name in home.__all__
        }
    return found


if __name__ == "__main__":
    json.dump(public_names(), sys.stdout, indent=1)
