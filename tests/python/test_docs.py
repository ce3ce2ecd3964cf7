"""What the pages of the documentation show is true.

Each ```python block of README.md and docs/ runs alone, as if it were pasted
into a new process, and prints what the ```text block right after it shows;
trailing spaces and line ends do not count. A block that needs more says so
after the word python:

- ```python server: a server with the demo model at http://127.0.0.1:8000, the
  API key KEY and the flags of `SERVED`,
- ```python program: a file that Python runs, for blocks that start processes.

A block whose imports are not installed does not run; its page is then reported
as skipped, with their names, after all its other blocks have run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gemmakv
from gemmakv import ModelConfig, Tokenizer
from gemmakv.cli import main
from gemmakv.cli.chat import first_screen
from gemmakv.cli.chat.view import TerminalView
from gemmakv.generation import _requests as requests
from gemmakv.generation._constraints import Compiler
from gemmakv.models import _loading as loading
from support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
DEMO = "gemma-3-270m"
URL = "http://127.0.0.1:8000"
SERVED = (
    *("--model", DEMO, "--default-temperature", 0, "--default-max-tokens", 64),
    *("--api-key-file", "keys.txt", "--sessions", "chats"),
)
TAGS = {"", "server", "program"}
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```\n", re.MULTILINE)
# A command that continues a text, and the lines below it.
TRANSCRIPT = re.compile(
    r"^    \$ \S*gemmakv (generate .*)\n((?:    .+\n)+)", re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A ```python block of a page.

    Attributes:
      page: the file.
      line: the number of lines before its first line of Python.
      tag: what follows the word python.
      code: its text.
      shown: the text block right after it; "" if there is none.
    """

    page: Path
    line: int
    tag: str
    code: str
    shown: str

    @property
    def place(self) -> str:
        return f"{_name(self.page)}:{self.line + 1}"

    @property
    def missing(self) -> list[str]:
        """The modules that it imports and that are not installed."""
        found = re.findall(r"^(?:from|import) (\w+)", self.code, re.MULTILINE)
        return [m for m in found if importlib.util.find_spec(m) is None]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    text = page.read_text("utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for i, fence in enumerate(fences):
        language, _, tag = fence[1].partition(" ")
        if language != "python":
            continue
        shown = ""
        if i + 1 < len(fences) and fences[i + 1][1] == "text":
            after = fences[i + 1]
            if not text[fence.end() : after.start()].strip():
                shown = after[2]
        line = text[: fence.start(2)].count("\n")
        found.append(Block(page, line, tag, fence[2], shown))
    return tuple(found)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _page_parameters() -> Iterator[object]:
    for page in PAGES:
        blocks = blocks_of(page)
        # A process, a server and the real model all take their time.
        slow = any(block.tag or DEMO in block.code for block in blocks)
        marks = [pytest.mark.slow] if slow else []
        if blocks:
            yield pytest.param(page, id=_name(page), marks=marks)


# Models with the same files and options share weights, and what grammars need
# of their vocabulary. Each `Gemma` still has a prefix cache of its own, and can
# be closed.
_load_once = functools.cache(loading.load)
_compilers: dict[int, Compiler] = {}


def _compiler_of(tokenizer: Tokenizer | None, config: ModelConfig) -> Compiler:
    if id(tokenizer) not in _compilers:
        _compilers[id(tokenizer)] = Compiler(tokenizer, config)
    return _compilers[id(tokenizer)]  # which keeps the tokenizer, and its id


@pytest.fixture
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[], str]:
    """Gives the address of a server, which is started at the first call."""

    @functools.cache
    def start() -> str:
        folder = tmp_path_factory.mktemp("server")
        (folder / "keys.txt").write_text("KEY", "utf-8")
        places = {"keys.txt": folder / "keys.txt", "chats": folder / "chats"}
        words = [places.get(str(word), word) for word in SERVED]
        server = ServerProcess(*words)
        request.addfinalizer(lambda: server.__exit__())
        return server.url

    return start


def _run(block: Block, served: Callable[[], str]) -> str:
    """Runs a block in the current folder, and gives what it printed."""
    if block.tag == "program":
        file = Path(f"{block.page.stem}_{block.line}.py")
        file.write_text(block.code, "utf-8")
        done = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning", file],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout
    code = block.code
    if block.tag == "server":
        code = code.replace(URL, served())
    # Errors name the page's own lines.
    program = compile("\n" * block.line + code, str(block.page), "exec")
    module = ModuleType("__main__")
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        patch.setitem(sys.modules, "__main__", module)
        warnings.simplefilter("error", DeprecationWarning)
        exec(program, module.__dict__)
    return printed.getvalue()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@pytest.mark.parametrize("page", list(_page_parameters()))
