"""Repositories that are a model's directory: config.json and safetensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gemmakv._support.progress import Callback
from gemmakv.models._forms import check_no_adapter
from gemmakv.models.hub._errors import FileMissing, not_found
from gemmakv.models.hub._repository import Listing, Repository
from gemmakv.models.hub._transfer import check_space
from gemmakv.models.huggingface._safetensors import (
    INDEX_NAME,
    SINGLE_NAME,
    read_weight_map,
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


def is_folder(files: Collection[str]) -> bool:
    """Whether files of these names are a model's directory."""
    return _CONFIG in files and (
        INDEX_NAME in files or bool(_weights_without_index(files))
    )


def fetch_folder(
    repository: Repository, listing: Listing, progress: Callback | None
) -> str:
    """The snapshot's folder, with all files that a model needs.

    What is here already is not downloaded again, and what broke off continues.
    `progress` gets (bytes that are here, bytes of all). The revision is noted
    last, so that a folder which is found later is whole. Raises MismatchError
    before anything is downloaded if there is an adapter beside the weights.
    """
    check_no_adapter(str(repository.name), listing.files)
    snapshot = repository.snapshot(listing.commit)
    if INDEX_NAME in listing.files and not (snapshot / INDEX_NAME).exists():
        _fetch(repository, INDEX_NAME, listing, None)
    wanted = [file for file in _SMALL_FILES if file in listing.files]
    for file in _weights(snapshot, listing.files):
        if file not in listing.files:
            raise not_found(
                str(repository.name),
                f"the repository has no {file}, which its {INDEX_NAME} names",
            )
        wanted.append(file)
    return str(fetch_files(repository, listing, wanted, progress))


def fetch_files(
    repository: Repository,
    listing: Listing,
    wanted: list[str],
    progress: Callback | None,
) -> Path:
    """The snapshot's folder, with these files of the listing."""
    snapshot = repository.snapshot(listing.commit)
    sizes = {file: listing.files[file] or 0 for file in wanted}
    missing = [file for file in wanted if not (snapshot / file).exists()]
    total = sum(sizes.values())
    done = total - sum(sizes[file] for file in missing)
    _check_room(repository, [sizes[file] for file in missing])
    for file in missing:
        _fetch(repository, file, listing, _part_of(progress, done, total))
        done += sizes[file]
    repository.note_commit(listing.commit)
    return snapshot


def folder_here(snapshot: Path) -> str | None:
    """The snapshot's folder if it is a model's, and whole."""
    files = [path.name for path in snapshot.iterdir()]
    if not is_folder(files):
        return None
    if not all((snapshot / file).exists() for file in
               _weights(snapshot, files)):
        return None
    return str(snapshot)


def _fetch(
    repository: Repository,
    file: str,
    listing: Listing,
    progress: Callback | None,
) -> None:
    try:
        repository.fetch(file, listing.commit, progress)
    except FileMissing:
        raise not_found(
            str(repository.name),
            f"the repository lists {file} and does not have it",
        ) from None


def _weights(snapshot: Path, files: Collection[str]) -> list[str]:
    """Names of the files that hold the weights."""
    if INDEX_NAME in files:
        return sorted(set(read_weight_map(snapshot / INDEX_NAME).values()))
    return _weights_without_index(files)


def _weights_without_index(files: Collection[str]) -> list[str]:
    """The one file of the weights; none if there are several."""
    if SINGLE_NAME in files:
        return [SINGLE_NAME]
    found = [
        file for file in files
        if file.endswith(".safetensors") and "/" not in file
    ]
    return found if len(found) == 1 else []


def _check_room(repository: Repository, sizes: list[int]) -> None:
    """Raises OSError before anything is fetched that cannot all be kept."""
    folder = repository.folder / "blobs"
    folder.mkdir(parents=True, exist_ok=True)
    begun = sum(
        path.stat().st_size for path in folder.glob("*.gemmakv.incomplete")
    )
    check_space(str(repository.name), folder, begun, sum(sizes))


def _part_of(
    progress: Callback | None, before: int, total: int
) -> Callback | None:
    """A file's progress as that of all files."""
    if progress is None:
        return None
    report = progress
    return lambda done, _: report(min(before + done, total), total)
