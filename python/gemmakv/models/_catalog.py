"""Where weights come from: aliases, paths and names of the hub."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
from pathlib import Path
from typing import NoReturn

from gemmakv._support.arguments import path_text
from gemmakv._support.documents import check_regular
from gemmakv._support.extras import install_command, pip_command
from gemmakv._support.files import (
    StrPath,
    atomic_writer,
    write_atomically,
)
from gemmakv._support.folders import cache_folder, in_cache_folder
from gemmakv._support.locks import locked
from gemmakv._support.progress import Callback
from gemmakv.errors import CorruptFile, GemmaKVError
from gemmakv.models._aliases import ALIASES, Alias
from gemmakv.models._forms import adapter_among, is_model_folder
from gemmakv.models._split import parts_of

_CHUNK_BYTES = 1 << 20


def resolve(model: StrPath, progress: Callback | None = None) -> str:
    """Path of the GGUF file or of the directory that `model` names.

    A str is an alias, a path or a name of the Hugging Face hub (`hub.parse`),
    in this order; an os.PathLike is a path. `progress` gets (done, total)
    bytes while a file is made or downloaded. Raises OSError, ValueError
    or GemmaKVError with one clear line.
    """
    path = path_text("model", model, "an alias or a path")
    if isinstance(model, str) and model in ALIASES:
        return str(fetch(ALIASES[model], progress))
    if os.path.isdir(path):
        if not is_model_folder(path):
            _refuse_folder(path)
        return path
    if os.path.exists(path):
        check_regular(Path(path))
        if os.path.basename(path) == "config.json" or path.endswith(
            ".safetensors"
        ):
            raise ValueError(
                f"{path}: a part of a model; expected the folder that it is in"
            )
        return _first_part(path)
    # Later: what is on disk does not need it.
    from gemmakv.models.hub import _download as hub

    name = hub.parse(model) if isinstance(model, str) else None
    if name is not None:
        return hub.fetch(name, progress)
    raise FileNotFoundError(
        errno.ENOENT,
        f"no such file, and no alias (known: {', '.join(ALIASES)}); a "
        "repository of the Hugging Face hub is written org/repo",
        path,
    )


def _first_part(path: str) -> str:
    """That of a split model; `path` itself if it is whole."""
    parts = parts_of(path)
    missing = [part for part in parts if not os.path.exists(part)]
    if missing:
        raise FileNotFoundError(
            errno.ENOENT,
            f"one of {len(parts)} files of a model, of which are missing: "
            + ", ".join(map(os.path.basename, missing)),
            path,
        )
    return parts[0]


def _refuse_folder(path: str) -> NoReturn:
    present = os.listdir(path)
    names = sorted(n for n in present if n.endswith(".gguf"))
    adapter = adapter_among(present)
    if adapter is not None and not names:
        reason = (
            f"found {adapter}, expected a model: adapters are not supported; "
            "merge it into the model that it was made for"
        )
    elif names:
        holds = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        reason = f"expected a .gguf file, found a folder; it holds {holds}"
    else:
        lacks = []
        if not os.path.isfile(os.path.join(path, "config.json")):
            lacks.append("config.json")
        if not any(".safetensors" in name for name in present):
            lacks.append("*.safetensors")
        reason = (
            "expected a .gguf file, or a folder with config.json and "
            f"*.safetensors; found a folder without {' and '.join(lacks)}"
        )
    raise IsADirectoryError(errno.EISDIR, reason, path)


def fetch(alias: Alias, progress: Callback | None = None) -> Path:
    """The alias's file in the cache folder, assembled if need be.

    Two processes may do this at the same time: one assembles, the other
    waits. The file is checked against its SHA256 when it is made; later
    calls compare its size and times with those noted then, and hash it again
    only if they differ.
    """
    folder = cache_folder()
    with in_cache_folder():
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / alias.file_name
    if _is_noted(path, alias):
        return path
    with contextlib.ExitStack() as stack:
        with in_cache_folder():
            stack.enter_context(locked(folder / f"{alias.file_name}.lock"))
        if _is_noted(path, alias):
            return path
        if not _is_sound(path, alias):
            _assemble(alias, path, progress)
        write_atomically(_note_of(path), _note(path, alias))
    return path


def _assemble(alias: Alias, path: Path, progress: Callback | None) -> None:
    digest = hashlib.sha256()
    done = 0
    with atomic_writer(path) as out:
        for part in _part_paths(alias):
            with open(part, "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None and done < alias.size_bytes:
                        progress(done, alias.size_bytes)
        if digest.hexdigest() != alias.sha256:
            raise CorruptFile(
                f"{alias.file_name}: expected {alias.size_bytes} bytes with "
                f"SHA256 {alias.sha256}, found {done} bytes with "
                f"{digest.hexdigest()} in the installed demo package; "
                f"reinstall it: {pip_command()} install --force-reinstall "
                + alias.package.replace("_", "-")
            )
    if progress is not None:
        progress(alias.size_bytes, alias.size_bytes)


def _part_paths(alias: Alias) -> list[Path]:
    try:
        package = importlib.import_module(alias.package)
        return [Path(part) for part in package.chunk_paths()]
    except ImportError as error:
        raise GemmaKVError(
            f"{alias.file_name}: the demo weights are not installed "
            f"({error}); install them with: {install_command('demo')}"
        ) from None


def _is_sound(path: Path, alias: Alias) -> bool:
    try:
        if path.stat().st_size != alias.size_bytes:
            return False
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except FileNotFoundError:
        return False
    return digest.hexdigest() == alias.sha256


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _note(path: Path, alias: Alias) -> bytes:
    # The change time cannot be set by a program, so an edit always shows.
    stat = path.stat()
    return (
        f"{alias.sha256} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} "
        f"{stat.st_ctime_ns}\n"
    ).encode()


def _is_noted(path: Path, alias: Alias) -> bool:
    try:
        return _note_of(path).read_bytes() == _note(path, alias)
    except OSError:
        return False
