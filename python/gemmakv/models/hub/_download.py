"""Models of the Hugging Face hub: names like `org/repo`.

What is fetched goes where huggingface_hub keeps its files (HF_HOME), so that
every program shares one copy. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable

from gemmakv._support.progress import Callback
from gemmakv._support.sizes import in_bytes
from gemmakv.errors import GemmaKVError
from gemmakv.models.hub._errors import (
    FileMissing,
    Unreachable,
    not_found,
)
from gemmakv.models.hub._folder import fetch_folder, folder_here, is_folder
from gemmakv.models.hub._repository import (
    DEFAULT_REVISION,
    HubName,
    Listing,
    Repository,
)

_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"refs/(?:pr|convert)/[\w.-]+|[\w.+-]+"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"
    r"(?:/(?P<file>[^@\\]+))?"
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)


def parse(name: str) -> HubName | None:
    """What `name` means on the hub; None for what can only be a path.

    Names are `org/repo`, `org/repo/file.gguf` and, at a branch, tag or
    commit, `org/repo@revision` and `org/repo@revision/file.gguf`.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    repo, file = match["repo"], match["file"]
    if file is None:
        if repo.lower().endswith(".gguf") and match["revision"] is None:
            return None  # a folder and a file
        return HubName(repo, None, match["revision"] or DEFAULT_REVISION)
    if not file.lower().endswith(".gguf"):
        return None
    if any(part in ("", ".", "..") for part in file.split("/")):
        return None
    if os.path.isdir(os.path.dirname(name)):
        return None  # the folder is here and lacks the file
    return HubName(repo, file, match["revision"] or DEFAULT_REVISION)


def fetch(name: HubName, progress: Callback | None = None) -> str:
    """Path of the model's file or folder on this machine, downloaded if need
    be.

    A download that broke off goes on where it did. `progress` gets (bytes
    that are here, bytes of the model). If the hub cannot be reached, a copy
    that is here is used, with a warning; under HF_HUB_OFFLINE nothing is
    asked and nothing said.

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
    except Unreachable as error:
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
    file = name.file
    if file is None:
        listing = repository.list_files()
        file = _choose(name, listing)
        if file is None:
            return fetch_folder(repository, listing, progress)
    if _SPLIT.search(file):
        raise GemmaKVError(
            f"{name}: {file} is one part of a split model, which is not "
            "supported; choose a model that is one .gguf file"
        )
    try:
        return repository.fetch(file, name.revision, progress)
    except FileMissing:
        raise not_found(
            str(name),
            f"the repository has no {file}; it holds "
            + _describe(repository.list_files().files),
        ) from None


def _choose(name: HubName, listing: Listing) -> str | None:
    """The only .gguf file of a repository; None for the model that it is
    without one.
    """
    files = listing.files
    models = _models_among(files)
    if len(models) == 1:
        return models[0]
    if models:
        example = dataclasses.replace(name, file=models[0])
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


def _models_among(files: Iterable[str]) -> list[str]:
    """The .gguf files with a language model: not the image encoders."""
    return sorted(
        file
        for file in files
        if file.lower().endswith(".gguf")
        and not os.path.basename(file).lower().startswith("mmproj")
    )


def _describe(files: dict[str, int | None]) -> str:
    """The models in a list for people."""
    texts = []
    for file in _models_among(files):
        size = files[file]
        texts.append(file if size is None else f"{file} ({in_bytes(size)})")
    return ", ".join(texts) or "no .gguf file"


def _find_here(repository: Repository) -> str | None:
    """The model among what was downloaded before."""
    name = repository.name
    snapshot = repository.snapshot_here()
    if snapshot is None or not snapshot.is_dir():
        return None
    if name.file is not None:
        path = snapshot / name.file
        return str(path) if path.is_file() else None
    found = _models_among(
        str(path.relative_to(snapshot))
        for path in snapshot.glob("**/*")
        if path.is_file()
    )
    if len(found) > 1:
        raise ValueError(
            f"{name}: expected one .gguf file among those downloaded before, "
            f"found {len(found)}; name one: {', '.join(found)}"
        )
    return str(snapshot / found[0]) if found else folder_here(snapshot)
