"""The settings of `gemmakv serve`: flags, variables and keys of a file.

`ServeSettings` is the one list of them. A value is the flag's, else the
variable's, else the file's, else the default. `read` makes the settings, and
`Places` says where the value of each stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from gemmakv._support.refusals import refusal
from gemmakv._support.sizes import parse_bytes
from gemmakv._support.text import utf8_text
from gemmakv.cli.arguments import MODEL_HELP
from gemmakv.cli.failures import Misplaced, argument_of, is_usage
from gemmakv.cli.flags import flag_of
from gemmakv.cli.prefix_flags import DISK_HELP, REMOTE_HELP, SHARED_HELP
from gemmakv.errors import GemmaKVError, one_line, unexpected

PREFIX = "GEMMAKV_"
# An empty or blank variable of these must not count as one that is not set: a
# server that asks nobody for a key would be the result.
_GUARDS = ("api_key", "api_key_file", "prefix_cache_secret_file")


def _words(value: Any) -> Any:
    """Splits a variable, which has several texts with spaces between them."""
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list):
        raise unexpected("texts", "a text or a list of them", value)
    return value


def _bytes(value: Any) -> int:
    return parse_bytes("size", value)


def _text(value: Any) -> Any:
    """Takes an integer of the file for a text."""
    return str(value) if type(value) is int else value


def _model(value: Any) -> Any:
    if value == "":
        raise unexpected("model", "a model", value)
    return value


Texts = Annotated[list[str], BeforeValidator(_words)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Size = Annotated[str, BeforeValidator(_text)]
Model = Annotated[str, BeforeValidator(_model)]


def _option(
    default: Any, metavar: str, description: str, **limits: float
) -> Any:
    """Makes a field; `metavar` stands for its value on the help page."""
    return Field(
        default,
        description=description,
        json_schema_extra={"metavar": metavar},
        ge=limits.get("ge"),
        le=limits.get("le"),
    )


def _switch(description: str) -> Any:
    return Field(False, description=description)


class ServeSettings(BaseModel):
    """The options of the server. What the server itself checks, such as the
    range of a port, is not checked here.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    # fmt: off
    model: Model | None = _option(None, "MODEL", MODEL_HELP)
    config: str | None = _option(None, "FILE",
        "Read options from a TOML file, by their names: port = 8080. Flags "
        "and variables take precedence.")
    served_model_name: Texts = _option([], "NAME",
        "The model's name in requests; * accepts any name, which answers "
        "repeat. Default: MODEL.")
    host: str = _option("127.0.0.1", "ADDRESS",
        "The address to listen at, or with a slash the path of a Unix "
        "socket. An address that others can reach needs API keys.")
    port: int = _option(8000, "N", "The port to listen at; 0 picks a free one.")
    workers: int = _option(1, "N",
        "Number of processes that serve. Each has the limits and sizes below "
        "for itself. They share weights, sessions and, on a memory file "
        "system, the prefix cache.")
    worker_timeout: int = _option(60, "S",
        "Replace a worker that hangs for this many seconds.", ge=1, le=10**7)
    threads: int | None = _option(None, "N",
        "Threads of each worker. Default: its part of the processors that "
        "may be used. Results do not depend on it.")
    pin_threads: bool = _switch(
        "Keep each thread on a processor of its own, one on each core first. "
        "Each of several workers has its own cores.")
    api_key: Texts = _option([], "KEY",
        "A key that requests must have. Other programs can see it on the "
        "command line; a file is safer.")
    api_key_file: str | None = _option(None, "FILE",
        "File with such keys, one on each line.")
    max_connections: int | None = _option(None, "N",
        "Open connections beyond which requests are refused with status 503. "
        "Default: no limit.")
    max_queue: int = _option(64, "N",
        "Requests that may wait; more are refused with status 429.")
    max_queue_tokens: int | None = _option(None, "N",
        "Prompt tokens of waiting requests that are not computed yet; more "
        "are refused with status 429. Default: no limit.")
    max_running: int = _option(16, "N",
        "Replies that are generated at the same time.")
    max_model_len: int | None = _option(None, "N",
        "Tokens of a prompt and its reply together. Default: the model's "
        "context.")
    kv_cache_memory: Bytes | None = _option(None, "SIZE",
        "Memory for the conversations of running requests, as 4GiB; requests "
        "wait while it is full. Default: no limit.")
    default_max_tokens: int | None = _option(None, "N",
        "max_tokens of requests that have none. Default: what fits.")
    default_temperature: float | None = _option(None, "X",
        "temperature of requests that have none. Default: what the model's "
        "files recommend, else 1.")
    default_seed: int | None = _option(None, "N",
        "seed of requests that have none. Default: a random one.")
    chat_template: str | None = _option(None, "NAME",
        "file, gemma, gemma4, plain, or the path of a Jinja template. "
        "Default: the one that fits the model.")
    speculate: str | None = _option(None, "off|lookup|draft",
        "Guess tokens where that saves time: lookup guesses from the "
        "conversations of the same key, draft asks the model of --draft. "
        "Results stay the same. A request of OpenAI's chat and completions may "
        "choose otherwise. Default: draft with --draft, else lookup.")
    draft: Model | None = _option(None, "MODEL",
        "A smaller model with the same vocabulary that guesses the next "
        "tokens.")
    prefix_cache_ram: Size | None = _option(None, "SIZE",
        "Memory for the common beginnings of prompts, as 2GiB; off: none. "
        "Default: 1GiB, at most a 16th of the memory.")
    prefix_cache_shared: str | None = _option(None, "DIR[:SIZE]", SHARED_HELP)
    prefix_cache_disk: str | None = _option(None, "DIR[:SIZE]", DISK_HELP)
    prefix_cache_remote: str | None = _option(None, "URL", REMOTE_HELP)
    prefix_cache_secret_file: str | None = _option(None, "FILE",
        "File with the secret that separates API keys in the prefix cache; "
        "created if missing. Default: DIR.secret.")
    sessions: str | None = _option(None, "DIR",
        "Keep conversations in a folder, for /v1/sessions and for "
        "/v1/responses by id. default: the folder of `gemmakv chat`.")
    response_days: float = _option(30.0, "N",
        "Days for which a response can be continued by its id.",
        ge=0.001, le=36_500)
    request_timeout: float | None = _option(None, "S",
        "Seconds from a request to the end of its answer. Default: no limit.")
    drain_timeout: float = _option(30.0, "S",
        "Seconds that running answers have when the server stops.")
    max_body_bytes: int = _option(8 << 20, "N", "Bytes of a request.", ge=1)
    max_messages: int = _option(4096, "N", "Messages of a conversation.", ge=1)
    max_n: int = _option(16, "N", "Replies to one request.", ge=1)
    cors_origin: Texts = _option([], "ORIGIN",
        "Let pages of this origin use the server, or *: of any.")
    allowed_host: Texts = _option([], "NAME",
        "Accept requests to this host name, or *: to any.")
    sse_ping_interval: float = _option(15.0, "S",
        "Seconds of silence after which a stream sends a sign of life; 0: "
        "none.", ge=0, le=1e7)
    log_format: str = _option("text", "FORMAT",
        "Write the log, on stderr, as text or json.")
    profile: bool = _switch(
        "Measure the time of each part of a step, for /metrics.")
    no_page: bool = _switch("Serve no chat page at /.")
    insecure: bool = _switch("Listen at any address without API keys.")
    # fmt: on


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the values of settings stand.

    Attributes:
      flags: what the command line has, by the names of fields.
      keys: the keys that the file has, by the names of fields.
      path: of the file.
    """

    flags: Mapping[str, object]
    keys: Mapping[str, str]
    path: object

    def of(self, name: str) -> str:
        """Gives the place of a field's value; "" if it is the default, or if
        there is no such field.
        """
        if name in self.flags:
            return flag_of(name)
        variable = PREFIX + name.upper()
        if name in ServeSettings.model_fields and os.environ.get(variable):
            return variable
        return f"{self.path}: {self.keys[name]}" if name in self.keys else ""

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Has an error inside that begins with the name of a field begin with
        the place of its value, if that is a variable or in the file.
        """
        try:
            yield
        except (ValueError, OSError, GemmaKVError) as error:
            name = argument_of(error)
            place = self.of(name)
            if not place or name in self.flags:
                raise
            words = one_line(error)[len(name) :]
            usage = is_usage(name, error)
            raise Misplaced(place + words, usage=usage) from None


