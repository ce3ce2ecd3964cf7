"""A miniature model with a vocabulary of Gemma 4's kind: merges decide.

Control tokens have the ids that they have in the original. What a reply is to
say can be scripted: `script` makes a grammar of texts and control tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gemmakv import ModelConfig
from support import tiny_gguf
from support.tiny_gguf import ARRAY, BOOL, STR, U32

MARKS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>",
    50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>',
    98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>",
}  # fmt: skip
IDS = {name: token for token, name in MARKS.items()}
# Converters call these user-defined.
SHOWN = (48, 49, 50, 51, 52, 100, 101)
RUNS = ["\n" * n for n in range(1, 8)] + ["\u2581" * n for n in range(2, 6)]
WORDS = [
    "th", "he", "the", "\u2581the", "in", "er", "\u2581t", "ther", "thought",
    "\u2581a", "an", "\u2581and", "call", "or", "res", "ou", "gh", "ght",
    "Xx",
]  # fmt: skip
EXTRA = ["\u00e9", "\u20ac", "\U0001f999"]
USER_DEFINED = "Xx"  # found in any text, before merges


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Pieces, types, and merges in GGUF's form, the most important first."""
    pieces: list[str] = []
    unused = 0
    for token in range(107):
        name = MARKS.get(token)
        if name is None:
            name, unused = f"<unused{unused}>", unused + 1
        pieces.append(name)
    types = [1] * len(pieces)
    for token in MARKS:
        types[token] = 4 if token in SHOWN else 3
    letters = [chr(c).replace(" ", "\u2581") for c in range(0x20, 0x7F)]
    words = [*RUNS, *letters, *EXTRA, *WORDS]
    pieces += words + [f"<0x{value:02X}>" for value in range(256)]
    types += [1] * len(words) + [6] * 256
    types[pieces.index(USER_DEFINED)] = 4
    known = {*words}
    merges = [
        f"{word[:i]} {word[i:]}"
        for word in sorted(words, key=len, reverse=True)
        for i in range(len(word) - 1, 0, -1)
        if {word[:i], word[i:]} <= known
    ]
    return pieces, types, merges


PIECES, TYPES, MERGES = vocabulary()
CONFIG = ModelConfig(
    **{
        **tiny_gguf.CONFIG.arguments(),
        "vocab_size": len(PIECES),
        "context_length": 4096,
        "eos_ids": [1, 50, 106],
    }
)


def metadata(
    template: str | None = None, **changes: Any
) -> dict[str, tuple[int, Any]]:
    """Of a GGUF file; `changes` of the tokenizer's keys, None leaves out."""
    found = tiny_gguf.metadata(CONFIG)
    own: dict[str, tuple[int, Any] | None] = {
        "model": (STR, "gemma4"),
        "tokens": (ARRAY, (STR, PIECES)),
        "scores": (ARRAY, (tiny_gguf.F32, [-1000.0] * len(PIECES))),
        "token_type": (ARRAY, (U32, TYPES)),
        "merges": (ARRAY, (STR, MERGES)),
        "eos_token_id": (U32, 1),
        "eot_token_id": (U32, 106),
        "add_bos_token": (BOOL, True),
        **changes,
    }
    for key, value in own.items():
        name = f"tokenizer.ggml.{key}"
        found.pop(name, None)
        if value is not None:
            found[name] = value
    if template is not None:
        found["tokenizer.chat_template"] = (STR, template)
    return found


def write(path: Path, template: str | None = None, **changes: Any) -> Path:
    return tiny_gguf.write(
        path,
        metadata(template, **changes),
        tiny_gguf.tensors(1, CONFIG),
    )


def tokenizer_json() -> dict[str, Any]:
    """The same vocabulary as a tokenizer.json."""
    special = [t for t in MARKS]
    added = [
        {
            "id": token, "content": PIECES[token], "special": True,
            "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False,
        }
        for token in special
    ]  # fmt: skip
    user = PIECES.index(USER_DEFINED)
    added.append({**added[0], "id": user, "content": USER_DEFINED,
                  "special": False})  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda one: int(str(one["id"]))),
        "normalizer": {
            "type": "Replace",
            "pattern": {"String": " "},
            "content": "\u2581",
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>",
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(PIECES)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }  # fmt: skip


def script(reply: str) -> str:
    """A grammar of which `reply` is the only text; names of control tokens
    in it are these.
    """
    names = "|".join(map(re.escape, IDS))
    parts = []
    for part in re.split(f"({names})", reply):
        if part in IDS:
            parts.append(f"<[{IDS[part]}]>")
        elif part:
            parts.append(json.dumps(part))
    return "start: " + " ".join(parts)


def force(monkeypatch: Any) -> None:
    """A script that a server has as its default holds replies with tools, too,
    instead of the tools' grammar.
    """
    from gemmakv import Grammar
    from gemmakv.server.service.checks import Checks

    with_tools = Checks._with_tools

    def scripted(self: Any, request: Any, options: dict[str, Any]) -> Any:
        found = with_tools(self, request, options)
        options["grammar"] = Grammar.lark(self.defaults["grammar"])
        return found

    monkeypatch.setattr(Checks, "_with_tools", scripted)


# What of the published template matters here, in our own words.
TEMPLATE = """\
{%- macro value(v) -%}
{%- if v is string -%}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is mapping -%}{{ '{' }}{%- for key, one in v | dictsort -%}
{{ ',' if not loop.first }}{{ key }}:{{ value(one) }}{%- endfor -%}{{ '}' }}
{%- else -%}{{ v | tojson }}{%- endif -%}
{%- endmacro -%}
{%- macro bare(text) -%}
{%- for part in text.split('<channel|>') -%}
{%- if '<|channel>' in part -%}{{ part.split('<|channel>')[0] }}
{%- else -%}{{ part }}{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(open=false, user=-1) -%}
{%- if enable_thinking or tools or messages[0].role == 'system' -%}
<|turn>system
{% if enable_thinking %}<|think|>{{ '\\n' }}{% endif -%}
{%- if messages[0].role == 'system' -%}
{{ messages[0].content | trim }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for tool in tools or [] -%}
<|tool>declaration:{{ tool.function.name }}{{ value(tool.function) }}<tool|>
{%- endfor -%}
<turn|>{{ '\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|tool_response>response:' + (m.name or 'tool') }}
{{- value({'value': m.content}) }}
{{- '<tool_response|>' }}
{%- else -%}
{%- if not ns.open -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}{{ '\\n' }}
{%- endif -%}
{%- set ns.open = false -%}
{%- if m.reasoning and m.tool_calls and loop.index0 > ns.user -%}
{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '<|tool_call>call:' + call.function.name }}
{{- value(call.function.arguments) }}{{ '<tool_call|>' }}
{%- set ns.open = true -%}
{%- endfor -%}
{{ bare(m.content | default('', true)) | trim if m.role == 'assistant'
   else m.content | trim }}
{%- if not ns.open -%}{{ '<turn|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}
{{ '<|turn>model\\n' }}
{%- if not enable_thinking -%}{{ '<|channel>thought\\n<channel|>' }}
{%- endif -%}
{%- endif -%}
"""
