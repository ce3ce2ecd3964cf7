"""Models whose paths are no UTF-8, as file systems allow."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import gemmakv
from support import golden_models
from support.command import RunCli

NAME = os.fsdecode(b"m\xff \xc3\xa9")


@pytest.fixture
def gguf(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_path, tmp_path / f"{NAME}.gguf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    golden = golden_models.read("gemma3-mqa")
    return golden_models.write(tmp_path / NAME, golden, "BF16")


def test_files_load(gguf: Path, tiny_path: Path, tmp_path: Path) -> None:
    expected = gemmakv.Gemma.load(tiny_path).fingerprint
    with gemmakv.Gemma.load(gguf, packed_cache=tmp_path / NAME) as model:
        assert model.fingerprint == expected
        assert model.packed_weights.state == "written"
    shape = gemmakv.ModelConfig.from_gguf(gguf)
    assert shape.layer_kinds == model.config.layer_kinds


def test_directories_load(folder: Path) -> None:
    with gemmakv.Gemma.load(folder) as model:
        assert model.config.num_layers == 7


def test_errors_name_them(gguf: Path, folder: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:1000])
    with pytest.raises(gemmakv.CorruptFile) as caught:
        gemmakv.Gemma.load(gguf)
    assert f"{gguf.parent}/m" in str(caught.value)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(gemmakv.CorruptFile) as caught:
        gemmakv.Gemma.load(folder)
    assert f"{folder}/model.safetensors" in str(caught.value)


def test_commands_take_them(cli: RunCli, gguf: Path, folder: Path) -> None:
    for path in (gguf, folder):
        for option in ([], ["--json"]):
            shown = cli("info", *option, path)
            assert shown.returncode == 0, shown.stderr
    run = cli("generate", "-m", gguf, "a", "--max-tokens", 2)
    assert run.returncode == 0, run.stderr
