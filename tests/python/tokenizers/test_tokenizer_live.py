"""Tokenizers of directories against transformers, live."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gemmakv import Gemma, Tokenizer
from gemmakv.chat._templates import template_for
from gemmakv.tokenizers._directory import tokenizer_of_folder
from support import tokenizer_files
from support.chat_cases import GENERATIONS, messages_of, text_of
from support.folders import GOLDEN
from support.template_folders import (
    cases_of,
    ids_of,
    is_harmless,
    model_with,
    source_of,
)
from support.tokenizer_folders import KINDS

TEXTS = json.loads((GOLDEN / "tokens.json").read_text())

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the reference is transformers",
)


def reference(folder: Path) -> Any:
    import transformers  # takes seconds

    return transformers.GemmaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest,
    model_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, Any]:
    """Gemma 3's vocabulary in a directory: ours and the reference's."""
    rows = tokenizer_files.rows_of_gguf(model_path)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(folder, rows, request.param)
    ours = tokenizer_of_folder(folder)
    assert ours is not None
    return ours, reference(folder)


def texts() -> list[str]:
    rng = random.Random(9)
    parts = [
        "the", " quick", "\n\n", "   ", "<table>", "</b>", "1234", "\t\t",
        "\U0001f469\u200d\U0001f467", "\u0928\u092e\u0938\u094d", "\r\n", "\0",
        "def f(x):\n    return", "\u4f60\u597d", "\ufeff", "e\u0301", "\ue000",
        "https://a.b/c?d=e", "\U0010fffd", "don't", " A", ".", " ", "\u00a0",
    ]
    made = ["".join(rng.choices(parts, k=rng.randrange(9)))
            for _ in range(5000)]
    return made + [
        "".join(
            chr(rng.randint(*rng.choice(((32, 126), (0xA0, 0xD7FF)))))
            for _ in range(rng.randrange(30))
        )
        for _ in range(5000)
    ]


def test_plain_text(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    compared = 0
    for text in [*texts(), *(case["text"] for case in TEXTS)]:
        # What docs/models.md says of tokenizer.json, and control tokens.
        if "\u2581" in text or " " * 32 in text:
            continue
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == expected, ascii(text)
        if all(ours.token_bytes[token] for token in expected):
            assert ours.encode(text) == expected, ascii(text)
        compared += 1
    assert compared > 10000


def test_control_tokens(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    rng = random.Random(4)
    parts = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused9>",
             "<mask>", "<unk>", "<pad>", "a", " b", "\n", "<", "start_of_turn>"]
    for _ in range(2000):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == expected, text
        plain = ours.encode(text)
        assert all(ours.token_bytes[token] for token in plain)
        assert ours.decode(plain) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_chat_templates(tmp_path: Path, kind: str, generation: str) -> None:
    gemma: Gemma = model_with(tmp_path, kind, source_of(generation))
    theirs = reference(tmp_path)
    for case in cases_of(generation):
        messages = messages_of(case)
        chat = [
            {
                "role": m.role,
                "content": m.content,
            }
            for m in messages
        ]
        reply = case["add_generation_prompt"]
        text = theirs.apply_chat_template(
            chat, add_generation_prompt=reply, tokenize=False
        )
        segments = template_for(gemma).render(
            messages, add_generation_prompt=reply
        )
        assert text_of(segments) == text == case["texts"][generation]
        if is_harmless(case):
            ids = theirs.apply_chat_template(
                chat, add_generation_prompt=reply, return_dict=False
            )
            assert ids_of(gemma, messages, reply) == list(ids)
