"""gemma.chat, apply_chat_template and count_tokens."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import CacheFullError, Gemma, Message, Session
from support import tiny_gguf

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <end_of_turn>"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And you?"},
]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_says_what_a_session_says(tiny: Gemma, template: str) -> None:
    session = Session(
        tiny, template=template,
        messages=[Message(m["role"], m["content"]) for m in TALK[:3]],
    )
    expected = session.send("And you?", **OPTIONS)
    found = tiny.chat(TALK, template=template, **OPTIONS)
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text == found.text.strip()
    ids = tiny.apply_chat_template(TALK, template=template)
    assert ids.dtype == np.int32 and ids[0] == 2
    assert session.cache.tokens[: len(ids)].tolist() == ids.tolist()
    assert found.usage.prompt_tokens == len(ids)
    assert tiny.count_tokens(TALK, template=template) == len(ids)
    assert tiny.count_tokens("Hi there") == len(
        tiny.tokenizer.encode("Hi there") if tiny.tokenizer else []
    )


def test_a_cache_changes_the_cost_alone(tiny: Gemma) -> None:
    cache = gemmakv.create_kv_cache(tiny.config)
    messages: list[Any] = TALK[:2]
    for turn in range(4):
        fresh = tiny.chat(messages, **OPTIONS)
        held = cache.tokens
        reply = tiny.chat(messages, cache=cache, **OPTIONS)
        assert reply.token_ids == fresh.token_ids
        wanted = tiny.apply_chat_template(messages)
        same = min(len(held), len(wanted))
        differs = np.flatnonzero(held[:same] != wanted[:same])
        common = int(differs[0]) if len(differs) else same
        assert reply.usage.cached_tokens == min(common, len(wanted) - 1)
        if turn:
            assert reply.usage.cached_tokens > 10
        messages = [*messages, Message("model", reply.text), *user("More")]
    # Something else, and the same once more: the last token is computed.
    for _ in range(2):
        reply = tiny.chat(user("Hi"), cache=cache, **OPTIONS)
        assert reply.token_ids == tiny.chat(user("Hi"), **OPTIONS).token_ids
    wanted = tiny.apply_chat_template(user("Hi"))
    assert reply.usage.cached_tokens == len(wanted) - 1


def test_a_call_that_raises_leaves_the_cache(tiny: Gemma) -> None:
    cache = gemmakv.create_kv_cache(tiny.config, capacity_tokens=60)
    tiny.chat(user("Hi"), cache=cache, max_tokens=3)
    before = cache.to_bytes()

    def fail(done: int, total: int) -> None:
        raise RuntimeError("progress")

    for keywords, error, found in [
        ({"messages": user("x" * 100)}, CacheFullError, "60"),
        ({"messages": user("Yo"), "progress": fail}, RuntimeError, "progress"),
        ({"messages": user("Yo"), "top_k": "a"}, ValueError, "top_k"),
        ({"messages": user("Yo"), "tools": [{}]}, ValueError, "tools.*: exp"),
        ({"messages": user("Yo"), "stop": 3}, ValueError, "stop: expected"),
        ({"messages": []}, ValueError, "messages: expected at least one"),
        ({"messages": user("\ud800")}, ValueError, "surrogate"),
        ({"messages": user("Yo"), "cache": "c"}, ValueError, "a KVCache"),
        ({"messages": user("Yo"), "template": "x"}, ValueError, "template: ex"),
        ({"messages": user("Yo"), "n": 2}, TypeError, "n"),
        ({"messages": user("Yo"), "parse_special": True}, ValueError, "parse"),
    ]:
        with pytest.raises(error, match=found):
            tiny.chat(**{"cache": cache, **keywords})
        assert cache.to_bytes() == before


def test_achat_is_chat(tiny: Gemma) -> None:
    cache = gemmakv.create_kv_cache(tiny.config)
    other = cache.fork()
    # How many guesses were made depends on what was said before.
    options = OPTIONS | {"speculate": "off"}
    for text in ("Hi", "Hi there"):
        expected = tiny.chat(user(text), cache=other, **options)
        found = asyncio.run(tiny.achat(user(text), cache=cache, **options))
        assert found.token_ids == expected.token_ids
        assert (found.text, found.usage) == (expected.text, expected.usage)
    before = cache.to_bytes()
    assert before == other.to_bytes()

    async def cancelled() -> None:
        reply = tiny.achat(
            user("Hi, you"), cache=cache, max_tokens=60, ignore_eos=True,
            # No reply is done before the task is cancelled.
            logits_processor=lambda ids, logits: time.sleep(0.001),
        )
        task = asyncio.create_task(reply)
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert cache.to_bytes() == before


def test_stop_adds_to_the_templates(talker: Gemma) -> None:
    options: Any = {"max_tokens": 40, "temperature": 1.0, "seed": 1}
    text = talker.chat(user("Hi"), template="plain", **options).text
    [stop, *_] = re.findall("[A-Za-z]{2}", text)
    short = talker.chat(user("Hi"), template="plain", stop=stop, **options)
    assert short.finish_reason == "stop"
    assert short.text == text[: text.index(stop)].strip()


def test_stops_are_looked_for_in_what_is_said(tiny: Gemma) -> None:
    """White space before a reply is no part of it, nor a stop string there."""
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    said = 'start: " \\n Hi there you"'
    for stop, text in (
        (" ", "Hi"), ("\n", "Hi there you"), (" Hi", "Hi there you"),
        ("Hi", ""), (" you", "Hi there"), ([" ", "there"], "Hi"),
        ([" \n", "e y"], "Hi ther"),
    ):  # fmt: skip
        options: Any = {"grammar": said, "stop": stop, "max_tokens": 60}
        found = tiny.chat(user("x"), template="gemma", **options)
        assert (found.text, found.finish_reason) == (text, "stop")
        session = Session(tiny, template="gemma")
        stream = session.stream("x", **options)
        assert "".join(piece.text for piece in stream) == text
        assert session.messages[-1].content == text
        assert session.undo()
        assert session.send("x", **options).text == text
        # What `generate` says begins with the white space.
        cache = gemmakv.create_kv_cache(tiny.config)
        whole = tiny.generate(cache, "x", **options).text
        first = min(
            " \n Hi there you".find(one)
            for one in ([stop] if isinstance(stop, str) else stop)
        )
        assert whole == " \n Hi there you"[:first]


def test_the_templates_stops_are_looked_for_everywhere(tiny: Gemma) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    found = tiny.chat(
        user("x"), template="plain", grammar='start: "\\nUser: Hi"', stop="zz",
        max_tokens=60,
    )  # fmt: skip
    assert (found.text, found.finish_reason) == ("", "stop")


def test_threads_with_one_cache_are_each_right(tiny: Gemma) -> None:
    cache = gemmakv.create_kv_cache(tiny.config)
    texts = ["Hi", "Hi there", "Ho", "the end"]
    expected = [tiny.chat(user(t), **OPTIONS).token_ids for t in texts]
    found: list[Any] = [None] * len(texts)

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = tiny.chat(user(texts[i]), cache=cache, **OPTIONS)
            assert found[i].token_ids == expected[i]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [g.token_ids for g in found] == expected
    assert any(
        cache.tokens.tolist()[: len(ids)] == ids.tolist()
        for ids in (tiny.apply_chat_template(user(text)) for text in texts)
    )


def test_keywords_of_the_files_template(tmp_path: Any) -> None:
    meta = tiny_gguf.metadata()
    source = "{{ messages[-1].content ~ (mood | default('')) }}"
    meta["tokenizer.chat_template"] = (tiny_gguf.STR, source)
    gemma = Gemma.load(tiny_gguf.write(tmp_path / "m.gguf", meta))
    assert gemma.tokenizer is not None
    ids = gemma.apply_chat_template(user("a"), mood="<eos>")
    assert gemma.tokenizer.decode(ids.tolist()) == "a<eos>"
    assert ids.tolist().count(1) == 0 and ids[0] == 2
    one = gemma.chat(user("a"), template_kwargs={"mood": "!"}, **OPTIONS)
    assert one.usage.prompt_tokens == 3
    assert one.token_ids == gemma.chat(user("a!"), **OPTIONS).token_ids
    with pytest.raises(ValueError, match="keywords: .*JSON"):
        gemma.apply_chat_template(user("a"), mood=object())


def test_a_model_without_a_tokenizer(tiny: Gemma) -> None:
    gemma = Gemma.from_tensors(tiny_gguf.CONFIG, tiny_gguf.tensors())
    for call in (gemma.chat, gemma.apply_chat_template, gemma.count_tokens):
        with pytest.raises(ValueError, match="has no tokenizer"):
            call(user("a"))


def test_keywords_and_options_that_are_no_mapping(tiny: Gemma) -> None:
    bad: Any = 5
    with pytest.raises(ValueError, match="template_kwargs: expected"):
        tiny.chat(user("Hi"), template_kwargs=bad)
    with pytest.raises(ValueError, match="options: expected"):
        Session(tiny, options=bad)


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_what_no_template_reads_is_refused(
    tiny: Gemma, template: str
) -> None:
    for call in (tiny.apply_chat_template, tiny.count_tokens):
        with pytest.raises(ValueError, match="thinking: "):
            call(TALK, template=template, thinking=True)
        call(TALK, template=template, thinking=None)
    with pytest.raises(ValueError, match="thinking"):
        tiny.chat(TALK, template=template, template_kwargs={"thinking": 1})
    for keywords in ({"tools": [{}]}, {"template": template}, {"thinking": 1}):
        with pytest.raises(ValueError, match="text"):
            tiny.count_tokens("text", **keywords)
