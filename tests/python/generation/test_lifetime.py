"""Memory is given back: by `close`, by `with`, and by garbage collection."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmakv import (
    BlockPool,
    Gemma,
    GemmaKVError,
    KVCache,
    Message,
    PrefixCache,
    Session,
    create_kv_cache,
)
from support import tiny_gguf
from support.forks import output_of
from support.sessions import NO_END, said
from support.waits import wait_until

MIB = 1 << 20


def numbers_of(source: str, *arguments: object) -> list[float]:
    """Runs Python code in a process of its own; the numbers it prints.

    The code may call `rss()`: MiB of memory that the process holds.
    """
    prelude = (
        "import gc, resource, sys\n"
        "def rss():\n"
        "    pages = int(open('/proc/self/statm').read().split()[1])\n"
        "    return pages * resource.getpagesize() / (1 << 20)\n"
    )
    printed = output_of(prelude + source, *arguments)
    return [float(line) for line in printed.split()]


def lives_through(source: str, *arguments: object) -> None:
    """Python code in a process of its own comes to its end, and says so."""
    assert output_of(source, *arguments) == "alive\n"


# ---- Measured ----

CACHES = """
import gemmakv
gemma = gemmakv.Gemma.load(sys.argv[1])
cache = gemmakv.create_kv_cache(gemma.config, kv_dtype="f32", block_tokens=128)
gemma.logits(cache, [2] + [20] * 500)
data = cache.to_bytes()
gemmakv.KVCache.from_bytes(data).close()
print(rss())
caches = [gemmakv.KVCache.from_bytes(data) for _ in range(400)]
print(rss(), sum(c.nbytes for c in caches) / (1 << 20))
how = sys.argv[2]
if how == "close":
    for cache in caches:
        cache.close()
elif how == "with":
    for cache in caches:
        with cache:
            pass
elif how == "truncate":
    for cache in caches:
        cache.truncate(0)
elif how == "sessions":
    sessions = []
    for cache in caches:
        session = gemmakv.Session(gemma)
        session.cache._become(cache)
        cache.close()
        sessions.append(session)
    for session in sessions:
        session.close()
else:
    del caches, cache
    gc.collect()
print(rss())
"""


@pytest.mark.parametrize(
    "how", ["close", "with", "truncate", "sessions", "gc"]
)
def test_caches_give_their_memory_back(tiny_path: Path, how: str) -> None:
    before, full, nbytes, after = numbers_of(CACHES, tiny_path, how)
    assert nbytes > 100
    assert full - before > 0.8 * nbytes
    # The pool keeps 16 MiB of free blocks for the next conversation, and up
    # to 32 MiB more wait until giving them back is worth the time.
    assert after - before < 0.45 * nbytes


MODELS = """
import gemmakv
print(rss())
if sys.argv[2] == "with":
    with gemmakv.Gemma.load(sys.argv[1], threads=1) as gemma:
        cache = gemmakv.create_kv_cache(gemma.config)
        gemma.generate(cache, "Hi", max_tokens=2)
        print(rss())
else:
    gemma = gemmakv.Gemma.load(sys.argv[1], threads=1)
    session = gemmakv.Session(gemma)
    session.stream("Hi", max_tokens=5)
    session.send("Hi", max_tokens=2)
    print(rss())
    del gemma, session
    gc.collect()
print(rss())
"""


@pytest.mark.parametrize("how", ["with", "gc"])
def test_models_give_their_memory_back(model_path: str, how: str) -> None:
    before, loaded, after = numbers_of(MODELS, model_path, how)
    assert loaded - before > 200
    # The tokenizer and what Python has imported stay for a while.
    assert after - before < 0.5 * (loaded - before)


LOOP = """
import gemmakv
gemma = gemmakv.Gemma.load(sys.argv[1])
def turn():
    session = gemmakv.Session(gemma, options={"max_tokens": 8})
    session.send("a" * 100)
    forks = [session.fork() for _ in range(5)]
    for fork in forks:
        fork.send("b" * 30)
        for piece in fork.stream("c"):
            break
    gemma.generate(session.cache.fork(), "d", n=4, max_tokens=4)
    gemmakv.Session.from_bytes(session.to_bytes(), gemma).undo()
