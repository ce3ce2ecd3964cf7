"""Public names say that they are of the public module."""

from __future__ import annotations

import types
from typing import Any, get_type_hints, is_typeddict


def publish(home: dict[str, Any]) -> None:
    """Has the classes and functions of a module's `__all__` name that module
    as theirs, for messages, help pages and pickles.

    Call it at the end of the module, with its `globals()`. Of two modules, the
    one with the shorter name is named.
    """
    module = home["__name__"]
    for name in home["__all__"]:
        thing = home.get(name)
        if not isinstance(thing, type | types.FunctionType):
            continue
        before = thing.__module__
        if "._" not in before and len(before) <= len(module):
            continue
        own = vars(thing).get("__annotations__")
        if own and isinstance(thing, type) and not is_typeddict(thing):
            # As text they have the names of the module that wrote them.
            found = get_type_hints(thing, localns=home, include_extras=True)
            thing.__annotations__ = {key: found[key] for key in own}
        thing.__module__ = module
