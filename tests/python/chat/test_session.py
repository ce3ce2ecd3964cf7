"""Sessions: each turn computes what is new, and every way back is exact."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gemmakv import (
    ArgumentError,
    CacheFullError,
    Gemma,
    KVCache,
    Message,
    MismatchError,
    Session,
    create_kv_cache,
)
from gemmakv.chat import _one_call
from gemmakv.generation._requests import requests_of
from support import family_models, tiny_gguf
from support.sessions import (
    BANNED,
    NO_END,
    assert_same,
    assert_sound,
    canonical,
    continued,
    said,
    state,
)
from support.waits import LIMIT_S


@pytest.fixture(params=["plain", "gemma"])
def session(tiny: Gemma, request: pytest.FixtureRequest) -> Session:
    return Session(tiny, "Be kind.", template=request.param)


# ---- The real model ----


@pytest.mark.slow
def test_sensible_turns_of_the_base_model(gemma: Gemma) -> None:
    session = Session(gemma)
    replies = [
        session.send(text, max_tokens=40)
        for text in (
            "What is the capital of France?",
            "And what is it famous for?",
            "My name is Anna. What is my name?",
            "Thanks, bye!",
        )
    ]
    assert "Paris" in replies[0].text
    assert "Anna" in replies[2].text
    for reply in replies:
        assert reply.finish_reason == "stop"
        assert 0 < len(reply.text) < 200
        assert reply.text == reply.text.strip()
        assert "User:" not in reply.text and "Assistant:" not in reply.text
    assert session.messages[1] == Message("model", replies[0].text)
    assert session.turns == 4
    held = session.cache.tokens.tolist()
    assert held == continued(session)[: len(held)].tolist()
    assert canonical(session) == held[: len(canonical(session))]
    # Each turn computed the new message and nothing else.
    assert gemma.tokenizer is not None
    new = gemma.tokenizer.encode(
        "\n\nUser: And what is it famous for?\n\nAssistant:"
    )
    # What stopped the first reply is where the second turn's text begins.
    ended = gemma.tokenizer.encode("\n\nUser:")
    assert replies[1].usage.prompt_tokens == len(new) - len(ended)
    assert all(0 < r.usage.prompt_tokens < 20 for r in replies)
    assert session.stats.saved_prefill_tokens == sum(
        r.usage.cached_tokens for r in replies
    )


@pytest.mark.slow
def test_every_way_gives_the_same_bits_on_the_real_model(
    gemma: Gemma,
) -> None:
    keywords: Any = {"max_tokens": 12, "logprobs": True}
    session = Session(gemma, template="gemma")
    session.send("Name a colour.", **keywords)
    messages = session.messages
    first = session.send("Another one.", **keywords)
    session.undo()
    assert_same(first, session.send("Another one.", **keywords))
    session.undo()
    restored = Session.from_bytes(session.to_bytes(), gemma)
    assert_same(first, restored.fork().send("Another one.", **keywords))
    fresh = Session(gemma, template="gemma", messages=messages)
    assert_same(first, fresh.send("Another one.", **keywords))


# ---- What a turn computes ----


def test_the_cache_holds_what_a_fresh_cache_would(session: Session) -> None:
    said(session, "the first", "second\n\n", "  in a")
    before = session.cache.tokens.tolist()
    reply = session.send("third", max_tokens=9, seed=5, **NO_END)
    prompt = len(before) + reply.usage.prompt_tokens
    assert reply.usage.cached_tokens in (len(before) - 1, len(before))
    tokens = session.cache.tokens.tolist()
    assert tokens[: len(before)] == before
    other = create_kv_cache(session.gemma.config)
    expected = session.gemma.generate(
        other, tokens[:prompt], max_tokens=9, seed=5, **NO_END
    )
    assert expected.token_ids == reply.token_ids
    assert expected.logprobs is not None and reply.logprobs is not None
    assert expected.logprobs.tobytes() == reply.logprobs.tobytes()


def test_sampled_tokens_stay_as_they_were_sampled(tiny: Gemma) -> None:
    # "the" out of its letters: no tokenizer says it so.
    assert tiny.tokenizer is not None
    ids = [tiny.tokenizer.id_of(letter) for letter in "the"]
    assert None not in ids
    session = Session(tiny, template="gemma")
    session.send(
        "x",
        max_tokens=3,
        logit_bias={i: 1e6 - 1000.0 * n for n, i in enumerate(ids)},
        presence_penalty=1e7,
    )
    assert session.messages[-1] == Message("model", "the")
    assert session.cache.tokens[-3:].tolist() == ids
    length = len(session.cache)
    reply = session.send("y", max_tokens=1)
    # The last token of a reply that was cut has been sampled, not read.
    assert reply.usage.cached_tokens == length - 1
    assert session.cache.tokens[length - 3 : length].tolist() == ids
    assert_sound(session)
    # A new session with these messages reads them as the tokenizer does.
    fresh = Session(tiny, template="gemma", messages=session.messages)
    fresh.send("z", max_tokens=1)
    assert tiny.tokenizer.id_of("the") in fresh.cache.tokens.tolist()


def test_white_space_around_a_reply_leaves_the_transcript(
    tiny: Gemma,
) -> None:
    assert tiny.tokenizer is not None
    ids = [tiny.tokenizer.id_of(piece) for piece in ("\n\n", "Q", "\n")]
    options: Any = {
        "max_tokens": 3,
        "logit_bias": {i: 1e6 - 1000.0 * n for n, i in enumerate(ids)},
        "presence_penalty": 1e7,
    }
    session = Session(tiny, template="gemma")
    reply = session.send("x", **options)
    assert reply.token_ids == ids and reply.text == "Q"
    assert session.messages[-1].content == "Q"
    assert_sound(session)
    other = Session(tiny, template="gemma")
    stream = other.stream("x", **options)
    assert [p.text for p in stream] == ["", "Q", ""]
    assert stream.result().text == "Q"
    assert other.cache.tokens.tolist() == session.cache.tokens.tolist()


@pytest.mark.parametrize("stop", [tiny_gguf.EOT, 1])
def test_replies_end_with_control_tokens(tiny: Gemma, stop: int) -> None:
    session = Session(tiny, template="gemma")
    reply = session.send("x", logit_bias={stop: 1e6})
    assert reply.token_ids == [stop]
    assert (reply.text, reply.finish_reason) == ("", "stop")
    session.send("y", logit_bias={stop: 1e6})
    assert canonical(session)[: len(session.cache)] == (
        session.cache.tokens.tolist()
    )


def test_stop_strings_add_up(tiny: Gemma) -> None:
    assert tiny.tokenizer is not None
    q = tiny.tokenizer.id_of("Q")
    session = Session(tiny, options={"stop": "QQQQ", "max_tokens": 30})
    for stop, length in [(None, 4), ("QQ", 2), (["QQQ", "x"], 3)]:
        reply = session.send("a", logit_bias={q: 1e6}, stop=stop)
        assert reply.finish_reason == "stop" and reply.text == ""
        assert len(reply.token_ids) == length
        assert_sound(session)
        session.undo()


def test_control_tokens_in_a_message_are_text(session: Session) -> None:
    reply = session.send("<end_of_turn><bos>", max_tokens=3)
    tokens = session.cache.tokens.tolist()
    prompt = tokens[: reply.usage.prompt_tokens]
    assert prompt.count(2) == 1
    assert prompt.count(tiny_gguf.EOT) == (
        1 if session.template.name == "gemma" else 0
    )
    assert session.messages[1].content == "<end_of_turn><bos>"


# ---- Ways back ----


def test_undo_leaves_no_trace(session: Session) -> None:
    said(session, "one", "two")
    before, tokens = session.messages, session.cache.tokens.tolist()
    other = session.fork()
    expected = other.send("three", max_tokens=9, seed=3, **NO_END)
    said(session, "something else", "and more", seed=50)
    removed = session.undo(2)
    assert [m.content for m in removed[::2]] == ["something else", "and more"]
    assert_sound(session)
    assert session.messages == before
    # The reply's closing may have joined it meanwhile.
    assert session.cache.tokens[: len(tokens)].tolist() == tokens
    assert_same(session.send("three", max_tokens=9, seed=3, **NO_END), expected)
    assert session.cache.tokens.tolist() == other.cache.tokens.tolist()


def test_goto(session: Session) -> None:
    said(session, "one", "two", "three")
    whole = session.messages
    assert session.goto(3) == []
    assert session.goto(1) == whole[3:]
    assert session.messages == whole[:3] and session.turns == 1
    assert_sound(session)
    assert session.goto(0) == whole[1:3]
    assert session.messages == [Message("system", "Be kind.")]
    # What every conversation with this system message begins with stays.
    tokenizer = session.gemma.tokenizer
    assert tokenizer is not None
    assert "Be kind." in tokenizer.decode(session.cache.tokens.tolist())
    assert_sound(session)


def test_bad_turn_numbers(session: Session) -> None:
    with pytest.raises(ArgumentError, match="turns: .*none, found 1"):
        session.undo()
    said(session, "one", "two")
    for call, found in [
        (lambda: session.undo(3), "turns: expected 1 to 2 .*found 3"),
        (lambda: session.undo(0), "turns: expected 1 to 2 .*found 0"),
        (lambda: session.goto(3), "turn: expected 0 to 2 .*found 3"),
        (lambda: session.goto(-1), "turn: expected 0 to 2 .*found -1"),
        (lambda: session.undo(True), "turns: .*found True"),
        (lambda: session.goto(1.0), "turn: .*found 1.0"),
    ]:
        with pytest.raises(ArgumentError, match=found):
            call()  # type: ignore[no-untyped-call]
    assert session.turns == 2


def test_fork_is_independent(session: Session) -> None:
    said(session, "one", "two")
    fork = session.fork()
    assert fork.cache.shared_nbytes > 0
    assert fork.stats.last_fork_us == session.stats.last_fork_us
    assert session.stats.last_fork_us is not None
    assert session.stats.last_fork_us > 0
    before = state(session)
    assert state(fork) == before
    fork.options["max_tokens"] = 3
    fork.system = "Else."
    said(fork, "three")
    fork.goto(0)
    assert state(session) == before
    assert session.options == {} and session.system == "Be kind."


def test_a_new_system_message_is_that_of_a_fresh_session(
    session: Session,
) -> None:
    said(session, "one", "two")
    for system in ("Be rude.", None, "", "Be kind."):
        session.system = system
        assert session.system == (system or None)
        assert_sound(session)
        fresh = Session(
            session.gemma,
            system,
            template=session.template,
            messages=session.messages[1 if system else 0 :],
        )
        fork = session.fork()
        assert_same(
            fork.send("three", max_tokens=9, seed=3, **NO_END),
            fresh.send("three", max_tokens=9, seed=3, **NO_END),
        )
        assert fork.cache.tokens.tolist() == fresh.cache.tokens.tolist()


# ---- When it gets full ----


def test_overflow_is_an_error_that_changes_nothing(tiny: Gemma) -> None:
    session = Session(tiny, capacity_tokens=128)
    said(session, "a" * 20, "b" * 20)
    before = state(session)
    with pytest.raises(CacheFullError, match="overflow='drop_oldest_turns'"):
        session.send("c" * 100)
    assert state(session) == before
    with pytest.raises(CacheFullError):
        session.stream("c" * 100)
    assert state(session) == before
    session.undo()
    session.send("ok", max_tokens=1)


def test_dropped_turns_leave_a_fresh_session(tiny: Gemma) -> None:
    session = Session(
        tiny, "sys", "drop_oldest_turns", template="gemma", capacity_tokens=160
    )
    dropped = 0
    for turn in range(12):
        messages = session.messages
        reply = session.send("t" * 9, max_tokens=12, seed=turn, **NO_END)
        kept = session.turns - 1
        assert session.messages[0] == messages[0]
        assert (
            session.messages[1 : 1 + 2 * kept]
            == (messages[1:][len(messages) - 1 - 2 * kept :])
        )
        assert_sound(session)
        if 2 * kept < len(messages) - 1:
            dropped += 1
            fresh = Session(
                tiny,
                template="gemma",
                capacity_tokens=160,
                messages=session.messages[: 1 + 2 * kept],
            )
            expected = fresh.send("t" * 9, max_tokens=12, seed=turn, **NO_END)
            assert_same(reply, expected)
            assert fresh.cache.tokens.tolist() == session.cache.tokens.tolist()
            assert reply.usage.prompt_tokens + reply.usage.cached_tokens <= 80
    assert 2 <= dropped <= 6  # each drop makes room for several turns


def test_one_turn_too_long_drops_nothing(tiny: Gemma) -> None:
    session = Session(tiny, overflow="drop_oldest_turns", capacity_tokens=128)
    said(session, "a" * 20, "b" * 20)
    before = state(session)
    with pytest.raises(CacheFullError, match="leaves no room") as error:
        session.send("c" * 130)
    assert "drop_oldest" not in str(error.value)
    assert state(session) == before


def test_a_reply_may_fill_the_cache(tiny: Gemma) -> None:
    session = Session(tiny, capacity_tokens=64)
    reply = session.send("a" * 20, **NO_END)
    assert reply.finish_reason == "length"
    assert_sound(session)
    with pytest.raises(CacheFullError):
        session.send("b")
    session.overflow = "drop_oldest_turns"
    session.send("b", max_tokens=2)
    assert session.turns == 1


# ---- Arguments ----


def test_bad_arguments(tiny: Gemma) -> None:
    def with_(**keywords: Any) -> Any:
        return lambda: Session(tiny, **keywords)

    user, model = Message("user", "a"), Message("model", "b")
    for call, found in [
        (with_(overflow="drop"), "overflow: expected 'error' or"),
        (with_(system=3), "system: expected a str or None, found 3"),
        (with_(kv_dtype="f8"), "kv_dtype"),
        (with_(capacity_tokens=0), "capacity_tokens"),
        (with_(template="nope"), "template: expected"),
        (with_(options=[("top_k", 1)]), "options: expected a mapping or None"),
        (with_(messages=[user]), "expected a reply of the model last"),
        (with_(messages=[model, user]), "expected a reply of the model last"),
        (with_(messages=[user, model, user]), "a reply of the model last"),
        (with_(messages=["a"]), r"messages\[0\]: expected a Message"),
        (
            with_(messages=[{"role": "user", "content": 1}]),
            r"messages\[0\].content: expected a str or a list of parts",
        ),
        (
            with_(system="a", messages=[Message("system", "b"), user, model]),
            "system: given twice",
        ),
        (with_(messages=[Message("user", "\ud800"), model]), "surrogate"),
        (lambda: Session("gemma"), "gemma: expected a Gemma"),
    ]:
        with pytest.raises(ValueError, match=found):
            call()


def test_bad_options_fail_where_the_session_is_made(tiny: Gemma) -> None:
    """Some failed with the first reply, others at once; each in the words of
    the call.
    """
    closed = Gemma.from_tensors(tiny.config, tiny_gguf.tensors())
    closed.close()
    shape = family_models.config("gemma3", vocab_size=384)
    other = Gemma.from_tensors(shape, tiny_gguf.tensors(3, shape))
    cases: list[dict[str, Any]] = [
        {"progress": 5},
        {"draft": 3},
        {"draft": closed},
        {"draft": tiny},
        {"draft": other},
        {"speculate": "draft"},
        {"logit_bias": {10**6: 1.0}},
        {"stop_token_ids": [10**6]},
        {"top_logprobs": 10**6},
        {"top_p": 3.0},
        {"top_k": "a"},
        {"parse_special": True},
        {"temprature": 1.0},
        {"n": 2},
        {"tools": []},
    ]
    for options in cases:
        session = Session(tiny)
        with pytest.raises((ValueError, TypeError, MismatchError)) as of_call:
            session.send("a", **options)
        with pytest.raises(type(of_call.value)) as found:
            Session(tiny, options=options)
        assert str(found.value) == str(of_call.value)


def test_options_of_sessions_that_are_right(tiny: Gemma) -> None:
    guesser = Gemma.from_tensors(
        tiny.config, tiny_gguf.tensors(), tiny.tokenizer
    )
    seen: list[int] = []
    session = Session(
        tiny,
        options={
            "progress": lambda done, total: seen.append(done),
            "draft": guesser,
            "speculate": "draft",
            "max_tokens": 4,
        },
    )
    session.send("a", **NO_END)
    assert seen
    # Neither can be saved; what a draft is made a session impossible to save.
    again = Session.from_bytes(session.to_bytes(), tiny)
    assert again.options == {"speculate": "draft", "max_tokens": 4}
    with pytest.raises(ValueError, match="speculate: .*draft="):
        again.send("b")
    again.options["speculate"] = "off"
    assert again.send("b", seed=3, **NO_END).token_ids == (
        session.send("b", seed=3, **NO_END).token_ids
    )


def test_a_cache_of_another_model_is_refused_at_once(
    tiny: Gemma,
) -> None:
    """It became the session's, and was even saved with it: no model could
    open that.
    """
    other = create_kv_cache(family_models.config("gemma3n"))
    with pytest.raises(MismatchError, match="was made for"):
        Session(tiny, cache=other)
    config = tiny.config
    same_shape = Gemma.from_tensors(
        config, tiny_gguf.tensors(9, config), tiny.tokenizer)
    cache = create_kv_cache(config)
    same_shape.prefill(cache, "ab")
    with pytest.raises(MismatchError, match="of other weights"):
        Session(tiny, cache=cache)
    assert Session(same_shape, cache=cache).cache is cache


def test_bad_turns_change_nothing(session: Session) -> None:
    said(session, "one")
    before = state(session)
    for text, options, found in [
        ("", {}, "text: expected a str of more than white space"),
        (" \n", {}, "text: expected a str of more than white space"),
        (7, {}, "text: .*found 7"),
        ("\ud800", {}, "surrogate"),
        ("a", {"temperature": "b"}, "temperature"),
        ("a", {"top_p": 2.0}, "top_p"),
        ("a", {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ("a", {"stop": [""]}, "stop"),
        ("a", {"parse_special": True}, "parse_special: expected False"),
    ]:
        for call in (session.send, session.stream):
            with pytest.raises(ValueError, match=found):
                call(text, **options)  # type: ignore[operator]
            assert state(session) == before
    session.options["max_tokens"] = -1
    with pytest.raises(ValueError, match="max_tokens"):
        session.send("a")
    assert state(session) == before
    for wrong in (5, None):
        session.options = wrong  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match="^options: expected a mapping"):
            session.send("a")
    session.options = {}
    session.send("a", max_tokens=1)


def test_without_a_tokenizer(tiny: Gemma) -> None:
    bare = Gemma.from_tensors(tiny.config, tiny_gguf.tensors())
    with pytest.raises(ValueError, match="no tokenizer"):
        Session(bare)


def test_options_of_the_session_and_of_the_turn(tiny: Gemma) -> None:
    given = {"max_tokens": 3, "logit_bias": BANNED}
    session = Session(tiny, options=given)  # type: ignore[arg-type]
    assert len(session.send("a").token_ids) == 3
    assert len(session.send("a", max_tokens=5).token_ids) == 5
    session.options["max_tokens"] = 2
    assert given["max_tokens"] == 3
    assert len(session.send("a").token_ids) == 2


def test_messages_given_at_the_start(tiny: Gemma) -> None:
    messages = [
        Message("system", "s"),
        Message("user", "a"),
        Message("model", "b"),
    ]
    session = Session(tiny, messages=messages, kv_dtype="f32")
    assert session.messages == messages and session.system == "s"
    assert (session.turns, len(session.cache)) == (1, 0)
    assert session.cache.kv_dtype == "f32"
    reply = session.send("c", max_tokens=1)
    assert reply.usage.cached_tokens == 0
    assert "s\n\nUser: a" in tiny.tokenizer.decode(  # type: ignore[union-attr]
        session.cache.tokens.tolist()
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_turns_behind_an_opening_message(tiny: Gemma, role: str) -> None:
    talk = [
        {"role": role, "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
    ]
    session = Session(tiny, messages=talk)
    assert (session.system, session.turns) == ("Be brief.", 1)
    session.send("two", max_tokens=3, **NO_END)
    assert_sound(session)
    assert [m.text for m in session.undo()][:1] == ["two"]
    assert [m.text for m in session.messages] == ["Be brief.", "one", "1"]
    session.system = None
    session.messages = talk
    assert (session.system, session.turns) == ("Be brief.", 1)


def test_messages_may_be_replaced(session: Session) -> None:
    said(session, "one", "two", "three")
    whole, tokens = session.messages, session.cache.tokens.tolist()
    session.messages = whole
    assert session.messages == whole
    session.messages = whole[1:3]  # the system text stays
    assert session.messages == whole[:3] and session.turns == 1
    assert_sound(session)
    assert 0 < len(session.cache) < len(tokens)
    session.messages = [
        Message("system", "New."),
        *whole[1:3],
        Message("user", "x"),
        Message("model", "y"),
    ]
    assert session.system == "New." and session.turns == 2
    fresh = Session(
        session.gemma, template=session.template, messages=session.messages
    )
    assert_same(
        session.send("z", max_tokens=9, seed=3, **NO_END),
        fresh.send("z", max_tokens=9, seed=3, **NO_END),
    )
    assert_sound(session)
    before = state(session)
    for wrong in ([Message("user", "x")], [Message("tool", "x")], ["x"]):
        with pytest.raises(ValueError, match="messages"):
            session.messages = wrong  # type: ignore[assignment]
        assert state(session) == before
    session.messages = []
    assert session.turns == 0 and session.system == "New."
    session.send("again", max_tokens=1)


def test_repr(session: Session) -> None:
    said(session, "one")
    assert f"1 turns, {session.template.name} template" in repr(session)


# ---- All together ----


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_is_exact(tiny: Gemma, seed: int) -> None:
    """Whatever happened before, a turn computes what a new cache computes."""
    rng = random.Random(seed)
    sessions = [
        Session(
            tiny,
            rng.choice([None, "sys"]),
            "drop_oldest_turns",
            template=rng.choice(["plain", "gemma"]),
            capacity_tokens=200,
        )
    ]
    for step in range(30):
        session = rng.choice(sessions)
        action = rng.randrange(8)
        if action == 0 and session.turns:
            session.undo(rng.randint(1, session.turns))
        elif action == 1:
            session.goto(rng.randint(0, session.turns))
        elif action == 2:
            session.system = rng.choice([None, "other", "the system"])
        elif action == 3 and len(sessions) < 4:
            sessions.append(session.fork())
        elif action == 4:
            i = sessions.index(session)
            sessions[i] = Session.from_bytes(session.to_bytes(), tiny)
        elif action == 5:
            stream = session.stream("cut", seed=step, temperature=1.0)
            for _ in range(rng.randrange(4)):
                next(stream, None)
            stream.cancel()
        else:
            check_turn(session, "a" * rng.randint(1, 30), step)
        for one in sessions:
            assert_sound(one)


def check_turn(session: Session, text: str, seed: int) -> None:
    options: Any = {
        "max_tokens": 10,
        "seed": seed,
        "temperature": 1.5,
        "logprobs": True,
    }
    turns: list[list[int]] = []
    requests = requests_of(session.gemma)
    run = requests.reply

    def spy(cache: KVCache, ids: Any, *rest: Any) -> Any:
        turns.append([*cache.tokens.tolist(), *ids.tolist()])
        return run(cache, ids, *rest)

    requests.reply = spy  # type: ignore[method-assign]
    try:
        reply = session.send(text, **options)
    finally:
        del requests.reply  # type: ignore[method-assign]
    capacity = session.cache.capacity_tokens
    other = create_kv_cache(session.gemma.config, capacity)
    expected = session.gemma.generate(
        other, turns[0], stop=list(session.template.stop) or None, **options
    )
    assert expected.token_ids == reply.token_ids
    assert expected.logprobs is not None and reply.logprobs is not None
    assert expected.logprobs.tobytes() == reply.logprobs.tobytes()


def test_letting_go_of_a_stream_while_another_call_waits(
    tiny: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This thread may be kept from letting go for longer.
    monkeypatch.setattr(_one_call, "_GRACE_S", LIMIT_S)
    session = Session(tiny, template="plain")
    stream = session.stream("hello", max_tokens=60)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(session.send, "and?", max_tokens=2)
        time.sleep(0.01)  # it waits, most often
        del stream
        reply.result()
    assert session.turns == 2


def test_a_closed_session_says_so(tiny: Gemma) -> None:
    session = Session(tiny, "be kind")
    session.send("hello", max_tokens=2)
    messages = session.messages
    session.close()
    session.close()
    uses: list[Callable[[], object]] = [
        lambda: session.send("more"),
        lambda: session.stream("more"),
        lambda: asyncio.run(session.asend("more")),
        lambda: asyncio.run(session.afork()),
        lambda: session.fork(),
        lambda: session.undo(),
        lambda: session.goto(0),
        lambda: session.to_bytes(),
        lambda: session.stats,
        lambda: setattr(session, "system", "be brief"),
        lambda: setattr(session, "messages", messages),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="^session: closed"):
            use()
    assert session.messages == messages
