"""What programs of users import and call goes on working.

The golden file has the public names and their parameters as they were when
people began to use them. A name may get more parameters, never fewer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache, Message, Session
from gemmakv.chat import store
from gemmakv.options import BatchOptions, GenerationOptions, Option, Options
from gemmakv.templates import GemmaTemplate, PlainTemplate, template_for
from support import tiny_gguf
from support.folders import GOLDEN
from support.public_names import UNKNOWN, describe

NAMES: dict[str, dict[str, Any]] = json.loads(
    (GOLDEN / "public_names.json").read_text()
)
TALK = [{"role": "user", "content": "ab"}]
PROMPT = [2, 17, 40]
SHORT: dict[str, Any] = {"max_tokens": 2}


# Those that take their first two arguments in both orders.
SWAPPED = ("gemmakv.Session.from_bytes", "gemmakv.Session.load")


def thing_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def listed() -> list[tuple[str, str]]:
    return [(module, name) for module, names in NAMES.items() for name in names]


def check_parameters(where: str, before: str, now: str) -> None:
    """Checks that calls which were right before are right now."""
    if before == UNKNOWN or now == UNKNOWN:
        return
    old, new = (Parameters(text) for text in (before, now))
    if where in SWAPPED:
        old.positional[:2] = reversed(old.positional[:2])
    if "*" not in new.rest:
        assert new.positional[: len(old.positional)] == old.positional, where
    if "**" not in new.rest:
        assert set(old.names) <= set(new.names), where
    assert new.required <= old.required, where
    assert old.rest <= new.rest, where


class Parameters:
    """Those of one function, as the golden file writes them."""

    def __init__(self, text: str) -> None:
        self.positional: list[str] = []
        self.names: list[str] = []
        self.required: set[str] = set()
        self.rest: set[str] = set()
        by_keyword = False
        for one in filter(None, text.split(", ")):
            name = one.lstrip("*").removesuffix("=")
            stars = one[: len(one) - len(one.lstrip("*"))]
            by_keyword = by_keyword or stars == "*"
            if stars:
                self.rest |= {stars} if name else set()
                continue
            self.names.append(name)
            if not by_keyword:
                self.positional.append(name)
            if not one.endswith("="):
                self.required.add(name)


@pytest.mark.parametrize(("module", "name"), listed())
def test_each_name_is_what_it_was(module: str, name: str) -> None:
    thing = thing_of(module, name)
    assert name in importlib.import_module(module).__all__
    before, now = NAMES[module][name], describe(thing)
    if isinstance(before, str):
        check_parameters(name, before, now)
    elif isinstance(before, dict):
        for member, parameters in before.items():
            where = f"{module}.{name}.{member}"
            assert member in now, where
            if parameters is not None:
                check_parameters(where, parameters, now[member])


@dataclasses.dataclass
class World:
    """What the calls are made with."""

    gemma: Gemma
    path: Path
    folder: Path

    def cache(self) -> KVCache:
        """Makes a conversation of some tokens."""
        cache = gemmakv.create_kv_cache(self.gemma.config, 64)
        self.gemma.prefill(cache, PROMPT)
        return cache

    def session(self, turns: int = 1) -> Session:
        """Makes a session of some turns."""
        session = Session(self.gemma, "cd", options=SHORT)
        for _ in range(turns):
            session.send("ab")
        return session

    def prefix(self) -> gemmakv.PrefixCache:
        return gemmakv.PrefixCache("1MiB")

    def kept(self) -> tuple[store.FolderStore, store.Record]:
        """Makes a store with one session, which is held."""
        number = len(list(self.folder.iterdir()))
        home = store.FolderStore(self.folder / f"store{number}")
        record = store.Record("a", messages=[])
        assert home.hold(record.id)
        home.write_record(record)
        return home, record


@pytest.fixture(scope="module")
def world(
    talker_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> World:
    gemma = Gemma.load(talker_path, threads=1, profile=True)
    return World(gemma, talker_path, tmp_path_factory.mktemp("yesterday"))


def filled(kind: type, *shape: int) -> Any:
    """Makes a padded cache with a token in it."""
    cache = kind(1, 4, 1, 2)
    one = np.ones((1, 1, 1, 2), np.float32)
    cache.prefill(one, one, np.ones((1, 1), np.int32))
    cache.update(one, one)
    return cache


def saver_of(world: World) -> store.Saver:
    home, _ = world.kept()
    return store.Saver(home)


def undeleted(world: World) -> Any:
    home, record = world.kept()
    home.delete(record.id)
    assert home.deleted()[0].id == record.id
    return home.undelete(record.id)


def unkept(world: World) -> tuple[Session, str]:
    record = store.Record("a", messages=world.session().messages)
    return store.from_store(
        world.gemma, record, None, lambda: Session(world.gemma)
    )


def saved(world: World, thing: Any) -> Path:
    path = world.folder / type(thing).__name__
    thing.save(path)
    return path


def closed(thing: Any) -> None:
    thing.close()
    thing.close()


async def streamed(awaited: Any, end: str) -> Any:
    stream = await awaited
    async for _ in stream:
        break
    return await getattr(stream, end)()


def part(name: str, *arguments: Any, of: str = "") -> Callable[[World], Any]:
    """Gives a call of a method of what the world makes."""
    return lambda w: getattr(getattr(w, of)(), name)(*arguments)


def piece_by_piece(name: str, *arguments: Any) -> Callable[[World], Any]:
    """Gives a call of a method of a stream, and of one of a session."""

    def call(world: World) -> Any:
        stream: Any = (
            world.session(0).stream("ab")
            if name.startswith("chat.")
            else world.gemma.stream(world.cache(), [17], **SHORT)
        )
        found = getattr(stream, name.removeprefix("chat."))(*arguments)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return call


def of_options(kind: type) -> Callable[[World], Any]:
    return lambda w: kind(max_tokens=3)["max_tokens"]


CALLS: dict[str, Callable[[World], Any]] = {
    "BlockPool": lambda w: gemmakv.BlockPool(bytes=1 << 20).used_bytes,
    "ChatStream.acancel": piece_by_piece("chat.acancel"),
    "ChatStream.cancel": piece_by_piece("chat.cancel"),
    "ChatStream.result": piece_by_piece("chat.result"),
    "Gemma.achat": lambda w: asyncio.run(w.gemma.achat(TALK, **SHORT)),
    "Gemma.aembed": lambda w: asyncio.run(
        w.gemma.aembed(["ab"], pooling="mean")
    ),
    "Gemma.agenerate": lambda w: asyncio.run(
        w.gemma.agenerate(w.cache(), "ab", **SHORT)
    ),
    "Gemma.apply_chat_template": lambda w: w.gemma.apply_chat_template(TALK),
    "Gemma.aprefill": lambda w: asyncio.run(w.gemma.aprefill(w.cache(), "ab")),
    "Gemma.astream": lambda w: asyncio.run(
        streamed(w.gemma.astream(w.cache(), "ab", **SHORT), "acancel")
    ),
    "Gemma.chat": lambda w: w.gemma.chat(TALK, cache=w.cache(), **SHORT).text,
    "Gemma.close": lambda w: closed(Gemma.load(w.path, threads=1)),
    "Gemma.count_tokens": lambda w: w.gemma.count_tokens("ab"),
    "Gemma.embed": lambda w: w.gemma.embed(["ab"], pooling="last"),
    "Gemma.from_tensors": lambda w: Gemma.from_tensors(
        w.gemma.config, tiny_gguf.tensors(), w.gemma.tokenizer, threads=1
    ),
    "Gemma.generate": lambda w: w.gemma.generate(w.cache(), "ab", n=2, **SHORT),
    "Gemma.generate_batch": lambda w: w.gemma.generate_batch(
        [w.cache(), w.cache()], ["ab", [17]], max_tokens=[1, 2]
    ),
    "Gemma.load": lambda w: Gemma.load(w.path, threads=1, prefix_cache=False),
    "Gemma.logits": lambda w: w.gemma.logits(w.cache(), [17], True),
    "Gemma.prefill": lambda w: w.gemma.prefill(w.cache(), "ab").usage,
    "Gemma.profile": lambda w: w.gemma.profile(),
    "Gemma.score": lambda w: w.gemma.score("ab", ["c", [17]], cache=w.cache()),
    "Gemma.stream": lambda w: list(
        w.gemma.stream(w.cache(), prompt="ab", **SHORT)
    ),
    "Gemma.with_salt": lambda w: w.gemma.with_salt("ab"),
    "Grammar": lambda w: gemmakv.Grammar("regex", "a"),
    "Grammar.json_schema": lambda w: gemmakv.Grammar.json_schema({}),
    "Grammar.lark": lambda w: gemmakv.Grammar.lark('start: "a"'),
    "Grammar.regex": lambda w: gemmakv.Grammar.regex("a"),
    "KVCache.checkpoint": part("checkpoint", of="cache"),
    "KVCache.close": lambda w: closed(w.cache()),
    "KVCache.fork": part("fork", of="cache"),
    "KVCache.from_bytes": lambda w: KVCache.from_bytes(
        w.cache().to_bytes(), w.gemma
    ),
    "KVCache.load": lambda w: KVCache.load(saved(w, w.cache()), w.gemma),
    "KVCache.reset": part("reset", of="cache"),
    "KVCache.save": lambda w: w.cache().save(io.BytesIO(), checkpoints=True),
    "KVCache.to_bytes": part("to_bytes", True, of="cache"),
    "KVCache.truncate": part("truncate", 1, of="cache"),
    "Message": lambda w: Message("user", "a", incomplete=False, name="b"),
    "Message.to_dict": lambda w: Message("user", "a").to_dict(),
    "ModelConfig": lambda w: gemmakv.ModelConfig(
        **w.gemma.config.arguments()
    ),
    "ModelConfig.arguments": lambda w: w.gemma.config.arguments(),
    "ModelConfig.from_family": lambda w: gemmakv.ModelConfig.from_family(
        "gemma3", hidden_size=8, num_layers=2, num_heads=2, kv_heads=1,
        head_dim=4, ffn_dim=8,
    ),
    "ModelConfig.from_gguf": lambda w: gemmakv.ModelConfig.from_gguf(w.path),
    "ModelConfig.from_name": lambda w: gemmakv.ModelConfig.from_name(
        gemmakv.ModelType.GEMMA3_270M.value
    ),
    "ModelConfig.json_keys": lambda w: gemmakv.ModelConfig.json_keys(),
    "ModelConfig.kv_bytes_at": lambda w: w.gemma.config.kv_bytes_at(9, "int8"),
    "ModelConfig.kv_bytes_per_token": lambda w: (
        w.gemma.config.kv_bytes_per_token()
    ),
    "ModelConfig.named": lambda w: w.gemma.config.named(),
    "ModelType": lambda w: gemmakv.ModelType("gemma3-270m"),
    "PackedWeights": lambda w: gemmakv.PackedWeights("memory"),
    "PrefixCache": lambda w: gemmakv.PrefixCache("1MiB", salt="ab"),
    "PrefixCache.clear": part("clear", "ram", of="prefix"),
    "PrefixCache.close": part("close", 1.0, of="prefix"),
    "PrefixCache.flush": part("flush", of="prefix"),
    "PrefixCache.stats": part("stats", of="prefix"),
    "PrefixStats.as_dict": lambda w: w.prefix().stats().as_dict(),
    "Segment": lambda w: gemmakv.Segment("a", special=True),
    "SentencePieceTokenizer": lambda w: pytest.raises(
        gemmakv.CorruptFile, gemmakv.SentencePieceTokenizer, b"no", "a"
    ),
    "Session": lambda w: Session(
        w.gemma, "cd", "error", template="plain", options={"top_k": 1}
    ).options,
    "Session.aclose": lambda w: asyncio.run(w.session().aclose()),
    "Session.afork": lambda w: asyncio.run(w.session().afork()),
    "Session.asend": lambda w: asyncio.run(w.session().asend("ab", **SHORT)),
    "Session.astream": lambda w: asyncio.run(
        streamed(w.session().astream("ab", **SHORT), "acancel")
    ),
    "Session.close": lambda w: closed(w.session()),
    "Session.fork": part("fork", of="session"),
    "Session.from_bytes": lambda w: Session.from_bytes(
        w.gemma, w.session().to_bytes(), rebuild=True
    ),
    "Session.goto": part("goto", 0, of="session"),
    "Session.load": lambda w: Session.load(w.gemma, saved(w, w.session())),
    "Session.save": lambda w: w.session().save(io.BytesIO()),
    "Session.send": part("send", "ab", of="session"),
    "Session.stream": lambda w: list(w.session().stream("ab", **SHORT)),
    "Session.to_bytes": part("to_bytes", of="session"),
    "Session.undo": part("undo", 1, of="session"),
    "StepProfile.phases": lambda w: dict(w.gemma.profile().phases()),
    "Stream.acancel": piece_by_piece("acancel"),
    "Stream.cancel": piece_by_piece("cancel"),
    "Stream.result": piece_by_piece("result"),
    "Tokenizer.decode": lambda w: w.gemma.tokenizer.decode(PROMPT),
    "Tokenizer.decode_bytes": lambda w: w.gemma.tokenizer.decode_bytes([17]),
    "Tokenizer.encode": lambda w: w.gemma.tokenizer.encode("ab", True),
    "Tokenizer.id_of": lambda w: w.gemma.tokenizer.id_of("<bos>"),
    "Tokenizer.piece_of": lambda w: w.gemma.tokenizer.piece_of(17),
    "Tokenizer.split_special": lambda w: w.gemma.tokenizer.split_special("a"),
    "ToolCall": lambda w: gemmakv.ToolCall("a", "b", {}),
    "ToolCall.to_dict": lambda w: gemmakv.ToolCall("a", "b", {}).to_dict(),
    "TopLogprobs.of": lambda w: gemmakv.TopLogprobs.of(None),
    "Truncation": lambda w: w.cache().truncate(1).replay_tokens,
    "attention": lambda w: gemmakv.attention(
        np.ones((1, 1, 1, 2)), filled(gemmakv.LayerCache), 1.0
    ),
    "compute_left_pads": lambda w: gemmakv.compute_left_pads([[0, 1]]),
    "cpu_info": lambda w: gemmakv.cpu_info()["target"],
    "create_kv_cache": lambda w: gemmakv.create_kv_cache(
        w.gemma, 64, "int8", block_tokens=32
    ),
    "BatchOptions": of_options(BatchOptions),
    "GenerationOptions": lambda w: GenerationOptions(),
    "GenerationOptions.check": lambda w: GenerationOptions.check(SHORT, 99),
    "GenerationOptions.json_schema": lambda w: GenerationOptions.json_schema(),
    "Option": lambda w: Option(
        GenerationOptions.table["top_k"].kind, 0, "help"
    ),
    "Option.check": lambda w: GenerationOptions.table["top_k"].check("a", 3),
    "Options": of_options(Options),
    "Gemma4Template": lambda w: gemmakv.templates.Gemma4Template().stop,
    "Gemma4Template.render": lambda w: gemmakv.templates.Gemma4Template(
    ).render([Message("user", "a")], tools=None),
    "GemmaTemplate": lambda w: GemmaTemplate().stop,
    "GemmaTemplate.render": lambda w: GemmaTemplate().render(
        [Message("user", "a")], add_generation_prompt=False
    ),
    "PlainTemplate": lambda w: PlainTemplate().stop,
    "PlainTemplate.render": lambda w: PlainTemplate().render(
        [Message("user", "a")]
    ),
    "template_for": lambda w: template_for(w.gemma, template="plain"),
    "FolderStore": lambda w: w.kept()[0].where,
    "FolderStore.close": lambda w: closed(w.kept()[0]),
    "FolderStore.delete": undeleted,
    "FolderStore.deleted": undeleted,
    "FolderStore.hold": lambda w: w.kept()[0].hold("a" * 32, 0),
    "FolderStore.holder": lambda w: w.kept()[0].holder("a" * 32),
    "FolderStore.listing": lambda w: w.kept()[0].listing().records[0].name,
    "FolderStore.open_session": lambda w: w.kept()[0].open_session("a" * 32),
    "FolderStore.read_record": lambda w: w.kept()[0].read_record("a" * 32),
    "FolderStore.release": lambda w: w.kept()[0].release("a" * 32),
    "FolderStore.take_emptied": lambda w: w.kept()[0].take_emptied(),
    "FolderStore.undelete": undeleted,
    "FolderStore.write_current": lambda w: w.kept()[0].write_current("a" * 32),
    "FolderStore.write_record": lambda w: w.kept(),
    "FolderStore.write_session": lambda w: (
        lambda home, record: home.write_session(record.id, w.session().save)
    )(*w.kept()),
    "Listing": lambda w: store.Listing([], [], set()),
    "Record": lambda w: store.Record("a", options={}).last_text,
    "Saver": lambda w: closed(saver_of(w)),
    "Saver.close": lambda w: closed(saver_of(w)),
    "Saver.drop": lambda w: saver_of(w).drop("a" * 32),
    "Saver.submit": lambda w: (
        lambda home, record: store.Saver(home).submit(
            record.id, w.session().save
        )
    )(*w.kept()),
    "Saver.take_failures": lambda w: saver_of(w).take_failures(),
    "Saver.wait": lambda w: saver_of(w).wait(),
    "folder_of": lambda w: store.folder_of("a", "b" * 64),
    "from_file": lambda w: store.from_file(w.gemma, saved(w, w.session())),
    "from_store": unkept,
    "keeps_keys": lambda w: store.keeps_keys(w.session()),
    "tokens_in": lambda w: store.tokens_in(w.kept()[0], "a" * 32),
}  # fmt: skip
for _kind in (gemmakv.LayerCache, gemmakv.CyclicCache):
    CALLS |= {
        f"{_kind.__name__}{name}": (lambda w, c=_kind, f=call: f(filled(c)))
        for name, call in {
            "": lambda cache: cache.length,
            ".prefill": lambda cache: cache.positions,
            ".update": lambda cache: cache.keys,
            ".compute_causal_mask": lambda cache: cache.compute_causal_mask(1),
            ".reset": lambda cache: cache.reset(),
        }.items()
    }
# Protocols, whose methods are called in the classes that have them, and values
# that calls give. `against` needs torch, `run` seconds, `forget` a folder of a
# prefix cache: their tests call them.
ELSEWHERE = {
    "CacheProtocol", "RemoteStore", "SessionStore", "Template", "Generation",
    "PhaseProfile", "Piece", "Prefill", "PrefixStats", "SessionStats",
    "StepProfile", "ThreadPlacement", "Timings", "TopLogprobs", "Usage",
    "Check", "Difference", "ReferenceReport", "Report", "against", "forget",
    "run",
}  # fmt: skip


def callables() -> set[str]:
    """Gives the names of the golden file that can be called."""
    found = set()
    for module, name in listed():
        kept = NAMES[module][name]
        if isinstance(kept, str):
            found.add(name)
        elif kept is not None:
            found |= {
                f"{name}.{member}".removesuffix(".()")
                for member, parameters in kept.items()
                if parameters is not None
            }
    return found


def test_each_is_called() -> None:
    left = {
        name
        for name in callables() - CALLS.keys() - ELSEWHERE
        if name.split(".")[0] not in ELSEWHERE
        and not name.startswith("SentencePieceTokenizer.")  # of `Tokenizer`
    }
    assert not left
    assert CALLS.keys() <= callables()


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_yesterday(world: World, name: str) -> None:
    CALLS[name](world)
