"""Chat: a conversation in turns over a KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from gemmakv._support.arguments import byte_view, integer
from gemmakv._support.files import PathOrFile, piecewise_writer
from gemmakv.cache._kv_cache import KVCache, KvDtype, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.chat import _session_file as session_file
from gemmakv.chat._conversation import Conversation, Turn
from gemmakv.chat._functions import (
    Function,
    call_later,
    call_now,
    is_async,
)
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Message, Messages, Said, Template, Tools
from gemmakv.chat._one_call import OneCall
from gemmakv.chat._session_file import (
    OVERFLOWS,
    Overflow,
    SessionState,
    SessionText,
    TokenPart,
)
from gemmakv.chat._stream import ChatStream
from gemmakv.chat._templates import (
    NAMES,
    check_reply_options,
    stop_texts,
    template_for,
)
from gemmakv.chat._toolset import Choice, result_messages, said_messages
from gemmakv.errors import brief, unexpected
from gemmakv.generation._options import Options
from gemmakv.generation._requests import requests_of
from gemmakv.generation._result import Generation, ToolCall
from gemmakv.generation._stream import Stream
from gemmakv.generation._work import time_left

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Message", "Session", "SessionStats"]

# What `send` is given, and what answers calls.
Text = str | Said | Sequence[Said]
Results = Mapping[str, object] | Sequence[object]


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """The numbers of a session.

    Attributes:
      tokens: held by its cache.
      own_bytes: of keys and values that it alone holds.
      shared_bytes: of keys and values that forks hold as well.
      saved_prefill_tokens: tokens of all prompts so far that the cache held
        already and that were not computed again.
      last_fork_us: microseconds that the last fork of it, or the fork that
        made it, took; None if there was none.
    """

    tokens: int
    own_bytes: int
    shared_bytes: int
    saved_prefill_tokens: int
    last_fork_us: float | None


class Session:
    """A conversation with a model: messages, a template and a KV cache.

    Each turn computes only what the cache does not hold yet. What the cache
    holds always says the same as the template's rendering of `messages`;
    tokens of replies stay as they were sampled, and what is computed again
    (after a change of `system`, or when turns are dropped) has the tokens
    that a new session with the same messages has, and so the same results.

    Calls of one session wait for each other, from any thread, but never for a
    reader: one that finds a half-read stream raises GemmaKVError. Sessions of
    one Gemma run at the same time. `messages`, `turns`, `stats` and `system`
    never wait and show the last turn that ended. A call that raises leaves
    the session as it was.

    On an event loop, `asend`, `astream`, `afork`, `aclose` and `async with`
    never block it; all other methods may, where they wait for a call or for
    the model.
    """

    def __init__(
        self,
        gemma: Gemma,
        system: str | None = None,
        overflow: Overflow = "error",
        *,
        template: Template | str | None = None,
        think: bool | None = None,
        messages: Messages = (),
        capacity_tokens: int | None = None,
        kv_dtype: KvDtype | None = None,
        checkpoint_bytes: int | None = None,
        pool: BlockPool | None = None,
        cache: KVCache | None = None,
        tools: Tools | None = None,
        tool_choice: Choice = None,
        parallel_tool_calls: bool = True,
        options: Mapping[str, object] | None = None,
        **more: Unpack[Options],
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
          template: "file", "gemma", "gemma4", "plain" or a Template; None
            chooses what fits the model, see `gemmakv.templates.template_for`.
          think: whether the model is to think before it replies; None: as
            the template has it.
          messages: turns that the conversation begins with, as `Message`,
            dict or what other libraries have for them, a reply last. Results
            of tools follow their calls. Neighbours of one role become one
            message, so that user and assistant take turns. System or developer
            messages may stand first: their text becomes `system`; later ones
            become the user's.
          capacity_tokens, kv_dtype, checkpoint_bytes, pool: see
            `create_kv_cache`.
          cache: a cache that becomes the session's, instead of a new one of
            those four: what it holds of the conversation is not computed
            again, what else it holds is removed with the first turn.
          tools: what the model may call: Python functions, which `run` calls
            (see `tool_schema`), or JSON schemas of functions. Needs the extra
            `grammar`.
          tool_choice: "auto" (the default), "none", "required" (at least one
            call) or the name of the tool that is to be called. It is for
            replies to the user; one to results may call what it likes.
          parallel_tool_calls: whether a reply may have several calls.
          options: generation keywords for all turns; `options` of the session
            may be changed at any time. They are checked here as a turn checks
            them, but for the text of a grammar, which is compiled with the
            first reply.
          **more: the same, as keywords.

        Raises ValueError naming the argument or option that is bad, TypeError
        for an option that is none, MismatchError if `cache` is of another
        model or the option `draft` has another vocabulary, GemmaKVError if the
        template cannot be used.
        """
        self._requests = requests_of(gemma)
        self._gemma = gemma
        self.overflow = overflow
        if not isinstance(options, Mapping | None):
            raise unexpected("options", "a mapping or None", options)
        for name in more.keys() & (options or {}).keys():
            raise unexpected(name, "it once, not in `options` as well", options)
        self.options: dict[str, Any] = {**(options or {}), **more}
        check_reply_options(self.options)
        self._requests.check_options(self.options)
        of_cache = {
            "capacity_tokens": capacity_tokens,
            "kv_dtype": kv_dtype,
            "checkpoint_bytes": checkpoint_bytes,
            "pool": pool,
        }
        given = {k: v for k, v in of_cache.items() if v is not None}
        if cache is None:
            cache = create_kv_cache(gemma.config, **given)  # type: ignore[arg-type]
        elif not isinstance(cache, KVCache):
            raise unexpected("cache", "a KVCache", cache)
        elif given:
            raise ValueError(
                f"{next(iter(given))}: belongs to a new cache, and `cache` is "
                "given; give it to create_kv_cache"
            )
        else:
            self._requests.check_fits(cache)
        self._talk = Conversation(
            gemma,
            template_for(gemma, template),
            cache,
            system,
            messages,
            think,
            tools,
            tool_choice,
            parallel_tool_calls,
        )
        self._last_fork_us: float | None = None
        self._calls = OneCall()

    def __repr__(self) -> str:
        return (
            f"<Session of {self.turns} turns, {self.template.name} template, "
            f"{self.cache!r}>"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    @property
    def gemma(self) -> Gemma:
        return self._gemma

    @property
    def cache(self) -> KVCache:
        """The conversation's cache: to look at, not to change."""
        return self._talk.cache

    @property
    def in_memory(self) -> bool:
        """Tells whether it holds keys and values. One that does not takes them
        from the prefix cache at its next turn, or computes them.
        """
        return not self._talk.elsewhere

    @property
    def template(self) -> Template:
        return self._talk.template

    @property
    def overflow(self) -> Overflow:
        """The way of a conversation that does not fit: "error" or
        "drop_oldest_turns"; may be changed at any time.
        """
        return self._overflow

    @overflow.setter
    def overflow(self, value: str) -> None:
        if value not in OVERFLOWS:
            raise unexpected(
                "overflow", " or ".join(map(repr, OVERFLOWS)), value
            )
        self._overflow = value

    @property
    def system(self) -> str | None:
        """The text that the model is told before the first turn; None or ""
        for nothing. A change has the rest of the conversation computed again
        at the next turn.
        """
        return self._talk.system

    @system.setter
    def system(self, text: str | None) -> None:
        with self._calls:
            self._talk.set_system(text)

    @property
    def think(self) -> bool | None:
        """Tells whether the model is to think before it replies; None: as
        the template has it. What it thought is the `reasoning` of replies and
        of their messages; templates say it again in a turn that goes on, or
        never, so most replies that were thought over are computed again with
        the next message. A change has the conversation computed again.
        """
        return self._talk.think

    @think.setter
    def think(self, think: bool | None) -> None:
        with self._calls:
            self._talk.set_think(think)

    @property
    def tools(self) -> list[Any]:
        """The tools that the model may call, as they were given.

        May be set. If the model is told other ones than before, the
        conversation is computed again.
        """
        return list(self._talk.tools.given)

    @tools.setter
    def tools(self, tools: Tools | None) -> None:
        with self._calls:
            now = self._talk.tools
            self._talk.set_tools(tools, now.choice, now.parallel)

    @property
    def tool_choice(self) -> Choice:
        """The choice of tools when the user has spoken; may be set, as at the
        beginning.
        """
        return self._talk.tools.choice

    @tool_choice.setter
    def tool_choice(self, choice: Choice) -> None:
        with self._calls:
            now = self._talk.tools
            self._talk.set_tools(now.given, choice, now.parallel)

    @property
    def messages(self) -> list[Message]:
        """The conversation, the system message first if there is one.

        May be set, as `messages` of a new session are; without a system
        message, that of the session stays. What is not the same as before is
        computed with the next message.
        """
        return self._talk.all_messages()

    @messages.setter
    def messages(self, messages: Messages) -> None:
        with self._calls:
            self._talk.set_messages(messages)

    @property
    def turns(self) -> int:
        """Messages of the user so far."""
        return self._talk.turns

    @property
    def stats(self) -> SessionStats:
        self._calls.check_open()
        return SessionStats(
            tokens=len(self.cache),
            own_bytes=self.cache.nbytes,
            shared_bytes=self.cache.shared_nbytes,
            saved_prefill_tokens=self._talk.saved_prefill_tokens,
            last_fork_us=self._last_fork_us,
        )

    def _count_tokens(self) -> int:
        """Counts the tokens of what was said, in the cache or not yet."""
        with self._calls:
            return self._talk.count_tokens()

    def send(self, text: Text, **options: Unpack[Options]) -> Generation:
        """Says `text` and waits for the reply.

        `text` may be a message of the user, or its parts, too; after a reply
        with `tool_calls` it may be the messages with the results of all, as
        `ToolCall.result` makes them.

        `options` are those of `Gemma.generate`, over those of the session;
        `stop` adds to what ends a reply anyway, and `progress` must not call
        the session. The result's `text` is the reply without white space
        around it, as it stands in `messages`.

        Raises ValueError for an empty text or a bad option, CacheFullError if
        the conversation does not fit; Ctrl-C raises KeyboardInterrupt. The
        session is then as if nothing had been said.
        """
        return self._send("text", text, options)

    async def asend(self, text: Text, **options: Unpack[Options]) -> Generation:
        """Does `send` without blocking the event loop, also where it waits for
        the session. A task that is cancelled leaves the session as if nothing
        had been said.
        """
        return await self._asend("text", text, options)

    def give(self, results: Results, **options: Unpack[Options]) -> Generation:
        """Gives the results of the calls that the last reply asks for, and
        waits for the next reply.

        Args:
          results: one for each call: in a list in their order, or in a dict by
            their ids or by the names of their tools. See `ToolCall.result` for
            what may be one.
          **options: those of `send`.

        Raises what `send` raises, ValueError if `results` are not those of the
        last reply's calls.
        """
        return self._send("results", results, options)

    async def agive(
        self, results: Results, **options: Unpack[Options]
    ) -> Generation:
        """Does `give` without blocking the event loop."""
        return await self._asend("results", results, options)

    def run(
        self, text: Text, *, rounds: int = 8, **options: Unpack[Options]
    ) -> Generation:
        """Says a text, calls the Python functions that the replies ask for,
        and returns the reply that asks for none.

        Functions are called on this thread, in the order of the calls, while
        others may use the session. What one raises is raised here: the calls
        stay in the conversation, and `give` may answer them.

        Args:
          text: as for `send`.
          rounds: how many replies may have their calls done. What comes after
            them is returned as it is, and so is a reply with a call of a tool
            that is no Python function.
          **options: those of `send`, for each reply.

        Raises what `send` and the functions raise; ValueError if one of these
        is to be awaited, which `arun` does.
        """
        functions = self._talk.tools.functions
        for function in functions.values():
            if is_async(function):
                raise unexpected("tools", "no async functions", function)
        left = integer("rounds", rounds, 0)
        reply = self.send(text, **options)
        while left and _are_done(reply.tool_calls, functions):
            results = [
                call_now(functions[call.name], call.arguments)
                for call in reply.tool_calls
            ]
            reply = self.give(results, **options)
            left -= 1
        return reply

    async def arun(
        self, text: Text, *, rounds: int = 8, **options: Unpack[Options]
    ) -> Generation:
        """Does `run` without blocking the event loop: async functions are
        awaited, others run on threads.
        """
        functions = self._talk.tools.functions
        left = integer("rounds", rounds, 0)
        reply = await self.asend(text, **options)
        while left and _are_done(reply.tool_calls, functions):
            results = [
                await call_later(functions[call.name], call.arguments)
                for call in reply.tool_calls
            ]
            reply = await self.agive(results, **options)
            left -= 1
        return reply

    def _send(self, name: str, said: Any, options: Any) -> Generation:
        begin = time.monotonic()
        with self._calls, self._begin(said, options, begin, name) as turn:
            ask = self._requests
            work = ask.reply(self.cache, *turn.request())
            return turn.finish(ask.done(work))

    async def _asend(self, name: str, said: Any, options: Any) -> Generation:
        begin = time.monotonic()
        async with self._calls:
            with self._begin(said, options, begin, name) as turn:
                ask = self._requests
                work = ask.reply(self.cache, *turn.request())
                return turn.finish(await ask.adone(work))

    def stream(self, text: Text, **options: Unpack[Options]) -> ChatStream:
        """Does `send` piece by piece: an iterator and async iterator.

        Bad arguments raise here. Until the stream has ended, the session is
        busy: other calls wait while it runs, and raise GemmaKVError if it
        waits for its reader. A reply that is cancelled, also by Ctrl-C, or
        that fails stays in the conversation with what was delivered, marked
        `incomplete`.
        """
        begin = time.monotonic()
        self._calls.acquire()
        with self._streaming(text, options, begin) as (turn, undo):
            work = self._requests.stream(self.cache, *turn.request())
            return self._begun(turn, self._requests.done(work), undo)

    async def astream(
        self, text: Text, **options: Unpack[Options]
    ) -> ChatStream:
        """Does `stream` without blocking the event loop where the session is
        busy: it waits for it like `asend`.
        """
        begin = time.monotonic()
        await self._calls.aacquire()
        with self._streaming(text, options, begin) as (turn, undo):
            work = self._requests.stream(self.cache, *turn.request())
            return self._begun(turn, await self._requests.adone(work), undo)

    @contextlib.contextmanager
    def _streaming(
        self, text: Text, options: Any, begin: float
    ) -> Iterator[tuple[Turn, contextlib.ExitStack]]:
        """Begins a turn, which what is given with it takes back, unless its
        stream has begun. Requires: acquired.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._calls.release)
            yield undo.enter_context(self._begin(text, options, begin)), undo

    def _begun(
        self, turn: Turn, inner: Stream, undo: contextlib.ExitStack
    ) -> ChatStream:
        stream = ChatStream(inner, turn, self._calls.release)
        self._calls.keep_for(stream)
        undo.pop_all()
        return stream

    def fork(self) -> Session:
        """Makes an independent session with the same conversation and
        settings.

        Shares the blocks of the cache: no key or value is copied. What a
        session that has not said anything begins with (the system text) is
        computed first, so that it is shared too: this waits for it.
        `copy.copy` and `copy.deepcopy` are forks.
        """
        with self._calls:
            beginning = self._talk.beginning()
            if len(beginning):
                self._gemma.prefill(self.cache, beginning)
            return self._forked(len(beginning) > 0)

    async def afork(self) -> Session:
        """Does `fork` without blocking the event loop, also where it waits for
        the session.
        """
        async with self._calls:
            beginning = self._talk.beginning()
            if len(beginning):
                await self._gemma.aprefill(self.cache, beginning)
            return self._forked(len(beginning) > 0)

    def _forked(self, begun: bool) -> Session:
        """Makes the fork; `begun`: the beginning was just computed. Requires:
        acquired.
        """
        if begun:
            self.cache.checkpoint()
        talk, self._last_fork_us = self._talk.fork()
        other = Session.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.options = dict(self.options)
        other._talk = talk
        other._calls = OneCall()
        return other

    def __copy__(self) -> Session:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, object]) -> Session:
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        # The pickler decides what becomes of the model (`persistent_id`).
        return _unpickled, (type(self), self.to_bytes(), self._gemma)

    def undo(self, turns: int = 1) -> list[Message]:
        """Takes back the last turns and returns their messages.

        Raises ValueError if there are not so many.
        """
        with self._calls:
            count = _checked_count("turns", turns, 1, self.turns)
            return self._talk.rewind(self.turns - count)

    def goto(self, turn: int) -> list[Message]:
        """Keeps the first `turn` turns, 0 to `turns`; returns the messages
        that were taken back.
        """
        with self._calls:
            return self._talk.rewind(
                _checked_count("turn", turn, 0, self.turns)
            )

    def to_bytes(self) -> bytes:
        """Gives messages, settings, keys and values, for `from_bytes`.

        A Template object is saved by its name; `progress`, `draft` and
        functions among the options are not saved. Pickling goes through this;
        the pickler must know what to do with the model.
        """
        buffer = io.BytesIO()
        self.save(buffer)
        return buffer.getvalue()

    def save(self, path_or_file: PathOrFile) -> None:
        """Writes `to_bytes()` to a path or to a binary file object, piece by
        piece: it takes no memory for a second copy of the keys and values, and
        the session may be used during it.

        A path is replaced in one step, once everything is on disk. Keys and
        values that are not in memory are brought back or computed first.
        """
        with self._calls:
            if not self.in_memory:
                self._bring_back()
        self._saving()(path_or_file)

    def _bring_back(self) -> None:
        """Computes what `resume_tokens` left out, or takes it over."""
        tokens = self.cache.tokens
        if len(tokens):
            cache = self.cache.fork()
            cache.truncate(len(tokens) - 1)
            self._gemma.prefill(cache, tokens[-1:])
            self.cache._become(cache)
        self._talk.elsewhere = False

    def _saving(self) -> Callable[[PathOrFile], None]:
        """Makes a `save` of what the session is now, to be called later."""
        with self._calls:
            text, cache = self._text(), self.cache.fork()

        def save(path_or_file: PathOrFile) -> None:
            with piecewise_writer(path_or_file) as write:
                session_file.write(text, cache, write)

        return save

    def _published(self) -> SessionState:
        """Gives what the session is now. The prefix cache takes in its keys
        and values.
        """
        with self._calls:
            self._publish()
            tokens = TokenPart(self._gemma.fingerprint, self.cache.tokens)
            return SessionState(self._text(), tokens)

    def _text(self) -> SessionText:
        """Requires: acquired."""
        return SessionText(
            template=self.template.name,
            system=self.system,
            messages=list(self._talk.messages),
            overflow=self.overflow,
            options=dict(self.options),
            capacity_tokens=self.cache.capacity_tokens,
            kv_dtype=self.cache.kv_dtype,
            saved_prefill_tokens=self._talk.saved_prefill_tokens,
            ends=list(self._talk.ends),
            think=self._talk.think,
            tools=self._talk.tools.schemas,
            tool_choice=self._talk.tools.choice,
            parallel_tool_calls=self._talk.tools.parallel,
        )

    def _publish(self) -> None:
        prefix = self._gemma.prefix_cache
        if prefix is not None and len(self.cache):
            prefix.publish(self.cache)

    def _leave_memory(self) -> None:
        """Lets go of keys and values, which the prefix cache takes in."""
        with self._calls:
            self._publish()
            self._talk.resume_tokens(self.cache.tokens, self._talk.ends)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | bytearray | memoryview,
        gemma: Gemma,
        *,
        template: Template | str | None = None,
        rebuild: bool = False,
        pool: BlockPool | None = None,
    ) -> Session:
        """Makes the session that `to_bytes` gave: it continues with the same
        bits as that one.

        `template` replaces the saved one; it is needed if that was an object
        of yours. Of tools that were Python functions the session has the
        schemas: set `tools` to have them called again. With `rebuild`, the
        keys and values in the data are ignored and computed again from the
        messages, at the next turn. Blocks come from `pool`.

        Raises CorruptFile if the data are not a whole, sound session;
        MismatchError if the keys and values belong to other weights
        (`rebuild` then keeps the text), the model has no such template, or a
        newer version wrote them.
        """
        data, gemma = _in_order("from_bytes", data, gemma)
        view = byte_view("data", data)
        text, kv = session_file.split(view, whole=not rebuild)
        if isinstance(kv, TokenPart):
            state = SessionState(text, kv)
            return cls._from_state(state, gemma, template, pool)
        session = cls._of_text(text, gemma, template, pool)
        if not rebuild:
            cache = session_file.restore(kv, gemma, pool)
            session._talk.resume(cache, text.ends)
        return session

    @classmethod
    def _from_state(
        cls,
        state: SessionState,
        gemma: Gemma,
        template: Template | str | None = None,
        pool: BlockPool | None = None,
    ) -> Session:
        """Makes the session that `_published` gave the state of. Raises what
        `from_bytes` raises.
        """
        text, tokens = state
        session = cls._of_text(text, gemma, template, pool)
        session._talk.resume_tokens(tokens.check(gemma, text), text.ends)
        return session

    @classmethod
    def _of_text(
        cls,
        text: SessionText,
        gemma: Gemma,
        template: Template | str | None = None,
        pool: BlockPool | None = None,
    ) -> Session:
        """Makes a session whose keys and values are to be computed."""
        if template is None and text.template not in NAMES:
            raise ValueError(
                "template: the session was saved with a Template named "
                f"{brief(text.template)}; give it: Session.load(path, gemma, "
                "template=...)"
            )
        session = cls(
            gemma,
            text.system,
            cast(Overflow, text.overflow),
            template=text.template if template is None else template,
            think=text.think,
            messages=text.messages,
            # The model may be one of a shorter context.
            capacity_tokens=min(
                text.capacity_tokens, gemma.config.context_length
            ),
            kv_dtype=cast(KvDtype, text.kv_dtype),
            pool=pool,
            tools=text.tools or None,
            tool_choice=text.tool_choice,
            parallel_tool_calls=text.parallel_tool_calls,
        )
        # Those that do not suit this model are errors of a reply: they can be
        # changed once the session is open.
        session.options.update(text.options)
        session._talk.saved_prefill_tokens = text.saved_prefill_tokens
        return session

    @classmethod
    def load(
        cls,
        path_or_file: PathOrFile,
        gemma: Gemma,
        *,
        template: Template | str | None = None,
        rebuild: bool = False,
        pool: BlockPool | None = None,
    ) -> Session:
        """Reads what `save` wrote; see `from_bytes`.

        A file that is no session is found by its first bytes, and not read.
        """
        path_or_file, gemma = _in_order("load", path_or_file, gemma)
        data = session_file.read(path_or_file)
        return cls.from_bytes(
            data, gemma, template=template, rebuild=rebuild, pool=pool
        )

    def close(self) -> None:
        """Ends a running reply and frees the cache; waits for the model's
        step that runs, and for another call that is running.

        Any later use of the conversation is a ValueError; `messages` stay.
        Raises GemmaKVError in a call of this thread, as of its `progress`.
        """
        self._calls.close(self.cache)

    async def aclose(self) -> None:
        """Closes the session without blocking the event loop, for any task of
        it; also done by `async with`.
        """
        await self._calls.aclose(self.cache)

    def _begin(
        self, said: Any, options: Any, begin: float, name: str = "text"
    ) -> Turn:
        """Begins a turn with what is said, or with `name` "results" with
        these. Requires: acquired.
        """
        calls = self._talk.open_calls()
        if name == "text":
            messages = said_messages(said, calls)
        else:
            messages = result_messages(name, calls, said)
        return self._talk.begin(
            messages,
            self._merged(options, begin),
            drop=self.overflow == "drop_oldest_turns",
        )

    def _merged(self, options: Any, begin: float) -> dict[str, Any]:
        """Gives the options of one turn, whose call began at `begin`."""
        for keywords in (self.options, options):
            check_reply_options(keywords)
        merged = {**self.options, **options}
        merged["stop"] = stop_texts(self.template, self.options, options)
        merged["deadline"] = time_left(merged.get("deadline"), begin)
        return merged


def _in_order(name: str, data: Any, gemma: Any) -> tuple[Any, Any]:
    """Takes arguments of `load` and `from_bytes` in their former order, too:
    the model first.
    """
    if not isinstance(data, Gemma):
        if not isinstance(gemma, Gemma):
            raise unexpected("gemma", "a Gemma", gemma)
        return data, gemma
    warnings.warn(
        f"Session.{name}: the model comes second now, as everywhere; "
        "the former order goes with a later version",
        DeprecationWarning,
        stacklevel=3,
    )
    return gemma, data


def _unpickled(kind: type[Session], data: bytes, gemma: Gemma) -> Session:
    """Makes a session that was pickled."""
    return kind.from_bytes(data, gemma)


def _are_done(
    calls: Sequence[ToolCall], functions: Mapping[str, Function]
) -> bool:
    """Tells whether there are calls, and Python functions for all of them."""
    return bool(calls) and all(call.name in functions for call in calls)


def _checked_count(name: str, value: int, least: int, most: int) -> int:
    count = integer(name, value)
    if least <= count <= most:
        return count
    expected = f"{least} to {most} (the turns there are)"
    if most < least:
        expected = "turns to undo, and there are none"
    raise unexpected(name, expected, count)
