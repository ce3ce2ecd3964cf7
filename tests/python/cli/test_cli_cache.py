"""`gemmakv cache inspect | verify | diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, create_kv_cache
from support import family_models, tiny_gguf
from support.command import RunCli, assert_fails

TOKENS = [2, *(20 + (13 * i) % 250 for i in range(159))]


@pytest.fixture
def saved(tiny: Gemma, tmp_path: Path) -> Path:
    cache = create_kv_cache(tiny.config, capacity_tokens=300)
    tiny.generate(cache, TOKENS, max_tokens=1)  # leaves a pending token
    cache.save(tmp_path / "a.kv")
    return tmp_path / "a.kv"


def variant(
    tiny: Gemma, saved: Path, name: str, tokens: list[int], dtype: str = "bf16"
) -> Path:
    cache = create_kv_cache(tiny.config, 300, dtype)
    tiny.generate(cache, tokens, max_tokens=1)
    cache.save(saved.parent / name)
    return saved.parent / name


def as_json(cli: RunCli, *arguments: object, code: int = 0) -> Any:
    result = cli("cache", *arguments, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", [[], ["inspect"], ["verify"], ["diff"]])
def test_help(cli: RunCli, command: list[str]) -> None:
    result = cli("cache", *command, "--help", COLUMNS="100", NO_COLOR="1")
    assert result.returncode == 0
    assert b"Usage" in result.stdout
    assert (b"--json" in result.stdout) == bool(command)


def test_inspect(cli: RunCli, tiny: Gemma, saved: Path) -> None:
    cache = gemmakv.KVCache.load(saved)
    document = as_json(cli, "inspect", saved)
    assert document["bytes"] == saved.stat().st_size
    assert document["fingerprint"] == tiny.fingerprint
    assert document["model_type"] is None
    assert document["kv_dtype"] == "bf16"
    assert document["capacity_tokens"] == 300
    assert document["length"] == 161
    assert document["tokens"] == cache.tokens.tolist()
    assert document["kv_bytes"] == cache.nbytes
    assert len(document["layers"]) == tiny_gguf.LAYERS
    for found, layer in zip(document["layers"], cache.layers):
        assert found["kind"] == layer.kind
        assert found["window"] == layer.window
        assert [found["start"], found["length"]] == [layer.start, layer.length]
        assert found["kv_heads"] == tiny_gguf.KV_HEADS
        assert found["head_dim"] == tiny_gguf.HEAD_DIM
        assert found["bytes"] == layer.nbytes
    text = cli("cache", "inspect", saved).stdout.decode()
    assert tiny.fingerprint in text
    assert "2 20 33" in text and "sliding" in text


def test_inspect_an_unused_one(cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "new.kv"
    create_kv_cache("gemma3-270m", 50).save(path)
    document = as_json(cli, "inspect", path)
    assert document["fingerprint"] is None
    assert document["model_type"] == "gemma3-270m"
    assert document["tokens"] == []
    assert cli("cache", "inspect", path).returncode == 0


def test_verify(cli: RunCli, saved: Path) -> None:
    document = as_json(cli, "verify", saved)
    assert document["sound"] is True
    names = [s["section"] for s in document["sections"]]
    assert names == ["header", "token ids", "keys and values", "content"]
    size = sum(s["bytes"] for s in document["sections"])
    assert size == saved.stat().st_size
    result = cli("cache", "verify", saved)
    assert result.returncode == 0
    assert result.stdout.decode().count("good") == 4


@pytest.mark.parametrize("section", [0, 1, 2])
def test_verify_names_the_bad_section(
    cli: RunCli, saved: Path, section: int
) -> None:
    good = as_json(cli, "verify", saved)["sections"][section]
    data = bytearray(saved.read_bytes())
    data[good["offset"] + good["bytes"] - 3] ^= 8  # in its checksum
    saved.write_bytes(data)
    document = as_json(cli, "verify", saved, code=1)
    assert document["sound"] is False
    bad = [s for s in document["sections"] if s["problem"]]
    assert [s["section"] for s in bad] == [good["section"]]
    result = cli("cache", "verify", saved)
    assert result.returncode == 1
    assert "BAD: " in result.stdout.decode()
    error = result.stderr.decode()
    assert error.startswith(f"gemmakv: error: {saved}: {good['section']}: ")
    assert error.count("\n") == 1


def test_diff_of_the_same(cli: RunCli, saved: Path) -> None:
    document = as_json(cli, "diff", saved, saved)
    assert document["same"] is True
    assert document["first_divergent_token"] is None
    assert {layer["max_key_difference"] for layer in document["layers"]} == {0}


def test_diff_finds_the_first_divergent_token(
    cli: RunCli, tiny: Gemma, saved: Path
) -> None:
    other = variant(tiny, saved, "b.kv", [*TOKENS[:150], 9, *TOKENS[151:]])
    document = as_json(cli, "diff", saved, other, code=1)
    assert document["same"] is False
    assert document["first_divergent_token"] == 150
    for layer in document["layers"]:
        # What follows from the same tokens is the same.
        assert layer["positions"][1] == 150
        assert layer["max_key_difference"] == 0
        assert layer["max_value_difference"] == 0
    text = cli("cache", "diff", saved, other).stdout.decode()
    assert "different" in text and "150" in text


def test_diff_of_a_prefix(cli: RunCli, tiny: Gemma, saved: Path) -> None:
    other = variant(tiny, saved, "b.kv", TOKENS[:5])
    document = as_json(cli, "diff", other, saved, code=1)
    assert document["first_divergent_token"] in (5, 6)
    # The window of the longer one lies behind the end of the shorter one.
    by_kind = {layer["kind"]: layer for layer in document["layers"]}
    assert by_kind["sliding"]["max_key_difference"] is None
    assert by_kind["full"]["max_key_difference"] == 0


def test_diff_of_two_dtypes(cli: RunCli, tiny: Gemma, saved: Path) -> None:
    other = variant(tiny, saved, "b.kv", TOKENS, "f32")
    document = as_json(cli, "diff", saved, other, code=1)
    assert [document["kv_dtype_a"], document["kv_dtype_b"]] == ["bf16", "f32"]
    assert document["same_weights"] is True
    caches = [gemmakv.KVCache.load(path) for path in (saved, other)]
    for i, layer in enumerate(document["layers"]):
        begin, end = layer["positions"]
        parts = [
            cache.layers[i].values[begin - start : end - start]
            for cache in caches
            for start in [cache.layers[i].start]
        ]
        expected = float(np.abs(parts[0] - parts[1]).max())
        assert layer["max_value_difference"] == expected > 0


def test_recurrent_layers(cli: RunCli, tmp_path: Path) -> None:
    model = family_models.model("recurrentgemma")
    paths = {}
    for name, tokens in (
        ("a", TOKENS), ("same", TOKENS), ("longer", [*TOKENS, 5]),
        ("other", [*TOKENS[:-1], 6]),
    ):  # fmt: skip
        cache = create_kv_cache(model.config)
        model.logits(cache, tokens)
        cache.save(paths.setdefault(name, tmp_path / f"{name}.kv"))
    document = as_json(cli, "inspect", paths["a"])
    kinds = model.config.layer_kinds
    assert [layer["kind"] for layer in document["layers"]] == kinds
    for layer, kind in zip(document["layers"], kinds):
        assert (layer["kv_heads"] is None) == (kind == "recurrent")
        assert layer["bytes"] > 0
    assert "recurrent" in cli("cache", "inspect", paths["a"]).stdout.decode()
    same = as_json(cli, "diff", paths["a"], paths["same"])
    assert same["same"] is True
    for layer, kind in zip(same["layers"], kinds):
        recurrent = kind == "recurrent"
        assert layer["max_state_difference"] == (0 if recurrent else None)
        assert layer["max_key_difference"] == (None if recurrent else 0)
    # States of different positions or of different tokens say nothing.
    for name in ("longer", "other"):
        unlike = as_json(cli, "diff", paths["a"], paths[name], code=1)
        assert {e["max_state_difference"] for e in unlike["layers"]} == {None}
    int8 = create_kv_cache(model.config, kv_dtype="int8")
    model.logits(int8, TOKENS)
    int8.save(tmp_path / "int8.kv")
    differs = as_json(cli, "diff", paths["a"], tmp_path / "int8.kv", code=1)
    states = [e["max_state_difference"] for e in differs["layers"]]
    # Only layers behind one of attention know its rounding.
    assert states[:3] == [0, 0, None] and min(states[3:]) > 0
    text = cli("cache", "diff", paths["a"], tmp_path / "int8.kv")
    assert f"{states[3]:.3g}" in text.stdout.decode()


def test_errors(cli: RunCli, saved: Path, tmp_path: Path) -> None:
    none, empty, text = (tmp_path / n for n in ("none", "empty", "text"))
    empty.write_bytes(b"")
    text.write_bytes(b"not a snapshot at all")
    shape = tmp_path / "shape.kv"
    create_kv_cache("gemma3-270m", 50).save(shape)
    for command in ("inspect", "verify"):
        assert_fails(cli("cache", command, none), str(none), "No such file")
        assert_fails(cli("cache", command, empty), str(empty))
        assert_fails(cli("cache", command, text), str(text), "GKVCACHE")
        assert_fails(cli("cache", command, tmp_path), str(tmp_path))
    data = bytearray(saved.read_bytes())
    data[8] = 99
    saved.write_bytes(data)
    assert_fails(cli("cache", "verify", saved), str(saved), "version is 99")
    data[8:] = data[8 : len(data) // 2]
    saved.write_bytes(data)
    assert_fails(cli("cache", "diff", saved, shape), str(saved), code=2)
    assert_fails(cli("cache", "diff", none, shape), str(none), code=2)
    assert_fails(cli("cache", "inspect", "/dev/zero"), "/dev/zero", "GKVCACHE")
    assert_fails(cli("cache", "diff", shape), "Missing argument", code=2)
    assert_fails(cli("cache", "frobnicate"), "frobnicate", code=2)


def test_diff_of_other_shapes(cli: RunCli, saved: Path) -> None:
    shape = saved.parent / "shape.kv"
    create_kv_cache("gemma3-270m", 50).save(shape)
    assert_fails(
        cli("cache", "diff", saved, shape), "7 layers of 1 x 32",
        "18 layers of 1 x 256 (gemma3-270m)", code=2,
    )  # fmt: skip


def test_sessions(cli: RunCli, talker: Gemma, tmp_path: Path) -> None:
    session = gemmakv.Session(talker, "be brief")
    session.send("hello", max_tokens=4)
    path, cache = tmp_path / "talk.session", tmp_path / "talk.kv"
    session.save(path)
    session.cache.save(cache)
    document = as_json(cli, "inspect", path)
    assert document["holds"] == "a session"
    assert document["turns"] == 1 and document["system"] == "be brief"
    assert document["bytes"] == path.stat().st_size
    assert document["tokens"] == session.cache.tokens.tolist()
    assert as_json(cli, "inspect", cache)["holds"] == "a KV cache"
    assert "a session" in cli("cache", "inspect", path).stdout.decode()
    sections = as_json(cli, "verify", path)["sections"]
    assert sections[0]["section"] == "session"
    assert sections[1]["offset"] == sections[0]["bytes"]
    assert sum(s["bytes"] for s in sections) == path.stat().st_size
    assert as_json(cli, "diff", path, cache)["same"]
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    for command in ("inspect", "verify"):
        assert_fails(cli("cache", command, path), str(path), "checksum")
