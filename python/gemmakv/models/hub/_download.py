"""Models of the Hugging Face hub: names like `org/repo`.

Downloads go where huggingface_hub keeps its files (HF_HOME), so that
every program shares one copy. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path

from gemmakv._support.progress import Callback
from gemmakv._support.sizes import in_bytes
from gemmakv.errors import GemmaKVError
from gemmakv.models._forms import check_no_adapter
from gemmakv.models._split import parts_of
from gemmakv.models.hub._errors import FileMissing, NoAnswer, not_found
from gemmakv.models.hub._repository import (
    DEFAULT_REVISION,
    HubName,
    Listing,
    Repository,
)
from gemmakv.models.huggingface._safetensors import (
    INDEX_NAME,
    read_weight_map,
    single_file,
)

_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"refs/(?:pr|convert)/[\w.-]+|[\w.+-]+"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"
    r"(?::(?P<quantization>\w+)|/(?P<file>[^@\\]+))?"
)

_CONFIG = "config.json"
# What is read beside the weights, if it is there.
_SMALL_FILES = (
    _CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tokenizer.json",
    "chat_template.jinja",
    "chat_template.json",
)


def parse(name: str) -> HubName | None:
    """Reads a name of the hub; None for what can only be a path.

    Names are `org/repo`, `org/repo:Q4_K_M` and `org/repo/file.gguf`, each with
    `@revision` after `repo` for a branch, tag or commit.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    repo, file = match["repo"], match["file"]
    revision = match["revision"] or DEFAULT_REVISION
    if file is None:
        whole = repo == name
        if whole and repo.lower().endswith(".gguf"):
            return None  # a folder and a file
        return HubName(repo, None, revision, match["quantization"])
    if not file.lower().endswith(".gguf"):
        return None
    if any(part in ("", ".", "..") for part in file.split("/")):
        return None
    if os.path.isdir(os.path.dirname(name)):
        return None  # the folder is here and lacks the file
    return HubName(repo, file, revision)


def fetch(name: HubName, progress: Callback | None = None) -> str:
    """Gives the path of the model's file or folder on this machine, downloaded
    if need be.

    A download that broke off continues. `progress` gets (bytes that are here,
    bytes of the model). If the hub gives no answer, a copy that is here is
    used, with a warning; under HF_HUB_OFFLINE nothing is asked and nothing
    said.

    Raises OSError, ValueError or GemmaKVError with one line that says what to
    do.
    """
    repository = Repository(name)
    if repository.offline:
        path = _find_here(repository)
        if path is None:
            raise not_found(
                str(name),
                "no such file, and no such model, or not all of it, among "
                "those downloaded before; unset HF_HUB_OFFLINE to download it",
            )
        return path
    try:
        return _fetch_online(repository, progress)
    except NoAnswer as error:
        path = _find_here(repository)
        if path is None:
            raise error.as_os_error() from None
        warnings.warn(
            f"{name}: {error.reason}; using the copy that was downloaded "
            "before",
            stacklevel=4,
        )
        return path


def _fetch_online(repository: Repository, progress: Callback | None) -> str:
    name = repository.name
    if name.file is not None and len(parts_of(name.file)) == 1:
        try:
            return str(repository.fetch_file(name.file, progress))
        except FileMissing:
            listing = repository.list_files()
            raise _lacks(name, listing, [name.file]) from None
    listing = repository.list_files()
    first = name.file or _choose(name, listing)
    if first is None:
        wanted = files_of_folder(repository, listing)
    else:
        wanted = parts_of(first)
        missing = [part for part in wanted if part not in listing.files]
        if missing:
            raise _lacks(name, listing, missing)
    folder = repository.fetch(listing, wanted, progress)
    repository.note(listing.commit)
    return str(folder if first is None else folder / wanted[0])


def _lacks(
    name: HubName, listing: Listing, missing: list[str]
) -> FileNotFoundError:
    return not_found(
        str(name),
        f"the repository has no {', '.join(missing)}; it holds "
        + _describe(listing.files),
    )


