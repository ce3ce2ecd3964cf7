#!/usr/bin/env python3
"""Writes docs/api.md from the sources of gemmakv, as griffe reads them, and
docs/options.md from its table of options.

    python tools/make_api_reference.py [--check]

The order is that of each module's `__all__`; members follow the source. With
--check nothing is written: exits with 1 if a page is not up to date. A
docstring that describes an argument or a field that is not there is an error.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import pydoc
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

import gemmakv

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
MODULES = {
    "gemmakv": "All of these names come with `import gemmakv`.",
    "gemmakv.options": "",
    "gemmakv.templates": "",
    "gemmakv.verify": "",
    "gemmakv.chat.store": "",
}
HEAD = """# API reference

Made by `tools/make_api_reference.py` from the docstrings.
"""
WIDTH = 80

Described = dict[str, str]


def live(thing: Any) -> Any:
    """The object itself: what is compiled has its docstring there alone."""
    return pydoc.locate(thing.path)


def docstring_of(thing: Any) -> griffe.Docstring | None:
    """Its own, or that of the member that it overrides."""
    if thing.docstring:
        return thing.docstring
    if thing.canonical_path.startswith("gemmakv._core."):
        text = inspect.getdoc(live(thing)) or ""
        if text.startswith(thing.name + "("):  # pybind11's signature
            text = text.partition("\n")[2]
        text = text.strip("\n")
        return griffe.Docstring(text, parent=thing) if text else None
    if thing.parent is not None and thing.parent.is_class:
        for base in thing.parent.mro():
            over = base.members.get(thing.name)
            if over is not None and over.docstring:
                return over.docstring
    return None


def sections(docstring: griffe.Docstring) -> Iterator[tuple[str, Any]]:
    """(kind, value): "text" with a str, else with what is described."""
    for section in docstring.parse("google", warnings=False):
        kind = section.kind.value
        if kind == "text":
            yield kind, section.value
        elif kind in ("parameters", "attributes"):
            yield kind, {
                item.name: " ".join(item.description.split())
                for item in section.value
            }
        else:
            raise SystemExit(f"{docstring.parent.path}: a section {kind!r}")


def words(
    thing: Any, names: set[str], fields: Described | None = None
) -> str:
    """A docstring: text as it stands, since its layout has a meaning, and
    lists of arguments, which must be among `names`. Attributes go to `fields`.
    """
    text = ""
    docstring = docstring_of(thing)
    for kind, value in sections(docstring) if docstring else ():
        if kind == "text":
            text += f"\n```text\n{value}\n```\n"
            continue
        for name in value:
            if not set(name.replace("*", "").split(", ")) <= names:
                raise SystemExit(f"{thing.path}: there is no {name}")
        if kind == "attributes" and fields is not None:
            fields.update(value)
            continue
        rows = (f"- `{name}`: {about}\n" for name, about in value.items())
        text += "\n" + "".join(rows)
    return text


def code(text: str) -> str:
    return f"\n```py\n{text}\n```\n"


def signature(name: str, function: Any) -> str:
    parts = []
    star = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value if parameter.kind else ""
        if kind == "keyword-only" and not star:
            parts.append("*")
        star = star or kind in ("keyword-only", "variadic positional")
        mark = {"variadic positional": "*", "variadic keyword": "**"}
        part = mark.get(kind, "") + parameter.name
        if parameter.annotation is not None:
            part += f": {parameter.annotation}"
        if parameter.default is not None and not kind.startswith("variadic"):
            part += f" = {parameter.default}"
        parts.append(part)
    makes = function.name == "__init__" or not function.returns
    end = "" if makes else f" -> {function.returns}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > WIDTH:
        line = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){end}"
    return line


def members(cls: Any) -> list[Any]:
    """The public ones, those of the class itself first."""
    found = {}
    for base in (cls, *cls.mro()):
        for name, member in base.members.items():
            if not name.startswith("_") and name not in found:
                found[name] = member
    return list(found.values())


def keywords(cls: Any) -> Iterator[tuple[str, str]]:
    """(name, type) of the keys of a TypedDict that is made from the table."""
    [base] = cls.bases
    table = cls.module[str(base.left)]
    types = dict(
        zip(map(str, table.bases[1].slice.elements), base.slice.elements)
    )
    for key in table.members.values():
        kind = key.annotation
        if str(kind).startswith("Annotated["):
            kind = types[str(kind.slice.elements[0])]
        yield key.name, str(kind)


def options(cls: Any) -> str:
    text = "\n| key | type | default |\n|---|---|---|\n"
    table = gemmakv.options.GenerationOptions.table
    for name, kind in keywords(cls):
        default = table[name].default if name in table else None
        kind = kind.replace("|", "\\|")
        text += f"| `{name}` | `{kind}` | `{default!r}` |\n"
    return text + "\n[options.md](options.md) says what each does.\n"


def field_rows(fields: list[Any], described: Described) -> str:
    text = ""
    for field in fields:
        row = f"- `{field.name}: {field.annotation}"
        is_default = "dataclass" in field.parent.labels and field.value
        if is_default and not str(field.value).startswith("dataclasses."):
            row += f" = {field.value}"
        found = None if field.name in described else docstring_of(field)
        about = " ".join(found.value.split()) if found else None
        about = described.get(field.name, about)
        text += row + (f"`: {about}\n" if about else "`\n")
    return f"\n{text}" if text else ""


def class_entry(cls: Any) -> str:
    inside = members(cls)
    init = cls.all_members.get("__init__")
    arguments = {p.name for p in init.parameters} if init else set()
    described: Described = {}
    text = words(cls, {member.name for member in inside} | arguments, described)
    # Without a docstring, making one is not for users.
    is_core = cls.canonical_path.startswith("gemmakv._core.")
    if init and (is_core and init.parameters or init.docstring):
        text = code(signature(cls.name, init)) + text + words(init, arguments)
    elif "\n- `" in text:
        text = code(signature(cls.name, init)) + text
    found = live(cls)
    if isinstance(found, enum.EnumType):
        return text + f"\n{', '.join(f'`{one.value}`' for one in found)}\n"
    if typing.is_typeddict(found):
        return text + options(cls)
    fields = [m for m in inside if m.is_attribute and m.annotation]
    text += field_rows(fields, described)
    for member in inside:
        if not member.is_function:
            continue
        about = words(member, {p.name for p in member.parameters})
        if about:
            name = f"{cls.name}.{member.name}"
            head = "async " * ("async" in member.labels)
            text += f"\n#### {name}\n"
            text += code(head + signature(name, member)) + about
    return text


def entry(thing: Any) -> str:
    title = f"\n### {thing.name}\n"
    if thing.is_class:
        return title + class_entry(thing)
    if thing.is_function:
        head = signature(thing.name, thing)
        about = words(thing, {p.name for p in thing.parameters})
        return title + code(head) + about
    return title + code(f"{thing.name} = {thing.value}") + words(thing, set())


def page() -> str:
    package = griffe.load(
        "gemmakv",
        search_paths=[ROOT / "python"],
        docstring_parser="google",
        allow_inspection=False,
    )
    text, seen = HEAD, set()
    for path, about in MODULES.items():
        module = package
        for name in path.split(".")[1:]:
            module = module[name]
        things = [module[name] for name in module.exports]
        own = [t for t in things if not t.is_module]
        again = [t.name for t in own if t.canonical_path in seen]
        own = [t for t in own if t.canonical_path not in seen]
        seen |= {thing.canonical_path for thing in own}
        about = about or module.docstring.value
        text += f"\n## {path}\n\n{about}\n"
        if again:
            text += f"\nAlso here: {', '.join(f'`{n}`' for n in again)}.\n"
        text += "".join(map(entry, own))
    return text


OPTIONS_HEAD = """# Generation options

Made by `tools/make_api_reference.py` from `GenerationOptions.table`, which is
also what calls, `gemmakv generate`, `/set` and a server check values with.

Keywords of `generate`, `stream`, `generate_batch` (one value, or a list with
one per row), `Session(options=)` and its calls; flags of the command line with
dashes. A token is drawn in this order: logits_processor; logit_bias, the three
penalties, the ban of min_tokens; temperature; top_k; top_p; min_p.
`progress=` takes a callable(done, total), or True for a line on stderr;
`draft=` a model that guesses, one for all rows ([speculation](speculation.md)).
`GenerationOptions.json_schema()` is the table as JSON Schema.

| option | default | what it does |
|---|---|---|
"""


def options_page() -> str:
    rows = []
    for name, option in gemmakv.options.GenerationOptions.table.items():
        about = f"{option.help}. {option.more}".strip()
        rows.append(f"| `{name}` | `{option.default}` | {about} |\n")
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
