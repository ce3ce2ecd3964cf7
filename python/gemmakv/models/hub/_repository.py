"""One repository of the Hugging Face hub, there and on this machine."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import re
from pathlib import Path
from typing import Any

from gemmakv._support.extras import install_command
from gemmakv._support.files import write_atomically
from gemmakv._support.progress import Callback
from gemmakv.errors import GemmaKVError
from gemmakv.models.hub._errors import clear_errors
from gemmakv.models.hub._transfer import download

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

    What the network or the disk refuses are the errors of `clear_errors`.
    """

    def __init__(self, name: HubName) -> None:
        try:
            self._api: Any = importlib.import_module("huggingface_hub")
            constants: Any = importlib.import_module(
                "huggingface_hub.constants"
            )
        except ImportError as error:
            raise GemmaKVError(
                f"{name}: no such file, and models of the hub need the "
                f"package huggingface_hub ({error}); install it with: "
                + install_command("hub")
            ) from None
        self.name = name
        # Read here as well: the package reads its own when it is imported.
        self._endpoint: str = (
            os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        ).rstrip("/")
        self.offline = bool(constants.HF_HUB_OFFLINE)
        self._timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT)
        # Where the files of the repository are kept.
        self.folder = Path(constants.HF_HUB_CACHE) / "--".join(
            ["models", *name.repo.split("/")]
        )

    def list_files(self) -> Listing:
        """What there is at the revision of the name."""
        with self._clear_errors():
            info = self._api.HfApi(endpoint=self._endpoint).model_info(
                self.name.repo,
                revision=self.name.revision,
                files_metadata=True,
                timeout=self._timeout_s,
            )
        commit = getattr(info, "sha", None) or ""
        if not _COMMIT.fullmatch(commit):
            raise self._no_hub("no commit")
        return Listing(
            commit,
            {
                str(entry.rfilename): getattr(entry, "size", None)
                for entry in info.siblings or []
            },
        )

    def fetch(
        self, file: str, revision: str, progress: Callback | None
    ) -> str:
        """Path of a file, downloaded if need be. `progress` gets (bytes that
        are here, bytes of the file). Raises FileMissing.
        """
        found = self._metadata(file, revision)
        with self._clear_errors():
            here = self._api.try_to_load_from_cache(
                self.name.repo, file, revision=found.commit_hash
            )
        blob = self.folder / "blobs" / found.etag
        if not isinstance(here, str) and not blob.exists():
            # At the commit: the branch may move meanwhile.
            url = self._url(file, found.commit_hash)
            download(str(self.name), url, blob, found.size, progress)
        # The content is there: this names it as every other program expects.
        # At the commit, too: at the branch it would ask what that is now.
        with self._clear_errors():
            path = self._api.hf_hub_download(
                self.name.repo,
                file,
                revision=found.commit_hash,
                endpoint=self._endpoint,
            )
        if revision == self.name.revision:
            self.note_commit(found.commit_hash)
        return str(path)

    def snapshot(self, commit: str) -> Path:
        """The folder of what is here of a commit."""
        return self.folder / "snapshots" / commit

    def snapshot_here(self) -> Path | None:
        """That of the name's revision, as known since the last download."""
        commit = self.name.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = self._ref.read_text().strip()
            except (OSError, ValueError):
                return None
        return self.snapshot(commit)

    def note_commit(self, commit: str) -> None:
        """Notes what the name's revision is, for `snapshot_here`."""
        if not _COMMIT.fullmatch(self.name.revision):
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._ref, commit.encode())

    @property
    def _ref(self) -> Path:
        return self.folder / "refs" / self.name.revision

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

    def _metadata(self, file: str, revision: str) -> Any:
        """Commit, ETag and size of a file."""
        url = self._url(file, revision)
        with self._clear_errors():
            found = self._api.get_hf_file_metadata(
                url, timeout=self._timeout_s
            )
        if (
            not found.commit_hash
            or not _COMMIT.fullmatch(found.commit_hash)
            or not found.etag
            or not _ETAG.fullmatch(found.etag)
        ):
            raise self._no_hub("no proper ETag or X-Repo-Commit")
        return found

    def _no_hub(self, reason: str) -> OSError:
        return OSError(
            errno.EPROTO,
            f"{self._endpoint} does not answer as a hub does ({reason}); "
            "check HF_ENDPOINT",
            str(self.name),
        )
