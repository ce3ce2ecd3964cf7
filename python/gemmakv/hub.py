"""Models of the Hugging Face hub: names like `org/repo/file.gguf`.

What is fetched goes where huggingface_hub keeps its files (HF_HOME), so that
every program shares one copy. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemmakv.errors import GemmaKVError
from gemmakv.hub_errors import (
    FileMissing,
    Unreachable,
    clear_errors,
    not_found,
    size_text,
)
from gemmakv.hub_transfer import download
from gemmakv.progress import Callback

DEFAULT_REVISION = "main"

_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"refs/(?:pr|convert)/[\w.-]+|[\w.+-]+"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"
    r"(?:/(?P<file>[^@\\]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[\w.+=-]+")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository of the hub, at a revision, and perhaps a file of it."""

    repo: str
    file: str | None = None
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{at}" + (f"/{self.file}" if self.file else "")


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
    """Path of the model's file on this machine, downloaded if need be.

    A download that broke off goes on where it did. `progress` gets (bytes
    that are here, bytes of the file). If the hub cannot be reached, a copy
    that is here is used, with a warning; under HF_HUB_OFFLINE nothing is
    asked and nothing said.

    Raises OSError, ValueError or GemmaKVError with one line that says what to
    do.
    """
    hub = _Hub(name)
    if hub.offline:
        path = _find_here(hub)
        if path is None:
            raise not_found(
                str(name),
                "no such file, and no such model among those downloaded "
                "before; unset HF_HUB_OFFLINE to download it",
            )
        return path
    try:
        return _fetch_online(hub, progress)
    except Unreachable as error:
        path = _find_here(hub)
        if path is None:
            raise error.as_os_error() from None
        warnings.warn(
            f"{name}: {error.reason}; using the copy that was downloaded "
            "before",
            stacklevel=4,
        )
        return path


class _Hub:
    """huggingface_hub, imported when first needed, for one name."""

    def __init__(self, name: HubName) -> None:
        try:
            self.api: Any = importlib.import_module("huggingface_hub")
            constants: Any = importlib.import_module(
                "huggingface_hub.constants"
            )
        except ImportError as error:
            raise GemmaKVError(
                f"{name}: no such file, and models of the hub need the "
                f"package huggingface_hub ({error}); install it with: "
                'pip install "gemmakv[hub]"'
            ) from None
        self.name = name
        # Read here as well: the package reads its own when it is imported.
        self.endpoint: str = (
            os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        ).rstrip("/")
        self.offline = bool(constants.HF_HUB_OFFLINE)
        self.timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT)
        # Where the files of the repository are kept.
        self.folder = Path(constants.HF_HUB_CACHE) / "--".join(
            ["models", *name.repo.split("/")]
        )

    def clear_errors(self) -> Any:
        return clear_errors(str(self.name), self.endpoint)

    def url(self, file: str, revision: str) -> str:
        return str(
            self.api.hf_hub_url(
                self.name.repo,
                file,
                revision=revision,
                endpoint=self.endpoint,
            )
        )

    def files(self) -> dict[str, int | None]:
        """Files of the repository and their bytes."""
        with self.clear_errors():
            info = self.api.HfApi(endpoint=self.endpoint).model_info(
                self.name.repo,
                revision=self.name.revision,
                files_metadata=True,
                timeout=self.timeout_s,
            )
        return {
            str(entry.rfilename): getattr(entry, "size", None)
            for entry in info.siblings or []
        }


def _fetch_online(hub: _Hub, progress: Callback | None) -> str:
    name = hub.name
    file = name.file or _choose(name, hub.files())
    if _SPLIT.search(file):
        raise GemmaKVError(
            f"{name}: {file} is one part of a split model, which is not "
            "supported; choose a model that is one .gguf file"
        )
    found = _metadata(hub, file)
    with hub.clear_errors():
        here = hub.api.try_to_load_from_cache(
            name.repo, file, revision=found.commit_hash
        )
    blob = hub.folder / "blobs" / found.etag
    if not isinstance(here, str) and not blob.exists():
        # At the commit: the branch may move meanwhile.
        url = hub.url(file, found.commit_hash)
        download(str(name), url, blob, found.size, progress)
    # The content is there: this names it as every other program expects.
    with hub.clear_errors():
        return str(
            hub.api.hf_hub_download(
                name.repo,
                file,
                revision=name.revision,
                endpoint=hub.endpoint,
            )
        )


def _metadata(hub: _Hub, file: str) -> Any:
    """Commit, ETag and size of a file."""
    name = hub.name
    url = hub.url(file, name.revision)
    try:
        with hub.clear_errors():
            found = hub.api.get_hf_file_metadata(url, timeout=hub.timeout_s)
    except FileMissing:
        raise not_found(
            str(name),
            f"the repository has no {file}; it holds "
            + _describe(hub.files()),
        ) from None
    if (
        not found.commit_hash
        or not _COMMIT.fullmatch(found.commit_hash)
        or not found.etag
        or not _ETAG.fullmatch(found.etag)
    ):
        raise OSError(
            errno.EPROTO,
            f"{hub.endpoint} does not answer as a hub does (no proper ETag "
            "or X-Repo-Commit); check HF_ENDPOINT",
            str(name),
        )
    return found


def _choose(name: HubName, files: dict[str, int | None]) -> str:
    """The only .gguf file of a repository."""
    models = _models_among(files)
    if len(models) == 1:
        return models[0]
    if models:
        example = dataclasses.replace(name, file=models[0])
        raise ValueError(
            f"{name}: expected one .gguf file, found {len(models)}; name one, "
            f"as in {example}; it holds {_describe(files)}"
        )
    if any(file.lower().endswith(".safetensors") for file in files):
        raise GemmaKVError(
            f"{name}: the repository holds safetensors weights and no .gguf "
            "file; only .gguf files are supported yet: look for a repository "
            "of the same model whose name ends in -GGUF"
        )
    raise not_found(str(name), "the repository holds no .gguf file")


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
        texts.append(file if size is None else f"{file} ({size_text(size)})")
    return ", ".join(texts) or "no .gguf file"


def _find_here(hub: _Hub) -> str | None:
    """The model among what was downloaded before."""
    name = hub.name
    commit = name.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (hub.folder / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            return None
    snapshot = hub.folder / "snapshots" / commit
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
    return str(snapshot / found[0]) if found else None