for _ in range(20):
    turn()
print(rss())
for _ in range(60):
    turn()
print(rss())
"""


def test_a_long_life_takes_no_more_memory(tiny_path: Path) -> None:
    before, after = numbers_of(LOOP, tiny_path)
    # Each of the 60 rounds holds a third of a MiB of keys and values.
    assert after - before < 16


# ---- By counting blocks ----


@pytest.mark.slow
def test_closing_a_fork_leaves_the_other_its_blocks(tiny: Gemma) -> None:
    with create_kv_cache(tiny.config) as cache:
        tiny.generate(cache, "the " * 20, max_tokens=1)
        whole = cache.nbytes
        fork = cache.fork()
        assert cache.nbytes == 0 and cache.shared_nbytes == whole
        fork.close()
        assert cache.nbytes == whole and cache.shared_nbytes == 0
        for _ in range(3):
            forks = [cache.fork() for _ in range(4)]
            assert cache.shared_nbytes == whole
            del forks
            gc.collect()
            assert cache.nbytes == whole


def test_a_session_gives_the_blocks_of_its_backups_back(tiny: Gemma) -> None:
    session = said(Session(tiny), "one", "two")
    for _ in range(3):
        with pytest.raises(ValueError):
            session.send("three", top_p=7.0)
        session.send("three", max_tokens=2, **NO_END)
        stream = session.stream("four", max_tokens=50, **NO_END)
        next(stream)
        stream.cancel()
        del stream
        session.undo(2)
        session.fork().close()
        assert session.cache.shared_nbytes == 0


def test_nothing_keeps_objects_alive(tiny_path: Path) -> None:
    gemma = Gemma.load(tiny_path)
    session = said(Session(gemma), "one")
    cache = session.cache
    stream = session.stream("two", max_tokens=200, **NO_END)
    next(stream)
    references = [weakref.ref(x) for x in (gemma, session, cache, stream)]
    del stream
    assert session.turns == 2
    del gemma, session, cache
    # No cycles: all is gone without the collector.
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("kind", ["stream", "chat", "session"])
def test_a_stream_that_ended_keeps_no_conversation(
    tiny: Gemma, kind: str
) -> None:
    pool = BlockPool()
    cache = create_kv_cache(tiny, pool=pool)
    options: Any = {"max_tokens": 3, **NO_END}
    stream: Any
    if kind == "stream":
        stream = tiny.stream(cache, "a", **options)
    elif kind == "chat":
        talk = [{"role": "user", "content": "a"}]
        stream = tiny.chat(talk, stream=True, cache=cache, **options)
    else:
        stream = Session(tiny, cache=cache).stream("a", **options)
    cache_gone = weakref.ref(cache)
    del cache
    list(stream)
    wait_until(lambda: cache_gone() is None and not pool.blocks_in_use)
    assert stream.result().finish_reason == "length"


class Refused(Exception):
    """Of a processor."""


def _refuse(token_ids: np.ndarray, logits: np.ndarray) -> None:
    raise Refused


def _fail(gemma: Gemma, cache: KVCache, how: str) -> None:
    """As a processor raises, with everything in this frame."""
    if how == "generate":
        gemma.generate(cache, "a", logits_processor=_refuse)
    elif how == "agenerate":
        asyncio.run(gemma.agenerate(cache, "a", logits_processor=_refuse))
    elif how == "batch":
        caches = [cache, cache.fork()]
        gemma.generate_batch(caches, ["a"] * 2, logits_processor=_refuse)
    else:
        stream = gemma.stream(cache, "a", logits_processor=_refuse)
        if how == "stream":
            list(stream)
        stream.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["generate", "agenerate", "batch", "stream", "result"]
)
def test_what_a_processor_raised_keeps_nothing_alive(
    tiny: Gemma, how: str
) -> None:
    cache = create_kv_cache(tiny.config)
    reference = weakref.ref(cache)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused) as info:
        _fail(tiny, cache, how)
    assert info.traceback[-1].name == "_refuse"
    assert reference() is cache
    del cache, info

    def is_gone() -> bool:
        if how not in ("generate", "batch"):
            gc.collect()  # a stream has what it failed with, and so has a task
        return reference() is None

    def are_closed() -> bool:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) <= descriptors

    # The engine's thread may still be about to let go of the request: of what
    # it failed with, and then of what wakes its loop.
    wait_until(is_gone, pause_s=0.01)
    wait_until(are_closed, pause_s=0.01)


# A model whose last reference is on a thread of its own: a closure of a
# processor, which the end of its request lets go of there, or the collector,
# which runs where Python code runs.
ENDS_INSIDE = """
import gc, os, sys, time, weakref
from gemmakv import Gemma, create_kv_cache

