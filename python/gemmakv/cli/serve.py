"""`gemmakv serve`: HTTP on one model."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

import gemmakv
from gemmakv._support.arguments import integer, number
from gemmakv._support.extras import install_command
from gemmakv._support.processors import check_pinned, processors, shares
from gemmakv._support.sizes import parse_bytes
from gemmakv._support.text import utf8_text
from gemmakv.cli import console
from gemmakv.cli.arguments import MODEL_HELP, complete_model, examples, no_model
from gemmakv.cli.sources import Misplaced, blaming, note_config
from gemmakv.errors import brief
from gemmakv.options import GenerationOptions

EXAMPLES = examples(
    "gemmakv serve -m gemma-3-270m",
    "gemmakv serve -m model.gguf --port 8080 --max-model-len 8192",
    "gemmakv serve -m org/repo --host 0.0.0.0 --api-key-file keys.txt",
    "gemmakv serve --config server.toml --log-format json",
)
_PREFIX = "GEMMAKV_"
_NEEDED = ("starlette", "uvicorn", "msgspec")
_OFF = ("0", "off")
# Whose variable, where it is empty, must not count as one that is not set.
_GUARDS = ("api_key", "api_key_file", "prefix_cache_secret_file")
_MOST_DAYS = 36_500


def _option(flag: str, default: Any, help: str, metavar: str = "") -> Any:
    """A flag that is also a variable and a key of the file."""
    name = flag.removeprefix("--").replace("-", "_")
    return typer.Option(
        default,
        flag,
        metavar=metavar or None,
        help=help,
        envvar=_PREFIX + name.upper(),
        show_envvar=False,
    )


def _not_of(parameter: Any, value: Any, several: bool) -> str:
    """What is wrong with a value of the file, behind its key; "" if nothing.

    TOML has types, and a program that takes "8" for 8 hides mistakes.
    """
    hint = get_type_hints(serve)[str(parameter.name)]
    hints = get_args(hint) or (hint,)
    types: tuple[type, ...] = (str,)
    expected = "a text"
    if bool in hints:
        types, expected = (bool,), "true or false"
    elif int in hints:
        types, expected = (int,), "an integer"
    elif float in hints:
        types, expected = (int, float), "a number"
    elif parameter.metavar == "SIZE":
        types, expected = (str, int), "a text as '4GiB', or bytes"
    if several:
        if not isinstance(value, list):
            found = _toml(value)
            return f": expected {expected} or a list of them, found {found}"
        values = {f"[{i}]": one for i, one in enumerate(value)}
    else:
        values = {"": value}
    for place, one in values.items():
        if not isinstance(one, types) or (
            isinstance(one, bool) and bool not in types
        ):
            return f"{place}: expected {expected}, found {_toml(one)}"
    return ""


def _toml(value: object) -> str:
    """As the file has it, or nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    return brief(value)


