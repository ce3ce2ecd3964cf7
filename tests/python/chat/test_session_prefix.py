"""Sessions over the prefix cache: what begins alike, what leaves memory."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemmakv
from gemmakv import Gemma, PrefixCache, Session
from gemmakv.chat._session_file import kept_tokens
from gemmakv.errors import CorruptFile, MismatchError
from support.sessions import NO_END, assert_same, assert_sound, said
from support.token_files import token_file

SYSTEM = "Of all that is said here nothing is forgotten. " * 6


class Place:
    """A folder on disk, and one process after the other that uses it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self.folder = folder
        self.prefix: PrefixCache | None = None

    def start(self) -> Gemma:
        self.close()
        self.prefix = PrefixCache("64MiB", disk=self.folder)
        return Gemma.load(self._model, prefix_cache=self.prefix)

    def close(self) -> None:
        if self.prefix is not None:
            self.prefix.close()

    def objects(self) -> set[Path]:
        return {path for path in self.folder.glob("??/*") if path.is_file()}


@pytest.fixture
def place(talker_path: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(talker_path, tmp_path / "prefix")
    yield place
    place.close()


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_a_system_text_is_shared_at_the_first_turn(
    talker: Gemma, talker_path: Path, place: Place, template: str
) -> None:
    def first(gemma: Gemma, text: str) -> gemmakv.Generation:
        session = Session(gemma, SYSTEM, template=template)
        assert gemma.tokenizer is not None
        reply = session.send(text, max_tokens=8, seed=1, **NO_END)
        assert_same(
            reply,
            Session(talker, SYSTEM, template=template).send(
                text, max_tokens=8, seed=1, **NO_END
            ),
        )
        return reply

    gemma = place.start()
    assert first(gemma, "one thing").usage.cached == {}
    length = Session(gemma, SYSTEM, template=template)._talk._system_end()
    assert length > 64
    here = first(gemma, "Another, entirely").usage
    assert here.cached == {"ram": length} and here.cached_tokens == length
    later = first(place.start(), "or a third").usage
    assert later.cached == {"disk": length}


def test_without_a_system_text_there_is_no_boundary(talker: Gemma) -> None:
    with Session(talker)._begin("Hi", {}, 0.0) as turn:
        assert turn.boundaries == []
    with Session(talker, "Be brief.")._begin("Hi", {}, 0.0) as turn:
        assert turn.boundaries == [] or turn.boundaries[0] >= 16


@pytest.mark.parametrize("template", ["plain", "gemma"])
@pytest.mark.parametrize("lost", ["nothing", "all", "damaged"])
def test_tokens_alone_bring_a_session_back(
    talker: Gemma, place: Place, template: str, lost: str
) -> None:
    texts = ("one " * 90, "two " * 60, "three")
    live = said(Session(talker, SYSTEM, template=template), *texts)
    data = token_file(
        said(Session(place.start(), SYSTEM, template=template), *texts)
    )
    assert len(data) < 16_000 < live.cache.nbytes
    gemma = place.start()
    if lost == "all":
        assert place.prefix is not None
        place.prefix.clear("disk")
    if lost == "damaged":
        for path in place.objects():
            path.chmod(0o600)
            whole = bytearray(path.read_bytes())
            whole[len(whole) // 2] ^= 1
            path.write_bytes(whole)
            path.chmod(0o400)
    back = Session.from_bytes(data, gemma)
    assert not back.in_memory and back.messages == live.messages
    assert back.cache.tokens.tolist() == live.cache.tokens.tolist()
    options = {"max_tokens": 12, "repetition_penalty": 1.3, **NO_END}
    reply = back.send("and on", seed=7, **options)
    assert_same(reply, live.send("and on", seed=7, **options))
    assert_sound(back)
    assert back.in_memory
    if lost == "nothing":
        assert reply.usage.cached.get("disk", 0) > 0
    else:
        assert "disk" not in reply.usage.cached
    # Undo leads to the same, whatever it costs.
    for session in (back, live):
        session.undo(2)
    assert_same(
        back.send("instead", seed=8, **options),
        live.send("instead", seed=8, **options),
    )
    again = Session.from_bytes(token_file(back), place.start())
    again.undo(2)
    live.undo(2)
    reply = again.send("later", seed=9, **options)
    assert_same(reply, live.send("later", seed=9, **options))
    # What is damaged shows when it is read, and is written anew behind that.
    assert lost == "damaged" or reply.usage.cached.get("disk", 0) > 0


def test_one_that_leaves_memory_goes_on(talker: Gemma, place: Place) -> None:
    live = said(Session(talker, SYSTEM), "one " * 50, "two")
    session = said(Session(place.start(), SYSTEM), "one " * 50, "two")
    assert session.in_memory
    session._leave_memory()
    assert not session.in_memory and session.stats.own_bytes == 0
    session._leave_memory()  # nothing is lost by it
    fork = session.fork()
    for one in (session, fork):
        reply = one.send("three", max_tokens=9, seed=3, **NO_END)
        assert reply.usage.cached.get("ram", 0) > 0
        assert_same(
            reply, live.fork().send("three", max_tokens=9, seed=3, **NO_END)
        )


def test_a_saved_file_holds_everything(
    talker: Gemma, place: Place, tmp_path: Path
) -> None:
    """Also of a session that is not in memory."""
    live = said(Session(talker, SYSTEM), "one", "two")
    data = token_file(said(Session(place.start(), SYSTEM), "one", "two"))
    Session.from_bytes(data, place.start()).save(tmp_path / "whole.gkv")
    back = Session.load(tmp_path / "whole.gkv", talker)
    assert back.in_memory
    reply = back.send("three", max_tokens=9, seed=3, **NO_END)
    own = live.send("three", max_tokens=9, seed=3, **NO_END)
    assert_same(reply, own)
    assert reply.usage.cached_tokens >= own.usage.cached_tokens > 100


def test_what_is_no_session_of_tokens(talker: Gemma, tiny: Gemma) -> None:
    session = said(Session(talker), "one")
    data = token_file(session)
    kept = kept_tokens(io.BytesIO(data))
    assert kept is not None and kept.kv_dtype == session.cache.kv_dtype
    assert kept.ids.tolist() == session.cache.tokens.tolist()
    assert kept_tokens(io.BytesIO(session.to_bytes())) is None
    assert kept_tokens(io.BytesIO(b"")) is None
    for position in (len(data) - 1, len(data) - 40, 30):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(CorruptFile):
            Session.from_bytes(bytes(bad), talker)
    with pytest.raises(CorruptFile):
        Session.from_bytes(data[:-1], talker)
    with pytest.raises(MismatchError, match="rebuild=True"):
        Session.from_bytes(data, tiny)
    again = Session.from_bytes(data[:-1], talker, rebuild=True)
    assert again.messages == session.messages and not len(again.cache)
    newer = data[:8] + struct.pack("<I", 6) + data[12:]
    with pytest.raises(MismatchError, match="update gemmakv"):
        Session.from_bytes(newer, talker)


@pytest.mark.parametrize("bad", [-1, 1 << 30])
def test_token_ids_that_no_model_has(talker: Gemma, bad: int) -> None:
    session = said(Session(talker), "one")
    ids = session.cache.tokens
    ids[3] = bad
    with pytest.raises(CorruptFile, match="token ids"):
        Session.from_bytes(token_file(session, ids), talker)