def make(how, path):
    gemma = Gemma.load(path, prefix_cache=False)

    def processor(token_ids, logits):
        if how == "dropped":
            assert gemma.config.vocab_size == len(logits)
        else:
            gc.collect()

    stream = gemma.stream(create_kv_cache(gemma), [2, 5], max_tokens=300,
                          ignore_eos=True, logits_processor=processor)
    if how == "dropped":
        next(stream)
        stream.cancel()
    else:
        class Cycle: pass
        cycle = Cycle()
        cycle.parts = cycle, gemma, stream
    return weakref.ref(gemma)

how, path = sys.argv[1:]
gc.disable()
deadline = time.monotonic() + 120
for _ in range(8):
    gone = make(how, path)
    while gone() is not None:
        assert time.monotonic() < deadline
        gc.collect()
print("alive")
"""


@pytest.mark.parametrize("how", ["dropped", "collected"])
def test_a_model_may_end_inside_its_own_step(
    tiny_path: Path, how: str
) -> None:
    lives_through(ENDS_INSIDE, how, tiny_path)


# A half-read reply that the collector finds inside a step of its own model.
REPLIES_INSIDE = """
import gc, sys
from gemmakv import Gemma, Session, create_kv_cache

def collect(token_ids, logits):
    gc.collect()

def leave(gemma):
    class Cycle: pass
    cycle = Cycle()
    session = Session(gemma)
    stream = session.stream("a", max_tokens=200, ignore_eos=True)
    next(stream)
    cycle.parts = cycle, stream
    return session

gc.disable()
gemma = Gemma.load(sys.argv[1], prefix_cache=False)
for _ in range(4):
    session = leave(gemma)
    gemma.generate(create_kv_cache(gemma), [2, 5], max_tokens=4,
                   ignore_eos=True, logits_processor=collect)
    while session.turns == 0:  # what was delivered stays
        pass
    assert session.messages[-1].incomplete
print("alive")
"""


def test_a_reply_may_end_inside_a_step(talker_path: Path) -> None:
    lives_through(REPLIES_INSIDE, talker_path)


# A processor that reads streams of its own model, which would wait for itself.
READS_INSIDE = """
import sys
from gemmakv import Gemma, GemmaKVError, Session, create_kv_cache

gemma = Gemma.load(sys.argv[1], prefix_cache=False)
keywords = dict(max_tokens=40, ignore_eos=True)

def begin():
    stream = gemma.stream(create_kv_cache(gemma), [2, 5], **keywords)
    reply = Session(gemma).stream("a", **keywords)
    next(stream), next(reply)
    return stream, reply

def wait(call):
    try:
        call()
    except GemmaKVError as error:
        assert "inside one of its own steps" in str(error), error
    else:
        raise AssertionError(call)

def processor(token_ids, logits):
    for one in stream, reply:
        wait(one.result)
        wait(lambda: next(one))
    wait(reply.cancel)

stream, reply = begin()
gemma.generate(create_kv_cache(gemma), [2, 5], max_tokens=3, ignore_eos=True,
               logits_processor=processor)
for one, other in zip((stream, reply), begin()):
    assert one.result().token_ids == other.result().token_ids