def _choose(name: HubName, listing: Listing) -> str | None:
    """Gives the only .gguf file of a repository; None if the repository itself
    is a model's directory.
    """
    files = listing.files
    models = models_among(files, name.quantization)
    if name.quantization and not models:
        raise ValueError(
            f"{name}: no .gguf file is of that quantization; the repository "
            f"holds {_describe(files)}"
        )
    if len(models) == 1:
        return models[0]
    if models:
        example = dataclasses.replace(
            name, file=models[0], quantization=None
        )
        raise ValueError(
            f"{name}: expected one .gguf file, found {len(models)}; name one, "
            f"as in {example}; it holds {_describe(files)}"
        )
    if is_folder(files):
        return None
    if any(file.lower().endswith(".safetensors") for file in files):
        raise GemmaKVError(
            f"{name}: the repository holds safetensors weights, but not as a "
            "model: expected config.json and model.safetensors, or shards "
            "with model.safetensors.index.json"
        )
    raise not_found(
        str(name),
        "the repository holds no model: neither a .gguf file nor "
        "config.json and model.safetensors",
    )


def models_among(
    files: Iterable[str], quantization: str | None = None
) -> list[str]:
    """Gives the .gguf files with a language model, of split ones the first
    part, and no image encoders. With `quantization`: those that have this word
    in their names.
    """
    word = re.compile(
        rf"(?:^|[-._/]){re.escape(quantization or '')}[-./]", re.IGNORECASE
    )
    return sorted(
        {
            parts_of(file)[0]
            for file in files
            if file.lower().endswith(".gguf")
            and not os.path.basename(file).lower().startswith("mmproj")
            and (quantization is None or word.search(file))
        }
    )


def _describe(files: dict[str, int | None]) -> str:
    """Lists the models, for people."""
    texts = []
    for file in models_among(files):
        sizes = [files.get(part) for part in parts_of(file)]
        known = [size for size in sizes if size is not None]
        all_known = len(known) == len(sizes)
        texts.append(f"{file} ({in_bytes(sum(known))})" if all_known else file)
    return ", ".join(texts) or "no .gguf file"


def _find_here(repository: Repository) -> str | None:
    """Gives the path of the model among what was downloaded before."""
    name = repository.name
    snapshot = repository.here()
    if snapshot is None:
        return None
    if name.file is not None:
        return _file_here(snapshot, name.file)
    found = models_among(files_of(snapshot), name.quantization)
    if len(found) > 1:
        raise ValueError(
            f"{name}: expected one .gguf file among those downloaded before, "
            f"found {len(found)}; name one: {', '.join(found)}"
        )
    if found or name.quantization:
        return _file_here(snapshot, found[0]) if found else None
    return folder_here(snapshot)


def _file_here(snapshot: Path, file: str) -> str | None:
    """Gives a file's path if it is here with all its parts."""
    parts = [snapshot / part for part in parts_of(file)]
    return str(parts[0]) if all(path.is_file() for path in parts) else None


def files_of(snapshot: Path) -> list[str]:
    """Lists the files that are here of a commit."""
    return [
        str(path.relative_to(snapshot))
        for path in snapshot.glob("**/*")
        if path.is_file()
    ]


# Repositories that are a model's directory.


def is_folder(files: Collection[str]) -> bool:
    """Tells whether files of these names are a model's directory."""
    return _CONFIG in files and (
        INDEX_NAME in files or single_file(files) is not None
    )


def files_of_folder(repository: Repository, listing: Listing) -> list[str]:
    """Gives the files of the listing that a model needs; of sharded weights
    the index is downloaded for it.

    Raises MismatchError before anything is downloaded if there is an adapter
    beside the weights.
    """
    files = listing.files
    check_no_adapter(str(repository.name), files)
    wanted = [file for file in _SMALL_FILES if file in files]
    if INDEX_NAME not in files:
        single = single_file(files)
        return wanted if single is None else [*wanted, single]
    folder = repository.fetch(listing, [INDEX_NAME])
    weights = _weights_of_index(folder)
    missing = [file for file in weights if file not in files]
    if missing:
        raise not_found(
            str(repository.name),
            f"the repository has no {missing[0]}, which its {INDEX_NAME} names",
        )
    return wanted + weights


def folder_here(snapshot: Path) -> str | None:
    """Gives the snapshot's folder if it is a model's, and whole."""
    files = [path.name for path in snapshot.iterdir()]
    if not is_folder(files):
        return None
    if INDEX_NAME in files and not all(
        (snapshot / file).exists() for file in _weights_of_index(snapshot)
    ):
        return None
    return str(snapshot)


def _weights_of_index(folder: Path) -> list[str]:
    return sorted(set(read_weight_map(folder / INDEX_NAME).values()))
