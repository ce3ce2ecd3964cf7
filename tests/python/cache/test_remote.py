"""The remote tier: real servers, dead, slow and lying ones, any object."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import _core
from gemmakv.cache import _remote
from gemmakv.cache._remote import open_remote
from gemmakv.cache._remote_client import CHUNK_BYTES
from support import remote_tier as tier
from support.bad_files import assert_says
from support.waits import wait_until

SECRET = "a secret of this test's own"
# A server that never answers is waited for so long, and no longer: a call that
# returns at all has been given up.
TIMEOUT_S = 0.5
BIG = 9_000_001


class InADict:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get_many(self, keys: list[str]) -> list[Any]:
        return [self.values.get(key) for key in keys]

    def put_many(self, items: list[tuple[str, memoryview]]) -> None:
        self.values.update((key, bytes(data)) for key, data in items)

    def has_many(self, keys: list[str]) -> list[bool]:
        return [key in self.values for key in keys]


def assert_dead(store: _core.RemoteStore, number: int = 1) -> None:
    """No call gives anything, and once that is known none is made."""
    assert tier.load(store, number) is None
    assert tier.has(store, number) is False
    tier.put(store, number, 100)
    store.clear()
    assert store.stats()["hits"] == 0
    wait_until(lambda: store.call_stats()["reads_open"])
    before = store.call_stats()
    for _ in range(100):
        assert tier.load(store, number) is None
    after = store.call_stats()
    assert after["calls"] == before["calls"]
    assert after["refused"] - before["refused"] == 100


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[tier.Server]:
    pytest.importorskip("redis", reason="the client")
    server = tier.redis_server(tmp_path)
    yield server
    server.kill()


def redis_tier(
    port: int, options: str = "", timeout_s: float = TIMEOUT_S
) -> _core.RemoteStore:
    return open_remote(
        f"redis://127.0.0.1:{port}/2{options}", SECRET, timeout_s=timeout_s
    )


@pytest.fixture(scope="module")
def s3_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tier.Server]:
    pytest.importorskip("obstore", reason="the client")
    server = tier.s3_server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "*",
    }.items():
        monkeypatch.setenv(name, value)


def make_bucket(server: tier.Server, name: str) -> None:
    boto3 = pytest.importorskip("boto3", reason="moto brings it")
    boto3.client("s3").create_bucket(Bucket=name)


def s3_tier(bucket: str, timeout_s: float = TIMEOUT_S) -> _core.RemoteStore:
    return open_remote(f"s3://{bucket}/some/where", SECRET, timeout_s=timeout_s)


def check_contract(store: _core.RemoteStore) -> None:
    sizes = [1, 200, 4 << 20, (4 << 20) - 56, (4 << 20) - 55, BIG]
    for number, size in enumerate(sizes):
        assert not tier.has(store, number)
        assert tier.load(store, number) is None
        tier.put(store, number, size, salt=0)
        assert tier.has(store, number)
        assert tier.load(store, number) == tier.content(number, size)
    keys = [tier.key(number) for number in range(40)]
    loaded = _core._store_load(store, keys)
    assert loaded[: len(sizes)] == [
        tier.content(number, size) for number, size in enumerate(sizes)
    ]
    assert loaded[len(sizes) :] == [None] * (40 - len(sizes))
    assert _core._store_has(store, keys) == [n < len(sizes) for n in range(40)]
    _core._store_remove(store, [tier.key(5), tier.key(39)])
    assert not tier.has(store, 5) and tier.has(store, 4)
    tier.put(store, 50, 1000, salt=9)
    _core._store_clear_salt(store, tier.key(0, 9)[4])
    assert not tier.has(store, 50, 9) and tier.has(store, 4)
    store.clear()
    assert not any(_core._store_has(store, keys))
    store.flush()
    assert store.tier == "remote"
    stats = store.stats()
    assert stats["writes"] == len(sizes) + 1
    assert stats["hits"] == 2 * len(sizes)
    assert stats["damaged"] == stats["failed_writes"] == 0
    calls = store.call_stats()
    assert calls["failures"] == calls["timeouts"] == calls["opened"] == 0


@pytest.mark.slow
def test_redis_keeps_what_is_put(redis_server: tier.Server) -> None:
    check_contract(
        open_remote(
            f"redis://127.0.0.1:{redis_server.port}/2", SECRET, timeout_s=20
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("url", ["memory:///", "file://{folder}/objects"])
def test_objects_keep_what_is_put(url: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the client")
    check_contract(
        open_remote(url.format(folder=tmp_path), SECRET, timeout_s=20)
    )


@pytest.mark.slow
def test_s3_keeps_what_is_put(
    s3_server: tier.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, s3_server.port)
    make_bucket(s3_server, "contract")
    check_contract(s3_tier("contract", 20))


def test_redis_values_expire_unless_they_are_used(
    redis_server: tier.Server,
) -> None:
    import redis

    store = redis_tier(redis_server.port, "?ttl=100", 20)
    tier.put(store, 1, 5_000_000)
    client = redis.Redis(port=redis_server.port, db=2)
    keys = client.keys("gkv1:*")
    assert len(keys) == 2
    assert all(60 < client.ttl(key) <= 100 for key in keys)
    for key in keys:
        client.expire(key, 50)
    assert tier.load(store, 1) is not None
    assert all(60 < client.ttl(key) <= 100 for key in keys)
    for_ever = redis_tier(redis_server.port, "?ttl=0", 20)
    tier.put(for_ever, 2, 100)
    assert [client.ttl(key) for key in set(client.keys("*")) - set(keys)] == [
        -1
    ]


@pytest.mark.slow
def test_redis_killed_and_back(redis_server: tier.Server) -> None:
    patient = redis_tier(redis_server.port, timeout_s=20)
    tier.put(patient, 1, 1000)
    assert tier.load(patient, 1) == tier.content(1, 1000)
    # A dead server refuses at once, and a large value may take its time.
    store = redis_tier(redis_server.port, timeout_s=20)
    wait_until(lambda: tier.load(store, 1) == tier.content(1, 1000))
    redis_server.kill()
    for _ in range(5):
        assert tier.load(store, 1) is None
        tier.put(store, 2, 1000)
    # A late call is judged when its own step is overdue.
    wait_until(lambda: store.call_stats()["reads_open"])

    def refused() -> bool:
        """Also where the first call came too late for its answer."""
        assert tier.load(store, 1) is None
        return "Connection" in store.call_stats()["last_error"]

    wait_until(refused)
    redis_server.start()

    def works() -> bool:
        tier.put(store, 3, BIG)
        return tier.load(store, 3) == tier.content(3, BIG)

    wait_until(works)


def test_redis_paused_and_back(redis_server: tier.Server) -> None:
    tier.put(redis_tier(redis_server.port, timeout_s=20), 1, 1000)
    store = redis_tier(redis_server.port)
    with redis_server.paused():
        for _ in range(3):
            assert tier.load(store, 1) is None
            tier.put(store, 2, BIG)
            assert tier.has(store, 1) is False
        assert store.call_stats()["running"] <= 8
    wait_until(lambda: tier.load(store, 1) == tier.content(1, 1000))


def test_redis_killed_at_any_moment(redis_server: tier.Server) -> None:
    """Whatever is given is right."""
    store = redis_tier(redis_server.port)
    for turn in range(4):
        killer = threading.Timer(0.02 * turn, redis_server.kill)
        killer.start()
        for number in range(6):
            tier.put(store, number, 1_500_000 * number + 10)
            found = tier.load(store, number)
            assert found in (
                None,
                tier.content(number, 1_500_000 * number + 10),
            )
        killer.join()
        redis_server.start()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_redis_full(tmp_path: Path, policy: str) -> None:
    pytest.importorskip("redis", reason="the client")
    server = tier.redis_server(
        tmp_path, "--maxmemory", "22mb", "--maxmemory-policy", policy
    )
    try:
        store = open_remote(
            f"redis://127.0.0.1:{server.port}", SECRET, timeout_s=20
        )
        size = 5_000_000
        for number in range(12):
            tier.put(store, number, size)
        found = [tier.load(store, number) for number in range(12)]
        for number, data in enumerate(found):
            assert data in (None, tier.content(number, size))
        whole = sum(data is not None for data in found)
        assert whole < 12
        calls = store.call_stats()
        if policy == "noeviction":
            assert whole >= 1
            assert "maxmemory" in calls["last_error"] and calls["writes_open"]
            assert not calls["reads_open"]
            assert store.stats()["failed_writes"] > 0
        else:
            assert calls["failures"] == 0
            # Half of a value was evicted: it is written as a whole again. What
            # goes for it is the oldest of a few by a clock of seconds, which
            # may be a part of it, and a part of each of the twelve.
            for _ in range(50):
                tier.put(store, 0, size)
                again = tier.load(store, 0)
                if again is not None:
                    break
            assert again == tier.content(0, size)
    finally:
        server.kill()


@pytest.mark.parametrize("scripts", [True, False])
def test_redis_is_asked_for_many(
    redis_server: tier.Server, scripts: bool
) -> None:
    """One script tells what is there; without the right to it, commands do."""
    import redis

    client = redis.Redis(port=redis_server.port, db=2)
    client.execute_command(
        "ACL", "SETUSER", "user", "on", ">word", "~*", "+@all",
        *(() if scripts else ("-eval",)),
    )  # fmt: skip
    store = open_remote(
        f"redis://user:word@127.0.0.1:{redis_server.port}/2", SECRET,
        timeout_s=20,
    )  # fmt: skip
    for number in range(0, 12, 3):
        tier.put(store, number, 1000)
    for _ in range(2):
        found = _core._store_has(store, [tier.key(n) for n in range(12)])
        assert list(found) == [number % 3 == 0 for number in range(12)]
    assert store.call_stats()["failures"] == 0
    calls = client.info("commandstats").get("cmdstat_eval", {})
    assert (calls.get("calls", 0) > 0) is scripts


def test_redis_values_that_are_none(redis_server: tier.Server) -> None:
    import redis

    store = redis_tier(redis_server.port, timeout_s=20)
    client = redis.Redis(port=redis_server.port, db=2)
    tier.put(store, 1, 5_000_000)
    keys = sorted(client.keys("gkv1:*"))
    for turn, key in enumerate(keys * 2):
        if turn < 2:
            client.delete(key)
            client.lpush(key, "a list")
        else:
            client.set(key, os.urandom(6_000_000))
        assert tier.load(store, 1) is None
        tier.put(store, 1, 5_000_000)
        assert tier.load(store, 1) == tier.content(1, 5_000_000)
    assert store.stats()["damaged"] == 4
    assert store.call_stats()["failures"] == 0


@pytest.mark.parametrize(
    "behave", tier.REDIS_IMPOSTORS, ids=lambda behave: behave.__name__
)
def test_what_is_no_redis_is_dead(behave: Callable[..., None]) -> None:
    pytest.importorskip("redis", reason="the client")
    impostor = tier.Impostor(behave)
    try:
        assert_dead(redis_tier(impostor.port))
    finally:
        impostor.close()


@pytest.mark.slow
def test_s3_paused_dead_and_without_objects(
    s3_server: tier.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore = pytest.importorskip("obstore", reason="the client")
    use_s3(monkeypatch, s3_server.port)
    make_bucket(s3_server, "bucket")
    patient = s3_tier("bucket", 20)
    tier.put(patient, 1, BIG)
    hasty = s3_tier("bucket")
    with s3_server.paused():
        assert_dead(hasty)
    wait_until(lambda: tier.has(hasty, 1))
    plain = obstore.store.from_url("s3://bucket")
    paths = [o["path"] for page in obstore.list(plain) for o in page]
    assert len(paths) == 3
    assert paths[0].startswith("some/where/gkv1/")
    obstore.delete(plain, max(paths))
    assert tier.load(patient, 1) is None
    tier.put(patient, 1, BIG)
    assert tier.load(patient, 1) == tier.content(1, BIG)
    obstore.put(plain, min(paths), b"x" * 5_000_000)
    assert tier.load(patient, 1) is None
    use_s3(monkeypatch, tier.free_port())  # where nobody listens
    assert_dead(s3_tier("bucket"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "behave", tier.HTTP_IMPOSTORS, ids=lambda behave: behave.__name__
)
def test_what_is_no_s3_gives_nothing(
    behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the client")
    impostor = tier.Impostor(behave)
    try:
        use_s3(monkeypatch, impostor.port)
        store = s3_tier("bucket")
        for _ in range(3):
            assert tier.load(store, 1) is None
            tier.put(store, 1, 100)
        assert store.stats()["hits"] == 0
        # A late call is judged when its own step is overdue.
        wait_until(
            lambda: (
                store.call_stats()["reads_open"] or store.stats()["damaged"] > 0
            )
        )
    finally:
        impostor.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote tiers of prefix caches give no call up."""
    monkeypatch.setattr(
        _remote, "open_remote", partial(open_remote, timeout_s=600)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_clear_says_what_stays(tiny_path: Path) -> None:
    """Of a remote store: one without the method, one that fails, one that
    does not answer."""
    gone = threading.Event()

    class Fails(InADict):
        def delete_some(self, prefix: str) -> bool:
            raise OSError("no route")

    class Waits(InADict):
        def delete_some(self, prefix: str) -> bool:
            return not gone.wait(600)

    late = "in time"
    for client, timeout_s, why in (
        (InADict(), 60, "delete_some"),
        (Fails(), 60, "failed"),
        (Waits(), 0.2, late),
    ):
        with gemmakv.PrefixCache(ram="8MiB", remote=client) as prefix:
            gemma = gemmakv.Gemma.load(tiny_path, prefix_cache=prefix)
            cache = gemmakv.create_kv_cache(gemma.config)
            gemma.generate(cache, "one two three " * 20, max_tokens=1)
            assert prefix.flush()
            for name in ("remote", None):
                with pytest.raises(gemmakv.GemmaKVError) as found:
                    prefix.clear(name, timeout=timeout_s)
                assert_says(found.value, "remote", why)
            assert prefix.stats().bytes["ram"] == 0
            with pytest.raises(ValueError, match="timeout"):
                prefix.clear(timeout=-1)
            if why == late:
                gone.set()


class Odd(InADict):
    """Gives what it is told to."""

    answer: Any = None

    def get_many(self, keys: list[str]) -> Any:
        return self.answer

    has_many = get_many


@pytest.mark.parametrize(
    "answer, says",
    [
        (None, ("get_many", "NoneType", "expected a list")),
        ([], ("get_many", "0 items", "expected 1")),
        ([None, None], ("get_many", "2 items", "expected 1")),
        ("a", ("get_many", "str", "expected a list")),
        (b"a", ("get_many", "bytes", "expected a list")),
        (["a"], ("TypeError", "'str'")),
        ([5], ("TypeError", "'int'")),
        (iter([b""]), ("get_many", "list_iterator", "expected a list")),
        ([memoryview(b"abcd")[::2]], ("BufferError", "C-contiguous")),
    ],
)
def test_an_object_of_wrong_answers(
    answer: Any, says: tuple[str, ...]
) -> None:
    client = Odd()
    client.answer = answer
    store = open_remote(client, SECRET, timeout_s=20)
    assert tier.load(store, 1) is None
    last_error = store.call_stats()["last_error"]
    assert all(word in last_error for word in says), last_error
    assert store.call_stats()["failures"] == 1
    # The same as an answer of has_many: no bool.
    other = open_remote(client, SECRET, timeout_s=20)
    assert tier.has(other, 1) is False
    assert other.call_stats()["failures"] == 1


def test_an_object_that_raises() -> None:
    class Raises(InADict):
        def get_many(self, keys: list[str]) -> list[Any]:
            raise KeyboardInterrupt("not\nnow")

    store = open_remote(Raises(), SECRET, timeout_s=20)
    tier.put(store, 1, 100)
    assert tier.load(store, 1) is None
    assert store.call_stats()["last_error"] == "KeyboardInterrupt: not"


def test_any_buffer_will_do() -> None:
    class Buffers(InADict):
        def get_many(self, keys: list[str]) -> list[Any]:
            return [
                kind(self.values[key])
                for kind, key in zip(self.kinds, keys, strict=True)
            ]

        kinds: tuple[Any, ...] = ()

    client = Buffers()
    store = open_remote(client, SECRET, timeout_s=20)
    tier.put(store, 1, 1000)
    for kind in (bytes, bytearray, memoryview):
        client.kinds = (kind,)
        assert tier.load(store, 1) == tier.content(1, 1000)


def test_views_outlive_the_call() -> None:
    kept: list[tuple[str, memoryview]] = []

    class Keeps(InADict):
        def put_many(self, items: list[tuple[str, memoryview]]) -> None:
            kept.extend(items)

    store = open_remote(Keeps(), SECRET, timeout_s=20)
    tier.put(store, 1, BIG)
    del store
    data = b"".join(bytes(view) for _, view in [kept[-1], *kept[:-1]])
    assert data[56:] == tier.content(1, BIG)
    assert all(view.readonly for _, view in kept)


@pytest.mark.slow
def test_an_object_that_hangs() -> None:
    gate = threading.Event()

    class Hangs(InADict):
        hung = 0

        def get_many(self, keys: list[str]) -> list[Any]:
            self.hung += 1
            gate.wait()
            return super().get_many(keys)

        has_many = get_many

    client = Hangs()
    store = open_remote(client, SECRET, timeout_s=0.2)
    client.values["x"] = b""

    def asked_again() -> bool:
        """Says whether a probe hangs, too."""
        assert tier.load(store, 1) is None
        return client.hung >= 3

    wait_until(asked_again)
    for _ in range(100):
        assert tier.load(store, 1) is None
    assert client.hung <= 8
    stats = store.call_stats()
    assert stats["calls"] <= 8
    assert stats["refused"] >= 100 - 8
    gate.set()
    wait_until(lambda: store.call_stats()["running"] == 0)


def test_a_dropped_tier_lets_go_of_its_object() -> None:
    import gc
    import weakref

    client = InADict()
    gone = weakref.ref(client)
    store = open_remote(client, SECRET, timeout_s=20)
    tier.put(store, 1, 100)
    del client, store
    gc.collect()
    wait_until(lambda: gone() is None)


@pytest.mark.usefixtures("patient")
def test_a_store_that_knows_its_prefix_cache(tiny_path: Path) -> None:
    """By a weak reference, as the protocol says."""
    import gc
    import weakref

    class Knows(InADict):
        prefix: Any = None

    client = Knows()
    prefix = gemmakv.PrefixCache(ram="8MiB", remote=client)
    client.prefix = weakref.ref(prefix)
    gemma = gemmakv.Gemma.load(tiny_path, prefix_cache=prefix)
    cache = gemmakv.create_kv_cache(gemma.config)
    gemma.generate(cache, "one two three " * 20, max_tokens=1)
    assert prefix.flush() and client.values
    assert client.prefix() is prefix
    gone = weakref.ref(client), weakref.ref(prefix)
    del client, prefix, gemma, cache

    def collected() -> bool:
        gc.collect()
        return [one() for one in gone] == [None, None]

    wait_until(collected)


# Each copy of the process falls through to the end of the program.
EXITS = """
import itertools, os, sys, threading, time
sys.path[:0] = {path!r}
from gemmakv.cache._remote import open_remote
from support import remote_tier as tier
from support.bad_files import assert_says
class Slow:
    def __init__(self, steps, step_s):
        self.steps, self.step_s = steps, step_s
    def wait(self, keys):
        for _ in range(self.steps):
            time.sleep(self.step_s)  # that slow it is
        return [None] * len(keys)
    get_many = has_many = put_many = wait
waits = ((10**9, 0.0005), (1, 30), (1, 0.1))
lasts = ("", "del store", "raise SystemExit(0)")
for wait, last, _ in itertools.product(waits, lasts, range(2)):
    pid = os.fork()
    if pid == 0:
        break
    _, status = os.waitpid(pid, 0)
    if status != 0:
        print(wait, last, status, flush=True)
else:
    print("all", flush=True)
    os._exit(0)
store = open_remote(Slow(*wait), timeout_s=0.05)
for _ in range(2):
    threading.Thread(target=lambda: tier.load(store, 1), daemon=True).start()
tier.load(store, 1)
exec(last)
"""


@pytest.mark.slow
def test_the_interpreter_ends_with_calls_in_flight() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS.format(path=sys.path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("all\n", "")


@pytest.mark.parametrize(
    "remote, secret, says",
    [
        ("http://host", None, "expected a URL that begins with one of redis"),
        ("host:6379", None, "found no scheme"),
        ("", None, "found no scheme"),
        ("redis://", None, "found no host"),
        ("redis:///0", None, "found no host"),
        ("redis://host:x/0", None, "Port could not be cast to integer"),
        ("redis://host:70000/0", None, "Port out of range"),
        ("redis://host:0", None, "port 0"),
        ("redis://host/one", None, "db of the URL: expected a number"),
        ("redis://host/-1", None, "db of the URL: expected a number"),
        ("redis://host?ttl=soon", None, "ttl of the URL: expected seconds"),
        ("redis://host?tll=5", None, "the option 'tll', expected ttl"),
        ("redis://host#x", None, "a fragment"),
        ("unix://", None, "expected unix:///path"),
        ("s3://", None, "found no bucket"),
        ("s3:///prefix", None, "found no bucket"),
        ("s3://bucket?x=1", None, "has no options"),
        ("file://", None, "expected file:///path"),
        ("file://host/x", None, "expected file:///path"),
        (5, None, "found a int without get_many"),
        (object(), None, "found a object without get_many"),
        (InADict(), 5, "remote_secret: expected a str or bytes, found a int"),
        (InADict(), "", "expected at least 16 bytes, found 0"),
        (InADict(), b"short", "expected at least 16 bytes, found 5"),
    ],
)
def test_what_cannot_be_meant(remote: Any, secret: Any, says: str) -> None:
    with pytest.raises(ValueError, match="^remote") as raised:
        open_remote(remote, secret)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_error_shows_a_password() -> None:
    for url in (
        "reddis://user:hunter2@host",
        "redis://user:hunter2@host:x",
        "redis://user:hunter2@host:0",
        "redis://user:hunter2@host/db",
        "redis://user:hunter2@",
        "s3://user:hunter2@?x=1",
    ):
        with pytest.raises(ValueError) as raised:
            open_remote(url)
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), 4000])
def test_timeouts_that_are_none(timeout_s: float) -> None:
    for remote in (InADict(), "redis://host"):
        with pytest.raises(ValueError, match="^timeout_s"):
            open_remote(remote, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "url, package, extra",
    [("redis://host", "redis", "redis"), ("s3://b", "obstore", "objects")],
)
def test_a_missing_package_is_named(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as raised:
        open_remote(url)
    assert_says(raised.value, "remote", package, f'"gemmakv[{extra}]"')


def test_objects_of_the_protocol() -> None:
    assert isinstance(InADict(), gemmakv.RemoteStore)
    assert not isinstance({}, gemmakv.RemoteStore)
    assert CHUNK_BYTES == 4 << 20