print("alive")
"""


def test_a_step_does_not_wait_for_itself(talker_path: Path) -> None:
    lives_through(READS_INSIDE, talker_path)


@pytest.mark.slow
def test_a_failed_stream_fails_as_often_as_it_is_asked(tiny: Gemma) -> None:
    stream = tiny.stream(
        create_kv_cache(tiny.config), "a", logits_processor=_refuse
    )
    raised = []
    for _ in range(2):
        with pytest.raises(Refused) as info:
            stream.result()
        raised.append(info.value)
        del info
        gc.collect()
    assert raised[0] is raised[1]


class Listener:
    """Has a half-read stream, whose processor is a method of it."""

    def __init__(self, gemma: Gemma, cache: KVCache, chat: bool) -> None:
        self.calls = 0
        keywords: Any = {"logits_processor": self.process, **NO_END}
        if chat:
            session = Session(gemma, cache=cache, options=keywords)
            self.stream: Any = session.stream("a", max_tokens=200)
        else:
            self.stream = gemma.stream(cache, "a", max_tokens=200, **keywords)
        next(self.stream)

    def process(self, token_ids: np.ndarray, logits: np.ndarray) -> None:
        self.calls += 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_whose_processor_has_it_is_let_go(
    tiny: Gemma, chat: bool
) -> None:
    cache = create_kv_cache(tiny.config)
    listener = Listener(tiny, cache, chat)
    assert listener.calls > 0
    references = weakref.ref(listener), weakref.ref(listener.stream)
    core = cache._core
    del listener, cache

    def are_gone() -> bool:
        gc.collect()
        return [reference() for reference in references] == [None] * 2

    wait_until(are_gone, pause_s=0.01)  # the processor may be running
    # What it was given is kept, and the conversation is free.
    again = KVCache(core)
    if chat:
        return
    wait_until(lambda: len(again) == 3)  # what was not read goes with its call
    tokens = again.tokens.tolist()
    assert same_bits(tiny, again, tokens)


def same_bits(gemma: Gemma, cache: KVCache, tokens: list[int]) -> bool:
    """Whether a cache of these tokens goes on as a new one does."""
    new = create_kv_cache(gemma.config)
    gemma.logits(new, tokens)
    return np.array_equal(gemma.logits(cache, [7]), gemma.logits(new, [7]))


def test_a_stream_keeps_its_model_alive(tiny_path: Path) -> None:
    cache = create_kv_cache(Gemma.load(tiny_path).config)
    stream = Gemma.load(tiny_path).stream(cache, "a", max_tokens=30, **NO_END)
    gc.collect()
    assert len(list(stream)) == 30
    assert stream.result().finish_reason == "length"


# ---- What is closed ----


def test_a_closed_cache(tiny: Gemma) -> None:
    with create_kv_cache(tiny.config) as cache:
        tiny.generate(cache, "a", max_tokens=2)
        layer = cache.layers[0]
        assert not cache.closed
    assert cache.closed
    cache.close()
    assert repr(cache) == "<KVCache, closed>"
    uses: list[Any] = [
        lambda: len(cache),
        lambda: cache.tokens,
        lambda: cache.nbytes,
        lambda: cache.fork(),
        lambda: cache.truncate(0),
        lambda: cache.reset(),
        lambda: cache.to_bytes(),
        lambda: cache.layers,
        lambda: layer.keys,
        lambda: tiny.generate(cache, "a"),
        lambda: tiny.generate(cache, [1], n=2),
        lambda: tiny.stream(cache, "a"),
        lambda: tiny.logits(cache, [1]),
        lambda: tiny.score([1], [[2]], cache=cache),
        lambda: tiny.chat([{"role": "nobody"}], cache=cache),
        lambda: tiny.chat([{"role": "nobody"}], cache=cache, stream=True),
        lambda: Session(tiny, cache=cache),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="cache: closed"):
            use()


def test_a_cache_closed_while_it_is_used(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    stream = tiny.stream(cache, "a", max_tokens=20, **NO_END)
    next(stream)
    cache.close()
    assert len(list(stream)) == 19


def test_a_reply_does_not_open_a_cache_again(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    talk = [{"role": "user", "content": "a"}]
    stream = tiny.chat(talk, stream=True, cache=cache, max_tokens=3, **NO_END)
    next(stream)
    cache.close()
    assert stream.result().usage.completion_tokens == 3
    assert cache.closed
    session = Session(tiny)
    stream = session.stream("a", max_tokens=3, **NO_END)
    next(stream)
    session.cache.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="cache: closed"):
            stream.result()
    assert session.cache.closed and session.messages == []


def test_a_closed_model(tiny_path: Path, tiny: Gemma) -> None:
    with Gemma.load(tiny_path) as gemma:
        cache = create_kv_cache(gemma.config)
        gemma.generate(cache, "a", max_tokens=3)
        session = said(Session(gemma), "one")
        stream = gemma.stream(cache.fork(), "a", max_tokens=300, **NO_END)
        next(stream)
    assert gemma.closed
    gemma.close()
    assert "closed" in repr(gemma)
    list(stream)
    assert stream.result().finish_reason == "cancelled"
    before = cache.tokens.tolist()
    uses: list[Any] = [
        lambda: gemma.generate(cache, "a"),
        lambda: gemma.generate(cache, "a", n=2),
        lambda: gemma.generate_batch([cache], ["a"]),
        lambda: gemma.stream(cache, "a"),
        lambda: gemma.logits(cache, [1]),
        lambda: gemma.fingerprint,
        lambda: gemma.threads,
        lambda: session.send("two"),
        lambda: session.stream("two"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="gemma: closed"):
            use()
    assert cache.tokens.tolist() == before and session.turns == 1
    assert gemma.config.hidden_size == tiny_gguf.HIDDEN
    assert len(create_kv_cache(gemma)) == len(gemma.new_cache()) == 0
    # The conversation goes on with the same weights elsewhere.
    tiny.generate(cache, "a", max_tokens=1)
    again = Session.from_bytes(session.to_bytes(), tiny)
    again.send("two", max_tokens=1)


@pytest.mark.slow
def test_closing_a_model_frees_its_own_prefix_cache(tiny_path: Path) -> None:
    """It stayed for as long as the object, up to 1 GiB that nothing found."""
    pool = BlockPool()
    own = Gemma.load(tiny_path)
    own.generate(create_kv_cache(own, pool=pool), "ab" * 90, max_tokens=3)
    assert pool.used_bytes > 0
    own.close()
    gc.collect()
    assert pool.used_bytes == 0
    with pytest.raises(ValueError, match="gemma: closed"):
        _ = own.prefix_cache
    # One that was given is the caller's, and stays.
    shared = PrefixCache(ram="16MiB")
    other = Gemma.load(tiny_path, prefix_cache=shared)
    other.generate(create_kv_cache(other, pool=pool), "ab" * 90, max_tokens=3)
    other.close()
    gc.collect()
    assert pool.used_bytes > 0
    shared.close()


def test_a_closed_session(tiny: Gemma) -> None:
    with said(Session(tiny), "one") as session:
        stream = session.stream("two", max_tokens=300, **NO_END)
        shown = [next(stream).text for _ in range(3)]
        cache = session.cache
    assert cache.closed
    session.close()
    assert stream.result().finish_reason == "cancelled"
    assert session.turns == 2
    assert session.messages[-1].content.startswith("".join(shown))
    uses: list[Any] = [
        lambda: session.send("a"),
        lambda: session.stream("a"),
        lambda: session.undo(),
        lambda: session.goto(0),
        lambda: session.fork(),
        lambda: session.to_bytes(),
        lambda: session.stats,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        session.system = "a"
    # What was said is still there to be taken elsewhere.
    other = Session(tiny, messages=session.messages)
    assert other.messages == session.messages


def test_closing_waits_for_a_call_of_another_thread(tiny: Gemma) -> None:
    session = said(Session(tiny), "one")
    started = threading.Event()
    found: list[int] = []

    def work() -> None:
        reply = session.send(
            "two",
            max_tokens=100,
            progress=lambda done, total: started.set(),
            **NO_END,
        )
        found.append(len(reply.token_ids))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    session.close()
    thread.join(60)
    assert found == [100] and session.turns == 2


# ---- Several models, asyncio and threads together ----


def test_two_models_do_not_mix(tiny: Gemma) -> None:
    other = Gemma.from_tensors(
        tiny.config, tiny_gguf.tensors(seed=5), tiny.tokenizer
    )

    def talk(gemma: Gemma, i: int) -> list[Message]:
        session = Session(gemma, f"system {i}")
        for turn in range(3):
            session.send(f"turn {turn}", max_tokens=10, seed=i, **NO_END)
        return session.messages

    pairs = [(gemma, i) for gemma in (tiny, other) for i in range(3)]
    expected = [talk(*pair) for pair in pairs]
    assert expected[0] != expected[3]

    async def main() -> list[list[Message]]:
        calls = [asyncio.to_thread(talk, *pair) for pair in pairs]
        return await asyncio.gather(*calls)

    assert asyncio.run(main()) == expected


def test_async_streams_of_many_caches(tiny: Gemma) -> None:
    def reply(cache: KVCache, seed: int) -> Any:
        return tiny.stream(
            cache, "the", max_tokens=12, seed=seed, **NO_END
        )

    expected = []
    for seed in range(8):
        stream = reply(create_kv_cache(tiny.config), seed)
        expected.append([(p.token_id, p.logprob) for p in stream])

    async def read(seed: int) -> list[tuple[int, float]]:
        with create_kv_cache(tiny.config) as cache:
            return [
                (p.token_id, p.logprob) async for p in reply(cache, seed)
            ]

    async def main() -> Any:
        return await asyncio.gather(*map(read, range(8)))

    assert asyncio.run(main()) == expected


def test_samples_by_fork_have_their_own_memory(tiny: Gemma) -> None:
    with create_kv_cache(tiny.config) as cache:
        prompt = "the " * 80
        samples = tiny.generate(
            cache, prompt, n=3, max_tokens=20, seed=1, **NO_END
        )
        for i, sample in enumerate(samples):
            own = sample.cache
            assert own is not None and own.shared_nbytes > 0
            assert own.tokens[len(cache) :].tolist() == sample.token_ids
            alone = create_kv_cache(tiny.config)
            expected = tiny.generate(
                alone, prompt, max_tokens=20, seed=1 + i, **NO_END
            )
            assert expected.token_ids == sample.token_ids
            assert np.array_equal(expected.logprobs, sample.logprobs)
        whole = cache.shared_nbytes
        del samples, sample, own
        gc.collect()
        assert cache.shared_nbytes == 0 and cache.nbytes >= whole


def test_a_model_is_its_own_copy_and_is_not_pickled(tiny: Gemma) -> None:
    assert copy.copy(tiny) is copy.deepcopy(tiny) is tiny
    for thing in (tiny, Session(tiny)):
        with pytest.raises(GemmaKVError, match="persistent_id"):
            pickle.dumps(thing)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_has_no_copies(
    tiny: Gemma, copied: Callable[[object], object]
) -> None:
    cache = create_kv_cache(tiny.config)
    with tiny.stream(cache, "ab", max_tokens=4) as stream:
        with pytest.raises(GemmaKVError, match="stream"):
            copied(stream)
        assert [p.token_id for p in stream] == stream.result().token_ids
    with (
        Session(tiny).stream("ab", max_tokens=4) as reply,
        pytest.raises(GemmaKVError, match="stream"),
    ):
        copied(reply)


NO_THREAD = """
import gemmakv, resource, sys
none = resource.RLIM_INFINITY
models = [gemmakv.Gemma.load(sys.argv[1], threads=1)]
# Less address space than a thread's stack. The C library may have kept one of a
# thread that has ended.
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, none))
models += [gemmakv.Gemma.load(sys.argv[1], threads=1) for _ in range(2)]
caches = [gemmakv.create_kv_cache(model.config) for model in models]
refused = set()
for model, cache in zip(models, caches):
    try:
        model.generate(cache, [2, 5], max_tokens=2)
    except OSError as error:
        refused.add(f"{error} {len(cache)}")
print(*refused)
resource.setrlimit(resource.RLIMIT_AS, (none, none))
for model, cache in zip(models, caches):
    cache.reset()
    model.generate(cache, [2, 5], max_tokens=0)
print(*map(len, caches))
"""


def test_a_system_without_another_thread(tiny_path: Path) -> None:
    ended = subprocess.run(
        ["sh", "-c", 'ulimit -s 1048576; exec "$@"', "sh",
         sys.executable, "-c", NO_THREAD, tiny_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = f"started 0 of 1 threads: {os.strerror(errno.EAGAIN)}"
    assert (ended.stdout, ended.stderr) == (
        f"[Errno {errno.EAGAIN}] {words} 0\n2 2 2\n", ""
    )
