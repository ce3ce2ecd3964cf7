"""The public names of the package, with what they are called with.

    python -m support.public_names > ../golden/public_names.json

was run before the package was made anew: the file says what programs call.
"""

from __future__ import annotations

import enum
import functools
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
UNKNOWN = "?"  # parameters of a compiled function
# What other calls make: programs do not call these classes.
MADE_ELSEWHERE = {
    "CacheProtocol", "ChatStream", "Gemma", "KVCache", "LayerView",
    "RemoteStore", "SessionStore", "Stream", "Template", "Tokenizer",
}  # fmt: skip
_MARKS = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}

# A class is a dict of its members with the parameters of its constructor at
# "()"; a function is its parameters; anything else is None.
Names = dict[str, dict[str, Any]]


def parameters(function: Any, *, bound: bool = True) -> str:
    """Gives them as "a, b=, *, c=, **rest", where = stands for a default.

    The first one is left out unless `bound`: it is the object.
    """
    if isinstance(function, enum.EnumMeta):
        return UNKNOWN  # Python's versions differ
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return UNKNOWN
    listed = []
    star = False
    for one in found if bound else found[1:]:
        if one.kind is one.KEYWORD_ONLY and not star:
            listed.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        default = "" if one.default is one.empty else "="
        listed.append(f"{_MARKS.get(one.kind, '')}{one.name}{default}")
    return ", ".join(listed)


def members(cls: type) -> dict[str, str | None]:
    """Gives the public members of a class that Python's own have not."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ != "builtins":
            names |= {*vars(base), *vars(base).get("__annotations__", ())}
    found: dict[str, str | None] = {}
    for name in sorted(name for name in names if not name.startswith("_")):
        member = inspect.getattr_static(cls, name, None)
        if isinstance(member, functools.cached_property):
            found[name] = None
        elif isinstance(member, classmethod | staticmethod):
            found[name] = parameters(getattr(cls, name))
        elif inspect.isroutine(member):
            found[name] = parameters(member, bound=False)
        else:
            found[name] = None
    return found


def describe(thing: Any) -> Any:
    """Says what a public name stands for."""
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        made = {} if thing.__name__ in MADE_ELSEWHERE else {"()": thing}
        made = {name: parameters(cls) for name, cls in made.items()}
        return {**made, **members(thing)}
    return parameters(thing) if inspect.isroutine(thing) else None


def public_names() -> Names:
    """Describes what each public module has, by module and name."""
    found: Names = {}
    for module in MODULES:
        home = importlib.import_module(module)
        found[module] = {
            name: describe(getattr(home, name)) for name in home.__all__
        }
    return found


if __name__ == "__main__":
    json.dump(public_names(), sys.stdout, indent=1)
    print()
