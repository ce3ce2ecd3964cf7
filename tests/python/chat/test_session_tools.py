"""Tools in sessions: called, answered, taken back, streamed and saved."""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import gemmakv
from gemmakv import CorruptFile, Gemma, Message, Session
from gemmakv.chat._toolset import Toolset
from gemmakv.errors import ArgumentError
from support import gemma4_files, tiny_gguf
from support.extras import needs

pytestmark = needs("tokenizers", "llguidance", "jsonschema")

PIECES = tiny_gguf.vocabulary()[0]
CLOSING: Any = {PIECES.index(c): 5.0 for c in '"}]'}
CALLED: list[tuple[str, int]] = []


def rain(city: str, days: int = 1) -> dict[str, Any]:
    """Gives the rain at a place.

    Args:
      city: its name.
    """
    CALLED.append((city, days))
    if city == "nowhere":
        raise LookupError(city)
    return {"mm": 3}


async def later(city: str) -> str:
    return f"{city} later"


SNOW = {"type": "function", "function": {"name": "snow", "parameters": {
    "type": "object", "properties": {}}}}  # fmt: skip
Script = Callable[..., None]


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return "model" if isinstance(value, Gemma) else None


def copied(session: Session) -> Session:
    """A session that was pickled."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(session)
    buffer.seek(0)
    unpickler = pickle.Unpickler(buffer)
    unpickler.persistent_load = lambda key: session.gemma
    found = unpickler.load()
    assert isinstance(found, Session)
    return found


def call(city: str = "Rome", name: str = "rain") -> str:
    body = f'{{"name": "{name}", "arguments": {{"city": "{city}"}}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def native(city: str = "Rome") -> str:
    return f'<|tool_call>call:rain{{city:<|"|>{city}<|"|>}}<tool_call|>'


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Has the next replies of sessions be these texts."""
    replies: list[str] = []

    def options_of(self: Any, options: Any, answers: bool) -> dict[str, Any]:
        grammar = gemma4_files.script(replies.pop(0))
        return {"max_tokens": 400, **options, "grammar": grammar}

    monkeypatch.setattr(Toolset, "options_of", options_of)
    CALLED.clear()
    return lambda *said: replies.extend(said)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    path = tmp_path_factory.mktemp("gemma4") / "tiny-it.gguf"
    gemma4_files.write(path, gemma4_files.TEMPLATE)
    return Gemma.load(path, packed_cache=False, prefix_cache=False)


def assert_held(session: Session) -> None:
    """The cache says nothing but what the messages say, with what follows."""
    messages = session.messages
    asked = messages[-1].tool_calls
    more = [
        Message("tool", "x", name=one["function"]["name"],
                tool_call_id=one.get("id"))
        for one in asked
    ] or [Message("user", "x")]  # fmt: skip
    ids = session.gemma.apply_chat_template(
        [*messages, *more], tools=session.tools or None,
        template=session.template,
    )  # fmt: skip
    tokenizer = session.gemma.tokenizer
    assert tokenizer is not None
    held = session.cache.tokens
    # The model may have said it in other tokens.
    text, whole = tokenizer.decode(held), tokenizer.decode(ids)
    assert whole.startswith(text)
    assert len(text) > 10


# ---- Calls and results ----


def test_run(talker: Gemma, script: Script) -> None:
    session = Session(talker, "Be kind.", template="gemma", tools=[rain])
    script(f"Well.\n{call()}", call("Bonn"), "It rains.")
    reply = session.run("Rain?")
    assert CALLED == [("Rome", 1), ("Bonn", 1)]
    assert reply.text == "It rains." and not reply.tool_calls
    assert session.turns == 1
    said = [(m.role, m.text) for m in session.messages[1:]]
    assert said == [
        ("user", "Rain?"),
        ("assistant", "Well."),
        ("tool", '{"mm": 3}'),
        ("assistant", ""),
        ("tool", '{"mm": 3}'),
        ("assistant", "It rains."),
    ]
    ids = [c["id"] for m in session.messages for c in m.tool_calls]
    results = [m for m in session.messages if m.role == "tool"]
    assert [m.tool_call_id for m in results] == ids
    assert [m.name for m in results] == ["rain", "rain"]
    assert_held(session)
    # What was said before is not computed again.
    assert talker.tokenizer is not None
    result = len(talker.tokenizer.encode('{"name": "rain", "content": {}}'))
    assert result < reply.usage.prompt_tokens < 3 * result
    assert len(session.undo()) == 6 and session.messages == [
        Message("system", "Be kind.")
    ]


