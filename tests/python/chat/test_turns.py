"""Turns of a conversation, whatever the order of roles that a client sends."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest

import gemmakv
from gemmakv import Message, Segment, Session, Tokenizer
from gemmakv.chat._messages import messages_of
from gemmakv.chat._templates import render, turn_rules
from gemmakv.chat._transcript import common_exact
from gemmakv.chat._turns import ALTERNATING, ANY_ORDER, TurnRules, arrange
from support.chat_cases import Refusing, text_of
from support.role_orders import ALTERNATING as STRICT
from support.role_orders import (
    NAMES,
    ORDERS,
    ROLES,
    messages,
    template_of,
    words,
)


@pytest.fixture(scope="module")
def tokenizer(tiny: gemmakv.Gemma) -> Tokenizer:
    assert tiny.tokenizer is not None
    return tiny.tokenizer


def said(template: Any, given: Any, opens: bool = True, **more: Any) -> str:
    return text_of(
        render(
            template, messages_of(given), add_generation_prompt=opens, **more
        )
    )


def arranged(given: Any, rules: TurnRules = ALTERNATING) -> list[Message]:
    return arrange(messages_of(given), lambda: rules, opens=True).messages


def shown(given: Any, rules: TurnRules = ALTERNATING) -> list[tuple[str, Any]]:
    return [(one.role, one.content) for one in arranged(given, rules)]


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*ids: str, text: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": id, "function": {"name": f"f_{id}", "arguments": {}}}
        for id in ids
    ]
    return say("assistant", text, tool_calls=calls)


def result(id: str | None, text: str) -> dict[str, Any]:
    return say("tool", text, tool_call_id=id)


# Templates of all kinds take all orders.


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_all_is_said_once_in_its_order(
    tokenizer: Tokenizer, name: str, order: str
) -> None:
    text = said(template_of(name, tokenizer), messages(order))
    places = [text.index(word) for word in words(order)]
    assert places == sorted(places)
    assert all(text.count(word) == 1 for word in words(order))
    if name in STRICT:
        turns = text.split("<start_of_turn>")[1:]
        roles = [turn.split("\n")[0] for turn in turns]
        assert roles == ["user", "model"] * (len(roles) // 2)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", ["plain", "gemma", "file gemma 3"])
def test_a_model_replies(
    tiny: gemmakv.Gemma, tokenizer: Tokenizer, name: str, order: str
) -> None:
    template = template_of(name, tokenizer)
    given = messages(order)
    assert tiny.chat(given, template=template, max_tokens=1).token_ids
    assert tiny.count_tokens(given, template=template) == len(
        tiny.apply_chat_template(given, template=template)
    )


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", ["plain", "gemma", "file gemma 2"])
def test_a_session_begins_with_them(
    tiny: gemmakv.Gemma, tokenizer: Tokenizer, name: str, order: str
) -> None:
    given = [*messages(order), say("assistant", "yes")]
    session = Session(
        tiny, template=template_of(name, tokenizer), messages=given
    )
    roles = [one.role for one in session.messages if one.role != "system"]
    assert roles == ["user", "assistant"] * session.turns
    text = "|".join(one.text for one in session.messages)
    assert all(text.count(word) == 1 for word in words(order))
    session.send("go on", max_tokens=1)
    assert session.messages[-2].text == "go on"
    session.messages = given
    assert session.turns == len(roles) // 2


def test_a_usual_conversation_stays_as_it_is(tokenizer: Tokenizer) -> None:
    for name in NAMES:
        template = template_of(name, tokenizer)
        for order in ("u", "uau", "uaua"):
            given = messages_of(messages(order))
            opens = order[-1] == "u"
            expected = template.render(given, add_generation_prompt=opens)
            assert said(template, given, opens) == text_of(expected)


def test_nothing_is_tried_for_a_usual_conversation() -> None:
    def never() -> TurnRules:
        raise AssertionError

    given = messages_of(messages("uaua"))
    assert arrange(given, never, opens=True).messages == given


def test_what_a_template_takes_stands(tokenizer: Tokenizer) -> None:
    """Gemma 4 has turns of the system anywhere, plain text any order."""
    for order in ("ssu", "uasu", "usuas"):
        for name in ("plain", "gemma4", "file gemma 4"):
            template = template_of(name, tokenizer)
            given = messages_of(messages(order))
            assert said(template, given) == text_of(template.render(given))
    plain = template_of("plain", tokenizer)
    given = messages_of(messages("uudaas"))
    assert said(plain, given) == text_of(plain.render(given))


def test_rules_of_templates(tokenizer: Tokenizer) -> None:
    """Of a file's own template, those that it shows when it is tried."""

    def rules(name: str) -> TurnRules:
        return turn_rules(template_of(name, tokenizer))

    assert rules("gemma") == ALTERNATING
    strict = dataclasses.replace(ALTERNATING, developer=False)
    assert rules("file gemma 3") == strict
    assert rules("file gemma 2") == dataclasses.replace(strict, system=False)
    four = rules("file gemma 4")
    assert four.systems and four.system_alone and four.users
    assert rules("gemma4").systems and not rules("gemma4").replies


