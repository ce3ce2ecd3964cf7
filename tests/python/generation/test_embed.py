"""`gemma.embed`: texts as vectors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._requests import requests_of
from support import family_models, tiny_gguf
from support.ctrl_c import ctrl_c_when
from support.waits import wait_in_loop

TEXTS = ["the cat", "a hat in the rain", "the inner thing " * 20, "a"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    return tiny_gguf.write_embedding(folder / "embed.gguf")


@pytest.fixture(scope="module")
def embedder(path: Path) -> gemmakv.Gemma:
    return gemmakv.Gemma.load(path, threads=2)


def test_vectors_are_unit_rows(embedder: gemmakv.Gemma) -> None:
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), 160)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    products = vectors @ vectors.T
    assert products[~np.eye(len(TEXTS), dtype=bool)].max() < 0.999


def test_a_vector_depends_on_its_text_alone(
    path: Path, embedder: gemmakv.Gemma
) -> None:
    vectors = embedder.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert np.array_equal(embedder.embed([text])[0], vector)
    assert np.array_equal(embedder.embed(TEXTS[::-1]), vectors[::-1])
    for threads in (1, 3):
        other = gemmakv.Gemma.load(path, threads=threads)
        assert np.array_equal(other.embed(iter(TEXTS)), vectors)


def test_dims_are_the_leading_values(embedder: gemmakv.Gemma) -> None:
    assert embedder.embedding_dims == [160, 128]
    whole = embedder.embed(TEXTS)
    assert np.array_equal(embedder.embed(TEXTS, dim=160), whole)
    cut = embedder.embed(TEXTS, dim=128)
    expected = whole[:, :128].astype(np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-7)


def test_texts_begin_with_bos_and_end_as_the_file_says(
    embedder: gemmakv.Gemma, tmp_path: Path
) -> None:
    assert embedder.tokenizer is not None
    ids = embedder.tokenizer.encode(TEXTS[0])
    expected = embedder.embed([[2, *ids, 1]])
    assert np.array_equal(embedder.embed(TEXTS[:1]), expected)
    other = gemmakv.Gemma.load(
        tiny_gguf.write_embedding(tmp_path / "open.gguf", add_eos=False))
    expected = embedder.embed([np.array([2, *ids])])
    assert np.array_equal(other.embed(TEXTS[:1]), expected)


@pytest.mark.parametrize("prompt, whole", [
    ("query", "task: search result | query: the cat"),
    ("document", "title: none | text: the cat"),
    ("STS", "task: sentence similarity | query: the cat"),
    ("{text}", "the cat"),
    ("title: Pets | text: {text}!", "title: Pets | text: the cat!"),
])
def test_prompts(
    embedder: gemmakv.Gemma, prompt: str, whole: str
) -> None:
    found = embedder.embed(["the cat"], prompt=prompt)
    assert np.array_equal(found, embedder.embed([whole]))


def test_the_published_prompts_are_known(embedder: gemmakv.Gemma) -> None:
    assert list(embedder.embedding_prompts)[:2] == ["query", "document"]
    assert family_models.model("gemma3").embedding_prompts == {}


@pytest.mark.parametrize("texts, options, message", [
    ("x", {}, "texts: expected a list of texts, found 'x'"),
    (5, {}, "texts: expected a list of texts, found 5"),
    ([], {}, "texts: expected at least one, found none"),
    (["x", ""], {}, "texts[1]: expected a text, found an empty one"),
    (["x", "a\ud800"], {}, "texts[1]: expected Unicode text, found a lone"),
    (["\udfff"], {"prompt": "query"}, "texts[0]: expected Unicode text, found"),
    (["x"], {"prompt": "a\ud800{text}"}, "prompt: expected Unicode text"),
    ([[2], []], {}, "texts[1]: expected a sequence of token ids"),
    ([[9999]], {}, "texts[0]: expected a sequence of token ids in [0, "),
    (["a" * 3000], {}, "texts[0]: found "),
    ([[5] * 513], {}, "texts[0]: found 513 tokens, expected at most 512"),
    (["x"], {"dim": 64}, "dim: expected one of 160, 128 (default: 160), "
     "found 64"),
    (["x"], {"dim": True}, "dim: expected one of 160, 128"),
    (["x"], {"dim": "160"}, "dim: expected one of 160, 128"),
    (["x"], {"prompt": "Query"}, "prompt: expected a name (query, document, "),
    (["x"], {"prompt": ""}, "prompt: expected a name (query, document, "),
    (["x"], {"prompt": "{text} {text}"}, "prompt: expected a name (query, "),
    ([[5]], {"prompt": "query"}, "texts[0]: expected a text, which the prompt"),
    (["x"], {"pooling": "mean"}, "pooling: expected none: this model is "
     "trained for the mean, found 'mean'"),
])
def test_bad_arguments_are_named(
    embedder: gemmakv.Gemma, texts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        embedder.embed(texts, **options)
    assert str(caught.value).startswith(message), caught.value
    assert "\n" not in str(caught.value)


def test_a_draft_of_a_model_of_embeddings_is_refused(
    path: Path, tiny: gemmakv.Gemma
) -> None:
    """It was taken, and never asked."""
    with pytest.raises(ValueError, match="holds no conversation"):
        gemmakv.Gemma.load(path, draft=tiny)


def test_conversations_are_refused(embedder: gemmakv.Gemma) -> None:
    message = "^gemma-embedding makes embeddings of texts and holds no conv"
    with pytest.raises(ValueError, match=message):
        gemmakv.create_kv_cache(embedder.config)
    with pytest.raises(ValueError, match="^embeddinggemma-300m "):
        gemmakv.create_kv_cache("embeddinggemma-300m")
    arguments = embedder.config.arguments() | {
        "architecture": "gemma3", "bidirectional": False, "dense_dim": 0}
    cache = gemmakv.create_kv_cache(gemmakv.ModelConfig(**arguments))
    with pytest.raises(ValueError, match=message):
        embedder.generate(cache, "x")
    with pytest.raises(ValueError, match=message):
        embedder.logits(cache, [2])
    with pytest.raises(ValueError, match=message):
        gemmakv.Session(embedder)
    assert len(cache) == 0


@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_models_that_generate_give_hidden_states(family: str) -> None:
    gemma = family_models.model(family)
    texts = [[2, 7, 9], [2, *range(20, 90)]]
    with pytest.raises(ValueError, match="pooling: expected 'mean' or 'last'"):
        gemma.embed(texts)
    with pytest.raises(ValueError, match="pooling: expected 'mean' or 'last'"):
        gemma.embed(texts, pooling="cls")
    with pytest.raises(ValueError, match="prompt: "):
        gemma.embed(texts, pooling="last", prompt="query")
    last = gemma.embed(texts, pooling="last")
    mean = gemma.embed(texts, pooling="mean", dim=64)
    assert last.shape == mean.shape == (2, 64)
    for vectors in (last, mean):
        np.testing.assert_allclose(
            np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    assert np.abs(last - mean).max() > 1e-2
    # A model of Gemma has its head tied to the embedding: the state of the
    # last position has the logits' direction.
    cache = gemmakv.create_kv_cache(gemma.config, kv_dtype="f32")
    logits = gemma.logits(cache, texts[0])
    scores = tiny_gguf.tensors(0, gemma.config)["token_embd.weight"] @ last[0]
    assert np.argmax(scores) == np.argmax(logits)


def test_ctrl_c_ends_it(embedder: gemmakv.Gemma) -> None:
    texts = [[5] * 512] * 4000
    begun = requests_of(embedder).engine.steps
    with (
        pytest.raises(KeyboardInterrupt),
        ctrl_c_when(lambda: requests_of(embedder).engine.steps > begun),
    ):
        embedder.embed(texts)
    assert requests_of(embedder).engine.steps - begun < 3000  # of 4000
    assert embedder.embed(TEXTS).shape == (4, 160)


def test_other_threads_run_meanwhile(embedder: gemmakv.Gemma) -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        embedder.embed([[5] * 300] * 40)
        done.set()

    for _ in range(20):  # this thread may get no processor for once
        begun.clear()
        done.clear()
        worker = threading.Thread(target=work)
        worker.start()
        assert begun.wait(60)
        seen = 0
        while not done.wait(0.001):
            seen += 1
        worker.join()
        if seen > 3:
            break
    assert seen > 3


def test_aembed_on_a_loop(embedder: gemmakv.Gemma) -> None:
    expected = embedder.embed(TEXTS, prompt="query", dim=128)

    async def main() -> None:
        found = await asyncio.gather(*[
            embedder.aembed([text], prompt="query", dim=128) for text in TEXTS
        ])
        assert np.array_equal(np.concatenate(found), expected)
        with pytest.raises(ValueError, match="texts: expected at least one"):
            await embedder.aembed([])
        begun = requests_of(embedder).engine.steps
        task = asyncio.create_task(embedder.aembed([[5] * 512] * 4000))
        await wait_in_loop(lambda: requests_of(embedder).engine.steps > begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine = requests_of(embedder).engine
        steps = again = engine.steps
        still = 0
        for _ in range(6000):  # until nothing runs for 0.1 s
            await asyncio.sleep(0.01)
            still = still + 1 if engine.steps == again else 0
            again = engine.steps
            if still == 10:
                break
        # It ends with the step that runs.
        assert still == 10 and again < steps + 20

    asyncio.run(main())