def test_what_a_form_of_its_own_keeps(gemma4: Gemma, script: Script) -> None:
    session = Session(gemma4, tools=[rain], think=True)
    script(f"<|channel>thought\nHm\n<channel|>{native()}", "It rains.", "So.")
    first = session.send("Rain?")
    assert first.reasoning == "Hm" and first.text == ""
    [asked] = first.tool_calls
    assert (asked.name, asked.arguments) == ("rain", {"city": "Rome"})
    assert session.messages[-1] == first.message
    held = len(session.cache)
    second = session.give([{"mm": 3}])
    assert second.text == "It rains."
    # Thoughts stay while the turn goes on.
    assert second.usage.cached_tokens >= held - 1
    assert session.turns == 1
    session.send("And?")
    assert session.turns == 2
    fresh = Session(gemma4, think=True, tools=[rain], messages=session.messages)
    session.goto(1)
    script("Same", "Same")
    fresh.undo()
    one = session.send("Again?", logprobs=True)
    other = fresh.send("Again?", logprobs=True)
    assert one.token_ids == other.token_ids
    assert one.logprobs is not None and other.logprobs is not None
    assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("way", ["list", "ids", "names", "messages", "send"])
def test_ways_to_give(talker: Gemma, script: Script, way: str) -> None:
    session = Session(talker, tools=[rain, SNOW])
    script(f"{call()}\n{call(name='snow')}", "So.")
    one, other = session.send("Rain?").tool_calls
    results = [other.result("white"), one.result(3)]
    given: Any = {
        "list": [3, "white"],
        "ids": {other.id: "white", one.id: 3},
        "names": {"snow": "white", "rain": 3},
        "messages": [m.to_dict() for m in results],
        "send": results,
    }[way]
    give = session.send if way == "send" else session.give
    assert give(given).text == "So."
    assert session.messages[2:4] == [one.result(3), other.result("white")]
    assert_held(session)


def test_results_that_do_not_answer(talker: Gemma, script: Script) -> None:
    session = Session(talker, tools=[rain])
    with pytest.raises(ArgumentError, match="^results: .* asks for no calls"):
        session.give([])
    with pytest.raises(ArgumentError, match="^text: .* asks for no calls"):
        session.send([Message("tool", "x")])
    script(f"{call()}\n{call()}", "So.")
    one, other = session.send("Rain?").tool_calls
    before = session.messages
    for bad in (
        [1], [1, 2, 3], "ab", 3, {}, {one.id: 1}, {"rain": 1},
        {one.id: 1, other.id: 2, "x": 3}, [one.result(1), one.result(2)],
        [one.result(1), 2],
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="^results: expected a result"):
            session.give(bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="^text: expected a result"):
        session.send([one.result(1)])
    assert session.messages == before
    # Nobody has to answer.
    assert session.send("Never mind").text == "So."
    assert session.turns == 2


def test_what_is_said(talker: Gemma) -> None:
    session = Session(talker, max_tokens=3)
    parts = [{"type": "text", "text": "a"}]
    for said in ("a", Message("user", "a"), {"role": "user", "content": "a"},
                 [Message("user", "a")], parts):  # fmt: skip
        session.send(said)
        [user, _] = session.undo()
        assert user in (Message("user", "a"), Message("user", parts))
    bad: Any
    for bad in (" ", "", None, 3, [], [Message("user", "a")] * 2, {"a": 1},
                Message("assistant", "a"), Message("user", " "),
                [3]):  # fmt: skip
        with pytest.raises(ValueError, match=r"^text: expected a str of more"):
            session.send(bad)
    with pytest.raises(ArgumentError, match=r"^text.role: expected one of"):
        session.send({"role": "x", "content": "a"})
    with pytest.raises(ArgumentError) as error:
        session.send([{"type": "image"}])
    assert error.value.argument == "text.content[0].type"


def test_a_function_that_raises(talker: Gemma, script: Script) -> None:
    session = Session(talker, tools=[rain])
    script(call("nowhere"), "So.")
    with pytest.raises(LookupError):
        session.run("Rain?")
    assert session.messages[-1].tool_calls
    assert session.give(["none"]).text == "So."
    assert session.turns == 1


