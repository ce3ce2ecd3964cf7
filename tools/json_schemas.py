"""Structured output against JSON-Schema-Test-Suite, the schemas that pydantic
and msgspec make of the types of installed packages, schemas and tools that
packages ship as JSON, and the tools of MCP servers.

    python tools/json_schemas.py [--folder json/tests/draft2020-12] [-v]
    python tools/json_schemas.py --no-suite --types --files \\
        --mcp "python -m mcp_server_git"

Without --folder the suite is taken from the source distribution of the
installed `jsonschema`, which pip downloads. Each schema is refused with an
error that names a keyword of it, or it holds: texts that a random model writes
under it validate, its suite's invalid instances are refused and the valid ones
accepted, token by token. Exit code 1 if one is accepted that is invalid, if an
output does not validate, or if a refusal names nothing. Valid instances that
are refused are counted: a grammar may allow less than its schema.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "clients"), str(ROOT / "tests" / "python")]

import gemmakv  # noqa: E402
from gemmakv.generation._requests import requests_of  # noqa: E402
from support import tiny_gguf  # noqa: E402

_ORDERS = 200  # of an instance's keys that are tried
_PIECES = tiny_gguf.vocabulary()[0]
# A random model closes brackets and strings too seldom to come to an end.
_CLOSING = {_PIECES.index(c): 6.0 for c in '"}],'}
_CLOSING[_PIECES.index(",")] = 2.0


class Report:
    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.refused_valid: Counter[str] = Counter()
        self.bad: list[str] = []

    def fault(self, kind: str, where: str, what: object) -> None:
        self.counts[kind] += 1
        self.bad.append(f"{kind}: {where}: {str(what)[:300]}")

    def print(self, name: str) -> int:
        print(f"{name}: {dict(self.counts)}")
        for words, count in self.refusals.most_common():
            print(f"  refused {count}: {words}")
        if self.verbose:
            for words, count in self.refused_valid.items():
                print(f"  valid, and not taken {count}: {words}")
        for line in self.bad:
            print(f"  {line}")
        return len(self.bad)


class Checked:
    """Schemas under one model."""

    def __init__(self, gemma: gemmakv.Gemma, outputs: int) -> None:
        self._gemma = gemma
        self._outputs = outputs

    def check(
        self, report: Report, where: str, schema: Any, tests: list[Any]
    ) -> None:
        report.counts["schemas"] += 1
        try:
            grammar = gemmakv.Grammar.json_schema(schema)
            compiler = requests_of(self._gemma).compiler
            matcher = compiler.compile("grammar", grammar)
        except ValueError as error:
            self._refused(report, where, schema, str(error))
            return
        report.counts["compiled"] += 1
        self._outputs_of(report, where, schema, grammar)
        for test in tests:
            said = f"{where}: {test['description']}"
            takes = self._takes(matcher, test["data"])
            if test["valid"]:
                report.counts["valid taken" if takes else "valid refused"] += 1
                if not takes:
                    report.refused_valid[said] += 1
            elif takes:
                report.fault("invalid taken", said, json.dumps(test["data"]))
            else:
                report.counts["invalid refused"] += 1

    def _refused(
        self, report: Report, where: str, schema: Any, error: str
    ) -> None:
        names = {*_keys(schema), "schema is false"}
        if "$ref" in names:  # what it leads to may be a draft's own schema
            names.add("$dynamicAnchor")
        if schema is False or any(
            re.search(rf"(?<![\w$]){re.escape(name)}(?!\w)", error)
            for name in names
        ):
            report.counts["refused"] += 1
        else:
            report.fault("refused without a name", where, error)
        words = error.removeprefix("grammar: ")
        report.refusals[re.sub(r"[0-9]+|\"[^\"]{30,}\"", "N", words)[:100]] += 1

    def _outputs_of(
        self, report: Report, where: str, schema: Any, grammar: gemmakv.Grammar
    ) -> None:
        said = self._gemma.generate(
            gemmakv.create_kv_cache(self._gemma.config),
            "Go: ",
            n=self._outputs,
            grammar=grammar,
            temperature=1,
            seed=7,
            max_tokens=200,
            logit_bias=_CLOSING,
        )
        validator = jsonschema.Draft202012Validator(schema)
        for one in said:
            if one.finish_reason != "stop":
                report.counts["outputs cut short"] += 1
                continue
            try:
                validator.validate(json.loads(one.text))
                report.counts["outputs"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                words = str(error).partition("\n")[0]
                report.fault("output invalid", where, f"{one.text} ({words})")

    def _takes(self, matcher: Any, instance: Any) -> bool:
        """Whether it takes the instance with its keys in any order."""
        orders = itertools.islice(_orders(instance), _ORDERS)
        texts = (json.dumps(one, ensure_ascii=False) for one in orders)
        return any(self._takes_text(matcher, text) for text in texts)

    def _takes_text(self, matcher: Any, text: str) -> bool:
        core = matcher._core.deep_copy()
        assert self._gemma.tokenizer is not None
        for token in self._gemma.tokenizer.encode(text):
            if core.try_consume_tokens([token]) != 1:
                return False
        accepts: bool = core.is_accepting()
        return accepts


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for values in itertools.product(*(_orders(value[k]) for k in keys)):
                yield dict(zip(keys, values))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(_orders, value)))
    else:
        yield value


def _keys(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            yield from _keys(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _keys(one)


def suite(folder: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """(name, schema, its instances) of JSON-Schema-Test-Suite."""
    files = sorted(folder.glob("*.json"))
    if not files:
        sys.exit(f"{folder}: expected the files of a draft, found none")
    for file in files:
        for case in json.loads(file.read_text("utf-8")):
            name = f"{file.stem}: {case['description']}"
            yield name, case["schema"], case["tests"]


def of_types(
    packages: list[str], params: bool = False
) -> Iterator[tuple[str, Any, list[Any]]]:
    """The schemas of all types of pydantic and msgspec in packages or modules;
    with `params` also of typed dicts, which clients describe requests with.
    """
    import pydantic

    seen = set()
    for package in packages:
        root = importlib.import_module(package)
        names = [package]
        if hasattr(root, "__path__"):
            found = pkgutil.walk_packages(root.__path__, f"{package}.")
            names += [info.name for info in found]
        for module in names:
            if module.rpartition(".")[2] == "__main__":
                continue  # it would run
            members = inspect.getmembers(
                importlib.import_module(module), inspect.isclass
            )
            for name, kind in members:
                if kind in seen or not kind.__module__.startswith(package):
                    continue
                seen.add(kind)
                try:
                    schema = _schema_of(kind, params)
                except (pydantic.errors.PydanticUserError, TypeError):
                    continue  # it has none, or fields of no such type
                if schema is not None:
                    yield f"{module}.{name}", schema, []


def _schema_of(kind: type, params: bool) -> Any:
    """None of what is no such type."""
    import msgspec
    import pydantic
    import typing_extensions

    if issubclass(kind, pydantic.BaseModel):
        return kind.model_json_schema()
    if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
        return msgspec.json.schema(kind)
    if params and typing_extensions.is_typeddict(kind):
        return pydantic.TypeAdapter(kind).json_schema()
    return None


def of_files(paths: list[Path]) -> Iterator[tuple[str, Any, list[Any]]]:
    """The schemas in JSON files: whole ones, and those of tools, which a list
    or an object of definitions has.
    """
    for path in paths:
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        for name, schema in _schemas_in(found, path.name):
            yield name, schema, []


def _schemas_in(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from _schemas_in(one, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key in ("inputSchema", "input_schema", "parameters"):
            one = value.get(key)
            if isinstance(one, dict) and one.get("type") == "object" and (
                isinstance(value.get("name"), str)
            ):
                yield f"{where}.{value['name']}", one
        if _is_schema(value):
            yield where, value
            return
        for key, one in value.items():
            if isinstance(one, dict | list):
                yield from _schemas_in(one, f"{where}.{key}")


def _is_schema(value: dict[str, Any]) -> bool:
    fields = value.get("properties")
    return "json-schema.org" in str(value.get("$schema")) or (
        value.get("type") == "object"
        and isinstance(fields, dict)
        and all(isinstance(one, dict | bool) for one in fields.values())
    )


def of_mcp(command: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """The tools of an MCP server, which speaks JSON-RPC, a line a message."""
    hello = {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "gemmakv", "version": "1"},
    }  # fmt: skip
    words = shlex.split(command)
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def say(method: str, **more: Any) -> None:
            said = {"jsonrpc": "2.0", "method": method, **more}
            server.stdin.write(json.dumps(said) + "\n")
            server.stdin.flush()

        def answer(number: int) -> Any:
            for line in server.stdout:
                found = json.loads(line)
                if found.get("id") == number and "method" not in found:
                    if "result" not in found:
                        sys.exit(f"{command}: {found.get('error')}")
                    return found["result"]
            sys.exit(f"{command}: it ended without an answer")

        say("initialize", id=0, params=hello)
        answer(0)
        say("notifications/initialized")
        cursor, number = None, 1
        while number == 1 or cursor:
            say("tools/list", id=number,
                params={"cursor": cursor} if cursor else {})  # fmt: skip
            page = answer(number)
            for tool in page["tools"]:
                yield f"{words[-1]}: {tool['name']}", tool["inputSchema"], []
            cursor, number = page.get("nextCursor"), number + 1
        server.terminate()


def shipped() -> list[Path]:
    """JSON files of all packages that are installed."""
    return sorted(
        Path(str(file.locate()))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if file.suffix == ".json" and ".dist-info" not in str(file)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--types", nargs="*", metavar="PACKAGE",
        default=["openai.types", "anthropic.types", "gemmakv.server"],
        help="packages or modules; none: no types")
    parser.add_argument("--params", action="store_true",
                        help="with types, typed dicts, too")
    parser.add_argument(
        "--files", nargs="*", type=Path, metavar="FILE",
        help="schemas, or definitions of tools; default: those that the "
        "installed packages ship")
    parser.add_argument(
        "--mcp", action="append", default=[], metavar="COMMAND",
        help="an MCP server, whose tools are taken; repeatable")
    parser.add_argument("--no-suite", action="store_true",
                        help="without JSON-Schema-Test-Suite")
    parser.add_argument("--outputs", type=int, default=3)
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder
        if folder is None and not arguments.no_suite:
            from contract import unpacked

            source = unpacked("jsonschema", Path(scratch))
            folder = source / "json" / "tests" / "draft2020-12"
        path = tiny_gguf.write_talker(Path(scratch) / "talker.gguf")
        gemma = gemmakv.Gemma.load(path, prefix_cache=False)
        checked = Checked(gemma, arguments.outputs)
        bad = 0
        files = shipped() if arguments.files is None else arguments.files
        sources = {
            "suite": [] if folder is None else list(suite(folder)),
            "types": list(of_types(arguments.types, arguments.params)),
            "files": list(of_files(files)),
            "mcp": [case for one in arguments.mcp for case in of_mcp(one)],
        }
        for name, cases in sources.items():
            if not cases:
                continue
            report = Report(arguments.verbose)
            for case in cases:
                checked.check(report, *case)
            bad += report.print(name)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
