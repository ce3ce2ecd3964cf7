"""Chat: a conversation in turns over a KV cache."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from gemmakv import session_file
from gemmakv.cache import KVCache, create_kv_cache
from gemmakv.chat_stream import ChatStream
from gemmakv.errors import CacheFullError, GemmaKVError, brief
from gemmakv.files import PathOrFile, read_all, write_all
from gemmakv.generation import Generation
from gemmakv.options import DEFAULT_MAX_TOKENS, Options, split_rows
from gemmakv.templates import Message, Template, check_turns, template_for
from gemmakv.transcript import Encoder, Ids, common_exact, common_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gemmakv.gemma import Gemma

__all__ = ["Message", "Session", "SessionStats"]

OVERFLOWS = ("error", "drop_oldest_turns")


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """Numbers of a session.

    tokens: held by its cache.
    own_bytes: of keys and values that it alone holds.
    shared_bytes: of keys and values that forks hold as well.
    saved_prefill_tokens: tokens of all prompts so far that the cache held
      already and that were not computed again.
    last_fork_us: microseconds that the last fork of it, or the fork that made
      it, took; None if there was none.
    """

    tokens: int
    own_bytes: int
    shared_bytes: int
    saved_prefill_tokens: int
    last_fork_us: float | None


@dataclasses.dataclass
class Turn:
    """A turn in the making: what there is to say, and the way back."""

    messages: list[Message]  # once the reply is there, with it
    ids: Ids  # to be appended to the cache
    options: dict[str, Any]
    backup: KVCache  # the cache as it was


class Session:
    """A conversation with a model: messages, a template and a KV cache.

    Each turn computes only what the cache does not hold yet. What the cache
    holds always says the same as the template's rendering of `messages`;
    tokens of replies stay as they were sampled, and what is computed anew
    (after a change of `system`, or when turns are dropped) has the tokens
    that a new session with the same messages has, and so the same results.

    Calls of one session wait for each other, from any thread; sessions of one
    Gemma run at the same time. `messages`, `turns`, `stats` and `system` never
    wait and tell of the last turn that ended. A call that raises leaves the
    session as it was.
    """

    def __init__(
        self,
        gemma: Gemma,
        system: str | None = None,
        overflow: str = "error",
        *,
        template: Union[Template, str, None] = None,
        messages: Sequence[Message] = (),
        capacity_tokens: int | None = None,
        kv_dtype: str = "bf16",
        options: Options | None = None,
    ) -> None:
        """Begins a conversation; computes nothing yet.

        Args:
          gemma: the model.
          system: what the model is told before the first turn.
          overflow: what happens when the conversation does not fit any more.
            "error": CacheFullError. "drop_oldest_turns": if the prompt and
            `max_tokens` (at most a quarter of the capacity) do not fit, the
            oldest turns are dropped until the prompt takes half of the
            capacity or only the newest turn is left.
          template: "file", "gemma", "plain" or a Template; None chooses what
            fits the model, see `gemmakv.templates.template_for`.
          messages: turns that the conversation begins with: user and model in
            turns, a reply last. A system message may stand first.
          capacity_tokens, kv_dtype: see `create_kv_cache`.
          options: generation keywords for all turns.

        Raises ValueError naming the argument that is bad, GemmaKVError if the
        template cannot be used.
        """
        if gemma.tokenizer is None:
            raise ValueError(
                "gemma: this model has no tokenizer, which a Session needs"
            )
        self._gemma = gemma
        self._tokenizer = gemma.tokenizer
        self._template = template_for(gemma, template)
        self.overflow = overflow
        self.options: dict[str, Any] = dict(options or {})
        split_rows(self.options, 1, batch=False)
        self._system, self._messages = _beginning(system, messages)
        self._cache = create_kv_cache(gemma.config, capacity_tokens, kv_dtype)
        self._encoder = Encoder(gemma.tokenizer, gemma.config.bos_id)
        self._saved_prefill_tokens = 0
        self._last_fork_us: float | None = None
        # Held by a call that works on the conversation, or by a stream from
        # its beginning to its end.
        self._changed = threading.Condition()
        self._busy = False
        self._holder = 0  # the thread that the current call needs to end
        self._stream: weakref.ref[ChatStream] | None = None
        if self._messages:
            self._encode(self._messages, False)  # a bad one shows now

    def __repr__(self) -> str:
        return (
            f"<Session of {self.turns} turns, {self._template.name} template, "
            f"{self._cache!r}>"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def gemma(self) -> Gemma:
        return self._gemma

    @property
    def cache(self) -> KVCache:
        """The conversation's cache: to look at, not to change."""
        return self._cache

    @property
    def template(self) -> Template:
        return self._template

    @property
    def overflow(self) -> str:
        """"error" or "drop_oldest_turns"; may be changed at any time."""
        return self._overflow

    @overflow.setter
    def overflow(self, value: str) -> None:
        if value not in OVERFLOWS:
            raise ValueError(
                "overflow: expected 'error' or 'drop_oldest_turns', found "
                + brief(value)
            )
        self._overflow = value

    @property
    def system(self) -> str | None:
        """What the model is told before the first turn; None or "" for
        nothing. A change has the rest of the conversation computed again at
        the next turn.
        """
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        with self._exclusive():
            before = self._system
            self._system = _checked_system(text)
            try:
                self._keep_common(self._messages, exact=True)
            except BaseException:
                self._system = before
                raise

    @property
    def messages(self) -> list[Message]:
        """The conversation, the system message first if there is one."""
        return self._with_system(self._messages)

    @property
    def turns(self) -> int:
        """Messages of the user so far."""
        return len(self._messages) // 2

    @property
    def stats(self) -> SessionStats:
        return SessionStats(
            tokens=len(self._cache),
            own_bytes=self._cache.nbytes,
            shared_bytes=self._cache.shared_nbytes,
            saved_prefill_tokens=self._saved_prefill_tokens,
            last_fork_us=self._last_fork_us,
        )

    def send(self, text: str, **options: Unpack[Options]) -> Generation:
        """Says `text` and waits for the reply.

        `options` are those of `Gemma.generate`, over those of the session;
        `stop` adds to what ends a reply anyway. The result's `text` is the
        reply without white space around it, as it stands in `messages`.

        Raises ValueError for an empty text or a bad option, CacheFullError if
        the conversation does not fit; Ctrl-C raises KeyboardInterrupt. The
        session is then as if nothing had been said.
        """
        with self._exclusive():
            turn = self._begin(text, options)
            try:
                generation = self._gemma._generate_reply(
                    self._cache, turn.ids, turn.options, self._stop_ids()
                )
                return self._finish(turn, generation)
            except BaseException:
                self._take_back(turn)
                raise

    def stream(self, text: str, **options: Unpack[Options]) -> ChatStream:
        """`send` piece by piece: an iterator and async iterator.

        Bad arguments raise here. Until the stream has ended or is cancelled,
        the session is busy: other threads wait, and a call from the thread
        that reads it is a GemmaKVError. A reply that is cancelled (also by
        Ctrl-C) stays in the conversation as far as it came.
        """
        self._acquire()
        try:
            turn = self._begin(text, options)
            try:
                inner = self._gemma._stream_reply(
                    self._cache, turn.ids, turn.options, self._stop_ids()
                )
            except BaseException:
                self._take_back(turn)
                raise
            stream = ChatStream(self, inner, turn)
            self._stream = weakref.ref(stream)
            return stream
        except BaseException:
            self._release()
            raise

    def fork(self) -> Session:
        """An independent session with the same conversation and settings.

        Shares the blocks of the cache: no key or value is copied.
        """
        with self._exclusive():
            start = time.perf_counter()
            cache = self._cache.fork()
            self._last_fork_us = (time.perf_counter() - start) * 1e6
            return self._made_with(cache)

    def undo(self, turns: int = 1) -> list[Message]:
        """Takes back the last turns and returns their messages.

        Raises ValueError if there are not so many.
        """
        with self._exclusive():
            count = _checked_count("turns", turns, 1, self.turns)
            return self._rewind(self.turns - count)

    def goto(self, turn: int) -> list[Message]:
        """Keeps the first `turn` turns, 0 to `turns`; returns the messages
        that were taken back.
        """
        with self._exclusive():
            return self._rewind(_checked_count("turn", turn, 0, self.turns))

    def to_bytes(self) -> bytes:
        """Messages, settings, keys and values, for `from_bytes`.

        A Template object is saved by its name; `progress` is not saved.
        """
        with self._exclusive():
            return session_file.pack(self)

    def save(self, path_or_file: PathOrFile) -> None:
        """Writes `to_bytes()` to a path or to a binary file object.

        A path is replaced in one step, once everything is on disk.
        """
        write_all(path_or_file, self.to_bytes())

    @classmethod
    def from_bytes(
        cls,
        gemma: Gemma,
        data: bytes | bytearray | memoryview,
        *,
        template: Union[Template, str, None] = None,
        rebuild: bool = False,
    ) -> Session:
        """The session that `to_bytes` gave: going on with it gives bit for
        bit what going on with that one gives.

        `template` replaces the saved one; it is needed if that was an object
        of yours. With `rebuild`, the keys and values in the data are ignored
        and computed again from the messages, at the next turn.

        Raises CorruptFile if the data are not a whole, sound session;
        MismatchError if the keys and values belong to other weights
        (`rebuild` then keeps the text) or the model has no such template.
        """
        return session_file.unpack(cls, gemma, bytes(data), template, rebuild)

    @classmethod
    def load(
        cls,
        gemma: Gemma,
        path_or_file: PathOrFile,
        *,
        template: Union[Template, str, None] = None,
        rebuild: bool = False,
    ) -> Session:
        """Reads what `save` wrote; see `from_bytes`."""
        return cls.from_bytes(
            gemma, read_all(path_or_file), template=template, rebuild=rebuild
        )

    def close(self) -> None:
        """Ends a running reply and lets go of the cache.

        Any later use of the conversation is a ValueError; `messages` stay.
        """
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            stream.cancel()
        with self._changed:
            while self._busy:
                self._changed.wait()
            self._cache.close()

    # ---- Turns; the session is held ----

    def _begin(self, text: str, options: Any) -> Turn:
        """Makes the cache ready for a turn, without computing anything."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                "text: expected a str that is not empty, found " + brief(text)
            )
        merged = self._merged(options)
        messages = [*self._messages, Message("user", text)]
        wanted = self._encode(messages, True)
        dropped = False
        if self.overflow == "drop_oldest_turns":
            reserve = merged.get("max_tokens", DEFAULT_MAX_TOKENS)
            while len(messages) > 1 and self._overflows(
                len(wanted), reserve, dropped
            ):
                messages = messages[2:]
                wanted = self._encode(messages, True)
                dropped = True
        capacity = self._cache.capacity_tokens
        if len(wanted) >= capacity:
            raise CacheFullError(
                f"session: the conversation takes {len(wanted)} tokens and "
                f"leaves no room for a reply in {capacity}; undo turns, say "
                "less, or begin a session with more capacity_tokens"
                + (
                    " or overflow='drop_oldest_turns'"
                    if self.overflow == "error"
                    else ""
                )
            )
        backup = self._cache.fork()
        held, said = self._common(wanted, exact=dropped)
        if said == len(wanted):  # there is always something to compute
            held = said = common_exact(backup.tokens, wanted) - 1
        self._cache.truncate(held)
        return Turn(messages, wanted[said:], merged, backup)

    def _overflows(self, prompt: int, reserve: int, dropping: bool) -> bool:
        capacity = self._cache.capacity_tokens
        if dropping:
            return prompt > capacity // 2
        return prompt + min(max(reserve, 1), capacity // 4) > capacity

    def _finish(self, turn: Turn, generation: Generation) -> Generation:
        """Takes a reply into the conversation."""
        text = generation.text.strip()
        messages = [*turn.messages, Message("model", text)]
        self._keep_common(messages)
        self._messages = messages
        self._saved_prefill_tokens += generation.usage.cached_tokens
        return dataclasses.replace(generation, text=text)

    def _take_back(self, turn: Turn) -> None:
        self._cache._become(turn.backup)

    def _rewind(self, turns: int) -> list[Message]:
        kept = self._messages[: 2 * turns]
        removed = self._messages[2 * turns :]
        self._keep_common(kept)
        self._messages = kept
        return removed

    def _keep_common(
        self, messages: Sequence[Message], exact: bool = False
    ) -> None:
        """Takes off the cache what does not belong to these messages."""
        if messages:
            wanted = self._encode(messages, False)
        else:
            # What every conversation with this system message begins with.
            one, other = (
                self._encode([Message("user", text)], True) for text in "AB"
            )
            wanted = one[: common_exact(one, other)]
        self._cache.truncate(self._common(wanted, exact)[0])

    def _common(self, wanted: Ids, exact: bool) -> tuple[int, int]:
        """Lengths of what the cache and `wanted` have in common."""
        held = self._cache.tokens
        if exact:
            count = common_exact(held, wanted)
            return count, count
        return common_text(held, wanted, self._tokenizer)

    def _encode(self, messages: Sequence[Message], reply: bool) -> Ids:
        return self._encoder.encode(
            self._template.render(self._with_system(messages), reply)
        )

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self._system is None:
            return list(messages)
        return [Message("system", self._system), *messages]

    def _merged(self, options: Any) -> dict[str, Any]:
        """Options of one turn."""
        for keywords in (self.options, options):
            split_rows(keywords, 1, batch=False)  # names what is bad
            if keywords.get("parse_special"):
                raise ValueError(
                    "parse_special: expected False (messages are text, the "
                    "template sets the control tokens), found True"
                )
        merged = {**self.options, **options}
        stops = list(self._template.stop)
        for keywords in (self.options, options):
            stop = keywords.get("stop") or []
            stops += [stop] if isinstance(stop, str) else stop
        merged["stop"] = list(dict.fromkeys(stops))
        return merged

    def _stop_ids(self) -> list[int]:
        named = map(self._tokenizer.id_of, self._template.stop_tokens)
        return [token for token in named if token is not None]

    def _made_with(self, cache: KVCache) -> Session:
        other = Session.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.options = dict(self.options)
        other._messages = list(self._messages)
        other._cache = cache
        other._encoder = Encoder(self._tokenizer, self._gemma.config.bos_id)
        other._changed = threading.Condition()
        other._busy = False
        other._stream = None
        return other

    # ---- One call at a time ----

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._busy:
                if self._holder == me:
                    raise GemmaKVError(
                        "session: its reply is still being streamed to this "
                        "thread; read it to its end or cancel() it first"
                    )
                self._changed.wait()
            self._cache._core  # raises if closed
            self._busy = True
            self._holder = me

    def _release(self) -> None:
        with self._changed:
            self._busy = False
            self._stream = None
            self._changed.notify_all()


def _beginning(
    system: str | None, messages: Sequence[Message]
) -> tuple[str | None, list[Message]]:
    """The system message and the turns that a session starts with."""
    turns = list(messages)
    for i, message in enumerate(turns):
        if not isinstance(message, Message):
            raise ValueError(
                f"messages[{i}]: expected a Message, found {brief(message)}"
            )
        if not isinstance(message.content, str):
            raise ValueError(
                f"messages[{i}].content: expected a str, found "
                + brief(message.content)
            )
    if turns:
        check_turns(turns)
        if turns[-1].role != "model" and len(turns) > 1:
            raise ValueError(
                "messages: expected a reply last, found a message of the "
                + turns[-1].role
            )
    if turns and turns[0].role == "system":
        if system is not None:
            raise ValueError("system: given twice, also as a message")
        system = turns.pop(0).content
    return _checked_system(system), turns


def _checked_system(text: str | None) -> str | None:
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"system: expected a str or None, found {brief(text)}"
        )
    return text or None


def _checked_count(name: str, value: int, least: int, most: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not least <= value <= most
    ):
        expected = (
            f"{least} to {most} (the turns there are)"
            if most >= least
            else "turns to undo, and there are none"
        )
        raise ValueError(f"{name}: expected {expected}, found {brief(value)}")
    return int(value)