class Chatty:
    """A template of somebody's own, in which nobody speaks twice."""

    name, stop, stop_tokens = "chatty", (), ()

    def render(
        self, messages: list[Message], *, tools: Any = None, **keywords: Any
    ) -> list[Segment]:
        for one, other in zip(messages, messages[1:]):
            if one.role == other.role or other.role == "system":
                raise ValueError("messages: twice")
        return [Segment(f"[{m.role}]{m.text}") for m in messages]


def test_a_template_of_ones_own() -> None:
    assert said(Chatty(), messages("suuas")) == (
        "[system]wordax[user]wordbx\n\nwordcx[assistant]worddx[user]wordex"
    )
    assert said(Chatty(), messages("au")) == "[assistant]wordax[user]wordbx"


def test_a_template_that_fails_gets_them_as_they_are(
    tokenizer: Tokenizer,
) -> None:
    assert turn_rules(Refusing()) == ALTERNATING  # as its class says

    class Failing(Chatty):
        def render(self, *args: Any, **keywords: Any) -> list[Segment]:
            raise KeyError

    assert turn_rules(Failing()) == ANY_ORDER


def test_errors_name_what_was_given() -> None:
    given = messages("ddusaa")
    for place, index in ((0, 0), (1, 2), (2, 4)):
        with pytest.raises(ValueError, match=rf"^messages\[{index}\].content"):
            said(Refusing(place), given)
    with pytest.raises(ValueError, match=r"messages\[1\].role: .*'judge'"):
        messages_of([say("user", "a"), say("judge", "b")])


# What becomes of what.


def test_texts_are_joined_by_a_blank_line() -> None:
    given = [say("user", "a "), say("user", " b\n"), say("user", "c\n")]
    assert shown(given) == [("user", "a \n\nb\n\nc")]


@pytest.mark.parametrize("empty", ["", " \n", [], [{"type": "text",
                                                   "text": ""}]])  # fmt: skip
def test_empty_texts_leave_no_gap(empty: Any) -> None:
    for given in (
        [say("user", empty), say("user", "b")],
        [say("user", "b"), say("user", empty)],
        [say("user", empty), say("user", "b"), say("user", empty)],
    ):
        [one] = arranged(given)
        assert "".join(one.parts).strip() == "b"


def test_parts_stay_parts() -> None:
    """The blank line stands within one, since templates trim them."""
    one, two = (
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        for text in "ab"
    )
    plain = {"type": "text", "text": "c"}
    assert shown([say("user", [one, plain]), say("user", [two])]) == [
        ("user", [one, {**two, "text": "c\n\nb"}])
    ]
    assert shown([say("user", "c"), say("user", [two, plain])]) == [
        ("user", [{**two, "text": "c\n\nb"}, plain])
    ]
    # Parts that say different things of their texts do not become one.
    languages = [{**plain, "language": name} for name in ("cs", "de")]
    assert shown([say("user", languages[:1]), say("user", languages[1:])]) == [
        ("user", languages)
    ]


