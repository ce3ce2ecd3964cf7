"""Writes tests/golden/tokens.json: llama.cpp's token ids of tricky strings.

Needs the package llama-cpp-python (any build; LLAMA_CPP_LIB_PATH may name a
folder with libllama) and a Gemma 3 GGUF file:

    python tools/make_token_goldens.py MODEL.gguf > tests/golden/tokens.json

Each case holds the text as a JSON string and the ids without BOS, once with
control-token strings taken as text (`ids`) and once parsed (`special_ids`).
"""

import ctypes
import json
import sys

import llama_cpp

SPACES = [" " * n for n in (1, 2, 3, 7, 30, 31, 32, 33, 64)]
NEWLINES = ["\n" * n for n in (1, 2, 3, 30, 31, 32, 40)]
TABS = ["\t" * n for n in (1, 2, 31, 32, 33)]

CASES = [
    "",
    "Hello",
    " Hello",
    "  Hello",
    "   Hello   world  ",
    "Hello ",
    *SPACES,
    *[s + "x" for s in SPACES],
    *NEWLINES,
    "a\nb",
    "a\n\nb",
    "a \n b",
    "\n a",
    " \n",
    "\r\n",
    "a\rb",
    "\n\r\n\r",
    *TABS,
    "\tif x:\n\t\treturn  1\n",
    " \t ",
    "\x00",
    "a\x00b",
    "\x00\x00",
    "\x01\x02\x7f\x1b[0m",
    "\x80\x9f\u00a0\u00ad",
    "\u2581",
    "a\u2581b",
    "\u200b\u200d\ufeff",
    "\u3000x\u2003y",
    "\u00e9",
    "e\u0301",
    "a\u0308\u0323\u0301\u0302z",
    "\u1100\u1161\u11a8 \uac01",
    "\ufb01 \u00bd \u2167 \uff21",
    "\U0001f642",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "\U0001fae8\U0001fadf",
    "\U0010ffff",
    "\ufffd\ufffe",
    "\U00012000\U00013080\U0001d54f",
    "\u0915\u094d\u0937\u093f \u0e01\u0e33 \u05e9\u05b8",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "<bos>",
    "<eos>",
    "<pad>",
    "<unk>",
    "<mask>",
    "<unused0>",
    "<unused6241>",
    "<0x41>",
    "<0x00>",
    "<bos><bos>x",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    " <end_of_turn> ",
    "<end_of_turn",
    "<<end_of_turn>>",
    "<end_of_turn>\n\n",
    "<start_of_image>",
    "<end_of_image>x",
    "[multimodal]",
    "[multimodal",
    "<h1>Title</h1>",
    "<table><tr><td>1</td></tr></table>",
    "<h1",
    "<<h1>>",
    "  <b>  bold  </b>  ",
    "x" * 100,
    "ab" * 60,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 3.14159 -1e-10",
    "don't can't I'll",
    "!!!???...---===",
    "https://example.org/a?b=c&d=%20#e",
    "def f(x):\n    return x ** 2  # comment\n",
    "{\"a\": [1, 2, {\"b\": null}]}",
    "The capital of France is",
    "The quick brown fox jumps over the lazy dog. " * 4,
]


def tokenize(vocab: object, text: str, parse_special: bool) -> list[int]:
    data = text.encode("utf-8")
    ids = (ctypes.c_int32 * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(
        vocab, data, len(data), ids, len(ids), False, parse_special
    )
    if count < 0:
        raise RuntimeError(f"llama_tokenize({text!r}) returned {count}")
    return list(ids[:count])


def main() -> None:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    lines = [
        json.dumps(
            {
                "text": text,
                "ids": tokenize(vocab, text, False),
                "special_ids": tokenize(vocab, text, True),
            }
        )
        for text in CASES
    ]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
