"""One repository of the Hugging Face hub, there and on this machine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from gemmakv._support.extras import import_extra
from gemmakv._support.files import write_atomically
from gemmakv._support.progress import Callback
from gemmakv.models.hub._errors import (
    FileMissing,
    NoAnswer,
    clear_errors,
    describe_answer,
    not_found,
)
from gemmakv.models.hub._transfer import check_space, download

DEFAULT_REVISION = "main"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[\w.+=-]+")


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository of the hub, at a revision, and perhaps a file of it or
    which quantization.
    """

    repo: str
    file: str | None = None
    revision: str = DEFAULT_REVISION
    quantization: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        kind = f":{self.quantization}" if self.quantization else ""
        file = f"/{self.file}" if self.file else ""
        return f"{self.repo}{at}{kind}{file}"


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, and their bytes if known."""

    commit: str
    files: dict[str, int | None]


class Repository:
    """huggingface_hub, imported when first needed, for one name.

    It says where files are, signs in, and keeps what it calls a snapshot: a
    folder of links to the files of a commit. The files themselves come by
    `download`, which continues what broke off in another process.

    What the network or the disk refuses are the errors of `clear_errors`.
    """

    def __init__(self, name: HubName) -> None:
        what = f"{name}: no such file, and a model of the hub"
        self._api = import_extra("huggingface_hub", "hub", what)
        constants: Any = importlib.import_module("huggingface_hub.constants")
        self.name = name
        # Read here as well: the package reads its own when it is imported.
        self._endpoint: str = (
            os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        ).rstrip("/")
        self.offline = bool(constants.HF_HUB_OFFLINE)
        self._timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT)
        self._folder = Path(constants.HF_HUB_CACHE) / "--".join(
            ["models", *name.repo.split("/")]
        )

    def list_files(self) -> Listing:
        """Asks what there is at the revision of the name."""
        with self._clear_errors():
            try:
                info = self._api.HfApi(endpoint=self._endpoint).model_info(
                    self.name.repo,
                    revision=self.name.revision,
                    files_metadata=True,
                    timeout=self._timeout_s,
                )
            except json.JSONDecodeError as error:
                came = describe_answer(error.doc.encode("utf-8", "replace"))
                raise self._no_hub(came or "no JSON") from None
            except KeyError as error:
                raise self._no_hub(f"JSON without {error}") from None
        if not _COMMIT.fullmatch(info.sha or ""):
            raise self._no_hub("no commit")
        files = {one.rfilename: one.size for one in info.siblings or []}
        return Listing(info.sha, files)

    def fetch(
        self,
        listing: Listing,
        files: Collection[str],
        progress: Callback | None = None,
    ) -> Path:
        """Downloads those files of the listing that are not here, and gives
        the folder of the commit. `progress` gets (bytes that are here, bytes
        of all).
        """
        sizes = {file: listing.files[file] or 0 for file in files}
        folder = self._snapshot(listing.commit)
        missing = [file for file in files if not (folder / file).exists()]
        total = sum(sizes.values())
        done = total - sum(sizes[file] for file in missing)
        self._check_room(total - done)
        for file in missing:
            part = progress if len(sizes) == 1 else _part(progress, done, total)
            try:
                self._fetch_one(file, listing.commit, part)
            except FileMissing:
                raise not_found(
                    str(self.name),
                    f"the repository lists {file} and does not have it",
                ) from None
            done += sizes[file]
        return folder

    def fetch_file(self, file: str, progress: Callback | None) -> Path:
        """Gives the path of a file at the revision of the name, downloaded if
        need be, without a list of the others. Raises FileMissing.
        """
        commit = self._fetch_one(file, self.name.revision, progress)
        self.note(commit)
        return self._snapshot(commit) / file

    def note(self, commit: str) -> None:
        """Notes what the revision of the name is, for `here`. That comes last,
        so that what is found later is whole.
        """
        if not _COMMIT.fullmatch(self.name.revision):
            ref = self._folder / "refs" / self.name.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, commit.encode())

    def here(self) -> Path | None:
        """Gives the folder of the files that are here, at what the revision of
        the name was when it was last downloaded.
        """
        with suppress(NoAnswer), self._clear_errors():
            return Path(
                self._api.snapshot_download(
                    self.name.repo,
                    revision=self.name.revision,
                    local_files_only=True,
                    allow_patterns=[],  # it need not be whole
                )
            )
        return None

    def _fetch_one(
        self, file: str, revision: str, progress: Callback | None
    ) -> str:
        """Downloads a file if it is not here; gives the commit."""
        name = self.name
        with self._clear_errors():
            found = self._api.get_hf_file_metadata(
                self._url(file, revision), timeout=self._timeout_s
            )
        commit = str(found.commit_hash)
        if not _COMMIT.fullmatch(commit) or not _ETAG.fullmatch(
            found.etag or ""
        ):
            raise self._no_hub("no proper ETag or X-Repo-Commit")
        if (self._snapshot(commit) / file).exists():
            return commit
        # From here on at the commit: the branch may move meanwhile.
        blob = self._folder / "blobs" / found.etag
        if not blob.exists():
            url = self._url(file, commit)
            download(str(name), url, blob, found.size, progress)
        with self._clear_errors():  # names it as every other program expects
            self._api.hf_hub_download(
                name.repo, file, revision=commit, endpoint=self._endpoint
            )
        return commit

    def _snapshot(self, commit: str) -> Path:
        return self._folder / "snapshots" / commit

    def _check_room(self, size: int) -> None:
        """Raises OSError before anything is fetched that cannot all be kept."""
        folder = self._folder / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        begun = sum(
            path.stat().st_size for path in folder.glob("*.gemmakv.incomplete")
        )
        check_space(str(self.name), folder, begun, size)

    def _clear_errors(self) -> Any:
        return clear_errors(str(self.name), self._endpoint)

    def _url(self, file: str, revision: str) -> str:
        return str(
            self._api.hf_hub_url(
                self.name.repo,
                file,
                revision=revision,
                endpoint=self._endpoint,
            )
        )

    def _no_hub(self, came: str) -> NoAnswer:
        reason = f"{self._endpoint} does not answer as a hub does ({came})"
        return NoAnswer(str(self.name), reason, wrong=True)


def _part(
    progress: Callback | None, before: int, total: int
) -> Callback | None:
    """Turns a file's progress into that of all files."""
    if progress is None:
        return None
    report = progress
    return lambda done, _: report(min(before + done, total), total)
