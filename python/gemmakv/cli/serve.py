"""`gemmakv serve`: HTTP on one model."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import gemmakv
from gemmakv._support.arguments import integer
from gemmakv._support.extras import lack
from gemmakv._support.processors import check_pinned, processors
from gemmakv.cli import console, prefix_flags
from gemmakv.cli.arguments import check_draft, examples, no_model
from gemmakv.cli.failures import Misplaced
from gemmakv.cli.flags import with_settings
from gemmakv.cli.serve_settings import ServeSettings, read
from gemmakv.options import GenerationOptions

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma
    from gemmakv.server.service.chat import ChatService

EXAMPLES = examples(
    "gemmakv serve -m gemma-3-270m",
    "gemmakv serve -m model.gguf --port 8080 --max-model-len 8192",
    "gemmakv serve -m org/repo --host 0.0.0.0 --api-key-file keys.txt",
    "gemmakv serve --config server.toml --log-format json",
)
_NEEDED = (
    "prometheus_client",
    "starlette",
    "uvicorn",
    "fastapi",
    "sqlalchemy",
    "alembic",
)
_OFF = ("0", "off")


@with_settings(ServeSettings)
def serve(context: typer.Context, **flags: Any) -> None:
    """Serve a model to programs that speak OpenAI, Anthropic or Ollama.

    Every option is also a variable (GEMMAKV_PORT) and a key of the --config
    file.
    """
    if missing := lack("the server", _NEEDED, "server"):
        raise ValueError(missing)
    given, places = read(flags)
    with places.blaming():
        _serve(context, given)


def _serve(context: typer.Context, given: ServeSettings) -> None:
    model = given.model
    if model is None:
        raise Misplaced(no_model())
    from gemmakv.server import settings as settings_of
    from gemmakv.server.process import run as _run
    from gemmakv.server.process.sockets import bound
    from gemmakv.server.process.workers import MOST_WORKERS

    keys = list(given.api_key)
    if given.api_key_file is not None:
        keys += settings_of.read_keys(given.api_key_file)
    workers = integer("workers", given.workers, 1, MOST_WORKERS)
    threads, shared = given.threads, given.prefix_cache_shared
    if workers > 1:
        if threads is None:
            threads = max(1, processors() // workers)
        if given.pin_threads:
            check_pinned(threads, workers)
        ram_off = (given.prefix_cache_ram or "").lower() in _OFF
        if shared is None and not ram_off:
            shared = _shared_by_workers()
    tiers = (
        given.prefix_cache_ram,
        prefix_flags.wanted(shared),
        prefix_flags.wanted(given.prefix_cache_disk),
        given.prefix_cache_remote,
    )
    prefix = _prefix_cache(*tiers)
    secret = _prefix_secret(
        *tiers[1:], given.prefix_cache_secret_file, bool(keys)
    )
    settings = _for_server(given, settings_of, keys, secret)
    settings_of.log_format(given.log_format)
    speculate = GenerationOptions.table["speculate"].check(
        "speculate", given.speculate
    )
    check_draft(given.speculate, given.draft)
    source = _template_source(given.chat_template)
    store = _open_sessions(given)
    path = console.fetch(model)
    draft_path: str | None = None
    if given.draft is not None:
        draft_path = console.fetch_draft(given.draft, path)
    setup = _Setup(
        given, settings, path, draft_path, threads, speculate, source, tiers,
        prefix, store,
    )  # fmt: skip
    with bound(settings) as sock:
        several = None
        if workers > 1:
            several = _run.Workers(
                workers, given.worker_timeout, given.pin_threads
            )
            setup.close()  # it was opened to see that it can be
        try:
            code = _run.serve(settings, sock, setup, given.log_format, several)
        finally:
            setup.close()
    raise typer.Exit(code)


@dataclasses.dataclass
class _Setup:
    """The model, the prefix cache and the sessions that a server opens. A
    pickled copy has none of them open: each worker opens its own.

    Attributes:
      same: the file that the store of conversations must still be.
    """

    given: ServeSettings
    settings: Any
    path: str
    draft_path: str | None
    threads: int | None
    speculate: Any
    source: str | None
    tiers: tuple[str | None, ...]
    prefix: Any = None
    store: Any = None
    same: tuple[int, int] | None = None

    def load(self, check: Callable[[], None]) -> Gemma:
        from gemmakv.chat._gemma import Gemma

        given = self.given
        if self.prefix is None:
            self.prefix = _prefix_cache(*self.tiers)
        draft = None
        if self.draft_path is not None:
            draft = console.load_draft(self.draft_path, self.path, self.threads)
        return Gemma.load(
            self.path,
            threads=self.threads,
            pin_threads=given.pin_threads,
            progress=lambda done, total: check(),
            prefix_cache=self.prefix,
            speculate=self.speculate,
            profile=given.profile,
            draft=draft,
        )

    def make_service(self, gemma: Gemma, mark: str) -> ChatService:
        from gemmakv.server.service.chat import ChatService
        from gemmakv.server.service.history import History

        template: Any = self.given.chat_template
        if self.source is not None:
            template = _file_template(self.source, gemma, template)
        found = ChatService(gemma, self.settings, template)
        if self.store is None:
            self.store = _open_sessions(self.given, self.same)
        if self.store is not None:
            History(found, self.store, mark)
        return found

    def close(self) -> None:
        if self.store is not None:
            self.same = self.store.database.file
            self.store.close()
        if not isinstance(self.prefix, bool | None):
            self.prefix.close()
        self.store = self.prefix = None


def _for_server(
    given: ServeSettings, settings_of: Any, keys: list[str], secret: bytes
) -> Any:
    """Makes the settings that the server takes: of the same names, but for a
    few.
    """
    names = {one.name for one in dataclasses.fields(settings_of.Settings)}
    same = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given
        if name in names
    }
    served = given.served_model_name
    if set(served) <= {"*"}:  # any, and this one where none is asked for
        same["served_model_name"] = (_name_of(given.model or ""), *served)
    return settings_of.Settings(
        **same,
        api_keys=settings_of.checked_keys(keys),
        page=not given.no_page,
        ping_s=given.sse_ping_interval,
        cache_secret=secret,
        version=gemmakv.__version__,
        limits=settings_of.Limits(
            body_bytes=given.max_body_bytes,
            messages=given.max_messages,
            rows=given.max_n,
        ),
    )


def _file_template(source: str, gemma: Any, name: str | None) -> Any:
    from gemmakv.chat._file_template import FileTemplate

    try:
        return FileTemplate(
            source,
            gemma.tokenizer,
            bos_id=gemma.config.bos_id,
            eos_ids=gemma.config.eos_ids,
        )
    except gemmakv.GemmaKVError as error:
        raise ValueError(f"chat_template: {name}: {error}") from None


def _shared_by_workers() -> str | None:
    """The default place, where there is one."""
    try:
        gemmakv.PrefixCache(0, shared=True).close()
    except (ValueError, OSError, gemmakv.GemmaKVError) as error:
        sys.stderr.write(f"gemmakv: the workers share no prefixes: {error}\n")
        return None
    return "default"


def _open_sessions(
    given: ServeSettings, same: tuple[int, int] | None = None
) -> Any:
    """Opens the store of conversations, in the `same` file; None if none are
    kept.
    """
    if given.sessions is None:
        return None
    from gemmakv.conversations._store import Conversations, folder_of

    folder = folder_of(given.sessions)
    return Conversations.open(folder, given.response_days, same)


def _name_of(model: str) -> str:
    """Gives the name in requests of a model that has no other."""
    if os.path.exists(model):
        return Path(model).name.removesuffix(".gguf") or model
    return model


def _prefix_cache(
    ram: str | None,
    shared: str | None,
    disk: str | None,
    remote: str | None,
) -> Any:
    """Opens the prefix cache; True stands for the default, False for none."""
    lower = not (shared is None and disk is None and remote is None)
    if ram is not None and ram.lower() in _OFF and not lower:
        return False
    if ram is not None and ram.lower() == "off":
        raise ValueError(
            "prefix_cache_ram: expected bytes with a shared, disk or remote "
            "prefix cache, as 0, found 'off'"
        )
    return prefix_flags.open_prefix_cache(ram, shared, disk, remote)


def _prefix_secret(
    shared: str | None,
    disk: str | None,
    remote: str | None,
    secret_file: str | None,
    keys: bool,
) -> bytes:
    """Gives the secret that separates API keys in tiers that outlive the
    server; b"" if none do.
    """
    outlives = not (shared is None and disk is None and remote is None)
    if secret_file is not None and not (outlives and keys):
        raise ValueError(
            "prefix_cache_secret_file: expected none without keys and a "
            f"shared, disk or remote prefix cache, found {secret_file!r}"
        )
    if not (outlives and keys):
        return b""
    for name, value in (("disk", disk), ("shared", shared)):
        if secret_file is None and value is not None:
            folder = prefix_flags.tier_folder(name, value)
            secret_file = folder.rstrip("/") + ".secret"
    if secret_file is None:
        raise ValueError(
            "prefix_cache_secret_file: expected a file with keys and a remote "
            "prefix cache, the same on all hosts, found none"
        )
    from gemmakv.server.process import secret as _secret

    return _secret.read_or_make(secret_file)


def _template_source(name: str | None) -> str | None:
    """Reads a template that is a file; gives None if it is a name."""
    from gemmakv.chat._templates import NAMES

    if name is None or name in NAMES:
        return None
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template: expected {', '.join(NAMES)} or the path of a "
            f"Jinja template, found {name!r}: "
            + (getattr(error, "strerror", None) or str(error))
        ) from None
