"""What sessions share: caches, pools, forks, copies; and what files keep."""

from __future__ import annotations

import copy
import io
import pickle
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gemmakv import (
    BlockPool,
    CacheFullError,
    CorruptFile,
    Gemma,
    MismatchError,
    Session,
    create_kv_cache,
)
from gemmakv.chat import _session_file
from support import family_models, tiny_gguf

SYSTEM = "Be kind, and take your time to say what is to be said. " * 3
GREEDY: Any = {"max_tokens": 12}


@pytest.fixture(params=family_models.FAMILIES)
def model(request: pytest.FixtureRequest, tiny: Gemma) -> Gemma:
    """A model of each family, with a tokenizer."""
    return family_models.model(request.param, tokenizer=tiny.tokenizer)


def replay_of_undo(session: Session) -> int:
    """Tokens that one undo has the next turn compute again."""
    before = session.cache.fork()
    session.undo()
    return before.truncate(len(session.cache)).replay_tokens


def test_forks_of_a_fresh_session_share_its_system_text(
    model: Gemma,
) -> None:
    session = Session(model, SYSTEM, template="gemma")
    reply = session.fork().send("one", **GREEDY)
    again = session.fork().send("one", **GREEDY)
    assert reply.usage.cached_tokens > 30
    assert again.usage.cached_tokens == reply.usage.cached_tokens
    fresh = Session(model, SYSTEM, template="gemma").send("one", **GREEDY)
    assert fresh.usage.cached_tokens == 0
    assert again.token_ids == reply.token_ids == fresh.token_ids


def test_a_fork_of_an_empty_session_computes_nothing(tiny: Gemma) -> None:
    assert len(Session(tiny).fork().cache) == 0
    # Nor one whose beginning does not fit.
    assert len(Session(tiny, SYSTEM, capacity_tokens=8).fork().cache) == 0


def test_undo_after_loading_costs_what_it_costs_live(model: Gemma) -> None:
    live = Session(model, template="gemma")
    assert model.tokenizer is not None
    # What is no text, and white space at the end, is taken off a reply.
    banned = {
        i: -float("inf")
        for i, text in enumerate(model.tokenizer.token_bytes)
        if not text.isalpha()
    }
    for i in range(3):
        live.send(
            f"the {i}", max_tokens=2 * tiny_gguf.WINDOW, logit_bias=banned
        )
    loaded = Session.from_bytes(live.to_bytes(), model)
    assert loaded.cache.checkpoints == live.cache.checkpoints
    for _ in range(2):
        assert replay_of_undo(loaded) == replay_of_undo(live) == 0
        assert loaded.cache.tokens.tolist() == live.cache.tokens.tolist()
    a, b = loaded.send("more", **GREEDY), live.send("more", **GREEDY)
    assert a.token_ids == b.token_ids
    assert a.usage.cached_tokens == b.usage.cached_tokens


def test_a_cache_of_ones_own(tiny: Gemma) -> None:
    first = Session(tiny, SYSTEM, template="gemma")
    first.send("one", **GREEDY)
    given = first.cache.fork()
    second = Session(tiny, SYSTEM, template="gemma", cache=given)
    assert second.cache is given
    reply = second.send("two", **GREEDY)
    assert reply.usage.cached_tokens > 30
    fresh = Session(tiny, SYSTEM, template="gemma").send("two", **GREEDY)
    assert reply.token_ids == fresh.token_ids
    for keyword in ("capacity_tokens", "checkpoint_bytes"):
        with pytest.raises(ValueError, match=f"^{keyword}: "):
            Session(
                tiny, cache=create_kv_cache(tiny.config), **{keyword: 64}
            )
    with pytest.raises(ValueError, match="cache: expected a KVCache"):
        Session(tiny, cache="x")  # type: ignore[arg-type]