@pytest.mark.slow
def test_many_messages_take_no_longer_each() -> None:
    """Of one role: texts are not copied again for each that joins them."""
    for content in ("long " * 400, [{"type": "text", "text": "long " * 400}]):
        given = messages_of(
            [
                say("user", content, name="ada"),
                *[say("user", content, name="bob")] * 30_000,
            ]
        )
        begin = time.process_time()
        [one] = arranged(given)
        assert len("".join(one.parts)) > 30_000 * 2_000
        # The limit of hanging: far less than a second, or many minutes.
        assert time.process_time() - begin < 60


def test_calls_and_thoughts_stay() -> None:
    first = called("1", text="a") | {"reasoning": "hm"}
    second = called("2") | {"reasoning": "so", "mood": "good"}
    given = [say("user", "q"), first, second, result("2", "y"),
             result("1", "x")]  # fmt: skip
    _, one, *results = arranged(given)
    assert [call["id"] for call in one.tool_calls] == ["1", "2"]
    assert one.content == "a" and one.reasoning == "hm\n\nso"
    assert one.extra["mood"] == "good"
    assert [m.text for m in results] == ["y", "x"]


def test_names_are_kept() -> None:
    def names(*given: dict[str, Any]) -> tuple[Any, Any]:
        [one] = arranged(given)
        return one.name, one.content

    ada, bob = (
        {**say("user", f"I am {name}"), "name": name} for name in ("ada", "bob")
    )
    assert names(ada, ada) == ("ada", "I am ada\n\nI am ada")
    assert names(ada, bob) == (None, "ada: I am ada\n\nbob: I am bob")
    assert names(say("user", "Hi"), bob) == (None, "Hi\n\nbob: I am bob")
    assert names(ada, {**bob, "content": ""}) == (None, "ada: I am ada")
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    _, content = names(ada, {**bob, "content": parts})
    assert [p["text"] for p in content] == ["ada: I am ada\n\nbob: x", "y"]
    [_, late] = arranged([say("system", "s"), ada])
    assert late.name == "ada" and late.content == "I am ada"


def test_results_follow_their_calls() -> None:
    """Whatever was said meanwhile."""
    given = [
        say("user", "q"), called("1", "2"), say("system", "s"),
        result("2", "y"), say("user", "u"), result("1", "x"),
    ]  # fmt: skip
    found = arranged(given)
    assert [m.role for m in found] == [
        "user", "assistant", "tool", "tool", "user"
    ]  # fmt: skip
    assert [m.text for m in found[2:]] == ["y", "x", "s\n\nu"]


def test_results_of_no_call_are_text(tokenizer: Tokenizer) -> None:
    given = [
        say("user", "q"), called("1"), result("1", "x"),
        say("assistant", "a"), result("1", "again"),
    ]  # fmt: skip
    last = arranged(given)[-1]
    assert last.role == "user"
    assert '"name": "f_1"' in last.text and "again" in last.text
    for name in NAMES:
        text = said(template_of(name, tokenizer), given)
        assert text.count("again") == 1, name


def test_a_system_text_with_tools(tokenizer: Tokenizer) -> None:
    """Tools are told after all of it."""
    tool = {"type": "function", "function": {"name": "rain"}}
    text = said(template_of("gemma", tokenizer), messages("sduu"), tools=[tool])
    places = [text.index(one) for one in ("wordax", "wordbx", "rain", "wordcx",
                                          "worddx")]  # fmt: skip
    assert places == sorted(places) and text.count("<start_of_turn>") == 2


