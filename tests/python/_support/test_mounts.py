"""Which file system a folder is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmakv._support.mounts import file_system_of, is_on_network


def test_the_deepest_mount_counts(tmp_path: Path) -> None:
    home = Path("/").joinpath("home of", "me")
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:5 / /home\\040of rw - nfs4 server:/home rw\n"
        "31 30 0:6 / /home\\040of/me/usb rw - fuse.sshfs me@there: rw\n"
        "32 30 0:6 / /home\\040of/me/own rw - tmpfs tmpfs rw\n"
        "odd\n"
    )
    for path, kind, network in (
        (Path("/elsewhere"), "ext4", False),
        (Path("/home offer"), "ext4", False),
        (home, "nfs4", True),
        (home / "usb/x", "fuse.sshfs", True),
        (home / "own", "tmpfs", False),
    ):
        assert file_system_of(path, str(mounts)) == kind
        assert is_on_network(path, str(mounts)) is network
    assert file_system_of(home, str(tmp_path / "none")) == ""


@pytest.mark.parametrize("name", ["/", "/proc", "."])
def test_here(name: str) -> None:
    assert not is_on_network(name, "/nowhere")
    assert isinstance(is_on_network(name), bool)
