"""The --prefix-cache-* flags of the commands that load a model."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

import typer

from gemmakv import _core
from gemmakv._support.sizes import in_bytes
from gemmakv.cache._folders import (
    default_disk_folder,
    default_shared_folder,
    parse_folder,
)
from gemmakv.cache._prefix import PrefixCache
from gemmakv.cli import describe
from gemmakv.cli.console import Tell, write_note
from gemmakv.cli.failures import Misplaced
from gemmakv.errors import GemmaKVError

_NONE = ("none", "off")
_DEFAULT = re.compile(r"default(?::([^/]*))?")
Opened = PrefixCache | bool | Callable[[], PrefixCache]

_SECRET = "GEMMAKV_PREFIX_CACHE_SECRET"

RAM = typer.Option(
    None,
    "--prefix-cache-ram",
    metavar="SIZE",
    help="Memory for the common beginnings of prompts, as 2GiB; 0: none. "
    "Default: 1GiB, at most a 16th of the memory.",
)
SHARED_HELP = (
    "Share the prefix cache with other processes in a folder on a memory "
    "file system, or default; none: do not share it."
)
SHARED = typer.Option(
    None, "--prefix-cache-shared", metavar="DIR[:SIZE]", help=SHARED_HELP
)
DISK_HELP = (
    "Keep the prefix cache for later starts in a folder; none: do not keep it."
)
DISK = typer.Option(
    None, "--prefix-cache-disk", metavar="DIR[:SIZE]", help=DISK_HELP
)
CHAT_DISK = typer.Option(
    None,
    "--prefix-cache-disk",
    metavar="DIR[:SIZE]",
    help=DISK_HELP + " Default: the user's cache folder, with 10 % of the free "
    "space of its disk, at most 50GiB.",
)
REMOTE_HELP = (
    "Share the prefix cache with other hosts: redis://, valkey:// or s3://. "
    f"The variable {_SECRET} has the secret that signs its values."
)
REMOTE = typer.Option(
    None, "--prefix-cache-remote", metavar="URL", help=REMOTE_HELP
)


def open_prefix_cache(
    ram: str | None,
    shared: str | None,
    disk: str | None,
    remote: str | None,
    default_disk: bool = False,
    tell: Tell = write_note,
) -> Opened:
    """Opens what the flags ask for; True stands for the default. An error
    begins with the name of the flag's parameter.

    With `default_disk`, where they say nothing of a disk, there is one in the
    user's cache folder if that can be: it is opened, or made, by the function
    that this gives. `tell` takes a line that says that it is made, or why it
    is not there, and one where a disk has less than was asked for.
    """
    disks = disk is None and default_disk
    disk, shared = wanted(disk), wanted(shared)
    if ram is shared is disk is remote is None and not disks:
        return True
    sizes: dict[str, int] = {}
    folders: dict[str, str | bool] = {}
    try:
        for name, value in (("shared", shared), ("disk", disk)):
            if value is None:
                continue
            default = _DEFAULT.fullmatch(value) if name == "shared" else None
            if default is None:
                folders[name], size = parse_folder(name, value)
            else:
                folders[name] = True
                # The size of any folder, if there is one.
                text = "/:" + default[1] if default[1] is not None else "/"
                _, size = parse_folder(name, text)
            if size is not None:
                sizes[f"{name}_bytes"] = size
        secret = os.environ.get(_SECRET) if remote is not None else None

        make = functools.partial(
            PrefixCache,
            ram,
            remote=remote,
            remote_secret=secret,
            **folders,  # type: ignore[arg-type]
            **sizes,  # type: ignore[arg-type]
        )
        if disks:
            make().close()  # what is asked for can be had
            return functools.partial(_with_default_disk, make, tell)
        opened = make()
        if "disk_bytes" in sizes:
            _say_what_is_free(
                opened, str(folders["disk"]), sizes["disk_bytes"], tell
            )
        return opened
    except (OSError, ValueError) as error:
        words = describe(error)
        for name, folder in folders.items():
            if folder is not True and words.startswith(str(folder)):
                # The folder is at fault: not a ValueError.
                raise OSError(f"prefix_cache_{name}: {words}") from None
        name, _, words = words.partition(": ")
        if name == "remote_secret":
            raise Misplaced(f"{_SECRET}: {words}") from None
        name = name.removesuffix("_bytes")
        if name not in ("ram", "shared", "disk", "remote"):
            raise
        raise ValueError(f"prefix_cache_{name}: {words}") from None


def wanted(tier: str | None) -> str | None:
    """What a flag says of a tier; None also of one that it says is not to
    be.
    """
    return None if tier in _NONE else tier


def _say_what_is_free(
    prefix: PrefixCache, folder: str, asked: int, tell: Tell
) -> None:
    """Tells it where a disk has less than was asked for."""
    found = os.statvfs(folder)
    room = found.f_bavail * found.f_frsize + prefix.stats().bytes["disk"]
    if asked > room:
        tell(
            f"--prefix-cache-disk: {in_bytes(asked)} asked for, "
            f"{folder} has room for {in_bytes(room)}: it takes what others "
            "leave of that"
        )


def _with_default_disk(
    make: Callable[..., PrefixCache], tell: Tell
) -> PrefixCache:
    try:
        folder, budget = default_disk_folder()
        made = not (folder / "key").exists()
        # What cannot be used shows here, not among what was asked for.
        _core.FolderStore(
            os.fsencode(folder), tier="disk", mapped=False, budget_bytes=budget
        )
    except (OSError, ValueError, GemmaKVError) as error:
        tell(
            f"what is computed is not kept for later starts: {describe(error)}"
        )
        return make()
    if made:
        tell(
            "what is computed is kept for later starts in "
            f"{folder} (at most {in_bytes(budget)}); --prefix-cache-disk none "
            "keeps nothing"
        )
    return make(disk=folder, disk_bytes=budget)


def tier_folder(name: str, value: str) -> str:
    """The folder of a tier, as its flag names it."""
    if name == "shared" and _DEFAULT.fullmatch(value):
        return default_shared_folder()
    return parse_folder(name, value)[0]
