"""Quantize on load: the bits of the reference quantizers, and honest errors."""

from __future__ import annotations

import functools
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import _core
from gemmakv.diagnostics import _bench as bench
from gemmakv.generation._requests import requests_of
from gemmakv.models import _packed as packed
from support import (
    edited_gguf,
    family_models,
    golden_checks,
    golden_configs,
    golden_models,
    tiny_gguf,
    tiny_models,
)
from support.bad_files import assert_says
from support.command import RunCli
from support.folders import ROOT

TOKENS = [2, *range(20, 70)]
NAMES = ["q8_0", "q5_0", "q4_0", "bf16"]


def _logits(gemma: gemmakv.Gemma) -> np.ndarray:
    cache = gemmakv.create_kv_cache(gemma.config)
    return gemma.logits(cache, TOKENS, all_positions=True)


def _types(gemma: gemmakv.Gemma) -> dict[str, str]:
    matrices = requests_of(gemma).engine.matrices()
    return {name: kind for name, kind, *_ in matrices}


def _payload(folder: Path) -> bytes:
    """What the only packed file of a folder holds behind its header."""
    [file] = packed.files(folder)
    data = file.path.read_bytes()
    _, header_bytes = struct.unpack_from("<QQ", data, 16)
    return data[header_bytes:]


def _embedding_kind(name: str) -> str:
    return "BF16" if name == "bf16" else "Q8_0"


def test_names_are_those_of_the_core() -> None:
    assert _core.quantize_types() == NAMES


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_the_reference_quantizers(
    tmp_path: Path, source: str, name: str
) -> None:
    model = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", source)
    reference = tiny_models.requantize(
        model, tmp_path / "r.gguf", name.upper(), _embedding_kind(name)
    )
    found = gemmakv.Gemma.load(
        model, quantize=name, packed_cache=tmp_path / "found"
    )
    expected = gemmakv.Gemma.load(reference, packed_cache=tmp_path / "wanted")
    assert _types(found) == _types(expected)
    assert _payload(tmp_path / "found") == _payload(tmp_path / "wanted")
    assert _logits(found).tobytes() == _logits(expected).tobytes()
    in_memory = gemmakv.Gemma.load(model, quantize=name, packed_cache=False)
    assert _logits(in_memory).tobytes() == _logits(expected).tobytes()


