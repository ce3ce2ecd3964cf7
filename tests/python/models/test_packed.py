"""Packed weights in a file: the same model, shared, and never in the way."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.models import _packed as packed
from support import tiny_gguf, tiny_models
from support.command import RunCli

TOKENS = [2, *range(20, 70)]


def _logits(gemma: gemmakv.Gemma) -> np.ndarray:
    cache = gemmakv.create_kv_cache(gemma.config)
    return gemma.logits(cache, TOKENS, all_positions=True)


def _load(path: Path, folder: Path) -> gemmakv.Gemma:
    return gemmakv.Gemma.load(path, packed_cache=folder)


@pytest.mark.parametrize(
    "types", [["F32"], ["Q4_0", "Q8_0", "BF16"], ["Q4_K", "Q5_K", "Q6_K"]]
)
def test_same_bits_and_fingerprint(tmp_path: Path, types: list[str]) -> None:
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", types)
    plain = gemmakv.Gemma.load(path, packed_cache=False)
    expected = _logits(plain)
    for state in ("written", "reused"):
        gemma = _load(path, tmp_path / "packed")
        assert gemma.packed_weights.state == state
        assert gemma.packed_weights.reason is None
        assert gemma.fingerprint == plain.fingerprint
        assert _logits(gemma).tobytes() == expected.tobytes()
    assert gemma.packed_weights.path is not None
    assert Path(gemma.packed_weights.path).parent == tmp_path / "packed"


def test_path_and_metadata_do_not_matter(
    tiny_path: Path, tmp_path: Path
) -> None:
    _load(tiny_path, tmp_path)
    meta = tiny_gguf.metadata()
    meta["general.name"] = (tiny_gguf.STR, "another name")
    other = tiny_gguf.write(tmp_path / "other.gguf", meta)
    assert _load(other, tmp_path).packed_weights.state == "reused"


def test_other_weights_behind_the_same_path_size_and_times(
    tiny_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(tiny_path.read_bytes())
    path.write_bytes(data)
    before = path.stat()
    _load(path, tmp_path / "packed")
    data[-200] ^= 1
    with open(path, "r+b") as file:  # in place: the inode stays
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = _load(path, tmp_path / "packed")
    assert changed.packed_weights.state == "written"
    plain = gemmakv.Gemma.load(path, packed_cache=False)
    assert changed.fingerprint == plain.fingerprint
    assert _logits(changed).tobytes() == _logits(plain).tobytes()


def _write_damaged(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "text"])
def test_damaged_file_is_made_again(
    tiny_path: Path, tmp_path: Path, damage: str
) -> None:
    first = _load(tiny_path, tmp_path)
    assert first.packed_weights.path is not None
    path = Path(first.packed_weights.path)
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[300] ^= 0x10  # within the header
    _write_damaged(
        path,
        {
            "flip": bytes(flipped),
            "cut": sound[:-1],
            "grow": sound + b"\0",
            "empty": b"",
            "text": b"removed",
        }[damage],
    )
    again = _load(tiny_path, tmp_path)
    assert again.packed_weights.state == "written"
    assert str(path) in (again.packed_weights.reason or "")
    assert path.read_bytes() == sound
    assert _logits(again).tobytes() == _logits(first).tobytes()


def test_damaged_matrix_gives_no_token(
    tiny_path: Path, tmp_path: Path
) -> None:
    first = _load(tiny_path, tmp_path)
    path = Path(first.packed_weights.path or "")
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[len(sound) * 2 // 3] ^= 0x10
    _write_damaged(path, bytes(flipped))
    damaged = _load(tiny_path, tmp_path)
    assert damaged.fingerprint == first.fingerprint
    cache = gemmakv.create_kv_cache(damaged.config)
    expected = f"{re.escape(str(path))}: tensor .* does not match its sum"
    with pytest.raises(gemmakv.CorruptFile, match=expected):
        damaged.logits(cache, TOKENS)
    assert len(cache) == 0
    assert not path.exists()
    seen: list[int] = []
    with pytest.raises(gemmakv.CorruptFile, match="load the model again"):
        for piece in damaged.stream(cache, TOKENS, max_tokens=4):
            seen.append(piece.token_id)
    with pytest.raises(gemmakv.CorruptFile, match="load the model again"):
        damaged.generate(cache, TOKENS, max_tokens=4)
    assert not seen
    again = _load(tiny_path, tmp_path)
    assert again.packed_weights.state == "written"
    assert path.read_bytes() == sound
    assert _logits(again).tobytes() == _logits(first).tobytes()


@pytest.mark.slow
def test_source_changed_in_place_is_noticed(
    tiny_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(tiny_path.read_bytes())
    path.write_bytes(data)
    time.sleep(2.2)  # until then times say little, and nothing is noted
    first = _load(path, tmp_path / "packed")
    assert _load(path, tmp_path / "packed").packed_weights.state == "reused"
    before = path.stat()
    data[-200] ^= 1
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        mapped[:] = bytes(data)
        mapped.close()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = _load(path, tmp_path / "packed")
    assert changed.packed_weights.state == "written"
    assert changed.fingerprint != first.fingerprint
    # Another file of that name.
    other = tmp_path / "other.gguf"
    data[-300] ^= 1
    other.write_bytes(data)
    os.replace(other, path)
    replaced = _load(path, tmp_path / "packed")
    assert replaced.packed_weights.state == "written"
    assert replaced.fingerprint != changed.fingerprint


def test_removed_while_in_use(tiny_path: Path, tmp_path: Path) -> None:
    gemma = _load(tiny_path, tmp_path)
    expected = _logits(gemma)
    for file in packed.files(tmp_path):
        file.path.unlink()
    assert _logits(gemma).tobytes() == expected.tobytes()


def test_small_models_go_without(tiny_path: Path) -> None:
    weights = gemmakv.Gemma.load(tiny_path).packed_weights
    assert weights.state == "off"
    assert weights.path is None
    assert "less than" in (weights.reason or "")


def test_off(tiny_path: Path, tiny: gemmakv.Gemma) -> None:
    gemma = gemmakv.Gemma.load(tiny_path, packed_cache=False)
    assert gemma.packed_weights.state == "off"
    assert gemma.packed_weights.path is None
    assert gemma.packed_weights.reason == "packed_cache=False"
    from_tensors = gemmakv.Gemma.from_tensors(
        tiny.config, tiny_gguf.tensors()
    )
    assert from_tensors.packed_weights == gemmakv.PackedWeights("off")


@pytest.mark.parametrize("bad", [1, 0, None, "", "a\0b", b"bytes", 2.5, []])
def test_bad_values(tiny_path: Path, bad: Any) -> None:
    with pytest.raises(ValueError, match="packed_cache: expected True, False"):
        gemmakv.Gemma.load(tiny_path, packed_cache=bad)


def test_default_folder(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MIN_MODEL_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GEMMAKV_PACKED_CACHE", raising=False)
    gemma = gemmakv.Gemma.load(tiny_path)
    assert gemma.packed_weights.state == "written"
    folder = tmp_path / "xdg" / "gemmakv" / "packed"
    assert [file.complete for file in packed.files(folder)] == [True]
    monkeypatch.setenv("GEMMAKV_PACKED_CACHE", str(tmp_path / "other"))
    assert gemmakv.Gemma.load(tiny_path).packed_weights.state == "written"
    assert len(packed.files(tmp_path / "other")) == 1
    monkeypatch.setenv("GEMMAKV_PACKED_CACHE", "off")
    weights = gemmakv.Gemma.load(tiny_path).packed_weights
    assert weights == gemmakv.PackedWeights(
        "off", reason="GEMMAKV_PACKED_CACHE=off"
    )
    # An explicit folder wins.
    assert _load(tiny_path, tmp_path / "other").packed_weights.path


def test_folder_names_of_any_encoding(tiny_path: Path, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xc3\xa9")
    gemma = gemmakv.Gemma.load(tiny_path, packed_cache=folder)
    assert gemma.packed_weights.state == "written"
    assert gemma.packed_weights.path is not None
    assert os.path.dirname(gemma.packed_weights.path) == folder


def test_unusable_folder_is_told_and_nothing_else(
    tiny_path: Path, tmp_path: Path, tiny: gemmakv.Gemma
) -> None:
    (tmp_path / "file").write_text("")
    gemma = _load(tiny_path, tmp_path / "file")
    assert gemma.packed_weights.state == "memory"
    assert gemma.packed_weights.path is None
    assert "Not a directory" in (gemma.packed_weights.reason or "")
    assert _logits(gemma).tobytes() == _logits(tiny).tobytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(
    tiny_path: Path, small_disk: Path, tiny: gemmakv.Gemma
) -> None:
    gemma = _load(tiny_path, small_disk)
    assert gemma.packed_weights.state == "memory"
    assert "No space left on device" in (gemma.packed_weights.reason or "")
    assert _logits(gemma).tobytes() == _logits(tiny).tobytes()
    assert list(small_disk.iterdir()) == []


_HOLD = """
import sys, gemmakv
gemma = gemmakv.Gemma.load(sys.argv[1], threads=1, packed_cache=sys.argv[2])
cache = gemmakv.create_kv_cache(gemma.config)
gemma.logits(cache, [2, 30, 40])
print(gemma.packed_weights.state, gemma.fingerprint, flush=True)
sys.stdin.read()
"""


def _start(path: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)
    assert process.returncode == 0


def _mapping(pid: int) -> dict[str, int]:
    """Sums over the mappings of packed weights, in KB, by kind."""
    sums: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = line.endswith(".gkvpack")
        elif inside and fields[-1] == "kB":
            key = fields[0][:-1]
            sums[key] = sums.get(key, 0) + int(fields[1])
    return sums


@pytest.mark.slow
def test_processes_share_one_copy(tiny_path: Path, tmp_path: Path) -> None:
    processes = [_start(tiny_path, tmp_path) for _ in range(3)]
    lines = [(process.stdout or sys.stdin).readline() for process in processes]
    states = sorted(line.split()[0] for line in lines)
    assert states == ["reused", "reused", "written"]
    assert len({line.split()[1] for line in lines}) == 1
    total = 0
    for process in processes:
        memory = _mapping(process.pid)
        assert memory["Rss"] > 300
        assert memory["Private_Dirty"] == 0
        assert memory["Pss"] < 0.5 * memory["Rss"]
        total += memory["Pss"]
        # Of the model file nothing stays mapped.
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert str(tiny_path) not in maps
    [file] = packed.files(tmp_path)
    assert total * 1024 < 1.1 * file.nbytes
    for process in processes:
        _finish(process)


def test_killed_writer_is_no_obstacle(tiny_path: Path, tmp_path: Path) -> None:
    first = _load(tiny_path, tmp_path)
    path = Path(first.packed_weights.path or "")
    part = path.with_name(path.name + ".part")
    path.rename(part)  # as if it had died just before the end
    assert [file.complete for file in packed.files(tmp_path)] == [False]
    again = _load(tiny_path, tmp_path)
    assert again.packed_weights.state == "written"
    assert [file.complete for file in packed.files(tmp_path)] == [True]


@pytest.mark.slow
def test_real_model(model_path: str, tmp_path: Path) -> None:
    def last(gemma: gemmakv.Gemma) -> bytes:
        cache = gemmakv.create_kv_cache(gemma.config)
        return gemma.logits(cache, TOKENS).tobytes()

    plain = gemmakv.Gemma.load(model_path, packed_cache=False)
    expected = last(plain)
    for state in ("written", "reused"):
        gemma = gemmakv.Gemma.load(model_path, packed_cache=tmp_path)
        assert gemma.packed_weights.state == state
        assert gemma.fingerprint == plain.fingerprint
        assert last(gemma) == expected


def test_command_line(cli: RunCli, tiny_path: Path, tmp_path: Path) -> None:
    missing = cli("packed", "--folder", tmp_path / "none")
    assert missing.returncode == 0
    assert missing.stdout.startswith(b"0 B in 0 files in ")
    gemma = _load(tiny_path, tmp_path)
    path = gemma.packed_weights.path
    (tmp_path / "keep.txt").write_text("not ours")
    listed = json.loads(
        cli("packed", "--folder", tmp_path, "--json").stdout
    )
    assert listed["folder"] == str(tmp_path)
    assert [file["path"] for file in listed["files"]] == [path]
    assert listed["files"][0]["nbytes"] == os.path.getsize(path or "")
    assert path is not None
    by_variable = cli("packed", GEMMAKV_PACKED_CACHE=str(tmp_path))
    assert path in by_variable.stdout.decode()
    off = cli("packed", GEMMAKV_PACKED_CACHE="off")
    assert off.returncode == 1
    assert b"--folder" in off.stderr
    (tmp_path / ("0" * 32 + ".gkvsource")).symlink_to(path)
    assert cli("packed", "--folder", tmp_path, "--clear").returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["keep.txt"]


def _make(folder: Path, number: int, nbytes: int = 10) -> Path:
    path = folder / f"{number:032x}.v1-2.gkvpack"
    path.write_bytes(bytes(nbytes))
    return path


def test_files_are_listed_with_their_models(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packed"
    report = _load(tiny_path, folder).packed_weights
    copy = shutil.copy(tiny_path, tmp_path / "copy.gguf")
    _load(copy, folder)
    gemmakv.Gemma.load(tiny_path, packed_cache=folder, quantize="q8_0")
    plain, quantized = sorted(
        packed.files(folder), key=lambda file: file.quantize or ""
    )
    assert plain.sources == (str(copy), str(tiny_path))
    assert plain.nbytes == report.nbytes
    assert plain.used == pytest.approx(time.time(), abs=60)
    assert (quantized.name, quantized.quantize) == ("tiny.gguf", "q8_0")
    listed = cli("packed", "--folder", folder).stdout.decode()
    assert "tiny.gguf as q8_0, used today" in listed
    one = cli("packed", "--folder", folder, "--remove", "copy.gguf")
    assert one.returncode == 0
    assert [file.path for file in packed.files(folder)] == [quantized.path]
    links = [p for p in folder.iterdir() if p.suffix == ".gkvsource"]
    assert all(link.exists() for link in links)
    none = cli("packed", "--folder", folder, "--remove", "copy.gguf")
    assert none.returncode == 1
    assert b"no packed file of that name" in none.stderr


@pytest.mark.parametrize(
    "name, removed",
    [
        ("gemma-3-270m", [1, 2]),  # as README and `gemmakv list` have it
        ("gemma-3-270m-q4", [1, 2]),
        ("gemma-3-270m-i", [3]),
        ("0000000000000000000000000000000", []),
        (f"{4:032x}", [4]),
        ("gemma-3", []),
        ("gemma3-270m", []),
        ("", []),
    ],
)
def test_files_are_removed_by_a_name_or_the_beginning_of_one(
    cli: RunCli, tmp_path: Path, name: str, removed: list[int]
) -> None:
    sources = {
        1: "/c/gemma-3-270m-q4_k_m.gguf",
        2: "/c/gemma-3-270m-q4_k_m.gguf",
        3: "/c/gemma-3-270m-it.gguf",
    }
    paths = {number: _make(tmp_path, number) for number in range(1, 5)}
    for number, source in sources.items():
        path = paths[number]
        note = {"sources": [source], "quantize": None}
        path.with_name(path.name + ".json").write_text(json.dumps(note))
    done = cli("packed", "--folder", tmp_path, "--remove", name)
    assert done.returncode == (0 if removed else 1)
    assert [n for n, path in paths.items() if not path.exists()] == removed


@pytest.mark.parametrize(
    "source, name",
    [
        ("/a/m.gguf", "m.gguf"),
        ("/hub/models--org--a--b/snapshots/0123", "org/a--b"),
        ("/hub/models--org--r/snapshots/0123/x/m.gguf", "org/r/x/m.gguf"),
    ],
)
def test_models_of_the_hub_have_their_names(
    tmp_path: Path, source: str, name: str
) -> None:
    path = _make(tmp_path, 1)
    note = {"sources": [source], "quantize": None}
    path.with_name(path.name + ".json").write_text(json.dumps(note))
    (file,) = packed.files(tmp_path)
    assert (file.name, file.orphaned) == (name, True)


def test_what_is_made_is_told(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gemmakv"):
        report = _load(tiny_path, tmp_path).packed_weights
        assert f"are kept in {report.path}" in caplog.text
        caplog.clear()
        _load(tiny_path, tmp_path)
        assert caplog.text == ""


def test_files_of_deleted_models_expire(
    tiny_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packed"
    copy = Path(shutil.copy(tiny_path, tmp_path / "copy.gguf"))
    _load(copy, folder)
    assert packed.expire(folder) == []
    copy.unlink()
    (gone,) = packed.expire(folder)
    assert gone.orphaned
    assert list(folder.iterdir()) == []


def test_unused_files_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = _make(tmp_path, 1), _make(tmp_path, 2)
    os.utime(old, (time.time() - 31 * 86400,) * 2)
    for no_limit in ("never", "-1", "nan"):
        monkeypatch.setenv("GEMMAKV_PACKED_DAYS", no_limit)
        monkeypatch.setenv("GEMMAKV_PACKED_GB", no_limit)
        assert packed.expire(tmp_path) == []
    monkeypatch.delenv("GEMMAKV_PACKED_GB")
    monkeypatch.delenv("GEMMAKV_PACKED_DAYS")
    assert packed.expire(tmp_path, keep=str(old)) == []
    assert [file.path for file in packed.expire(tmp_path)] == [old]
    assert list(tmp_path.iterdir()) == [new]


def test_the_oldest_go_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [_make(tmp_path, i, 400_000) for i in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (time.time() - 1000 * age,) * 2)
    monkeypatch.setenv("GEMMAKV_PACKED_GB", "0.001")
    assert [file.path for file in packed.expire(tmp_path)] == [paths[2]]


@pytest.mark.parametrize("note", [b"", b"[" * 9999, b"5", b'{"sources": 5}',
                                  b'{"sources": [5], "quantize": 5}'])
def test_damaged_notes_do_no_harm(tmp_path: Path, note: bytes) -> None:
    path = _make(tmp_path, 1)
    path.with_name(path.name + ".json").write_bytes(note)
    (file,) = packed.files(tmp_path)
    assert (file.sources, file.quantize) == ((), None)


def test_the_home_folder_is_expanded(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    gemma = gemmakv.Gemma.load(tiny_path, packed_cache="~/zz")
    assert Path(gemma.packed_weights.path or "").parent == tmp_path / "zz"
    assert not Path("~").exists()


def test_verify_flag(cli: RunCli, tiny_path: Path, tmp_path: Path) -> None:
    path = Path(_load(tiny_path, tmp_path).packed_weights.path or "")
    sound = cli("packed", "--folder", tmp_path, "--verify")
    assert sound.returncode == 0
    assert b"damaged" not in sound.stdout
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    _write_damaged(path, bytes(content))
    assert cli("packed", "--folder", tmp_path).returncode == 0
    damaged = cli("packed", "--folder", tmp_path, "--verify")
    assert damaged.returncode == 1
    assert f"{path}  damaged" in damaged.stdout.decode()
    as_json = cli("packed", "--folder", tmp_path, "--verify", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["damaged"] == [str(path)]


def test_no_packed_cache_flag(
    cli: RunCli, model_path: str, tmp_path: Path
) -> None:
    run = ["generate", "--model", model_path, "--max-tokens", 1, "Hi"]
    env = {"GEMMAKV_PACKED_CACHE": str(tmp_path)}
    assert cli(*run, "--no-packed-cache", **env).returncode == 0
    assert packed.files(tmp_path) == []
    first = cli(*run, **env)
    assert first.returncode == 0
    assert b"note: " in first.stderr
    assert str(tmp_path).encode() in first.stderr
    assert len(packed.files(tmp_path)) == 1
