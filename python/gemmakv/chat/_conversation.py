"""Messages, the template that renders them and the cache that holds them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmakv._support.text import overlap
from gemmakv.cache._kv_cache import KVCache
from gemmakv.chat._messages import (
    Message,
    Messages,
    Template,
    Tools,
    messages_of,
)
from gemmakv.chat._rendering import Rendering
from gemmakv.chat._reply import ReplyReader, read_reply, with_parts
from gemmakv.chat._templates import stop_ids
from gemmakv.chat._toolset import Choice, Toolset, open_calls
from gemmakv.chat._transcript import Ids, common_exact, common_text
from gemmakv.chat._turns import ALTERNATING, SYSTEM_ROLES, arrange
from gemmakv.errors import ArgumentError, CacheFullError, unexpected
from gemmakv.generation._message import reply_message
from gemmakv.generation._options import DEFAULT_MAX_TOKENS
from gemmakv.generation._result import Generation, ToolCall

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma


_WORTH_SHARING = 16  # fewer tokens take a step no time
_KEPT_ENDS = 4
# Turns are pairs, whatever the template takes; a system text has its own place.
_PAIRS = dataclasses.replace(ALTERNATING, system_alone=True)


@dataclasses.dataclass
class Turn:
    """A turn in the making: what there is to say, and the way back.

    A block of `with` whose body raises takes it back.
    """

    talk: Conversation
    messages: list[Message]  # up to what is new
    ids: Ids  # to be appended to the cache
    kept: int  # tokens of the cache that stay where they are
    backup: KVCache  # the cache as it was
    options: dict[str, Any]  # of its generation
    boundaries: list[int]  # positions where conversations part, or go on

    def request(self) -> tuple[Ids, dict[str, Any], list[int], list[int]]:
        """Gives what a model is asked for, after the cache."""
        ends = self.talk.stop_ids()
        return self.ids, self.options, ends, self.boundaries

    def reader(self) -> ReplyReader:
        return self.talk.reader(self.options)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None:
            self.take_back()

    def finish(self, generation: Generation) -> Generation:
        """Takes in the reply; gives it as it stands in the messages.

        Of one that was cancelled before its first token nothing stays.
        """
        parts = read_reply(self.reader(), generation)
        generation = with_parts(generation, parts)
        if generation.finish_reason == "cancelled" and not generation.token_ids:
            self.take_back()
            return generation
        text = self.keep(
            generation.text,
            generation.reasoning,
            generation.tool_calls,
            incomplete=generation.finish_reason == "cancelled",
        )
        self.talk.saved_prefill_tokens += generation.usage.cached_tokens
        return dataclasses.replace(generation, text=text)

    def keep(
        self,
        text: str,
        reasoning: str,
        calls: Sequence[ToolCall] = (),
        *,
        incomplete: bool = True,
    ) -> str:
        """Takes in what there is of a reply; returns its text, trimmed.

        One that is cut short does not keep half a text that would end it.
        """
        if incomplete:
            text = text[: len(text) - overlap(text, *self.options["stop"])]
        text = text.strip()
        reply = reply_message(text, reasoning, calls, incomplete)
        self.talk._take_in([*self.messages, reply], self.kept)
        return text

    def take_back(self) -> None:
        """Leaves all as it was before the turn."""
        self.talk.cache._become(self.backup)


class Conversation:
    """The conversation of a `Session`, without locks and without generating.

    The cache always says the same as the template's rendering of the messages
    as far as it goes: whenever they change, what does not belong to them is
    taken off, and a turn appends what is missing. Not thread-safe. A method
    that raises changes nothing.
    """

    def __init__(
        self,
        gemma: Gemma,
        template: Template,
        cache: KVCache,
        system: str | None,
        messages: Messages,
        think: bool | None = None,
        tools: Tools | None = None,
        choice: Choice = None,
        parallel: bool = True,
    ) -> None:
        if gemma.tokenizer is None:
            raise ValueError(
                "gemma: this model has no tokenizer (a folder needs a "
                "tokenizer.model or tokenizer.json), and a Session needs one"
            )
        self._tokenizer = gemma.tokenizer
        self._bos_id = gemma.config.bos_id
        self.template = template
        self.tools = Toolset(template, self._tokenizer, tools, choice, parallel)
        self._rendering = self._render(think, self.tools)
        self.cache = cache
        self.system, self.messages = _beginning(system, messages)
        self.elsewhere = False  # keys and values of the cache's tokens
        self.saved_prefill_tokens = 0
        # Of each turn, the cache's length when it ended; None if that has
        # been computed anew since, or never was.
        self.ends: list[int | None] = [None] * self.turns
        if self.messages:
            self._encode(self.messages, False)  # a bad one shows now

    def all_messages(self) -> list[Message]:
        """Gives the messages, the system message first if there is one."""
        return self._with_system(self.messages)

    @property
    def turns(self) -> int:
        return len(_turn_starts(self.messages))

    @property
    def think(self) -> bool | None:
        return self._rendering.think

    def reader(self, options: Mapping[str, Any]) -> ReplyReader:
        """Makes what reads one reply, of the options of its generation."""
        grammar = options.get("grammar")
        return ReplyReader(self._tokenizer, self.tools.form, grammar=grammar)

    def set_think(self, think: bool | None) -> None:
        with self._change():
            self._rendering = self._render(think, self.tools)

    def set_tools(
        self, tools: Tools | None, choice: Choice, parallel: bool
    ) -> None:
        chosen = Toolset(
            self.template, self._tokenizer, tools, choice, parallel
        )
        if chosen.said != self.tools.said:
            with self._change():
                self._rendering = self._render(self.think, chosen)
        self.tools = chosen

    def _render(self, think: bool | None, tools: Toolset) -> Rendering:
        return Rendering(
            self.template, self._tokenizer, self._bos_id, think, tools.said
        )

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Has the body change what is said; the cache keeps what is the same.
        """
        before = self.system, self.messages, self._rendering
        try:
            yield
            self._keep_common(self.messages, exact=True)
        except BaseException:
            self.system, self.messages, self._rendering = before
            raise

    def stop_ids(self) -> list[int]:
        """Gives the template's control tokens that end a reply."""
        return stop_ids(self.template, self._tokenizer)

    def count_tokens(self) -> int:
        """Counts the tokens of the messages, held by the cache or not: some
        templates say a reply in another way than the model did, and the next
        turn computes it anew.
        """
        if not self.messages:
            return len(self.cache)
        wanted = self._encode(self.messages, False)
        held, said = self._common(wanted, exact=False)
        return max(held + len(wanted) - said, len(self.cache))

    def beginning(self) -> Ids:
        """Gives what every way to go on begins with, if none of it is
        computed.
        """
        if len(self.cache) or not (self._opening or self.messages):
            return np.empty(0, np.int32)
        ids = self._beginning_of(self.messages)
        return ids if len(ids) < self.cache.capacity_tokens else ids[:0]

    def resume(self, cache: KVCache, ends: list[int | None]) -> None:
        """Goes on with a cache that holds these messages."""
        self.cache = cache
        self.ends = [*ends, *self.ends[len(ends) :]]
        self._forget_ends(self.ends, len(cache))

    def resume_tokens(self, tokens: Ids, ends: list[int | None]) -> None:
        """Goes on with tokens whose keys and values are elsewhere: the next
        turn takes them from the prefix cache, or computes them.
        """
        self.cache.reset()
        self.cache._core.append(tokens)
        self.resume(self.cache, ends)
        self.elsewhere = True

    def fork(self) -> tuple[Conversation, float]:
        """Makes an independent copy; gives the microseconds that the cache's
        fork took, too.
        """
        start = time.perf_counter()
        cache = self.cache.fork()
        took_us = (time.perf_counter() - start) * 1e6
        other = Conversation.__new__(Conversation)
        other.__dict__.update(self.__dict__)
        other.messages = list(self.messages)
        other.ends = list(self.ends)
        other.cache = cache
        other._rendering = self._rendering.copy()
        return other, took_us

    def set_system(self, text: str | None) -> None:
        with self._change():
            self.system = _checked_system(text)

    def set_messages(self, messages: Messages) -> None:
        """Replaces the turns, and the system text if one is among them."""
        system, turns = _beginning(None, messages)
        before = self.messages
        with self._change():
            self.system = self.system if system is None else system
            self.messages = turns
        kept = self.ends if turns[: len(before)] == before else []
        self.ends = [*kept, *[None] * self.turns][: self.turns]

    def open_calls(self) -> list[ToolCall]:
        """Gives the calls of the last reply."""
        return open_calls(self.messages)

    def begin(
        self, new: Sequence[Message], options: dict[str, Any], drop: bool
    ) -> Turn:
        """Makes the cache ready for a reply to new messages; `drop` as
        "drop_oldest_turns".
        """
        options = self.tools.options_of(options, new[-1].role == "tool")
        everything = messages = [*self.messages, *new]
        wanted = self._encode(messages, True)
        capacity = self.cache.capacity_tokens
        # Some more than is needed goes at once: what is left is computed
        # anew, and that should not happen at every turn.
        max_tokens = options.get("max_tokens", DEFAULT_MAX_TOKENS)
        limit = capacity - min(max(max_tokens, 1), capacity // 4)
        dropped = False
        starts = _turn_starts(messages)
        first = 0  # of the turns that stay
        while drop and first + 1 < len(starts) and len(wanted) > limit:
            first += 1
            messages = everything[starts[first] :]
            wanted = self._encode(messages, True)
            dropped = True
            limit = capacity // 2
        if len(wanted) >= capacity:
            raise CacheFullError(
                f"session: the conversation takes {len(wanted)} tokens and "
                f"leaves no room for a reply in {capacity}; undo turns, say "
                "less, or begin a session with more capacity_tokens"
                + ("" if drop else " or overflow='drop_oldest_turns'")
            )
        held, said = self._common(wanted, exact=dropped)
        if said == len(wanted):  # there is always something to compute
            held = said = max(common_exact(self.cache.tokens, wanted) - 1, 0)
        backup = self.cache.fork()
        self.cache.truncate(held)
        kept = 0 if dropped else held
        return Turn(
            self,
            messages,
            wanted[said:],
            kept,
            backup,
            options,
            self._boundaries(kept),
        )

    def _boundaries(self, kept: int) -> list[int]:
        """Gives the positions where conversations part from this one, after
        the system text, and where it may go on from what was kept of it: its
        last turns' ends, up to `kept`. The last token of a turn may not have
        been computed.
        """
        ends = [end for end in self.ends if end is not None and end <= kept]
        last = ends[-_KEPT_ENDS:]
        found = {end - back for end in last for back in (0, 1)}
        if self._opening:
            found.add(self._system_end())
        return sorted(p for p in found if p >= _WORTH_SHARING)

    def _system_end(self) -> int:
        """Counts the tokens of the system text and what stands around it."""
        return self._rendering.system_end(self._with_system([]))

    @property
    def _opening(self) -> bool:
        """Tells whether the model is told something before the first turn."""
        return self.system is not None or bool(self.tools.said)

    def _take_in(self, messages: list[Message], kept: int) -> None:
        """Goes on with messages, of which a turn has added the last ones."""
        self._keep_common(messages)
        # Where an undo, or the next reply's stop string that is taken off,
        # may lead back to.
        self.cache.checkpoint()
        self.elsewhere = False
        self.messages = messages
        ends = self.ends
        if messages[-2].role == "tool":  # the last turn went on
            ends = ends[:-1]
        ends = ends[len(ends) - (self.turns - 1) :]
        self._forget_ends(ends, kept)
        self.ends = [*ends, len(self.cache)]

    def rewind(self, turns: int) -> list[Message]:
        """Keeps the first `turns` turns; returns the other messages."""
        starts = [*_turn_starts(self.messages), len(self.messages)]
        kept = self.messages[: starts[turns]]
        removed = self.messages[starts[turns] :]
        end = self.ends[turns - 1] if turns else None
        if end is None:
            self._keep_common(kept)
        else:
            self._truncate(end)
        self.messages = kept
        del self.ends[turns:]
        return removed

    def _keep_common(
        self, messages: Sequence[Message], exact: bool = False
    ) -> None:
        """Takes off the cache what does not belong to these messages."""
        # What stays is what every way to go on from them begins with: text
        # that ended the reply, as the template has it, among it.
        wanted = self._beginning_of(messages)
        self._truncate(self._common(wanted, exact)[0])

    def _beginning_of(self, messages: Sequence[Message]) -> Ids:
        """Gives what every way to go on from these messages begins with."""
        return self._rendering.shared_beginning(self._with_system(messages))

    def _truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self._forget_ends(self.ends, length)

    @staticmethod
    def _forget_ends(ends: list[int | None], length: int) -> None:
        """Forgets the ends that lie beyond the first `length` tokens."""
        for i, end in enumerate(ends):
            if end is not None and end > length:
                ends[i] = None

    def _common(self, wanted: Ids, exact: bool) -> tuple[int, int]:
        """Gives the lengths of what the cache and `wanted` have in common."""
        held = self.cache.tokens
        if exact:
            count = common_exact(held, wanted)
            return count, count
        return common_text(held, wanted, self._tokenizer)

    def _encode(self, messages: Sequence[Message], reply: bool) -> Ids:
        return self._rendering.encode(self._with_system(messages), reply)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system is None:
            return list(messages)
        return [Message("system", self.system), *messages]


def _beginning(
    system: str | None, messages: Messages
) -> tuple[str | None, list[Message]]:
    """Gives the system message and the turns that a session starts with."""
    given = messages_of(messages) if messages else []
    turns, _ = arrange(given, lambda: _PAIRS, opens=False)
    if turns and turns[-1].role in ("user", "tool"):
        raise ArgumentError(
            "messages",
            "a reply of the model last",
            turns[-1],
            shown=f"a {turns[-1].role}'s",
        )
    if turns and turns[0].role in SYSTEM_ROLES:
        if system is not None:
            raise ValueError("system: given twice, also as a message")
        system = turns.pop(0).text
    return _checked_system(system), turns


def _turn_starts(messages: Sequence[Message]) -> list[int]:
    """Gives the places of the user's messages: each begins a turn."""
    return [i for i, one in enumerate(messages) if one.role == "user"]


def _checked_system(text: str | None) -> str | None:
    if text is not None and not isinstance(text, str):
        raise unexpected("system", "a str or None", text)
    return text or None
