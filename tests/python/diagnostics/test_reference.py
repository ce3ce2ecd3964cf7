"""`gemmakv verify --reference`: what it measures, what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gemmakv import verify
from gemmakv.cli import main
from gemmakv.diagnostics import _reference
from gemmakv.diagnostics._reference import compare
from support import golden_models
from support.command import RunCli, assert_fails


def test_what_is_compared() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.25, 0.5, 0.25])
    reference = np.log([p, p, p]).astype(np.float32)
    # A constant on all logits changes nothing of the probabilities.
    found = np.stack([np.log(p), np.log(q), np.log(p) + 3]).astype(np.float32)
    measured = compare(reference, found)
    expected = float((p * np.log(p / q)).sum())
    np.testing.assert_allclose(measured.kl, [0, expected, 0], atol=1e-6)
    assert measured.top.tolist() == [0, 0, 0]
    assert measured.found_top.tolist() == [0, 1, 0]
    np.testing.assert_allclose(measured.probability, 0.7, atol=1e-6)
    np.testing.assert_allclose(
        measured.found_probability, [0.7, 0.2, 0.7], atol=1e-6
    )
    spread = math.log(7)
    most = max(abs(np.log(p) - np.log(q)))
    np.testing.assert_allclose(
        measured.difference, [0, most / spread, 3 / spread], atol=1e-6
    )


def test_many_positions_are_compared_in_parts() -> None:
    draw = np.random.default_rng(1)
    reference = draw.normal(size=(150, 11)).astype(np.float32)
    found = reference + draw.normal(scale=0.1, size=(150, 11)).astype(
        np.float32
    )
    measured = compare(reference, found)
    assert len(measured.kl) == 150
    last = compare(reference[140:], found[140:])
    np.testing.assert_array_equal(measured.kl[140:], last.kl)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_none(bad: float) -> None:
    good = np.zeros((70, 4), np.float32)
    other = good.copy()
    other[66, 2] = bad
    with pytest.raises(ValueError, match="model: .*position 66"):
        compare(good, other)
    with pytest.raises(ValueError, match="reference: .*position 66"):
        compare(other, good)


def test_packages_that_are_missing(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reference, "_can_import", lambda name: False)
    with pytest.raises(ModuleNotFoundError, match="torch.*transformers"):
        verify.against(tiny_path, tiny_path)


def test_references_that_are_none(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reference, "_can_import", lambda name: True)
    for place in (tmp_path, tmp_path / "none.gguf", "gemma-3-270m"):
        with pytest.raises(ValueError, match="^reference: "):
            verify.against(tiny_path, place)
    with pytest.raises(ValueError, match="tokens: .*2.*found 1"):
        verify.against(tiny_path, tiny_path, tokens=1)


def test_a_limit_of_nothing(cli: RunCli, tiny_path: Path) -> None:
    result = cli("verify", "-m", tiny_path, "--limit", "1")
    assert_fails(result, "--limit", "--reference", code=2)
    result = cli(
        "verify", "-m", tiny_path, "--reference", tiny_path, "--limit", "-1"
    )
    assert_fails(result, "--limit", "-1", code=2)


@pytest.fixture
def transformers() -> None:
    pytest.importorskip("torch", reason="the reference needs torch")
    pytest.importorskip("transformers", reason="the reference is transformers")


# One golden stands for files with images: transformers refuses its stand-ins
# for their encoder, and Gemma 3n's without the package timm.
TEXT = [
    name
    for name in golden_models.names()
    if name not in ("gemma3-multimodal", "gemma3n-mqa")
]


@pytest.mark.usefixtures("transformers")
class TestLive:
    """With transformers itself."""

    @pytest.mark.parametrize("name", TEXT)
    def test_its_own_weights_agree(self, tmp_path: Path, name: str) -> None:
        golden = golden_models.read(name)
        folder = golden_models.write(tmp_path / "model", golden)
        report = verify.against(folder, folder, tokens=64)
        assert report.mean_kl < 1e-8
        assert report.same_top == 1.0 and not report.differences

    def test_other_weights_do_not(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        golden = golden_models.read("gemma2-gqa")
        folder = golden_models.write(tmp_path / "model", golden)
        other = golden_models.write(tmp_path / "other", golden)
        config = json.loads((other / "config.json").read_text())
        config["sliding_window"] = 3
        golden_models.write_config(other, config)

        def verify_here(reference: Path, *more: str) -> tuple[int, str]:
            words = ["verify", "-m", str(folder), "--tokens", "40"]
            words += ["--reference", str(reference), "--limit", "1e-6", *more]
            code = main(words)  # a copy would load transformers itself
            return code, capsys.readouterr().out

        code, said = verify_here(folder, "--json")
        assert code == 0 and json.loads(said)["agrees"] is True
        code, said = verify_here(other, "--json")
        found = json.loads(said)
        assert code == 1
        assert found["agrees"] is False and found["mean_kl"] > 1e-4
        _, text = verify_here(other)
        assert "It DIFFERS: a mean KL of up to 1e-06" in text

    def test_a_reference_that_cannot_be_loaded(
        self, tiny_path: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(OSError, match="transformers cannot load"):
            verify.against(tiny_path, tmp_path)