def test_python_runs_and_prints_what_is_shown(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Callable[[], str],
) -> None:
    blocks = blocks_of(page)
    if any(DEMO in block.code for block in blocks):
        request.getfixturevalue("model_path")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(loading, "load", _load_once)
    monkeypatch.setattr(requests, "Compiler", _compiler_of)
    wrong, left_out = [], []
    for block in blocks:
        assert block.tag in TAGS, f"{block.place}: {block.tag}"
        if block.missing:
            left_out.append(f"{block.place} ({', '.join(block.missing)})")
            continue
        folder = tmp_path / str(block.line)
        folder.mkdir()
        monkeypatch.chdir(folder)
        printed = _run(block, served)
        if _lines(printed) != _lines(block.shown):
            wrong.append(f"{block.place} prints\n{printed}")
    assert not wrong, "\n".join(wrong)
    if left_out:
        pytest.skip("all ran but " + ", ".join(left_out))


def _transcripts() -> Sequence[tuple[Path, str, str]]:
    return [
        (page, command, printed)
        for page in PAGES
        for command, printed in TRANSCRIPT.findall(page.read_text("utf-8"))
    ]


@pytest.mark.slow
def test_pages_show_what_generate_prints(
    model_path: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    del model_path
    found = _transcripts()
    assert sum(page == ROOT / "README.md" for page, *_ in found) >= 2
    for command, printed in {(command, said) for _, command, said in found}:
        assert main(shlex.split(command)) == 0
        said = capfdbinary.readouterr().out.decode()
        assert said.split() == printed.split(), command


def test_only_other_libraries_are_not_run() -> None:
    """Blocks of other languages hold no Python of this package."""
    for page in PAGES:
        if page.name == "api.md":  # signatures
            continue
        for fence in FENCE.finditer(page.read_text("utf-8")):
            if not fence[1].startswith("python"):
                assert "import gemmakv" not in fence[2], _name(page)
            if fence[1] in ("py", "pycon"):
                assert "gemmakv." not in fence[2], _name(page)


def test_readme_shows_the_first_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first_screen.show(
        TerminalView(), "gemma-3-270m", ".venv/bin/gemmakv", ".venv/bin/pip"
    )
    said = textwrap.indent(capsys.readouterr().out, "    ")
    shown = (ROOT / "README.md").read_text("utf-8")
    assert re.sub(" +\n", "\n", said) in shown


def test_every_page_is_listed() -> None:
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        name = page.relative_to(docs).as_posix()
        assert name == "README.md" or f"({name})" in text, name


def test_every_error_is_on_the_page_of_errors() -> None:
    from gemmakv.conversations import StoreClosed, StoreError  # a database

    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    names = {
        name
        for name in gemmakv.__all__
        if isinstance(thing := getattr(gemmakv, name), type)
        and issubclass(thing, Exception)
    }
    codes = {error.code for error in _subclasses(StoreError)}
    codes.remove(StoreClosed.code)  # "server_stopping" to clients
    for source in Path(gemmakv.__file__).parent.glob("server/**/*.py"):
        codes |= set(re.findall(r'code="(\w\w+)"', source.read_text("utf-8")))
    assert len(names) > 5 and len(codes) > 25
    for name in names | codes:
        assert re.search(rf"`(gemmakv\.)?{name}`", text), name


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def test_every_async_form_is_on_the_page_of_threads() -> None:
    text = (ROOT / "docs" / "threads.md").read_text("utf-8")
    for kind in (gemmakv.Gemma, gemmakv.Session, gemmakv.Stream):
        for name in dir(kind):
            if name[:1] == "a" and hasattr(kind, name[1:]):
                assert re.search(rf"`(await )?{name}\b", text), name


def _anchors(page: Path) -> set[str]:
    """The names of a page's headlines in links, as GitHub makes them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", line).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(other.rsplit("-", 1)[0] == name for other in found)
        found.add(f"{name}-{number + 1}" if name in found else name)
    return found


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        text = page.read_text("utf-8")
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if "://" in link:
                continue
            target = page.parent / link if link else page
            if not target.exists():
                broken.append(f"{page.name}: {link}")
            elif anchor and anchor not in _anchors(target):
                broken.append(f"{page.name}: {link}#{anchor}")
    assert not broken


MODULES = [
    gemmakv,
    gemmakv.options,
    gemmakv.templates,
    gemmakv.verify,
    importlib.import_module("gemmakv.chat.store"),
]


@pytest.mark.slow
def test_api_reference_is_up_to_date() -> None:
    pytest.importorskip("griffe", reason="griffe reads the docstrings")
    tool = ROOT / "tools" / "make_api_reference.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_api_reference_has_every_option_and_field(module: ModuleType) -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert f"\n## {module.__name__}\n" in page
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, ModuleType):
            continue
        about = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
        keys = []
        if typing.is_typeddict(thing):
            keys = list(typing.get_type_hints(thing))
            assert set(gemmakv.options.GenerationOptions.table) < set(keys)
        elif dataclasses.is_dataclass(thing):
            keys = [field.name for field in dataclasses.fields(thing)]
        for key in keys:
            assert f"`{key}" in about, f"{name}.{key}"
