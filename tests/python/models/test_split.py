"""Models in several GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gemmakv
from gemmakv.models._split import parts_of
from support import tiny_gguf
from support.command import RunCli


def test_names_of_parts() -> None:
    three = [f"a/x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert all(parts_of(path) == three for path in three)
    for whole in ("x.gguf", "x-00004-of-00003.gguf", "x-00000-of-00003.gguf"):
        assert parts_of(whole) == [whole]


def test_the_same_model_as_one_file(tiny_path: Path, tmp_path: Path) -> None:
    paths = tiny_gguf.write_split(tmp_path)
    packed = tmp_path / "packed"
    whole = gemmakv.Gemma.load(tiny_path, packed_cache=packed)
    assert whole.packed_weights.state == "written"
    for path in paths:  # any part will do
        split = gemmakv.Gemma.load(path, packed_cache=packed)
        assert split.packed_weights.state == "reused"
        assert split.fingerprint == whole.fingerprint
        assert split.config.arguments() == whole.config.arguments()
    prompt = "the thin net"
    texts = {
        str(one.generate(gemmakv.create_kv_cache(one), prompt, max_tokens=9))
        for one in (whole, split)
    }
    assert len(texts) == 1
    plain = gemmakv.Gemma.load(paths[0], packed_cache=False)
    assert plain.fingerprint == whole.fingerprint


def test_another_part_is_another_identity(tmp_path: Path) -> None:
    paths = tiny_gguf.write_split(tmp_path)
    packed = tmp_path / "packed"
    before = gemmakv.Gemma.load(paths[0], packed_cache=packed).fingerprint
    data = bytearray(paths[2].read_bytes())
    data[-200] ^= 1
    paths[2].write_bytes(data)
    after = gemmakv.Gemma.load(paths[0], packed_cache=packed)
    assert after.packed_weights.state == "written"
    assert after.fingerprint != before


def test_missing_parts_in_one_error(tmp_path: Path) -> None:
    first, second, third = tiny_gguf.write_split(tmp_path)
    second.unlink()
    third.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        gemmakv.Gemma.load(first)
    assert "of which are missing: " in str(caught.value)
    assert second.name in str(caught.value)
    assert third.name in str(caught.value)


def test_info_counts_all_parts(
    cli: RunCli, tiny_path: Path, tmp_path: Path
) -> None:
    paths = tiny_gguf.write_split(tmp_path)
    split, whole = (
        json.loads(cli("info", "--json", path).stdout)
        for path in (paths[1], tiny_path)
    )
    assert split.pop("file") == str(paths[0])
    del whole["file"]
    assert split == whole
