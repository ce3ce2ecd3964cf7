"""Calls by code that a step runs, and by a child of `fork` during a step.

Each in a process of its own, whose end is awaited for a bounded time.
"""

from __future__ import annotations

from pathlib import Path

from support.forks import output_of

PRELUDE = """
import asyncio, os, signal, sys, threading
import numpy as np
from gemmakv import Gemma, GemmaKVError, KVCache, create_kv_cache

def load():
    return Gemma.load(sys.argv[1], threads=2, prefix_cache=False)

gemma = load()
PROMPT = [2, 5, 7]
LENGTH = dict(ignore_eos=True)

def cache():
    return create_kv_cache(gemma)

def tried(call):
    try:
        call()
    except GemmaKVError as error:
        return str(error)
    return "done"

def on_both_threads(gemma, call):
    # The two rows are on the scheduler's thread and on a worker: neither goes
    # on without the other one.
    together = threading.Barrier(2, timeout=60)
    caches = [cache(), cache()]
    threads = set()
    def of_row(own):
        def process(token_ids, logits):
            threads.add(threading.get_ident())
            together.wait()
            call(own)
        return process
    gemma.generate_batch(caches, [PROMPT] * 2, max_tokens=1, **LENGTH,
                         logits_processor=[of_row(one) for one in caches])
    assert len(threads) == 2
"""


def run(source: str, path: Path) -> None:
    output_of(PRELUDE + source, path)


OWN_MODEL = """
stream = gemma.stream(cache(), PROMPT, max_tokens=40, **LENGTH)
next(stream)
used = cache()
other = gemma.stream(used, PROMPT, max_tokens=40, **LENGTH)
next(other)

async def read():
    async for _ in stream:
        pass

found = []
def call(own):
    for what in (
        lambda: gemma.generate(cache(), PROMPT, max_tokens=1),
        lambda: gemma.generate(own, PROMPT, max_tokens=1),
        lambda: gemma.generate_batch([cache(), cache()], [PROMPT] * 2),
        lambda: gemma.prefill(cache(), PROMPT),
        lambda: gemma.stream(cache(), PROMPT),
        lambda: gemma.logits(cache(), PROMPT),
        lambda: gemma.embed([PROMPT], pooling="mean"),
        lambda: asyncio.run(gemma.agenerate(cache(), PROMPT, max_tokens=1)),
        lambda: asyncio.run(read()),
        lambda: asyncio.run(stream.acancel()),
        lambda: list(stream),
        stream.result,
        lambda: own.truncate(0),
        lambda: own.reset(),
        lambda: own.checkpoint(),
        lambda: used.truncate(0),
    ):
        found.append(tried(what))

on_both_threads(gemma, call)
assert len(found) == 32, found
assert all("inside" in words for words in found), found
other.cancel()
assert len(stream.result().token_ids) == 40
"""


def test_what_waits_for_its_own_step_is_told_so(tiny_path: Path) -> None:
    run(OWN_MODEL, tiny_path)


NO_WAIT = """
idle = cache()
gemma.generate(idle, PROMPT, max_tokens=2, **LENGTH)
done = []
def call(own):
    assert len(own) == 3 and own.tokens.tolist() == PROMPT
    assert len(own.fork()) == 3
    assert len(KVCache.from_bytes(own.to_bytes())) == 3
    own.nbytes, gemma.preemptions
    assert len(idle.fork()) == 5
    stream.cancel()
    done.append(own)

stream = gemma.stream(cache(), PROMPT, max_tokens=40, **LENGTH)
on_both_threads(gemma, call)
assert len(done) == 2
idle.truncate(2)
"""


def test_what_does_not_wait_works_inside_a_step(tiny_path: Path) -> None:
    run(NO_WAIT, tiny_path)


ANOTHER_MODEL = """
another = load()
expected = another.generate(cache(), PROMPT, max_tokens=3, **LENGTH).token_ids
found = []
def call(own):
    keywords = dict(max_tokens=3, **LENGTH)
    found.append(another.generate(cache(), PROMPT, **keywords).token_ids)
    found.append([piece.token_id for piece in
                  another.stream(cache(), PROMPT, **keywords)])
    found.append(asyncio.run(another.agenerate(
        cache(), PROMPT, **keywords)).token_ids)
    assert another.logits(cache(), PROMPT).shape
    assert another.embed([PROMPT], pooling="last").shape

on_both_threads(gemma, call)
assert found == [expected] * 6, found
"""


def test_another_model_may_be_called_inside_a_step(tiny_path: Path) -> None:
    run(ANOTHER_MODEL, tiny_path)


CIRCLE = """
another = load()
async def read(stream):
    return [piece async for piece in stream]

ways = [
    lambda called: called.generate(cache(), PROMPT, max_tokens=1),
    lambda called: list(called.stream(cache(), PROMPT, max_tokens=5)),
    lambda called: asyncio.run(
        read(called.stream(cache(), PROMPT, max_tokens=5))),
    lambda called: asyncio.run(
        called.agenerate(cache(), PROMPT, max_tokens=1)),
]
for way in ways:
    together = threading.Barrier(2, timeout=60)
    found = []
    def process_with(called):
        def process(token_ids, logits):
            together.wait()
            found.append(tried(lambda: way(called)))
        return process
    def generate(model, called):
        model.generate(cache(), PROMPT, max_tokens=1, **LENGTH,
                       logits_processor=process_with(called))
    thread = threading.Thread(target=generate, args=(another, gemma))
    thread.start()
    generate(gemma, another)
    thread.join()
    found.sort()
    assert found[0] == "done" and "waits for the step" in found[1], found
"""


def test_steps_of_two_models_do_not_wait_for_each_other(
    tiny_path: Path,
) -> None:
    run(CIRCLE, tiny_path)


CLOSES = """
import gc
for how in ("closed", "dropped"):
    models = [load()]
    def call(own):
        last, models[:] = list(models), []
        if how == "closed":
            for model in last:
                model.close()
        del last
        gc.collect()
    on_both_threads(models[0], call)
"""


def test_a_model_may_be_closed_inside_a_step_of_a_batch(
    tiny_path: Path,
) -> None:
    run(CLOSES, tiny_path)


FORKS = """
def in_child(call):
    # What `call` returns in a child, None if that hangs.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            found = repr(call())
        except BaseException as error:
            found = repr(error)
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found or None

used = cache()
over = threading.Event()
def keep_at_it():
    while not over.is_set():
        gemma.generate(used, PROMPT, max_tokens=30, **LENGTH)
        used.truncate(0)

def look():
    length = len(used)
    assert length <= 33, length
    used.nbytes, used.checkpoints, gemma.preemptions
    assert len(used.fork()) == len(used.tokens) == length
    return "right"

thread = threading.Thread(target=keep_at_it)
thread.start()
try:
    for _ in range(20):
        found = in_child(look)
        assert found == "'right'", found
finally:
    over.set()
    thread.join()
"""


def test_a_child_reads_a_conversation_that_its_parent_uses(
    tiny_path: Path,
) -> None:
    run(FORKS, tiny_path)


FORKS_INSIDE = """
found = []
def process(token_ids, logits):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        length = 0
        try:
            made = gemma.generate(cache(), PROMPT, max_tokens=2, **LENGTH)
            length = len(made.token_ids)
        finally:
            os._exit(length)
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

gemma.generate(cache(), PROMPT, max_tokens=1, **LENGTH,
               logits_processor=process)
assert found == [2], found
"""


def test_a_child_of_a_step_may_use_the_model(tiny_path: Path) -> None:
    run(FORKS_INSIDE, tiny_path)
