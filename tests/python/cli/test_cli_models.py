"""gemmakv pull, list and rm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support import golden_models, tiny_gguf
from support.chat_screen import ENTER, Screen
from support.command import RunCli, assert_fails
from support.fake_hub import FakeHub
from support.hub_checks import environment, needs_hub

pytestmark = needs_hub


@pytest.fixture
def env(server: FakeHub, tmp_path: Path) -> dict[str, str]:
    return environment(
        server, tmp_path / "hub", XDG_CACHE_HOME=str(tmp_path / "cache")
    )


@pytest.fixture
def files(tmp_path: Path, tiny_path: Path) -> dict[str, bytes]:
    """Two models, one of them in parts, and what is none of Gemma's."""
    parts = tiny_gguf.write_split(tmp_path)
    other = tiny_gguf.metadata() | {
        "general.architecture": (tiny_gguf.STR, "llama")
    }
    return {
        "tiny-F32.gguf": tiny_path.read_bytes(),
        **{part.name: part.read_bytes() for part in parts},
        "other.gguf": tiny_gguf.write(tmp_path / "o", other).read_bytes(),
    }


def listed(cli: RunCli, env: dict[str, str]) -> dict[str, Any]:
    result = cli("list", "--json", **env)
    assert result.returncode == 0, result.stderr
    return {one["name"]: one for one in json.loads(result.stdout)["models"]}


SPLIT = "tiny-00001-of-00003.gguf"


def test_pull_list_and_rm(
    cli: RunCli, server: FakeHub, env: dict[str, str], files: dict[str, bytes]
) -> None:
    server.add("org/tiny", files)
    assert listed(cli, env) == {}
    for file in ("other.gguf", SPLIT):
        assert cli("pull", f"org/tiny/{file}", **env).returncode == 0
    pulled = json.loads(cli("pull", "--json", "org/tiny:F32", **env).stdout)
    size = len(files["tiny-F32.gguf"])
    assert pulled["model"] == "org/tiny:F32"
    assert pulled["nbytes"] == size == os.path.getsize(pulled["path"])
    found = listed(cli, env)
    assert list(found) == [f"org/tiny/{SPLIT}", "org/tiny/tiny-F32.gguf"]
    assert found["org/tiny/tiny-F32.gguf"]["path"] == pulled["path"]
    sizes = [len(data) for name, data in files.items() if "-of-" in name]
    assert found[f"org/tiny/{SPLIT}"]["nbytes"] == sum(sizes)
    text = cli("list", **env).stdout.decode()
    assert f"org/tiny/{SPLIT}" in text and "in 2 models" in text

    one = cli("rm", "--yes", "--json", f"org/tiny/{SPLIT}", **env)
    assert [m["name"] for m in json.loads(one.stdout)["removed"]] == [
        f"org/tiny/{SPLIT}"
    ]
    assert list(listed(cli, env)) == ["org/tiny/tiny-F32.gguf"]
    blobs = Path(pulled["path"]).parents[2] / "blobs"
    assert len(list(blobs.iterdir())) == 2  # that, and what is no Gemma's
    gone = cli("rm", "--yes", f"org/tiny/{SPLIT}", **env)
    assert_fails(gone, "no such model is here")


def test_rm_of_a_folder_and_its_packed_file(
    cli: RunCli, server: FakeHub, env: dict[str, str], tmp_path: Path
) -> None:
    golden = golden_models.read("gemma3-mqa")
    source = golden_models.write(tmp_path / "m", golden, "BF16")
    content = {p.name: p.read_bytes() for p in source.iterdir()}
    server.add("org/gemma", content)
    path = cli("pull", "org/gemma", **env).stdout.decode().strip()
    assert list(listed(cli, env)) == ["org/gemma"]
    packed = Path(env["XDG_CACHE_HOME"]) / "gemmakv" / "packed"
    kept = gemmakv.Gemma.load(path, packed_cache=packed).packed_weights
    assert kept.state == "written"
    assert cli("rm", "--yes", "org/gemma", **env).returncode == 0
    assert listed(cli, env) == {}
    assert not Path(path).exists()
    assert list(packed.iterdir()) == []


