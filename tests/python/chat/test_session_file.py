"""Saved sessions: whole or not at all, and the same bits afterwards."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmakv import (
    CorruptFile,
    Gemma,
    GemmaKVError,
    Grammar,
    Message,
    MismatchError,
    Segment,
    Session,
)
from gemmakv.chat._session_file import MAGIC, options_from_json
from support import tiny_gguf
from support.sessions import (
    INF,
    NO_END,
    assert_same,
    assert_sound,
    said,
    state,
)

TEXT_PART = struct.Struct("<8sIIQQ")


@pytest.fixture(params=["plain", "gemma"])
def session(tiny: Gemma, request: pytest.FixtureRequest) -> Session:
    session = Session(
        tiny,
        "Be \u00e9 \U0001f642\n",
        "drop_oldest_turns",
        template=request.param,
        capacity_tokens=400,
        kv_dtype="int8",
        options={
            "top_k": 40,
            "seed": 2**64 - 1,
            "stop": ["xyz"],
            "logit_bias": {3: -INF, 20: 0.1},
        },
    )
    return said(session, "one", 'two "\\\n\x00')


def with_text(data: bytes, change: dict[str, Any]) -> bytes:
    """Saved data with other fields, and checksums that fit."""
    _, _, _, length, kv = TEXT_PART.unpack_from(data)
    fields = json.loads(data[TEXT_PART.size : TEXT_PART.size + length])
    fields.update(change)
    text = json.dumps(fields).encode()
    head = TEXT_PART.pack(MAGIC, 2, 0, len(text), kv) + text
    return head + hashlib.sha256(head).digest() + data[len(data) - kv :]


def assert_goes_on_alike(a: Session, b: Session) -> None:
    for text in ("three", "four"):
        assert_same(
            a.send(text, max_tokens=9, seed=4, **NO_END),
            b.send(text, max_tokens=9, seed=4, **NO_END),
        )
    assert a.messages == b.messages
    assert a.cache.tokens.tolist() == b.cache.tokens.tolist()


@pytest.mark.parametrize("how", ["path", "file", "bytes"])
def test_going_on_is_the_same(
    session: Session, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "a session"
    if how == "path":
        session.save(path)
        again = Session.load(path, session.gemma)
    elif how == "file":
        buffer = io.BytesIO()
        session.save(buffer)
        buffer.seek(0)
        again = Session.load(buffer, session.gemma)
    else:
        again = Session.from_bytes(
            memoryview(session.to_bytes()), session.gemma
        )
    assert again.messages == session.messages
    assert again.system == session.system
    assert again.overflow == session.overflow
    assert again.options == session.options
    assert again.template.name == session.template.name
    assert state(again) == state(session)
    assert again.cache.capacity_tokens == 400
    assert again.cache.kv_dtype == "int8"
    assert again.to_bytes() == session.to_bytes()
    assert_goes_on_alike(again, session)
    assert again.stats.saved_prefill_tokens == (
        session.stats.saved_prefill_tokens
    )


def test_an_empty_session(tiny: Gemma) -> None:
    session = Session(tiny)
    again = Session.from_bytes(session.to_bytes(), tiny)
    assert again.messages == []
    assert_goes_on_alike(again, session)


def test_a_running_reply_is_not_saved(session: Session) -> None:
    stream = session.stream("three", max_tokens=200, **NO_END)
    next(stream)
    with pytest.raises(GemmaKVError, match=r"cancel\(\)"):
        session.to_bytes()
    stream.cancel()
    again = Session.from_bytes(session.to_bytes(), session.gemma)
    assert again.turns == 3 and stream.result().finish_reason == "cancelled"
    assert again.messages == session.messages


def test_saving_replaces_in_one_step(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"old")
    session.save(str(path))
    assert path.read_bytes() == session.to_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    with pytest.raises(FileNotFoundError):
        session.save(tmp_path / "nowhere" / "s")
    with pytest.raises(FileNotFoundError):
        Session.load(tmp_path / "nowhere", session.gemma)


def test_a_killed_save_leaves_nothing_behind_the_next(
    session: Session, tiny_path: Path, tmp_path: Path
) -> None:
    script = (
        "import os, sys\n"
        "import gemmakv\n"
        "gemma = gemmakv.Gemma.load(sys.argv[1], packed_cache=False)\n"
        "os.fsync = lambda file: os.kill(os.getpid(), 9)\n"
        "gemmakv.Session(gemma, template='plain').save(sys.argv[2])\n"
    )
    path = tmp_path / "a session"
    killed = subprocess.run(
        [sys.executable, "-c", script, tiny_path, path], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert [file.name[0] for file in tmp_path.iterdir()] == ["."]
    session.save(tmp_path / "another")
    assert [file.name for file in tmp_path.iterdir()] == ["another"]


def test_progress_is_not_saved(tiny: Gemma) -> None:
    session = Session(tiny, options={"progress": True, "top_k": 3})
    again = Session.from_bytes(session.to_bytes(), tiny)
    assert again.options == {"top_k": 3}


def test_messages_that_cannot_be_kept(tiny: Gemma, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "a", "x": object()},
        {"role": "assistant", "content": "b"},
    ]
    session = Session(tiny, messages=talk)
    path = tmp_path / "kept"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="^messages: .*JSON"):
        session.save(path)
    assert path.read_bytes() == b"before" and [*tmp_path.iterdir()] == [path]


def test_a_grammar_is_saved(tiny: Gemma, tmp_path: Path) -> None:
    grammar = Grammar.regex("[a-z]{3}")
    session = Session(tiny, options={"grammar": grammar})
    session.save(tmp_path / "s")
    loaded = Session.load(tmp_path / "s", tiny)
    assert loaded.options["grammar"] == grammar
    for bad in ({"kind": "regex"}, {"kind": "x", "text": "a"}):
        with pytest.raises(ValueError, match="grammar"):
            options_from_json({"grammar": bad})


def test_numpy_values_in_options(tiny: Gemma) -> None:
    options: Any = {
        "top_k": np.int64(3),
        "temperature": np.float32(0.5),
        "logit_bias": {np.int32(4): np.float64(-INF)},
        "stop": ("a", "b"),
    }
    again = Session.from_bytes(Session(tiny, options=options).to_bytes(), tiny)
    assert again.options == {
        "top_k": 3,
        "temperature": 0.5,
        "logit_bias": {4: -INF},
        "stop": ["a", "b"],
    }


# ---- Data that are not a sound session ----


def test_damage_is_found(session: Session) -> None:
    data = session.to_bytes()
    text_end = TEXT_PART.size + TEXT_PART.unpack_from(data)[3] + 32
    places = [*range(text_end + 200), *range(text_end, len(data), 997)]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        with pytest.raises((CorruptFile, MismatchError)) as error:
            Session.from_bytes(damaged, session.gemma)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith("session: ")
    for length in [*range(0, text_end + 100, 7), len(data) - 1]:
        with pytest.raises(CorruptFile):
            Session.from_bytes(data[:length], session.gemma)
    with pytest.raises(CorruptFile):
        Session.from_bytes(data + b"\0", session.gemma)


def test_text_survives_damaged_keys_and_values(session: Session) -> None:
    data = session.to_bytes()
    kv_bytes = TEXT_PART.unpack_from(data)[4]
    for damaged in (
        data[:-1],
        data[:-kv_bytes],
        data[:-kv_bytes] + bytes(kv_bytes),
    ):
        with pytest.raises(CorruptFile) as error:
            Session.from_bytes(damaged, session.gemma)
        if len(damaged) == len(data):
            assert "rebuild=True" in str(error.value)
        again = Session.from_bytes(damaged, session.gemma, rebuild=True)
        assert again.messages == session.messages
        assert len(again.cache) == 0
    fresh = Session(
        session.gemma,
        overflow=session.overflow,
        template=session.template,
        messages=session.messages,
        capacity_tokens=400,
        kv_dtype="int8",
        options=session.options,  # type: ignore[arg-type]
    )
    assert_goes_on_alike(again, fresh)


def test_a_later_format(session: Session) -> None:
    data = bytearray(session.to_bytes())
    data[8] = 6
    with pytest.raises(MismatchError, match="version 6 is newer"):
        Session.from_bytes(data, session.gemma)


def test_a_cache_is_no_session(session: Session) -> None:
    with pytest.raises(CorruptFile, match="saved session, found b'GKVCACHE'"):
        Session.from_bytes(session.cache.to_bytes(), session.gemma)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "model", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [["user", "a"], ["model", "b"]]},
        {"messages": [{"role": "user", "content": "a", "name": 1}]},
        {"ends": [1, 2, 3]},
        {"ends": ["x"]},
        {"ends": [-1]},
        {"capacity_tokens": True},
        {"mood": 1},
        {"messages": {"a": 1}},
        {"template": 3},
        {"system": 3},
        {"overflow": "x"},
        {"options": {"top_k": "x"}},
        {"options": {"nope": 1}},
        {"options": {"logit_bias": 4}},
        {"options": {"logit_bias": [[1]]}},
        {"kv_dtype": "f8"},
        {"capacity_tokens": -4},
        {"capacity_tokens": "x"},
    ],
)
def test_fields_that_no_session_has(
    session: Session, change: dict[str, Any]
) -> None:
    data = with_text(session.to_bytes(), change)
    with pytest.raises((ValueError, CorruptFile)) as error:
        Session.from_bytes(data, session.gemma)
    assert "\n" not in str(error.value)


def test_fields_that_one_may_have(session: Session) -> None:
    data = with_text(session.to_bytes(), {})
    assert Session.from_bytes(data, session.gemma).turns == 2


# ---- Another model, another template ----


def test_other_weights(session: Session, tmp_path: Path) -> None:
    other = Gemma.load(
        tiny_gguf.write(tmp_path / "o.gguf", weights=tiny_gguf.tensors(seed=9))
    )
    with pytest.raises(MismatchError, match="rebuild=True"):
        Session.from_bytes(session.to_bytes(), other)
    again = Session.from_bytes(session.to_bytes(), other, rebuild=True)
    assert again.messages == session.messages
    again.send("three", max_tokens=2)
    assert_sound(again)


class Own:
    name = "own"
    stop = ()
    stop_tokens = ()

    def render(self, messages: Any, add_generation_prompt: bool) -> Any:
        return [Segment(f"{m.role}: {m.content}; ") for m in messages]


def test_a_template_of_ones_own(tiny: Gemma) -> None:
    session = said(Session(tiny, template=Own()), "one")
    data = session.to_bytes()
    with pytest.raises(ValueError, match="'own'"):
        Session.from_bytes(data, tiny)
    again = Session.from_bytes(data, tiny, template=Own())
    assert_goes_on_alike(again, session)
    # Another one reads the same messages.
    plain = Session.from_bytes(data, tiny, template="plain")
    assert plain.messages == [Message("user", "one"), session.messages[1]]
    plain.send("two", max_tokens=1)
    assert_sound(plain)


def test_the_files_template(tiny: Gemma, tmp_path: Path) -> None:
    meta = tiny_gguf.metadata()
    source = (
        "{% for m in messages %}<start_of_turn>{{ m.content }}{% endfor %}"
    )
    meta["tokenizer.chat_template"] = (tiny_gguf.STR, source)
    carries = Gemma.load(tiny_gguf.write(tmp_path / "m.gguf", meta))
    session = said(Session(carries), "one", "two")
    assert session.template.name == "file"
    again = Session.from_bytes(session.to_bytes(), carries)
    assert_goes_on_alike(again, session)
    with pytest.raises(MismatchError, match="no chat template of its own"):
        Session.from_bytes(session.to_bytes(), tiny)