def test_rounds_and_tools_without_a_function(
    talker: Gemma, script: Script
) -> None:
    session = Session(talker, tools=[rain, SNOW])
    script(call(), call("Bonn"), call(name="snow"))
    reply = session.run("Rain?", rounds=1)
    assert CALLED == [("Rome", 1)] and len(reply.tool_calls) == 1
    session.undo()
    reply = session.run("Snow?")
    assert [one.name for one in reply.tool_calls] == ["snow"]
    with pytest.raises(ArgumentError, match="^rounds: "):
        session.run("a", rounds=-1)


def test_on_an_event_loop(talker: Gemma, script: Script) -> None:
    session = Session(talker, tools=[rain, later])
    with pytest.raises(ArgumentError, match="^tools: expected no async"):
        session.run("Rain?")
    script(f"{call()}\n{call(name='later')}", "So.", call(), "So.")

    async def main() -> None:
        reply = await session.arun("Rain?")
        assert reply.text == "So." and CALLED == [("Rome", 1)]
        results = [m.content for m in session.messages if m.role == "tool"]
        assert results == [{"mm": 3}, "Rome later"]
        await session.asend("Rain?")
        assert (await session.agive([1])).text == "So."
        await session.aclose()

    asyncio.run(main())


def test_a_result_that_is_to_be_awaited(talker: Gemma, script: Script) -> None:
    """Only its call tells that a wrapped function is async."""

    def wrapped(city: str) -> Awaitable[str]:
        return later(city)

    session = Session(talker, tools=[wrapped])
    script(call(name="wrapped"), call(name="wrapped"), "So.")
    with pytest.raises(ArgumentError, match="^tools: expected no async"):
        session.run("Rain?")
    session.undo()
    assert asyncio.run(session.arun("Rain?")).text == "So."
    results = [m.content for m in session.messages if m.role == "tool"]
    assert results == ["Rome later"]


def test_a_function_that_raises_stop_iteration(
    talker: Gemma, script: Script
) -> None:
    """No future can take it, so it becomes what an async function makes of
    it.
    """

    def first(city: str) -> str:
        return next(iter(()))

    session = Session(talker, tools=[first])
    script(call(name="first"), call(name="first"))
    with pytest.raises(RuntimeError, match="^first raised StopIteration"):
        asyncio.run(session.arun("Rain?"))
    session.undo()
    with pytest.raises(StopIteration):
        session.run("Rain?")


# ---- What a reply may be ----


def test_grammars(talker: Gemma) -> None:
    """A call that must come comes once, and the reply to its result is
    free.
    """
    asked: list[str] = []

    def rain(kind: Literal["light", "heavy"]) -> None:
        asked.append(kind)

    session = Session(
        talker, tools=[rain], tool_choice="required",
        parallel_tool_calls=False, logit_bias=CLOSING, max_tokens=200,
    )  # fmt: skip
    reply = session.send("Rain?")
    [one] = reply.tool_calls
    assert one.name == "rain" and one.arguments["kind"] in ("light", "heavy")
    assert session.give([1], max_tokens=4).tool_calls == []
    session.undo()
    assert session.run("Rain?", max_tokens=100).finish_reason == "length"
    assert len(asked) == 1 and session.turns == 1
    session.tool_choice = "none"
    assert not session.send("Rain?", max_tokens=4).tool_calls
    session.tool_choice = None


def test_tools_may_change(talker: Gemma) -> None:
    session = Session(talker, tools=[rain], max_tokens=3)
    session.send("a")
    held = len(session.cache)
    session.tools = [gemmakv.tool_schema(rain)]  # the same to the model
    assert len(session.cache) == held
    session.tools = [SNOW]
    assert session.tools == [SNOW] and len(session.cache) < held
    session.send("b")
    with pytest.raises(ValueError, match=r"tools\[0\]"):
        session.tools = [3]
    assert session.tools == [SNOW]
    session.tools = None
    assert session.tools == [] and not session.send("c").tool_calls
    assert_held(session)