def test_files_of_another_commit_stay(
    cli: RunCli, server: FakeHub, env: dict[str, str], tiny_path: Path
) -> None:
    repo = server.add("org/tiny", {"m.gguf": tiny_path.read_bytes()})
    cli("pull", "org/tiny", **env)
    old, new = repo.revisions["main"], "b" * 40
    repo.revisions.update({"main": new, new: new})
    cli("pull", "org/tiny", **env)
    names = ["org/tiny/m.gguf", f"org/tiny@{old}/m.gguf"]
    assert sorted(listed(cli, env)) == names
    assert cli("rm", "--yes", names[1], **env).returncode == 0
    (left,) = listed(cli, env).values()
    assert Path(left["path"]).read_bytes() == tiny_path.read_bytes()
    named = cli("info", "--json", names[0], HF_HUB_OFFLINE="1", **env)
    assert named.returncode == 0


def test_rm_leaves_what_a_link_of_ones_own_leads_to(
    cli: RunCli, server: FakeHub, env: dict[str, str], files: dict[str, bytes],
    tmp_path: Path,
) -> None:
    server.add("org/tiny", files)
    path = Path(cli("pull", "org/tiny:F32", **env).stdout.decode().strip())
    own = tmp_path / "blobs" / "own.gguf"
    own.parent.mkdir()
    own.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(own)
    assert cli("rm", "--yes", "org/tiny/tiny-F32.gguf", **env).returncode == 0
    assert not path.is_symlink()
    assert own.read_bytes() == files["tiny-F32.gguf"]


def test_what_is_broken_hides_no_model(
    cli: RunCli, server: FakeHub, env: dict[str, str], files: dict[str, bytes]
) -> None:
    server.add("org/tiny", files)
    path = Path(cli("pull", "org/tiny:F32", **env).stdout.decode().strip())
    hub = path.parents[3]
    for name, text in {
        "link": None,
        "json": "{",
        "path": '{"weight_map": {"a": "../../b.safetensors"}}',
    }.items():
        snapshot = hub / f"models--a--{name}" / "snapshots" / "c"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text('{"model_type": "gemma3"}')
        index = snapshot / "model.safetensors.index.json"
        if text is None:
            index.symlink_to("gone")
        else:
            index.write_text(text)
    (hub / "models--a--link" / "snapshots" / ".DS_Store").touch()
    refs = hub / "models--a--json" / "refs"
    refs.mkdir()
    (refs / "main").write_bytes(b"\xff")
    assert list(listed(cli, env)) == ["org/tiny/tiny-F32.gguf"]


def test_models_of_packages(
    cli: RunCli, env: dict[str, str], tmp_path: Path, model_path: str
) -> None:
    assert cli("pull", "gemma-3-270m", **env).returncode == 0
    (one,) = listed(cli, env).values()
    assert one["name"] == "gemma-3-270m"
    assert one["nbytes"] == os.path.getsize(model_path)
    assert cli("rm", "-y", "gemma-3-270m", **env).returncode == 0
    assert list(Path(one["path"]).parent.iterdir()) == []
    told = cli("list", **env).stdout.decode()
    assert "in 0 models" in told and "gemma-3-270m" in told


@pytest.mark.parametrize("answer, stays", [("n", True), ("y", False)])
def test_rm_asks(
    cli: RunCli, server: FakeHub, env: dict[str, str],
    tiny_path: Path, answer: str, stays: bool,
) -> None:
    server.add("org/tiny", {"m.gguf": tiny_path.read_bytes()})
    path = Path(cli("pull", "org/tiny", **env).stdout.decode().strip())
    assert_fails(cli("rm", "org/tiny/m.gguf", **env), "--yes")
    screen = Screen("rm", "org/tiny/m.gguf", **env)
    screen.wait_for("Delete")
    screen.type(answer, ENTER)
    screen.wait_for_exit()
    screen.close()
    assert path.exists() == stays
