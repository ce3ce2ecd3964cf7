#!/usr/bin/env python3
"""Writes docs/api.md from the docstrings of the public names of gemmakv, and
docs/options.md from its table of options.

    python tools/make_api_reference.py [--check]

The order is that of `gemmakv.__all__`; members follow the source. With --check
nothing is written: exits with 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemmakv

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API reference

Made by `tools/make_api_reference.py` from the docstrings. `import gemmakv`
gives all of these names.
"""


def docstring(thing: Any) -> str:
    return inspect.cleandoc(inspect.getdoc(thing) or "")


def block(text: str) -> str:
    """A docstring as it stands: its layout has a meaning."""
    return f"\n```text\n{text}\n```\n" if text else ""


def signature(name: str, thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    # Annotations are text; quotes and module names only make them longer.
    found = re.sub(r"(?<=: |> )'([^']*)'", r"\1", found)
    module = r"\b(gemmakv(?:\.[a-z_]+)+|typing|npt|_core)\."
    return name + re.sub(module, "", found)


def members(cls: type) -> Iterator[tuple[str, str]]:
    """(name or signature, docstring) of the public members that have one."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("gemmakv"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(value, property):
                if docstring(value):
                    yield f"{cls.__name__}.{name}", docstring(value)
                continue
            function = getattr(cls, name)
            if callable(function) and docstring(function):
                line = signature(f"{cls.__name__}.{name}", function)
                yield line, docstring(function)


def entry(name: str) -> str:
    thing = getattr(gemmakv, name)
    if not inspect.isclass(thing):
        return (
            f"\n## {name}\n\n`{signature(name, thing)}`\n"
            + block(docstring(thing))
        )
    text = f"\n## {name}\n"
    # Without a docstring, making one is not for users.
    init = vars(thing).get("__init__")
    has_init = init is not None and bool(init.__doc__) and (
        init.__doc__ != object.__init__.__doc__
    )
    if has_init or "\nArgs:" in docstring(thing):
        text += f"\n`{signature(name, thing)}`\n"
    text += block(docstring(thing))
    if issubclass(thing, enum.Enum):
        values = ", ".join(f"`{value.value}`" for value in thing)
        return text + f"\n{values}\n"
    if issubclass(thing, Exception):
        return text
    if has_init:
        text += block(docstring(init))
    for line, words in members(thing):
        text += f"\n### `{line}`\n" + block(words)
    return text


def page() -> str:
    return HEAD + "".join(map(entry, gemmakv.__all__))


OPTIONS_HEAD = """# Generation options

Made by `tools/make_api_reference.py` from `GenerationOptions.table`, which is
also what calls, `gemmakv generate`, `/set` and a server check values with.

Keywords of `generate`, `stream`, `generate_batch` (one value, or a list with
one per row), `Session(options=)` and its calls; flags of the command line with
dashes. A token is drawn in this order: logits_processor; logit_bias, the three
penalties, the ban of min_tokens; temperature; top_k; top_p; min_p.
`progress=` takes a callable(done, total), or True for a line on stderr.
`GenerationOptions.json_schema()` is the table as JSON Schema.

| option | default | what it does |
|---|---|---|
"""


def options_page() -> str:
    rows = []
    for name, option in gemmakv.options.GenerationOptions.table.items():
        words = f"{option.help}. {option.more}".strip()
        rows.append(f"| `{name}` | `{option.default}` | {words} |\n")
    return OPTIONS_HEAD + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    pages = {PAGE: page(), PAGE.with_name("options.md"): options_page()}
    old = [
        path
        for path, text in pages.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    for path in old:
        if args.check:
            print(f"{path.name} is old: run tools/make_api_reference.py")
        else:
            path.write_text(pages[path], "utf-8")
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
