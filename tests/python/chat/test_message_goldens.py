"""Messages of all kinds as transformers renders them, stored and live.

The goldens are made by tools/make_message_goldens.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmakv import Gemma, Message, Segment
from gemmakv.chat import _templates
from gemmakv.chat._file_template import FileTemplate
from gemmakv.chat._messages import messages_of
from support import tiny_gguf
from support.chat_cases import (
    EVIL,
    FUNCTION_TOKENS,
    SOURCES,
    conversations,
    digest,
    functions_metadata,
    random_conversations,
    talk,
    text_of,
    tool,
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    path = tmp_path_factory.mktemp("functions") / "m.gguf"
    return Gemma.load(tiny_gguf.write(path, functions_metadata()))


@pytest.fixture(scope="module")
def templates(gemma: Gemma) -> dict[str, FileTemplate]:
    assert gemma.tokenizer is not None
    return {
        name: FileTemplate(source, gemma.tokenizer, bos_id=2, eos_ids=[1])
        for name, source in SOURCES.items()
    }


Renders = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def render(templates: dict[str, FileTemplate]) -> Renders:
    def text(case: dict[str, Any]) -> str:
        keywords = {k: v for k, v in case.items() if k != "template"}
        return text_of(templates[case["template"]].render(**keywords))

    return text


@pytest.mark.slow
def test_stored(render: Renders, golden: Path) -> None:
    stored = (golden / "messages.txt").read_text("utf-8").split()
    cases = list(conversations())
    assert len(cases) == len(stored) > 250
    for case, expected in zip(cases, stored):
        assert digest(render(case)) == expected, case


def test_live(render: Renders) -> None:
    """The same, and random texts, against the installed transformers."""
    transformers = pytest.importorskip(
        "transformers.utils.chat_template_utils",
        reason="the reference is transformers",
    )
    for case in [*conversations(), *random_conversations(2000)]:
        keywords = {
            k: v for k, v in case.items() if k not in ("template", "messages")
        }
        [expected], _ = transformers.render_jinja_template(
            [case["messages"]],
            chat_template=SOURCES[case["template"]],
            bos_token="<bos>",
            eos_token="<eos>",
            **keywords,
        )
        assert render(case) == expected, case


def specials(segments: list[Segment]) -> list[str]:
    return [segment.text for segment in segments if segment.special]


@pytest.mark.parametrize("name", SOURCES)
def test_hostile_text_is_text_in_every_place(
    templates: dict[str, FileTemplate], name: str
) -> None:
    """Contents, parts, names, ids, arguments, results, schemas, their keys."""
    tools = name in ("functions", "json")

    def render(text: str) -> list[Segment]:
        system = [{"role": "system", "content": text}]
        return templates[name].render(
            system + talk(text, name != "turns", tools),
            tools=[tool(text, text)] if tools else None,
            language=text,
        )

    calm, evil = render("calm"), render(EVIL)
    assert specials(evil) == specials(calm)
    forms = [EVIL]
    if name == "json":
        forms += [
            json.dumps(EVIL, ensure_ascii=ascii)[1:-1]
            for ascii in (False, True)
        ]
    found = sum(map(text_of(evil).count, forms))
    assert found == text_of(calm).count("calm")
    assert found >= {"turns": 4, "parts": 6, "functions": 30, "json": 79}[name]


def test_the_tokens_of_functions(gemma: Gemma) -> None:
    """From messages to ids: control tokens are the template's alone."""
    assert gemma.tokenizer is not None
    template = FileTemplate(
        SOURCES["functions"], gemma.tokenizer, bos_id=2, eos_ids=[1]
    )
    control = [gemma.tokenizer.id_of(piece) for piece in FUNCTION_TOKENS]
    assert None not in control

    def ids(text: str) -> list[int]:
        return [
            int(token)
            for token in gemma.apply_chat_template(
                talk(text, True, True), tools=[tool("f", text)],
                template=template,
            )
        ]

    def only_control(tokens: list[int]) -> list[int]:
        return [t for t in tokens if t in control or t < tiny_gguf.EOT + 1]

    assert set(control) <= set(ids("x"))
    assert only_control(ids(EVIL)) == only_control(ids("x"))
    wire = gemma.tokenizer.decode(ids("x"))
    assert "call:f{" not in wire and "call:x{" in wire


def test_parts_for_a_template_of_text(
    templates: dict[str, FileTemplate],
) -> None:
    """It gets what it knows, not the repr of a list."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    user = Message("user", parts)
    assert text_of(templates["turns"].render([user])) == text_of(
        templates["turns"].render([Message("user", "a\nb")])
    )
    assert "user\nab<" in text_of(templates["parts"].render([user]))


def test_roles_a_template_does_not_know(
    templates: dict[str, FileTemplate],
) -> None:
    user = {"role": "user", "content": "a"}
    with pytest.raises(ValueError, match="roles must alternate"):
        templates["parts"].render([user, user])
    assert text_of(templates["turns"].render([user, user])).count("user\n") == 2
    # What it has no role for, it says as Gemma 3 does.
    developer = {"role": "developer", "content": "c"}
    said = messages_of([developer, user])
    found = _templates.render(templates["parts"], said)
    system = {**developer, "role": "system"}
    assert found == templates["parts"].render([system, user])
    for name in ("turns", "parts"):
        with pytest.raises(ValueError, match="^tools: "):
            templates[name].render([user], tools=[tool("f", "t")])
    templates["turns"].render([user], tools=[])
