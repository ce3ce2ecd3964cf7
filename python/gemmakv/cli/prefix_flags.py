"""The --prefix-cache-* flags of the commands that load a model."""

from __future__ import annotations

import os

import typer

from gemmakv.cache._folders import parse_folder
from gemmakv.cache._prefix import PrefixCache

__all__ = ["DISK", "RAM", "REMOTE", "SHARED", "open_prefix_cache"]

_SECRET = "GEMMAKV_PREFIX_CACHE_SECRET"

RAM = typer.Option(
    None,
    "--prefix-cache-ram",
    metavar="SIZE",
    help="Memory for what prompts have in common, as 2GiB; 0: none. Default: "
    "1GiB, at most a 16th of the memory.",
)
SHARED = typer.Option(
    None,
    "--prefix-cache-shared",
    metavar="DIR[:SIZE]",
    help="Share it with other processes: a folder on a memory file system, "
    "or default.",
)
DISK = typer.Option(
    None,
    "--prefix-cache-disk",
    metavar="DIR[:SIZE]",
    help="Keep it for later starts in a folder.",
)
REMOTE = typer.Option(
    None,
    "--prefix-cache-remote",
    metavar="URL",
    help="Share it with other hosts: redis://, valkey:// or s3://. The "
    f"variable {_SECRET} has the secret.",
)


def open_prefix_cache(
    ram: str | None,
    shared: str | None,
    disk: str | None,
    remote: str | None,
) -> PrefixCache | bool:
    """What the flags ask for; True: the default."""
    if ram is shared is disk is remote is None:
        return True
    sizes: dict[str, int] = {}
    folders: dict[str, str | bool] = {}
    try:
        for name, value in (("shared", shared), ("disk", disk)):
            if value is None:
                continue
            if name == "shared" and value == "default":
                folders[name] = True
                continue
            folders[name], size = parse_folder(name, value)
            if size is not None:
                sizes[f"{name}_bytes"] = size
        secret = os.environ.get(_SECRET) if remote is not None else None
        return PrefixCache(
            ram,
            remote=remote,
            remote_secret=secret or None,
            **folders,  # type: ignore[arg-type]
            **sizes,  # type: ignore[arg-type]
        )
    except ValueError as error:
        name, colon, words = str(error).partition(": ")
        if name == "remote_secret":
            raise typer.BadParameter(_SECRET + colon + words) from None
        name = name.removesuffix("_bytes")
        if name not in ("ram", "shared", "disk", "remote"):
            raise
        raise typer.BadParameter(
            f"--prefix-cache-{name}{colon}{words}"
        ) from None