def test_pool_and_checkpoint_bytes(tiny: Gemma) -> None:
    session = Session(tiny, checkpoint_bytes=0)
    session.send("one", **GREEDY)
    assert session.cache.checkpoint_bytes == 0
    assert session.cache.checkpoints == []
    pool = BlockPool(bytes=1 << 10)
    for build in (
        lambda: Session(tiny, pool=pool).send("one", **GREEDY),
        lambda: Session.from_bytes(session.to_bytes(), tiny, pool=pool),
    ):
        with pytest.raises(CacheFullError):
            build()


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.fingerprint if isinstance(value, Gemma) else None


def test_copies_are_forks_and_pickling_goes_through_bytes(
    tiny: Gemma,
) -> None:
    session = Session(tiny, options={"progress": False, "top_k": 3})
    session.send("one", **GREEDY)
    buffer = io.BytesIO()
    Pickler(buffer).dump(session)
    buffer.seek(0)
    unpickler = pickle.Unpickler(buffer)
    unpickler.persistent_load = lambda key: {tiny.fingerprint: tiny}[key]
    others = [copy.copy(session), copy.deepcopy(session), unpickler.load()]
    for other in others:
        assert other.gemma is tiny and other.messages == session.messages
        assert other.options["top_k"] == 3
        assert other.cache is not session.cache
        other.undo()
    assert session.turns == 1
    assert others[0].stats.last_fork_us is not None


class Counting(io.RawIOBase):
    """Takes everything, a little at a time."""

    def __init__(self) -> None:
        self.bytes = 0
        self.largest = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = min(len(data), 1 << 16)
        self.bytes += taken
        self.largest = max(self.largest, len(data))
        return taken


@pytest.mark.slow
def test_saving_takes_no_second_copy(gemma: Gemma) -> None:
    session = Session(gemma, capacity_tokens=2048)
    session.send("count " * 600, max_tokens=1)
    file = Counting()
    tracemalloc.start()
    try:
        session.save(file)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.bytes > 8 << 20
    assert peak < 2 << 20 and file.largest < 1 << 20


def test_what_is_no_session_is_not_read(tiny: Gemma) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFile, match="expected a file of a saved"):
        Session.load("/dev/zero", tiny)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 << 10  # KiB


@pytest.mark.parametrize("bad", [5, None, b"x", io.StringIO("x")])
def test_wrong_types(tiny: Gemma, bad: Any) -> None:
    with pytest.raises(ValueError, match="path"):
        Session(tiny).save(bad)
    with pytest.raises(ValueError, match="path"):
        Session.load(bad, tiny)


def test_wrong_types_of_data(tiny: Gemma) -> None:
    for bad in (5, None, "text"):
        with pytest.raises(ValueError, match="data: expected bytes"):
            Session.from_bytes(bad, tiny)  # type: ignore[arg-type]


def test_short_reads(tiny: Gemma, tmp_path: Path) -> None:
    session = Session(tiny)
    session.send("one", **GREEDY)

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 100))

    again = Session.load(Slow(session.to_bytes()), tiny)
    assert again.messages == session.messages
    # A message of the file tells of it, not of what stands beside it.
    with pytest.raises(OSError) as error:
        session.save(tmp_path / "no" / "where")
    assert error.value.filename == str(tmp_path / "no" / "where")


def test_options_that_no_file_can_hold(tiny: Gemma) -> None:
    plain = _session_file.options_to_json(
        {"progress": print, "logits_processor": print, "top_k": 3}
    )
    assert plain == {"top_k": 3}


def test_an_empty_session_of_another_model_is_refused(tiny: Gemma) -> None:
    other = family_models.model("gemma2", tokenizer=tiny.tokenizer)
    with pytest.raises(MismatchError, match="rebuild=True"):
        Session.from_bytes(Session(other).to_bytes(), tiny)
    again = Session.from_bytes(Session(other).to_bytes(), tiny, rebuild=True)
    assert again.send("one", **GREEDY).token_ids