def _nasty(rows: int, cols: int, seed: int) -> np.ndarray:
    """Blocks of zeros, of ties, of equal magnitudes, of tiny values."""
    rng = np.random.default_rng(seed)
    blocks = rng.normal(0, 0.1, (rows * cols // 32, 32)).astype(np.float32)
    at = np.arange(len(blocks))
    kind = at % 8
    blocks[kind == 0] = 0.0
    blocks[kind == 1] = -0.0
    # Halves of the largest of 127, 8 and 16 levels.
    halves = rng.integers(-15, 15, blocks.shape) + 0.5
    for number, level in ((2, 127.0), (3, 8.0), (4, -16.0)):
        blocks[kind == number] = halves[kind == number] / 256
        blocks[kind == number, 5] = level / 256
    signs = rng.choice(np.float32([-1, 1]), blocks.shape)
    blocks[kind == 5] = signs[kind == 5] * np.float32(0.07)
    blocks[kind == 6] *= np.exp2(-rng.integers(10, 110, (len(blocks), 1)))[
        kind == 6
    ].astype(np.float32)
    return blocks.reshape(rows, cols)


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_extreme_blocks(tmp_path: Path, name: str) -> None:
    weights = tiny_gguf.tensors()
    for seed, (key, array) in enumerate(weights.items()):
        if array.ndim == 2:
            weights[key] = _nasty(*array.shape, seed)
    model = tiny_gguf.write(tmp_path / "m.gguf", weights=weights)
    reference = tiny_models.requantize(
        model, tmp_path / "r.gguf", name.upper(), _embedding_kind(name)
    )
    gemmakv.Gemma.load(model, quantize=name, packed_cache=tmp_path / "found")
    gemmakv.Gemma.load(reference, packed_cache=tmp_path / "wanted")
    assert _payload(tmp_path / "found") == _payload(tmp_path / "wanted")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_quantized_already_stays(tmp_path: Path, name: str) -> None:
    model = tiny_models.write_tiny_gguf(
        tmp_path / "m.gguf", ["F16", "Q4_0", "BF16", "Q8_0"], "Q5_0"
    )
    before = _types(gemmakv.Gemma.load(model))
    after = _types(gemmakv.Gemma.load(model, quantize=name))
    assert after["token_embd.weight"] == "Q5_0"
    assert set(before.values()) == {"F16", "Q4_0", "BF16", "Q8_0", "Q5_0"}
    for tensor, kind in before.items():
        floats = kind in ("F16", "BF16")
        assert after[tensor] == (name.upper() if floats else kind)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_matrix_is_kept_like_the_embedding(
    tiny: gemmakv.Gemma, name: str
) -> None:
    weights = tiny_gguf.tensors()
    weights["output.weight"] = weights["token_embd.weight"]
    gemma = gemmakv.Gemma.from_tensors(tiny.config, weights, quantize=name)
    types = _types(gemma)
    kind = _embedding_kind(name)
    assert types.pop("token_embd.weight") == kind
    assert types.pop("output.weight") == kind
    assert set(types.values()) == {name.upper()}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_in_memory(
    tiny: gemmakv.Gemma, tiny_path: Path, name: str
) -> None:
    gemma = gemmakv.Gemma.from_tensors(
        tiny.config, tiny_gguf.tensors(), quantize=name
    )
    loaded = gemmakv.Gemma.load(tiny_path, quantize=name)
    assert gemma.fingerprint == loaded.fingerprint
    assert _logits(gemma).tobytes() == _logits(loaded).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_recurrent_gates_and_vectors_stay_float(name: str) -> None:
    config = family_models.config("recurrentgemma")
    gemma = gemmakv.Gemma.from_tensors(
        config, tiny_gguf.tensors(0, config), quantize=name
    )
    gates = 0
    for tensor, kind in _types(gemma).items():
        if ".rec_" in tensor and "_gate." in tensor:
            assert kind == "F32", tensor
            gates += 1
        elif tensor == "token_embd.weight":
            assert kind == _embedding_kind(name)
        else:
            assert kind == name.upper(), tensor
    assert gates == 2 * config.layer_kinds.count("recurrent")
    assert np.isfinite(_logits(gemma)).all()


@pytest.mark.parametrize("name", NAMES)
def test_routers_of_experts_stay_float(name: str) -> None:
    config = family_models.config("gemma4")
    gemma = gemmakv.Gemma.from_tensors(
        config, tiny_gguf.tensors(0, config), quantize=name
    )
    kinds = _types(gemma)
    for layer in range(config.num_layers):
        for tensor in ("ffn_gate_up_exps", "ffn_down_exps", "ffn_down"):
            assert kinds.pop(f"blk.{layer}.{tensor}.weight") == name.upper()
        assert kinds.pop(f"blk.{layer}.ffn_gate_inp.weight") == "F32"
    assert "F32" not in kinds.values()
    assert np.isfinite(_logits(gemma)).all()


@pytest.mark.filterwarnings("ignore::gemmakv.PartialModelWarning")
@pytest.mark.parametrize("model", golden_checks.NAMES)
def test_directories(tmp_path: Path, model: str) -> None:
    golden = golden_checks.golden_of(model)
    path = golden_models.write(tmp_path / "model", golden, "F32")
    config = golden_configs.model_config(golden.config)
    widths = np.hstack([
        config.hidden_size, config.ffn_dim, config.lru_width,
        config.expert_ffn_dim])
    for name in ("q4_0", "bf16"):
        if name == "q4_0" and (widths % 32).any():
            with pytest.raises(ValueError, match=r"quantize: .* columns.* 32 "):
                gemmakv.Gemma.load(path, quantize=name)
            continue
        expected = gemmakv.Gemma.from_tensors(
            config, golden_checks.tensors_of(model), quantize=name
        )
        types, logits = _types(expected), _logits(expected).tobytes()
        for state in ("written", "reused"):
            gemma = gemmakv.Gemma.load(
                path, quantize=name, packed_cache=tmp_path / "packed"
            )
            assert gemma.packed_weights.state == state
            assert gemma.fingerprint == expected.fingerprint
            assert _types(gemma) == types
            assert _logits(gemma).tobytes() == logits


def test_fingerprints_tell_them_apart(tiny_path: Path) -> None:
    plain = gemmakv.Gemma.load(tiny_path)
    found = {plain.fingerprint}
    for name in NAMES:
        gemma = gemmakv.Gemma.load(tiny_path, quantize=name)
        again = gemmakv.Gemma.load(tiny_path, quantize=name, threads=1)
        assert gemma.fingerprint == again.fingerprint
        found.add(gemma.fingerprint)
    assert len(found) == 5


def test_bf16_of_bf16_is_the_model_itself(tmp_path: Path) -> None:
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", "BF16")
    plain = gemmakv.Gemma.load(path)
    assert gemmakv.Gemma.load(path, quantize="bf16").fingerprint == (
        plain.fingerprint
    )


def test_caches_belong_to_one_quantization(tiny_path: Path) -> None:
    gemma = gemmakv.Gemma.load(tiny_path, quantize="q8_0")
    cache = gemmakv.create_kv_cache(gemma.config)
    gemma.logits(cache, TOKENS)
    data = cache.to_bytes()
    other = gemmakv.Gemma.load(tiny_path, quantize="q5_0")
    with pytest.raises(gemmakv.MismatchError):
        gemmakv.KVCache.from_bytes(data, other)
    same = gemmakv.Gemma.load(tiny_path, quantize="q8_0")
    again = gemmakv.KVCache.from_bytes(data, same)
    assert (
        same.logits(again, [40]).tobytes()
        == gemma.logits(cache, [40]).tobytes()
    )


def test_each_has_its_packed_file(tiny_path: Path, tmp_path: Path) -> None:
    choices = [None, *NAMES]
    first = {}
    for name in choices:
        gemma = gemmakv.Gemma.load(
            tiny_path, quantize=name, packed_cache=tmp_path
        )
        assert gemma.packed_weights.state == "written"
        first[name] = (gemma.packed_weights.path, _logits(gemma).tobytes())
    assert len(packed.files(tmp_path)) == len(choices)
    for name in choices:
        gemma = gemmakv.Gemma.load(
            tiny_path, quantize=name, packed_cache=tmp_path
        )
        assert gemma.packed_weights.state == "reused"
        path, logits = first[name]
        assert gemma.packed_weights.path == path
        assert _logits(gemma).tobytes() == logits


@pytest.mark.parametrize(
    "bad", ["", "Q8_0", "q4_k", "q4_k_m", "int8", "q8", b"q8_0", 8, True, []]
)
def test_other_names_are_refused(
    tiny: gemmakv.Gemma, tiny_path: Path, bad: Any
) -> None:
    expected = "quantize: .*q8_0, q5_0, q4_0, bf16"
    with pytest.raises(ValueError, match=expected):
        gemmakv.Gemma.load(tiny_path, quantize=bad)
    with pytest.raises(ValueError, match=expected):
        gemmakv.Gemma.from_tensors(
            tiny.config, tiny_gguf.tensors(), quantize=bad
        )
    # Before the model is looked for.
    with pytest.raises(ValueError, match=expected):
        gemmakv.Gemma.load("no-such/repository", quantize=bad)
    with pytest.raises(ValueError, match=expected):
        bench.run("no-such/repository", quantize=bad)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_quantize(tmp_path: Path, name: str) -> None:
    path = tiny_models.write_tiny_gguf(
        tmp_path / "m.gguf", ["Q8_0", "Q4_0"], "Q5_0"
    )
    with pytest.raises(ValueError) as error:
        gemmakv.Gemma.load(path, quantize=name)
    assert_says(
        error.value, "quantize: ", path, "Q4_0, Q5_0, Q8_0",
        "expected F32, F16 or BF16",
    )  # fmt: skip


def _load_changed(
    tmp_path: Path, name: str, value: float, packed_cache: bool | Path
) -> gemmakv.Gemma:
    weights = tiny_gguf.tensors()
    weights["blk.3.ffn_up.weight"][70, 9] = value
    path = tiny_gguf.write(tmp_path / "m.gguf", weights=weights)
    return gemmakv.Gemma.load(path, quantize=name, packed_cache=packed_cache)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_no_type_can_hold(
    tmp_path: Path, name: str, in_file: bool
) -> None:
    folder = tmp_path / "packed" if in_file else False
    for value in (np.nan, np.inf, -np.inf):
        found = "NaN" if np.isnan(value) else "infinity"
        with pytest.raises(gemmakv.CorruptFile) as error:
            _load_changed(tmp_path, name, value, folder)
        assert_says(
            error.value, tmp_path / "m.gguf", "blk.3.ffn_up.weight", found,
            "row 70", "column 9", "expected finite",
        )  # fmt: skip
    with pytest.raises(ValueError) as too_large:
        _load_changed(tmp_path, name, -3.4e38, folder)
    assert_says(
        too_large.value, "quantize: ", "blk.3.ffn_up.weight", "3.4e+38",
        "row 70", name.upper(),
    )  # fmt: skip
    assert not packed.files(tmp_path / "packed")


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_0"])
def test_columns_that_are_no_whole_blocks(tmp_path: Path, name: str) -> None:
    shape = tiny_models.Shape(ffn=80)
    path = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", "F32", shape=shape)
    with pytest.raises(ValueError) as error:
        gemmakv.Gemma.load(path, quantize=name)
    assert_says(
        error.value, "quantize: ", "blk.0.ffn_down.weight", "80 columns",
        "multiple of 32", name.upper(),
    )  # fmt: skip
    assert set(_types(gemmakv.Gemma.load(path, quantize="bf16")).values()) == {
        "BF16"
    }


def test_generate(cli: RunCli, tiny_path: Path) -> None:
    run = ["generate", "-m", tiny_path, "--max-tokens", 12, "--json", "the"]
    for name in NAMES:
        result = cli(*run, "--quantize", name)
        assert result.returncode == 0, result.stderr
        gemma = gemmakv.Gemma.load(tiny_path, quantize=name)
        cache = gemmakv.create_kv_cache(gemma.config)
        expected = gemma.generate(cache, "the", max_tokens=12)
        document = json.loads(result.stdout)
        assert document["token_ids"] == expected.token_ids


def test_chat(cli: RunCli, talker_path: Path) -> None:
    gemma = gemmakv.Gemma.load(talker_path, quantize="q4_0")
    expected = gemmakv.Session(gemma, options={"max_tokens": 12}).send("hello")
    run = ["chat", "-m", talker_path, "--max-tokens", 12, "--no-persist"]
    result = cli(*run, "--quantize", "q4_0", stdin=b"hello\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode().strip() == expected.text.strip()


def test_verify(cli: RunCli, tiny_path: Path) -> None:
    result = cli(
        "verify", "-m", tiny_path, "--tokens", 99, "--quantize", "q5_0",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    gemma = gemmakv.Gemma.load(tiny_path, quantize="q5_0")
    assert document["fingerprint"] == gemma.fingerprint
    assert document["quantize"] == "q5_0"


@pytest.mark.slow
def test_bench(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One measurement will do: what each of them is has tests of its own.
    monkeypatch.setattr(
        bench, "_measures",
        lambda made: {"prefill 8": functools.partial(made.prefill, 8)},
    )  # fmt: skip
    report = bench.run(
        tiny_path, threads=1, rounds=1, packed_cache=False, quantize="q4_0"
    )
    assert report.quantize == "q4_0"
    gemma = gemmakv.Gemma.load(tiny_path, quantize="q4_0")
    assert report.weight_bytes == sum(
        nbytes for *_, nbytes in requests_of(gemma).engine.matrices()
    )


@pytest.mark.parametrize("command", ["generate", "chat", "verify", "bench"])
def test_bad_names_on_the_command_line(cli: RunCli, command: str) -> None:
    arguments = ["x"] if command == "generate" else []
    result = cli(
        command, "-m", "no-such/repository", "--quantize", "q4_k", *arguments
    )
    assert result.returncode == 2
    assert result.stdout == b""
    [line] = result.stderr.decode().splitlines()
    assert "quantize: " in line and "q8_0, q5_0, q4_0, bf16" in line
    assert "found 'q4_k'" in line


@pytest.mark.slow
def test_real_model(model_path: str, tmp_path: Path) -> None:
    """Six of its layers and some of its vocabulary, of its values and widths:
    they lie on the levels of other types, so that many are ties.
    """
    fields = gemmakv.ModelConfig.from_gguf(model_path).arguments()
    fields["name"] = ""
    fields["num_layers"] = 6
    fields["layer_kinds"] = fields["layer_kinds"][:6]
    assert set(fields["layer_kinds"]) == {"sliding", "full"}
    fields["vocab_size"] = 4096
    weights = {
        name: values
        for name, values in edited_gguf.read_tensors(Path(model_path)).items()
        if not name.startswith("blk.") or int(name.split(".")[1]) < 6
    }
    rows = weights["token_embd.weight"]
    weights["token_embd.weight"] = rows[: fields["vocab_size"]]
    config = gemmakv.ModelConfig(**fields)
    floats = tiny_gguf.write(
        tmp_path / "f.gguf", tiny_gguf.metadata(config), weights
    )
    reference = tiny_models.requantize(
        floats, tmp_path / "r.gguf", "Q5_0", "Q8_0"
    )
    gemmakv.Gemma.load(floats, quantize="q5_0", packed_cache=tmp_path / "a")
    gemmakv.Gemma.load(reference, packed_cache=tmp_path / "b")
    assert _payload(tmp_path / "a") == _payload(tmp_path / "b")


@pytest.mark.slow
def test_the_tool_takes_types_in_small_letters(tmp_path: Path) -> None:
    """They ended in a traceback, as did types that it cannot write."""

    def run(*flags: str) -> Any:
        script = ROOT / "tools" / "requantize_gguf.py"
        arguments = [script, model, tmp_path / "small.gguf", *flags]
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    model = tiny_models.write_tiny_gguf(tmp_path / "m.gguf", "F32")
    done = run("--type", "q4_0", "--embedding-type", "q8_0")
    assert done.returncode == 0, done.stderr
    large = tiny_models.requantize(
        model, tmp_path / "large.gguf", "Q4_0", "Q8_0"
    )
    assert (tmp_path / "small.gguf").read_bytes() == large.read_bytes()
    for flags in (
        ("--type", "Q4_K"),
        ("--type", "F32", "--embedding-type", "x"),
    ):
        bad = run(*flags)
        assert bad.returncode == 2
        line = bad.stderr.splitlines()[-1]
        assert f"{flags[-2]}: " in line and f"found {flags[-1]}" in line
        assert "F32, F16, BF16, Q4_0, Q5_0, Q8_0" in line