def test_conversations_with_calls(talker: Gemma, script: Script) -> None:
    """What `chat` was given, a session takes."""
    function = {"name": "rain", "arguments": "{}"}
    calls = [{"id": "1", "function": function}]
    asked = {"role": "assistant", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    user, reply = {"role": "user", "content": "a"}, Message("assistant", "b")
    session = Session(
        talker, messages=[user, asked, result, reply, user, reply]
    )
    assert session.turns == 2 and len(session.messages) == 6
    script("c", "So.")
    assert session.send("c").text == "c"
    session.goto(1)
    assert len(session.messages) == 4
    session.messages = [user, asked]
    assert session.give(["3"]).text == "So."
    assert len(session.messages) == 4 and session.turns == 1
    with pytest.raises(ValueError, match="a reply of the model last"):
        Session(talker, messages=[user, asked, result])


def test_forks_and_undo(talker: Gemma, script: Script) -> None:
    session = Session(talker, tools=[rain])
    script("Hello.", call(), "So.", "Else.")
    session.send("Hi")
    end = session.cache.tokens.tolist()
    session.send("Rain?")
    fork = session.fork()
    assert session.give([1]).text == "So."
    assert fork.give([2]).text == "Else."
    assert fork.messages[-2].content == "2"
    for one in (session, fork):
        assert one.turns == 2
        assert [m.role for m in one.undo()] == [
            "user", "assistant", "tool", "assistant",
        ]  # fmt: skip
        assert one.cache.tokens.tolist() == end


def test_the_oldest_turns_go_with_their_calls(
    talker: Gemma, script: Script
) -> None:
    session = Session(
        talker, tools=[rain], overflow="drop_oldest_turns",
        capacity_tokens=1500,
    )  # fmt: skip
    for turn in range(4):
        script(call(), f"So {turn}.")
        session.run("Rain? " * 40, max_tokens=100)
        roles = [m.role for m in session.messages]
        assert roles == ["user", "assistant", "tool", "assistant"] * (
            len(roles) // 4
        )
        assert_held(session)
    assert session.turns < 4 and session.messages[-1].text == "So 3."


# ---- Streams ----


@pytest.mark.parametrize("form", ["json", "native"])
def test_streams(
    talker: Gemma, gemma4: Gemma, script: Script, form: str
) -> None:
    asked = call() if form == "json" else native()
    session = Session(talker if form == "json" else gemma4, tools=[rain])
    script(f"Well <t.\n{asked}", "So <tool", "So")
    stream = session.stream("Rain?")
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == "Well <t."
    reply = stream.result()
    assert [one.arguments for one in reply.tool_calls] == [{"city": "Rome"}]
    assert session.messages[-1] == reply.message
    stream = session.stream([reply.tool_calls[0].result(3)])
    assert "".join(piece.text for piece in stream) == "So <tool"
    assert stream.result().text == session.messages[-1].text == "So <tool"
    assert session.turns == 1

    async def main() -> None:
        stream = await session.astream("And?")
        assert [piece async for piece in stream]
        assert stream.result().text == "So"

    asyncio.run(main())


def test_a_stream_that_is_cancelled_within_a_call(
    talker: Gemma, script: Script
) -> None:
    session = Session(talker, tools=[rain])
    script(f"Well.\n{call()}\n{call('Bonn')}", "So.")
    count = len(f"Well.\n{call()}\n<tool_call>")  # tokens are letters
    with session.stream("Rain?") as stream:
        for read, _ in enumerate(stream):
            if read == count:
                break
    message = session.messages[-1]
    assert message.incomplete and message.text == "Well."
    assert [c["function"]["arguments"] for c in message.tool_calls] == [
        {"city": "Rome"}
    ]
    assert_held(session)
    assert session.give([1]).text == "So."


def test_a_stream_that_fails_within_a_call(
    talker: Gemma, script: Script
) -> None:
    session = Session(talker, tools=[rain])
    script(f"Well.\n{call()}\n{call('Bonn')}", "So.")
    count = len(f"Well.\n{call()}\n<tool_call>")

    def progress(done: int, total: int) -> None:
        if done == count:
            raise LookupError

    with pytest.raises(LookupError):
        list(session.stream("Rain?", progress=progress))
    message = session.messages[-1]
    assert message.incomplete and len(message.tool_calls) == 1
    assert_held(session)


# ---- Files ----


def test_files(talker: Gemma, script: Script, tmp_path: Path) -> None:
    session = Session(
        talker, tools=[rain, SNOW], tool_choice="rain",
        parallel_tool_calls=False,
    )  # fmt: skip
    script(call(), "So.", call(), "So.", "So.")
    session.run("Rain?")
    session.send("Rain?")
    data = session.to_bytes()
    assert struct.unpack("<I", data[8:12]) == (4,)
    session.save(tmp_path / "a.gkv")
    for again in (
        Session.load(tmp_path / "a.gkv", talker),
        copied(session),
    ):
        assert again.messages == session.messages and again.turns == 2
        assert again.tools == [gemmakv.tool_schema(rain), SNOW]
        assert again.tool_choice == "rain"
        assert again.cache.tokens.tolist() == session.cache.tokens.tolist()
        again.tools = [rain, SNOW]
        assert again.cache.tokens.tolist() == session.cache.tokens.tolist()
    assert again.give([1]).text == "So."
    rebuilt = Session.from_bytes(data, talker, rebuild=True)
    assert rebuilt.messages == session.messages and not len(rebuilt.cache)
    plain = Session(talker, max_tokens=3)
    plain.send("a")
    assert struct.unpack("<I", plain.to_bytes()[8:12]) == (2,)
    with pytest.raises(CorruptFile):
        Session.from_bytes(data.replace(b'"tools": [', b'"tools": {'), talker)


def test_the_model_may_come_first_as_before(
    talker: Gemma, tmp_path: Path
) -> None:
    session = Session(talker, max_tokens=3)
    session.send("a")
    session.save(tmp_path / "a.gkv")
    old: Any = Session
    for ways in (
        lambda: old.load(talker, tmp_path / "a.gkv"),
        lambda: old.from_bytes(talker, session.to_bytes(), rebuild=True),
    ):
        with pytest.warns(DeprecationWarning, match="comes second") as found:
            assert ways().messages == session.messages
        assert found[0].filename == __file__
    again = old.load(gemma=talker, path_or_file=tmp_path / "a.gkv")
    assert again.messages == session.messages


def test_options_as_keywords(talker: Gemma) -> None:
    session = Session(talker, max_tokens=3, options={"seed": 1})
    assert session.options == {"max_tokens": 3, "seed": 1}
    assert session.send("a").usage.completion_tokens == 3
    with pytest.raises(ArgumentError, match="^seed: expected it once"):
        Session(talker, seed=2, options={"seed": 1})
    with pytest.raises(TypeError, match="sed"):
        Session(talker, sed=2)  # type: ignore[call-arg]


def test_bad_tools(talker: Gemma) -> None:
    bad: Any
    for bad, found in (
        ({"tools": [{}]}, r"tools\[0\]: expected a function, or"),
        ({"tools": rain}, "tools: expected a list"),
        ({"tools": [rain, rain]}, r"tools\[1\]: a second 'rain'"),
        ({"tools": [rain], "tool_choice": "x"}, "tool_choice: expected 'auto'"),
        ({"tools": [SNOW, lambda a: a]}, r"tools\[1\]: expected a function "),
        ({"tools": [rain], "parallel_tool_calls": 1}, "parallel_tool_calls: "),
    ):
        with pytest.raises(ValueError, match=f"^{found}"):
            Session(talker, **bad)


def test_functions_in_chat(talker: Gemma) -> None:
    options: Any = {"max_tokens": 120, "logit_bias": CLOSING}
    ways = [
        talker.chat(
            [{"role": "user", "content": "Rain?"}], tools=[tool],
            tool_choice="required", parallel_tool_calls=False, **options,
        ).token_ids
        for tool in (rain, gemmakv.tool_schema(rain))
    ]  # fmt: skip
    assert ways[0] == ways[1]
    user = [{"role": "user", "content": "a"}]
    assert talker.count_tokens(user, tools=[rain]) == talker.count_tokens(
        user, tools=[gemmakv.tool_schema(rain)]
    )


def test_a_message_may_be_a_model_of_pydantic(tiny: Gemma) -> None:
    pydantic = pytest.importorskip("pydantic")
    said = pydantic.create_model("Said", role=(str, "user"), content=(str, ...))
    session = Session(tiny)
    session.send(said(content="two"), max_tokens=1)
    assert session.messages[0] == Message("user", "two")