def _text(data: bytes) -> str:
    try:
        return utf8_text(data)
    except ValueError as error:
        raise tomllib.TOMLDecodeError(str(error)) from None


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Makes the file's values the defaults of the command."""
    if path is None:
        return None
    try:
        found = tomllib.loads(_text(Path(path).read_bytes()))
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    known = {
        str(p.name): p
        for p in context.command.params
        if p.name not in ("config", "help")
    }
    defaults, keys = {}, {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            names = sorted(one.replace("_", "-") for one in known)
            raise typer.BadParameter(
                f"{path}: {key}: expected one of " + ", ".join(names)
            )
        several = bool(getattr(known[name], "multiple", False))
        if several and isinstance(value, str):
            value = [value]
        wrong = _not_of(known[name], value, several)
        if wrong:
            raise typer.BadParameter(f"{path}: {key}{wrong}")
        defaults[name] = value
        keys[name] = key
    context.default_map = defaults
    note_config(context, path, keys)
    return path


_CONFIG = typer.Option(
    None,
    "--config",
    metavar="FILE",
    help="A TOML file with options by their names, port = 8080; flags and "
    "variables come first.",
    envvar=_PREFIX + "CONFIG",
    show_envvar=False,
    is_eager=True,
    callback=_read_config,
)


def serve(
    context: typer.Context,
    model: str | None = typer.Option(
        None,
        "--model",
        "-m",
        metavar="MODEL",
        help=MODEL_HELP,
        autocompletion=complete_model,
        envvar=_PREFIX + "MODEL",
        show_envvar=False,
    ),
    config: str | None = _CONFIG,
    served_model_name: list[str] | None = _option(
        "--served-model-name",
        None,
        "What requests call the model; repeatable. Default: MODEL.",
        "NAME",
    ),  # fmt: skip
    host: str = _option(
        "--host",
        "127.0.0.1",
        "Address to listen at; others than loopback need a key. With a "
        "slash: the path of a Unix socket.",
        "ADDRESS",
    ),  # fmt: skip
    port: int = _option("--port", 8000, "0 takes a free one.", "N"),
    workers: int = _option(
        "--workers",
        1,
        "Processes that serve; each has the limits and sizes below for "
        "itself. They share weights, sessions and, on a memory file system, "
        "what prompts have in common.",
        "N",
    ),  # fmt: skip
    worker_timeout: float = _option(
        "--worker-timeout",
        60.0,
        "Seconds after which a worker that hangs is replaced.",
        "S",
    ),  # fmt: skip
    threads: int | None = _option(
        "--threads",
        None,
        "Of each worker. Default: its part of all that there are to use. "
        "Results do not depend on it.",
        "N",
    ),  # fmt: skip
    pin_threads: bool = _option(
        "--pin-threads",
        False,
        "Keep each thread on a processor of its own, one on each core first; "
        "each of several workers has its own cores.",
    ),  # fmt: skip
    api_key: list[str] | None = _option(
        "--api-key",
        None,
        "A key that requests may have; repeatable. Other programs see it "
        "here: rather a file.",
        "KEY",
    ),  # fmt: skip
    api_key_file: str | None = _option(
        "--api-key-file", None, "A file with a key a line.", "FILE"
    ),
    max_queue: int = _option(
        "--max-queue", 64, "Requests that may wait; more get 429.", "N"
    ),
    max_queue_tokens: int | None = _option(
        "--max-queue-tokens",
        None,
        "Tokens of waiting prompts that are still to be computed; more get "
        "429. Default: no limit.",
        "N",
    ),  # fmt: skip
    max_running: int = _option(
        "--max-running", 16, "Continuations that run at once.", "N"
    ),
    max_model_len: int | None = _option(
        "--max-model-len",
        None,
        "Tokens of a prompt and its reply. Default: the model's context.",
        "N",
    ),  # fmt: skip
    kv_cache_memory: str | None = _option(
        "--kv-cache-memory",
        None,
        "Bytes for what running requests keep of their conversations, as "
        "4GiB; where it is full some wait for others. Default: no limit.",
        "SIZE",
    ),  # fmt: skip
    default_max_tokens: int | None = _option(
        "--default-max-tokens",
        None,
        "Where a request has no max_tokens. Default: what fits.",
        "N",
    ),  # fmt: skip
    default_temperature: float | None = _option(
        "--default-temperature",
        None,
        "Where a request has none. Default: the model's, else 1.",
        "X",
    ),  # fmt: skip
    default_seed: int | None = _option(
        "--default-seed",
        None,
        "Where a request has none. Default: another each time.",
        "N",
    ),  # fmt: skip
    chat_template: str | None = _option(
        "--chat-template",
        None,
        "file, gemma, gemma4, plain, or the path of a Jinja template. "
        "Default: what fits the model.",
        "NAME",
    ),  # fmt: skip
    speculate: str | None = _option(
        "--speculate",
        None,
        "Guess tokens where that saves time, from what the tenant's "
        "conversations have (lookup) or by --draft; results stay the same. "
        "Requests of OpenAI's chat and completions may say otherwise. "
        "Default: draft if there is one, else lookup.",
        "off|lookup|draft",
    ),  # fmt: skip
    draft: str | None = _option(
        "--draft",
        None,
        "A smaller model with the same vocabulary, which guesses what comes "
        "next.",
        "MODEL",
    ),  # fmt: skip
    prefix_cache_ram: str | None = _option(
        "--prefix-cache-ram",
        None,
        "Bytes for what prompts have in common, as 2GiB; off: none. Default: "
        "1 GiB, at most a 16th of the memory.",
        "SIZE",
    ),  # fmt: skip
    prefix_cache_shared: str | None = _option(
        "--prefix-cache-shared",
        None,
        "Share it with other processes: a folder on a memory file system, or "
        "default; none: with nobody.",
        "DIR[:SIZE]",
    ),  # fmt: skip
    prefix_cache_disk: str | None = _option(
        "--prefix-cache-disk",
        None,
        "Keep it for later starts in a folder; none: nowhere.",
        "DIR[:SIZE]",
    ),  # fmt: skip
    prefix_cache_remote: str | None = _option(
        "--prefix-cache-remote",
        None,
        "Share it with other hosts: redis://, valkey:// or s3://. The variable "
        "GEMMAKV_PREFIX_CACHE_SECRET has the secret of its values.",
        "URL",
    ),  # fmt: skip
    prefix_cache_secret_file: str | None = _option(
        "--prefix-cache-secret-file",
        None,
        "By what keys find their parts of these; made where there is none. "
        "Default: DIR.secret.",
        "FILE",
    ),  # fmt: skip
    sessions: str | None = _option(
        "--sessions",
        None,
        "Keep conversations in a folder: /v1/sessions, and /v1/responses by "
        "their ids.",
        "DIR",
    ),  # fmt: skip
    response_days: float = _option(
        "--response-days",
        30.0,
        "How long a response can be gone on from by its id.",
        "N",
    ),  # fmt: skip
    request_timeout: float | None = _option(
        "--request-timeout",
        None,
        "Seconds from a request to the end of its answer.",
        "S",
    ),  # fmt: skip
    drain_timeout: float = _option(
        "--drain-timeout",
        30.0,
        "Seconds for running answers when the server stops.",
        "S",
    ),  # fmt: skip
    max_body_bytes: int = _option(
        "--max-body-bytes", 8 << 20, "Of a request's body.", "N"
    ),
    max_messages: int = _option(
        "--max-messages", 4096, "Of a conversation.", "N"
    ),
    max_n: int = _option("--max-n", 16, "Continuations of one request.", "N"),
    cors_origin: list[str] | None = _option(
        "--cors-origin",
        None,
        "An origin whose pages may use the server, or *; repeatable.",
        "ORIGIN",
    ),  # fmt: skip
    allowed_host: list[str] | None = _option(
        "--allowed-host",
        None,
        "A name that requests may call this server by, or *; repeatable.",
        "NAME",
    ),  # fmt: skip
    log_format: str = _option(
        "--log-format", "text", "text or json, on stderr.", "FORMAT"
    ),
    lenient: bool = _option(
        "--lenient",
        False,
        "Leave out of a request what would be refused, where that is a "
        "setting, and name it in the answer (x-gemmakv-ignored).",
    ),  # fmt: skip
    profile: bool = _option(
        "--profile",
        False,
        "Time steps part by part, for /metrics.",
    ),  # fmt: skip
    no_page: bool = _option(
        "--no-page", False, "No page to chat at /, for browsers."
    ),
    insecure: bool = _option(
        "--insecure", False, "Listen at any address without a key."
    ),
) -> None:
    """Serve a model to programs that speak OpenAI, Anthropic or Ollama.

    Every option is also a variable (GEMMAKV_PORT) and a key of the --config
    file.
    """
    del config  # has become defaults
    with blaming(context):
        if model is None:
            raise typer.BadParameter(no_model(), param_hint="--model")
        _check_extra()
        from gemmakv.server import _run, _workers
        from gemmakv.server import _settings as settings_of
        from gemmakv.server._board import MOST_WORKERS
        from gemmakv.server._service import ChatService

        for name in _GUARDS:
            _check_not_empty(context, name)
        keys = list(api_key or ())
        if api_key_file is not None:
            keys += settings_of.read_keys(api_key_file)
        integer("--workers", workers, 1, MOST_WORKERS)
        number("worker_timeout", worker_timeout, 1, 1e7)
        if workers > 1:
            if threads is None:
                threads = max(1, processors() // workers)
            if pin_threads:
                check_pinned(threads, workers)
            ram_off = (prefix_cache_ram or "").lower() in _OFF
            if prefix_cache_shared is None and not ram_off:
                prefix_cache_shared = _shared_by_workers()
        from gemmakv.cli.prefix_flags import wanted

        tiers = (
            prefix_cache_ram,
            wanted(prefix_cache_shared),
            wanted(prefix_cache_disk),
            prefix_cache_remote,
        )
        prefix = _prefix_cache(*tiers)
        secret = _prefix_secret(
            *tiers[1:], prefix_cache_secret_file, bool(keys)
        )
        settings = settings_of.Settings(
            served_model_name=tuple(served_model_name or (_name_of(model),)),
            host=host,
            port=port,
            api_keys=settings_of.checked_keys(keys),
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            kv_cache_memory=None
            if kv_cache_memory is None
            else parse_bytes("--kv-cache-memory", kv_cache_memory),
            default_max_tokens=default_max_tokens,
            default_temperature=default_temperature,
            default_seed=default_seed,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            cors_origin=tuple(cors_origin or ()),
            allowed_host=tuple(allowed_host or ()),
            lenient=lenient,
            insecure=insecure,
            page=not no_page,
            cache_secret=secret,
            version=gemmakv.__version__,
            limits=settings_of.Limits(
                body_bytes=integer("--max-body-bytes", max_body_bytes, 1),
                messages=integer("--max-messages", max_messages, 1),
                rows=integer("--max-n", max_n, 1),
            ),
        )
        settings_of.log_format(log_format)
        GenerationOptions.table["speculate"].check("--speculate", speculate)
        if speculate == "draft" and draft is None:
            raise ValueError("--speculate: expected a --draft, found none")
        source = _template_source(chat_template)
        store = _open_sessions(sessions, response_days)
        path = console.fetch(model)
        draft_path: str | None = None
        if draft is not None:
            draft_path = console.fetch_draft(draft, path)
        sock = context.with_resource(_run.bound(settings))
        worker = None
        if workers > 1:
            # It has threads, and was opened to see that it can be.
            _close(prefix, store)
            _run.set_up_logs(log_format)
            found = _workers.supervise(
                workers,
                sock,
                drain_timeout,
                lambda: _run.say_ready(settings, sock),
                worker_timeout,
            )
            if isinstance(found, int):
                raise typer.Exit(found)
            worker = found
            if pin_threads:
                # What it starts is to stay there, too: HTTP, templates.
                os.sched_setaffinity(0, shares(workers)[worker.index])
            prefix = _prefix_cache(*tiers)
            same = None if store is None else store.file
            store = _open_sessions(sessions, response_days, same)

        def guesses() -> Any:
            if draft_path is None:
                return None
            return console.load_draft(draft_path, path, threads)

        def load(check: Any) -> Any:
            from gemmakv.chat._gemma import Gemma

            return Gemma.load(
                path,
                threads=threads,
                pin_threads=pin_threads,
                progress=lambda done, total: check(),
                prefix_cache=prefix,
                speculate=speculate,
                profile=profile,
                draft=guesses(),
            )

        def service(gemma: Any) -> ChatService:
            template: Any = chat_template
            if source is not None:
                from gemmakv.chat._file_template import FileTemplate

                try:
                    template = FileTemplate(
                        source,
                        gemma.tokenizer,
                        bos_id=gemma.config.bos_id,
                        eos_ids=gemma.config.eos_ids,
                    )
                except gemmakv.GemmaKVError as error:
                    raise gemmakv.GemmaKVError(
                        f"--chat-template {chat_template}: {error}"
                    ) from None
            found = ChatService(gemma, settings, template)
            if store is not None:
                from gemmakv.server._history import History

                History(found, store, worker.mark if worker else "")
            return found

        try:
            _run.serve(settings, sock, load, service, log_format, worker)
        finally:
            _close(prefix, store)


def _check_not_empty(context: typer.Context, name: str) -> None:
    """Raises BadParameter for an option's variable that is set, and empty."""
    source = getattr(context.get_parameter_source(name), "name", "")
    variable = _PREFIX + name.upper()
    if source == "DEFAULT" and os.environ.get(variable) == "":
        raise Misplaced(
            f"{variable}: expected a value, or no such variable, found an "
            "empty one"
        )


def _close(prefix: Any, store: Any) -> None:
    if store is not None:
        store.close()
    if not isinstance(prefix, bool):
        prefix.close()


def _shared_by_workers() -> str | None:
    """The default place, where there is one."""
    try:
        gemmakv.PrefixCache(0, shared=True).close()
    except (ValueError, OSError, gemmakv.GemmaKVError) as error:
        sys.stderr.write(f"gemmakv: the workers share no prefixes: {error}\n")
        return None
    return "default"


def _open_sessions(
    folder: str | None, days: float, same: tuple[int, int] | None = None
) -> Any:
    """The store of conversations, in the `same` file; None if none are kept."""
    number("response_days", days, 0.001, _MOST_DAYS)
    if folder is None:
        return None
    if not folder:
        raise ValueError("sessions: expected a folder, found ''")
    from gemmakv.server._store import Store

    return Store(folder, days, same)


def _check_extra() -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"the server needs the package {name}; install it with: "
                + install_command("server")
            )


def _name_of(model: str) -> str:
    """What requests call a model that has no other name."""
    if os.path.exists(model):
        return Path(model).name.removesuffix(".gguf") or model
    return model


def _prefix_cache(
    ram: str | None,
    shared: str | None,
    disk: str | None,
    remote: str | None,
) -> Any:
    """The prefix cache; True: the default; False: none."""
    from gemmakv.cli.prefix_flags import open_prefix_cache

    lower = not (shared is None and disk is None and remote is None)
    if ram is not None and ram.lower() in _OFF and not lower:
        return False
    if ram is not None and ram.lower() == "off":
        raise ValueError(
            "prefix_cache_ram: expected bytes with a shared, disk or remote "
            "prefix cache, as 0, found 'off'"
        )
    return open_prefix_cache(ram, shared, disk, remote)


def _prefix_secret(
    shared: str | None,
    disk: str | None,
    remote: str | None,
    secret_file: str | None,
    keys: bool,
) -> bytes:
    """By what keys find their parts, where tiers outlive the server; else
    b""."""
    from gemmakv.cli.prefix_flags import tier_folder

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
            secret_file = tier_folder(name, value).rstrip("/") + ".secret"
    if secret_file is None:
        raise ValueError(
            "prefix_cache_secret_file: expected a file with keys and a remote "
            "prefix cache, the same on all hosts, found none"
        )
    from gemmakv.server import _secret

    return _secret.read_or_make(secret_file)


def _template_source(name: str | None) -> str | None:
    """The text of a template that is a file; None if it is a name."""
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
