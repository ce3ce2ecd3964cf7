"""A chat: messages, their template and the KV cache that holds them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

from gemmakv import session_file
from gemmakv.cache import KVCache, PathOrFile, create_kv_cache
from gemmakv.chat_stream import ChatStream
from gemmakv.errors import CacheFullError, brief
from gemmakv.files import write_atomically
from gemmakv.generation import Generation
from gemmakv.templates import (
    Message,
    Segment,
    Template,
    choose_template,
    split_system,
)

if TYPE_CHECKING:
    from gemmakv.gemma import Gemma

__all__ = ["MAGIC", "Message", "Session", "SessionStats"]

MAGIC = session_file.MAGIC
OVERFLOWS = ("error", "drop_oldest_turns")
TokenArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """What a session holds and what its cache has saved.

    tokens: in the conversation. own_bytes, shared_bytes: keys and values that
    it alone holds, and that forks hold as well. saved_prefill_tokens: tokens
    of earlier turns that replies did not have to compute again.
    last_fork_us: microseconds that the last fork() took; None before one.
    """

    tokens: int
    own_bytes: int
    shared_bytes: int
    saved_prefill_tokens: int
    last_fork_us: float | None


@dataclasses.dataclass(frozen=True)
class Turn:
    """A user's message and the reply.

    The turn's tokens begin at `start` in the transcript. `tail` is text that
    stands behind the reply already: the end token or stop string that ended
    it. The next turn's text goes on from there.
    """

    user: str
    reply: str
    start: int = 0
    tail: str = ""


@dataclasses.dataclass
class _Live:
    """A streamed reply that has not been settled yet."""

    stream: ChatStream
    turns: list[Turn]
    user: str
    start: int
    cache: KVCache


class Session:
    """A conversation with a model.

    Each message computes only what is new: earlier turns stay in the KV
    cache. Calls on one session wait for each other; sessions of one model run
    at the same time. Only one reply can be streamed at a time: whatever is
    done next with the session ends it, as `cancel()` does.
    """

    def __init__(
        self,
        gemma: Gemma,
        system: str | None = None,
        overflow: str = "error",
        *,
        template: Template | str | None = None,
        capacity_tokens: int | None = None,
        kv_dtype: str = "bf16",
        options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
          gemma: the model; it needs a tokenizer.
          system: text that stands before the conversation.
          overflow: what happens when a message does not fit: "error" raises
            CacheFullError and changes nothing; "drop_oldest_turns" forgets as
            many turns as leave a quarter of the capacity free, and computes
            the rest anew, exactly as if they had never been there.
          template: "file", "gemma", "plain" or a Template; None takes what
            suits the model (see `choose_template`).
          capacity_tokens, kv_dtype: as for `create_kv_cache`.
          options: keywords of `Gemma.generate` for every reply; those of a
            call come before them.
        """
        if gemma.tokenizer is None:
            raise ValueError(
                "gemma: a session needs a model with a tokenizer, found one "
                "without"
            )
        self._gemma = gemma
        self._lock = threading.RLock()
        if template is None or isinstance(template, str):
            template = choose_template(gemma, template)
        self._template = template
        self._system = _text("system", system) if system is not None else None
        self.overflow = overflow
        self.options = dict(options or {})
        self._cache = create_kv_cache(
            gemma.config, capacity_tokens, kv_dtype
        )
        self._turns: list[Turn] = []
        self._stale = False  # the cache does not hold `_turns` as rendered
        self._live: _Live | None = None
        self._saved_tokens = 0
        self._last_fork_us: float | None = None

    def __repr__(self) -> str:
        return (
            f"<Session of {len(self._turns)} turns, {len(self._cache)} of "
            f"{self._cache.capacity_tokens} tokens>"
        )

    @property
    def gemma(self) -> Gemma:
        return self._gemma

    @property
    def cache(self) -> KVCache:
        """The conversation's KV cache, to look at or to fork.

        Changing it behind the session's back breaks the session. Another one
        takes its place when earlier text changes.
        """
        return self._cache

    @property
    def template(self) -> Template:
        return self._template

    @property
    def overflow(self) -> str:
        return self._overflow

    @overflow.setter
    def overflow(self, value: str) -> None:
        if value not in OVERFLOWS:
            raise ValueError(
                f"overflow: expected one of {', '.join(OVERFLOWS)}, found "
                + brief(value)
            )
        self._overflow = value

    @property
    def system(self) -> str | None:
        """Text that stands before the conversation.

        Setting it keeps the turns; they are computed anew with the next
        message, from the first token that differs.
        """
        return self._system

    @system.setter
    def system(self, value: str | None) -> None:
        text = _text("system", value) if value is not None else None
        with self._lock:
            self._settle()
            if text != self._system:
                self._system = text
                self._stale = bool(self._turns)

    @property
    def messages(self) -> list[Message]:
        """System text, if any, and the messages so far.

        Setting it replaces the conversation: user and model alternate, and
        the model comes last. It is computed with the next message.
        """
        found = [] if self._system is None else [_system(self._system)]
        for turn in list(self._turns):
            found.append(Message("user", turn.user))
            found.append(Message("model", turn.reply))
        return found

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        system, turns = split_system(messages)
        if len(turns) % 2:
            raise ValueError(
                "messages: expected the model's reply last, found a user's "
                "message"
            )
        with self._lock:
            self._settle()
            self._turns = [
                Turn(user.content, reply.content)
                for user, reply in zip(turns[::2], turns[1::2])
            ]
            if system is not None:
                self._system = system
            self._stale = True

    @property
    def turns(self) -> int:
        """Number of the user's messages that have a reply."""
        return len(self._turns)

    @property
    def stats(self) -> SessionStats:
        cache = self._cache
        return SessionStats(
            len(cache),
            cache.nbytes,
            cache.shared_nbytes,
            self._saved_tokens,
            self._last_fork_us,
        )

    # ---- Talking ----

    def send(self, text: str, **options: Any) -> Generation:
        """Says `text` and waits for the reply.

        The result's `text` is the reply without white space around it. A call
        that raises (CacheFullError, a bad option, Ctrl-C) changes nothing.
        """
        with self._lock:
            plan = self._plan(text, options)
            result = self._gemma.generate(
                plan.cache, plan.prompt, **plan.options
            )
            reply = self._conclude(plan, result)
        return dataclasses.replace(result, text=reply)

    def stream(self, text: str, **options: Any) -> ChatStream:
        """Says `text` and gives the reply piece by piece.

        A reply that is cancelled stays as far as it was returned. The turn is
        part of the session once the stream has ended.
        """
        with self._lock:
            plan = self._plan(text, options)
            stream = ChatStream(
                self._gemma.stream(plan.cache, plan.prompt, **plan.options),
                self._settle_stream,
            )
            self._live = _Live(
                stream, plan.turns, plan.user, plan.start, plan.cache
            )
            self._saved_tokens += plan.saved
            return stream

    def fork(self) -> Session:
        """An independent session with the same content.

        The KV cache is shared: nothing is copied or computed.
        """
        with self._lock:
            self._settle()
            begin = time.perf_counter()
            cache = self._cache.fork()
            self._last_fork_us = (time.perf_counter() - begin) * 1e6
            other = Session.__new__(Session)
            other.__dict__.update(self.__dict__)
            other._lock = threading.RLock()
            other._cache = cache
            other._turns = list(self._turns)
            other.options = dict(self.options)
            other._saved_tokens = 0
            return other

    def undo(self, turns: int = 1) -> list[Message]:
        """Takes back the last turns; gives their messages.

        Raises ValueError if there are not as many.
        """
        with self._lock:
            self._settle()
            if not 0 <= turns <= len(self._turns):
                raise ValueError(
                    f"turns: expected 0 to {len(self._turns)} (the turns "
                    f"there are), found {brief(turns)}"
                )
            return self.goto(len(self._turns) - turns)

    def goto(self, turn: int) -> list[Message]:
        """Keeps the first `turn` turns; gives the messages taken back."""
        with self._lock:
            self._settle()
            if not 0 <= turn <= len(self._turns):
                raise ValueError(
                    f"turn: expected 0 to {len(self._turns)}, found "
                    + brief(turn)
                )
            taken = self._turns[turn:]
            if taken and not self._stale:
                self._cache.truncate(taken[0].start)
            del self._turns[turn:]
            return [
                message
                for one in taken
                for message in (
                    Message("user", one.user),
                    Message("model", one.reply),
                )
            ]

    # ---- Saving ----

    def to_bytes(self) -> bytes:
        """Messages, settings and KV cache, for `from_bytes`.

        Options that are no plain data (a `progress` callable) are left out.
        """
        with self._lock:
            self._settle()
            return session_file.encode(
                session_file.Content(
                    template=self._template.name,
                    system=self._system,
                    overflow=self._overflow,
                    stale=self._stale,
                    turns=[dataclasses.asdict(turn) for turn in self._turns],
                    options=self.options,
                ),
                self._cache.to_bytes(),
            )

    @staticmethod
    def from_bytes(
        gemma: Gemma,
        data: bytes | bytearray | memoryview,
        *,
        rebuild: bool = False,
        template: Template | None = None,
    ) -> Session:
        """The session that `to_bytes` gave.

        Going on gives bit for bit what going on without saving gives. With
        `rebuild` the KV cache in `data` is left aside, and computed again
        with the next message: for another model, or other weights.
        `template` is needed if the session had a Template of your own.

        Raises CorruptFile for damaged data, MismatchError if the KV cache
        belongs to other weights.
        """
        content, snapshot = session_file.decode(bytes(data))
        if template is None and content.template == "file":
            template = choose_template(
                gemma, "file" if gemma.chat_template or not rebuild else None
            )
        session = Session(
            gemma,
            content.system,
            content.overflow,
            template=content.template if template is None else template,
            options=content.options,
        )
        session._turns = [Turn(**turn) for turn in content.turns]
        if rebuild:
            session._stale = bool(session._turns)
        else:
            session._cache = KVCache.from_bytes(snapshot, gemma)
            session._stale = content.stale
        return session

    def save(self, path_or_file: PathOrFile) -> None:
        """Writes `to_bytes()`; a path is replaced in one step."""
        data = self.to_bytes()
        if hasattr(path_or_file, "write"):
            path_or_file.write(data)
        else:
            write_atomically(path_or_file, data)

    @staticmethod
    def load(
        gemma: Gemma,
        path_or_file: PathOrFile,
        *,
        rebuild: bool = False,
        template: Template | None = None,
    ) -> Session:
        """Reads what `save` wrote; see `from_bytes`."""
        if hasattr(path_or_file, "read"):
            data = path_or_file.read()
        else:
            with open(path_or_file, "rb") as file:
                data = file.read()
        return Session.from_bytes(
            gemma, data, rebuild=rebuild, template=template
        )

    # ---- How messages become tokens ----

    def _plan(self, text: str, call_options: dict[str, Any]) -> _Plan:
        """What to append to which cache for a message. Changes nothing."""
        user = _text("text", text)
        self._settle()
        options = {**self.options, **call_options}
        stop = options.get("stop")
        own = [stop] if isinstance(stop, str) else list(stop or ())
        options["stop"] = [*own, *self._template.stop]
        turns = self._turns
        if not self._stale:
            prompt = self._encode(self._new_segments(user))
            saved = len(self._cache)
            if saved + len(prompt) < self._cache.capacity_tokens:
                return _Plan(
                    self._cache, prompt, options, turns, user, saved, saved
                )
        turns, tokens, start = self._fit(turns, user)
        common = _common_prefix(tokens, self._cache.tokens)
        cache = self._cache.fork()
        # At least one token is computed, so that there are logits.
        cache.truncate(min(common, len(tokens) - 1))
        return _Plan(
            cache, tokens[len(cache):], options, turns, user, start, len(cache)
        )

    def _fit(
        self, turns: list[Turn], user: str
    ) -> tuple[list[Turn], list[int], int]:
        """Turns that are kept, and the tokens of all text up to the reply.

        Raises CacheFullError if they do not fit.
        """
        capacity = self._cache.capacity_tokens
        turns, tokens, start = self._canonical(turns, user)
        if len(tokens) < capacity:
            return turns, tokens, start
        found = len(tokens)
        if self._overflow == "drop_oldest_turns":
            while turns:
                turns, tokens, start = self._canonical(turns[1:], user)
                if len(tokens) <= capacity - capacity // 4:
                    return turns, tokens, start
            found = len(tokens)
            if found < capacity:
                return turns, tokens, start
        raise CacheFullError(
            f"the conversation needs {found} tokens and room for a reply, but "
            f"its capacity is {capacity}: undo turns, use overflow="
            "'drop_oldest_turns', or make the session with more "
            "capacity_tokens"
        )

    def _new_segments(self, user: str) -> list[Segment]:
        """What follows the last reply, but for what stands there already."""
        segments = self._template.render(
            self._history(self._turns, user), add_generation_prompt=True
        )
        if not self._turns:
            return segments
        last = max(i for i, s in enumerate(segments) if s.role == "model")
        following = segments[last + 1 :]
        tail = self._turns[-1].tail
        if tail:  # see _conclude: the template's text begins with it
            head = following[0]
            following[0] = Segment(head.text[len(tail) :], head.role)
        return following

    def _canonical(
        self, turns: list[Turn], user: str
    ) -> tuple[list[Turn], list[int], int]:
        """The turns with where they begin when all text is encoded anew,
        the tokens up to the new reply, and where the new turn begins.
        """
        segments = self._template.render(
            self._history(turns, user), add_generation_prompt=True
        )
        lead = self._reply_lead()
        tokens: list[int] = []
        placed: list[Turn] = []
        pending: list[Segment] = []
        start = 0
        for segment in segments:
            if segment.role != "model":
                pending.append(segment)
                continue
            before = pending[-1].text
            cut = len(before) - len(lead) if before.endswith(lead) else None
            pending[-1] = Segment(before[:cut])
            tokens += self._encode(pending)
            tokens += self._encode(
                [Segment(before[len(pending[-1].text) :] + segment.text, "model")]
            )
            old = turns[len(placed)]
            placed.append(Turn(old.user, old.reply, start))
            start = len(tokens)
            pending = []
        return placed, tokens + self._encode(pending), start

    def _reply_lead(self) -> str:
        """What the template puts between the generation prompt and a reply."""
        user, reply = Message("user", "."), Message("model", ".")
        prompt = self._template.render([user], add_generation_prompt=True)
        whole = self._template.render([user, reply])
        at = max(i for i, s in enumerate(whole) if s.role == "model")
        asked, given = _after_user(prompt), _after_user(whole[:at])
        return given[len(asked) :] if given.startswith(asked) else ""

    def _history(self, turns: list[Turn], user: str) -> list[Message]:
        found = [] if self._system is None else [_system(self._system)]
        for turn in turns:
            found.append(Message("user", turn.user))
            found.append(Message("model", turn.reply))
        return [*found, Message("user", user)]

    def _encode(self, segments: Sequence[Segment]) -> list[int]:
        assert self._gemma.tokenizer is not None
        return self._gemma.tokenizer.encode_segments(
            (segment.text, segment.special) for segment in segments
        )

    # ---- What a reply leaves behind ----

    def _conclude(self, plan: _Plan | _Live, result: Generation) -> str:
        """Makes the turn part of the session; gives the reply's text."""
        reply = result.text.strip()
        turn = Turn(plan.user, reply, plan.start)
        self._turns = [*plan.turns, turn]
        self._cache = plan.cache
        self._stale = False
        if isinstance(plan, _Plan):
            self._saved_tokens += plan.saved
        if result.finish_reason == "stop":
            self._turns[-1] = self._with_tail(turn, result)
        return reply

    def _with_tail(self, turn: Turn, result: Generation) -> Turn:
        """Keeps what ended the reply if the template goes on with it.

        Else it is taken off the transcript again.
        """
        tokenizer = self._gemma.tokenizer
        assert tokenizer is not None
        text = result.text.encode("utf-8")
        last = result.token_ids[-1]
        if last in self._gemma.config.eos_ids:
            tail = tokenizer.piece_of(last)
            keep = len(result.token_ids) - 1
        else:
            whole = tokenizer.decode_bytes(result.token_ids)
            tail = whole[len(text) :].decode("utf-8", "replace")
            keep = _tokens_within(tokenizer, result.token_ids, len(text))
        with_tail = dataclasses.replace(turn, tail=tail)
        following = self._template.render(
            [Message("user", "."), Message("model", "."), Message("user", ".")],
            add_generation_prompt=True,
        )
        at = next(i for i, s in enumerate(following) if s.role == "model")
        if following[at + 1].text.startswith(tail):
            return with_tail
        self._cache.truncate(
            len(self._cache) - len(result.token_ids) + keep
        )
        return turn

    def _settle(self) -> None:
        """Ends a streamed reply that is still open, and takes it in."""
        live = self._live
        if live is not None:
            live.stream.cancel()
            # What made it fail, if anything, is for its reader to see.
            with contextlib.suppress(Exception):
                live.stream.close()

    def _settle_stream(self, result: Generation | None) -> None:
        """Called once by the stream: its result, or None if it failed."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None and result is not None:
                self._conclude(live, result)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A message ready to be computed."""

    cache: KVCache
    prompt: list[int]
    options: dict[str, Any]
    turns: list[Turn]
    user: str
    start: int
    saved: int


def _tokens_within(tokenizer: Any, ids: Sequence[int], size: int) -> int:
    """How many of the first tokens lie within the first `size` bytes."""
    used = 0
    for count, token in enumerate(ids):
        used += len(tokenizer.decode_bytes([token]))
        if used > size:
            return count
    return len(ids)


def _after_user(segments: Sequence[Segment]) -> str:
    at = max(i for i, s in enumerate(segments) if s.role == "user")
    return "".join(segment.text for segment in segments[at + 1 :])


def _common_prefix(some: Sequence[int], others: TokenArray) -> int:
    size = min(len(some), len(others))
    differ = np.flatnonzero(np.asarray(some[:size]) != others[:size])
    return int(differ[0]) if differ.size else size


def _system(text: str) -> Message:
    return Message("system", text)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a str, found {brief(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is a lone surrogate, which is "
            "not Unicode text"
        ) from None
    return value
