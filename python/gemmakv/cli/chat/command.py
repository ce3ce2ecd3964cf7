"""`gemmakv chat`: options of the command line, and what they open."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import typer

import gemmakv
from gemmakv._support.arguments import choice
from gemmakv._support.extras import lack
from gemmakv.chat._session_file import OVERFLOWS
from gemmakv.chat._templates import NAMES
from gemmakv.cli import EXIT_FAILURE, console, describe, prefix_flags
from gemmakv.cli.arguments import (
    DRAFT,
    PIN_THREADS,
    QUANTIZE,
    SAMPLING_DEFAULTS,
    THREADS,
    check_capacity_tokens,
    check_draft,
    check_kv_dtype,
    examples,
    model_option,
    optional_text_of,
)
from gemmakv.cli.option_flags import with_options
from gemmakv.options import GenerationOptions

DEFAULT_MODEL = "gemma-3-270m"

EXAMPLES = examples(
    "gemmakv chat",
    "gemmakv chat -m org/repo/model-it-Q4_K_M.gguf --temperature 0.7",
    'gemmakv chat --session notes --system "You answer in one line."',
    "gemmakv chat --json < questions.txt > answers.jsonl",
)


def _check_session(name: str | None) -> str | None:
    from gemmakv.cli.chat.book import check_form

    if name is not None:
        try:
            check_form(name)
        except ValueError as error:
            raise ValueError(f"session: {error}") from None
    return name


def _check_sessions(folder: str | None) -> str | None:
    if folder == "":
        raise ValueError("sessions: expected a folder, found ''")
    return folder


def _check_overflow(name: str | None) -> str | None:
    return name if name is None else choice("overflow", name, OVERFLOWS)


def _check_template(name: str | None) -> str | None:
    return name if name is None else choice("template", name, NAMES)


@with_options(chat=True)
def chat(
    model: str | None = model_option(
        None, f" Default: {DEFAULT_MODEL} (of gemmakv[demo])."
    ),
    session: str | None = typer.Option(
        None,
        "--session",
        "-s",
        metavar="NAME",
        callback=_check_session,
        help="Open this session, or start it. Default: the last one on a "
        "terminal, a passing one on a pipe.",
    ),
    system: str | None = typer.Option(
        None,
        metavar="TEXT",
        callback=optional_text_of,
        help="System text: the model reads it before all messages.",
    ),
    sessions: str | None = typer.Option(
        None,
        metavar="DIR",
        callback=_check_sessions,
        help="Keep sessions in this folder, as `gemmakv serve --sessions` "
        "does. Default: your own folder, which `default` names.",
    ),
    no_persist: bool = typer.Option(
        False,
        "--no-persist",
        help="Neither read nor write the stored sessions and history, nor "
        "the disk of the prefix cache unless it is given.",
    ),
    overflow: str | None = typer.Option(
        None,
        metavar="WHAT",
        callback=_check_overflow,
        help=f"When the context is full: {' or '.join(OVERFLOWS)}.",
    ),
    template: str | None = typer.Option(
        None,
        metavar="NAME",
        callback=_check_template,
        help="plain, gemma, gemma4 or file. Default: what the model asks for.",
    ),
    think: bool | None = typer.Option(
        None,
        "--think/--no-think",
        help="Whether the model thinks before it replies, if it can. Default: "
        "what its template says.",
    ),
    capacity_tokens: int | None = typer.Option(
        None,
        metavar="N",
        callback=check_capacity_tokens,
        help="Limit of a new session; default: the model's context.",
    ),
    kv_dtype: str | None = typer.Option(
        None,
        metavar="TYPE",
        callback=check_kv_dtype,
        help="f32, bf16 (default) or int8, for new sessions.",
    ),
    as_json: bool = typer.Option(
        False, "--json", help="On a pipe: a JSON object for each reply."
    ),
    threads: int | None = THREADS,
    pin_threads: bool = PIN_THREADS,
    quantize: str | None = QUANTIZE,
    draft: str | None = DRAFT,
    sampling_defaults: bool = SAMPLING_DEFAULTS,
    prefix_cache_ram: str | None = prefix_flags.RAM,
    prefix_cache_shared: str | None = prefix_flags.SHARED,
    prefix_cache_disk: str | None = prefix_flags.CHAT_DISK,
    prefix_cache_remote: str | None = prefix_flags.REMOTE,
    **options: Any,
) -> int:
    """Talk with a model in many sessions at once.

    On a terminal, /help lists the commands; sessions, with their KV cache,
    are stored after each turn and continue at the next start.

    On a pipe, each line of stdin is a message (or a command) and each reply
    one line of stdout, its line breaks made spaces. All else is on stderr.
    The first line that fails ends the run with exit code 1. No session is
    stored unless --session names one.

    The exit code is 1 where what was said could not be stored in the end.
    """
    check_draft(options.get("speculate"), draft)
    on_terminal = console.stdin().isatty() and sys.stdout.isatty()
    if on_terminal and as_json:
        raise typer.BadParameter("--json is for a pipe")
    if on_terminal and (
        missing := lack("chat on a terminal", ["prompt_toolkit"], "cli")
    ):
        raise gemmakv.GemmaKVError(missing)

    from gemmakv.cli.chat.chat import Chat, Defaults
    from gemmakv.cli.chat.view import PipeView, TerminalView, View

    screen = TerminalView()
    view: View = screen if on_terminal else PipeView(as_json)
    persist = not no_persist and (on_terminal or session is not None)
    if persist:  # it takes a while, and so does the model
        threading.Thread(target=_import_library, daemon=True).start()
    with view.notes as notes:
        prefix = prefix_flags.open_prefix_cache(
            prefix_cache_ram,
            prefix_cache_shared,
            prefix_cache_disk,
            prefix_cache_remote,
            default_disk=not no_persist,
            tell=notes.add,
        )
        try:
            gemma = console.load(
                model or DEFAULT_MODEL,
                threads,
                quantize=quantize,
                prefix_cache=prefix,
                draft=draft,
                pin_threads=pin_threads,
                tell=notes.add,
            )
        except gemmakv.GemmaKVError as error:
            if model is not None:
                raise
            words = f"no --model given, and {error}"
            raise gemmakv.GemmaKVError(words) from None
        if sampling_defaults:
            options = console.with_sampling_defaults(gemma, options)
        store = None
        if persist:
            store = _open_store(gemma, view, sessions or "default")
        defaults = Defaults(
            system,
            options,
            overflow,
            template,
            capacity_tokens,
            kv_dtype,
            think,
        )
        open_chat = Chat(gemma, view, defaults, store)
        try:
            GenerationOptions.check(options, gemma.config.vocab_size)
            if not on_terminal:
                from gemmakv.cli.chat import pipe

                open_chat.open(session)
                code = pipe.run(open_chat, console.lines())
                lost = persist and (store is None or not store.writable)
                return code or (EXIT_FAILURE if lost else 0)
            from gemmakv._support.folders import data_folder
            from gemmakv.cli.chat import first_screen
            from gemmakv.cli.chat.terminal import Terminal

            view.say(_greeting(gemma))
            open_chat.open(session)
            if persist and first_screen.is_for(open_chat):
                first_screen.show(view, model or DEFAULT_MODEL)
            open_chat.show_where()
            history = data_folder() / "chat/history" if persist else None
            code = Terminal(open_chat, screen, history).run()
            unstored = open_chat.unstored() if persist else []
            if unstored:
                view.error(f"not saved: {', '.join(unstored)}")
                return EXIT_FAILURE
            return code
        finally:
            open_chat.close()
            if gemma.prefix_cache is not None:
                gemma.prefix_cache.cache.close()


def _greeting(gemma: gemmakv.Gemma) -> str:
    from gemmakv.cli.chat.table import count

    name = gemma.config.name or gemma.config.architecture
    threads = count(gemma.threads, "thread")
    return (
        f"gemmakv {gemmakv.__version__} · {name} · {threads} · "
        "/help lists commands, Ctrl-D leaves"
    )


def _import_library() -> None:
    with contextlib.suppress(ImportError):
        import sqlalchemy  # noqa: F401


def _open_store(gemma: gemmakv.Gemma, view: Any, sessions: str) -> Any:
    """The model's store; None, with a line said, if there can be none."""
    missing = lack("keeping sessions", ("sqlalchemy", "alembic"), "cli")
    if missing:
        view.error(f"this chat is kept in memory only: {missing}")
        return None
    from gemmakv.chat import store as earlier
    from gemmakv.conversations._chat import ChatStore
    from gemmakv.conversations._store import folder_of
    from gemmakv.conversations._takeover import take_over

    weights = gemma.weights_fingerprint
    try:
        store = ChatStore.open(folder_of(sessions), weights)
    except (OSError, ValueError) as error:
        view.error(
            f"sessions cannot be stored ({describe(error)}); this chat is "
            "kept in memory only"
        )
        return None
    if not store.writable:
        view.error(
            f"nothing can be stored ({store.read_only}); this chat works on "
            "copies (/save PATH writes one to a file)"
        )
    if sessions == "default":
        name = gemma.config.name or gemma.config.architecture
        try:
            for line in take_over(earlier.folder_of(name, weights), store):
                view.error(line)
        except (OSError, gemmakv.GemmaKVError) as error:
            view.error(
                "the sessions of earlier versions stay where they are, for "
                f"now: {describe(error)}"
            )
    return store
