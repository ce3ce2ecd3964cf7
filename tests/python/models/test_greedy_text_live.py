"""What tiny models say, beside what they say in transformers: the same
directory, with a tokenizer and a chat template, read by both. Needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support.gemma4_files import MARKS, MERGES, PIECES

torch = pytest.importorskip("torch", reason="the reference needs torch")
transformers = pytest.importorskip(
    "transformers", reason="the reference is transformers")
pytest.importorskip("tokenizers", reason="the extra `tokenizers`")
random_models = pytest.importorskip("support.random_models")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else "
    "message['role']) + '\\n' + message['content'] + '<turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "the \u20ac and\n\nXx \U0001f999 \u00e9?"},
    {"role": "assistant", "content": "or call there"},
    {"role": "user", "content": "  in the  thought {x} "},
]
# Bytes that are no text, and control tokens.
NEVER = [
    i for i, piece in enumerate(PIECES)
    if i in MARKS or piece.startswith(("<0x", "<unused"))
]
NEW_TOKENS = 40


def folder_of(family: str, seed: int, folder: Path) -> Path:
    model = random_models.random_model(family, seed, len(PIECES))
    random_models.save(model, folder)
    tokenizer = transformers.GemmaTokenizer(
        vocab={piece: i for i, piece in enumerate(PIECES)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
        additional_special_tokens=list(MARKS.values()),
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
        "suppress_tokens": NEVER,
    }))
    return folder


def said_by_transformers(folder: Path) -> tuple[list[int], str]:
    """(ids of the prompt, the reply's text)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS,
            use_cache=False)
    reply = out[0, len(ids):].tolist()
    return ids, tokenizer.decode(reply, skip_special_tokens=True)


@pytest.mark.parametrize("seed", [21, 22])
@pytest.mark.parametrize("family", [
    "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "experts", "vaultgemma",
])
def test_greedy_text_is_that_of_transformers(
    family: str, seed: int, tmp_path: Path
) -> None:
    folder = folder_of(family, seed, tmp_path)
    ids, expected = said_by_transformers(folder)
    gemma = gemmakv.Gemma.load(folder)
    assert gemma.apply_chat_template(MESSAGES).tolist() == ids
    assert gemma.suppressed_tokens == tuple(NEVER)
    cache = gemmakv.create_kv_cache(
        gemma.config, capacity_tokens=len(ids) + NEW_TOKENS, kv_dtype="f32")
    found: Any = gemma.generate(cache, ids, max_tokens=NEW_TOKENS)
    assert found.text == expected
    assert len(set(found.token_ids)) > 1, "a reply that shows nothing"