def read(flags: Mapping[str, object]) -> tuple[ServeSettings, Places]:
    """Reads the settings of a command line that has `flags`, of the variables
    and of the file that is named there. Raises Misplaced.
    """
    path = flags.get("config", os.environ.get(PREFIX + "CONFIG") or None)
    values, keys = ({}, {}) if path is None else _read_file(str(path))
    places = Places(flags, keys, path)

    # The names of variables are exact: "gemmakv_port" is none.
    typed = {
        name: os.environ.get(PREFIX + name.upper())
        for name in ServeSettings.model_fields
    }
    values |= {name: text for name, text in typed.items() if text}
    try:
        settings = ServeSettings(**{**values, **flags})
    except ValidationError as error:
        details = error.errors()[0]
        name, *index = details["loc"]
        where = (places.of(str(name)) or str(name)) + _in_list(index)
        raise Misplaced(f"{where}: {refusal(details)}") from None
    for name in _GUARDS:
        variable = PREFIX + name.upper()
        if name not in flags and not os.environ.get(variable, "-").strip():
            raise Misplaced(
                f"{variable}: expected a value, or no such variable, found "
                "an empty one"
            )
    # One of the class above cannot be pickled, as workers need it.
    return ServeSettings.model_construct(**dict(settings)), places


def _in_list(index: list[Any]) -> str:
    return "".join(f"[{one}]" for one in index)


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a file: values and keys, by the names of fields."""
    try:
        found = tomllib.loads(utf8_text(Path(path).read_bytes()))
    except OSError as error:
        raise Misplaced(f"{path or repr(path)}: {error.strerror}") from None
    except ValueError as error:
        raise Misplaced(f"{path}: {error}") from None
    types = get_type_hints(ServeSettings, include_extras=True)
    names = set(ServeSettings.model_fields) - {"config"}
    values, keys = {}, {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in names:
            known = ", ".join(sorted(flag_of(one)[2:] for one in names))
            raise Misplaced(f"{path}: {key}: expected one of {known}")
        if types[name] == Texts and isinstance(value, str):
            value = [value]
        values[name] = _checked(f"{path}: {key}", types[name], value)
        keys[name] = key
    return values, keys


def _checked(place: str, kind: Any, value: Any) -> Any:
    """Checks the type of a value of the file: TOML has types, and a program
    that takes "8" for 8 hides mistakes.
    """
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        details = error.errors()[0]
        where = place + _in_list(list(details["loc"]))
        raise Misplaced(f"{where}: {refusal(details)}") from None