def test_system_parts_reach_templates_that_take_one(
    tokenizer: Tokenizer,
) -> None:
    """Gemma 3's reads the first part of a system text alone."""
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    template = template_of("file gemma 3", tokenizer)
    text = said(template, [say("system", parts), say("user", "hi")])
    assert "user\none\ntwo\n\nhi" in text


def test_a_system_text_waits_where_no_reply_follows(
    tokenizer: Tokenizer,
) -> None:
    """What all conversations with it begin with stays that."""
    template = template_of("gemma", tokenizer)
    alone = said(template, messages("s"), opens=False)
    assert said(template, messages("su")).startswith(alone)


def test_a_session_has_results_after_their_calls(tiny: gemmakv.Gemma) -> None:
    given = [say("user", "q"), called("1"), say("user", "r"), result("1", "x"),
             say("assistant", "a"), result("2", "y"),
             say("assistant", "b")]  # fmt: skip
    session = Session(tiny, messages=given)
    roles = [message.role for message in session.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant"] + [
        "user", "assistant",
    ]  # fmt: skip
    assert session.turns == 3
    with pytest.raises(ValueError, match="^messages: expected a reply"):
        Session(tiny, messages=given[:-1])


# Conversations that go on begin as they did.


def count_beginnings(name: str, given: list[dict[str, Any]], template: Any,
                     whole: str) -> int:
    """Compares a conversation with each of its beginnings before a reply, and
    gives how many there are.
    """
    opens = "4" not in name  # these say it otherwise once there is a reply
    replies = [one["role"] == "assistant" for one in given]
    places = [
        place for place in range(1, len(given))
        if replies[place] and not replies[place - 1]
    ]  # fmt: skip
    for place in places:
        assert whole.startswith(said(template, given[:place], opens)), given
    return len(places)


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_begins_as_before(
    tokenizer: Tokenizer, name: str
) -> None:
    template = template_of(name, tokenizer)
    choose = random.Random(name)
    compared = 0
    for _ in range(30):
        order = choose.choices([*ROLES], [2, 1, 4, 4, 1], k=9)
        given = messages("".join(order))
        whole = said(template, given, opens=False)
        compared += count_beginnings(name, given, template, whole)
    assert compared > 25


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_results_in_any_order(
    tokenizer: Tokenizer, name: str
) -> None:
    """Each is said once, and the conversation begins as before."""
    template = template_of(name, tokenizer)
    choose = random.Random(name)
    compared = 0
    for _ in range(30):
        order = "".join(choose.choices("suact", [1, 3, 2, 3, 5], k=9))
        ids = [str(place) for place, one in enumerate(order) if one == "c"]
        given: list[dict[str, Any]] = []
        for place, (letter, one) in enumerate(zip(order, words("u" * 9))):
            if letter == "c":
                given.append(called(str(place), text=one))
            elif letter == "t":
                made = [id for id in ids if int(id) < place]
                if name != "file functions":  # that cannot do without a name
                    made.append("other")
                given.append(result(choose.choice(made or ["other"]), one))
            else:
                given.append(say(ROLES[letter], one))
        whole = said(template, given, opens=False)
        for one in given:
            assert whole.count(one["content"]) == 1, (order, whole)
        compared += count_beginnings(name, given, template, whole)
    assert compared > 25


@pytest.mark.parametrize("name", ["gemma", "file gemma 2", "file gemma 3"])
def test_a_cache_keeps_what_was_merged(
    talker: gemmakv.Gemma, tokenizer: Tokenizer, name: str
) -> None:
    template = template_of(name, tokenizer)
    cache = gemmakv.create_kv_cache(talker.config)
    given, before = messages("dsuu"), 1
    for more in ("us", "suu", "uu", "u"):
        ids = talker.apply_chat_template(given, template=template)
        held = common_exact(cache.tokens, ids)
        assert held >= before - 1
        found = talker.chat(
            given, cache=cache, template=template, max_tokens=4, seed=1
        )
        assert common_exact(cache.tokens, ids) == len(ids)
        before = len(ids)
        given += [say("assistant", found.text), *messages(more)]
