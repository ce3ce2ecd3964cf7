"""Checks tokens and templates of Gemma 4 against transformers; keeps texts.

    python tools/make_gemma4_goldens.py VOCAB.gguf TEMPLATE.jinja [-o FILE]

VOCAB.gguf has Gemma 4's vocabulary; if VOCAB.gguf.inp and .out stand beside it,
as in llama.cpp, those are checked too. TEMPLATE.jinja is the chat template that
the model's makers publish. FILE, tests/golden/gemma4_template.json, gets what
transformers renders with it, which tests hold the template "gemma4" to.

Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))

from gemmakv import Tokenizer, _core  # noqa: E402
from gemmakv.chat._file_template import FileTemplate  # noqa: E402
from gemmakv.templates import Gemma4Template, Segment  # noqa: E402
from gemmakv.tokenizers._directory import tokenizer_of_folder  # noqa: E402
from gemmakv.tokenizers._gguf import tokenizer_of_gguf  # noqa: E402
from support.gemma4_cases import CASES  # noqa: E402

GOLDEN = ROOT / "tests/golden/gemma4_template.json"
# A thought that the published template begins after the result of a tool.
CUE = "<|channel>thought\n"
BEGUN = [Segment("<|channel>", special=True), Segment("thought\n")]
PARTS = [
    "the", " quick", "\n", "\n\n\n", " " * 7, " " * 33, "\n" * 35, "<table>",
    "</b>", "1234", "\t\t", "\U0001f469\u200d\U0001f467", "\r\n", "\0",
    "\u0928\u092e\u0938\u094d", "def f(x):\n    return", "\u4f60\u597d",
    "\ufeff", "e\u0301", "\ue000", "https://a.b/c?d=e", "\U0010fffd",
    "don't", " A", ".", " ", "\u00a0", "<|turn", ">", "<0x41>", "[",
]  # fmt: skip


def texts(count: int) -> list[str]:
    rng = random.Random(7)
    made = []
    for i in range(count):
        if i % 2:
            made.append("".join(rng.choices(PARTS, k=rng.randrange(9))))
        else:
            ranges = ((32, 126), (0xA0, 0x24FF), (0x2580, 0xD7FF))
            made.append(
                "".join(
                    chr(rng.randint(*rng.choice(ranges)))
                    for _ in range(rng.randrange(40))
                )
            )
    return [text for text in made if "\u2581" not in text]


def reference(path: str) -> Any:
    import transformers

    file = _core.GgufFile(path)
    pieces = file.get("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type")
    merges = file.get("tokenizer.ggml.merges")
    return transformers.GemmaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        additional_special_tokens=[
            p for p, kind in zip(pieces, kinds) if kind in (3, 4)
        ],
    )


def check_tokens(path: str, ours: Tokenizer) -> None:
    theirs = reference(path)
    made = texts(10_010)
    for text in made:
        expected = theirs.encode(text, add_special_tokens=False)
        found = ours.encode(text, parse_special=True)
        assert found == expected, ascii(text)
        if not set(found) & ours._silent:
            assert ours.encode(text) == expected, ascii(text)
            assert ours.decode(expected) == text, ascii(text)
    print(f"{len(made)} texts have the tokens that transformers gives")
    rng = random.Random(8)
    names = [ours.piece_of(i) for i in sorted(ours._silent) if i < 120]
    names = [n for n in names if not n.startswith("<unused")]
    for _ in range(2000):
        text = "".join(rng.choices([*names, "a", " b", "\n"], k=8))
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == expected, text
        plain = ours.encode(text)
        assert not set(plain) & ours._silent and ours.decode(plain) == text
    print("2000 texts with control tokens, too")
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        other = tokenizer_of_folder(Path(folder))
    assert other is not None and other.token_bytes == ours.token_bytes
    for text in made[:2000]:
        for special in (False, True):
            assert other.encode(text, special) == ours.encode(text, special)
    print("the tokenizer.json that transformers writes says the same")
    inp, out = Path(path + ".inp"), Path(path + ".out")
    if inp.exists():
        given = inp.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        for text, line in zip(given, out.read_text().split("\n")):
            assert ours.encode(text) == [int(one) for one in line.split()]
        print(f"{len(given)} texts have the tokens that llama.cpp expects")


def render(source: str, case: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    keywords = {k: v for k, v in case.items() if k not in ("messages", "tools")}
    keywords.setdefault("add_generation_prompt", True)
    [text], _ = render_jinja_template(
        conversations=[case["messages"]],
        tools=case.get("tools"),
        chat_template=source,
        bos_token="<bos>",
        **keywords,
    )
    assert isinstance(text, str)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary")
    parser.add_argument("template", type=Path)
    parser.add_argument("-o", dest="output", type=Path, default=GOLDEN)
    args = parser.parse_args()
    tokenizer = tokenizer_of_gguf(
        args.vocabulary, _core.GgufFile(args.vocabulary)
    )
    assert tokenizer is not None
    source = args.template.read_text("utf-8")
    own = FileTemplate(source, tokenizer, bos_id=2, eos_ids=[1, 50, 106])
    kept = []
    for i, case in enumerate(CASES):
        expected = render(source, case)
        theirs = own.render(**case)
        segments = Gemma4Template().render(**case)
        if case.get("enable_thinking") and theirs[-2:] == BEGUN:
            theirs = theirs[:-2]
            expected = expected.removesuffix(CUE)
        # And the same tokens: segments are cut at the same places.
        for found in (theirs, segments):
            assert "".join(s.text for s in found) == expected, (
                f"case {i}:\n{expected}\n" + "".join(s.text for s in found)
            )
        assert segments == theirs, i
        kept.append([[s.text, s.special] for s in segments])
    args.output.write_text(
        json.dumps(kept, ensure_ascii=False, indent=0) + "\n", "utf-8"
    )
    print(f"{len(CASES)} conversations render as transformers renders them")
    check_tokens(args.vocabulary, tokenizer)


if __name__ == "__main__":
    main()
