"""The turns of a conversation, as a template takes them.

Clients send roles in orders that most models were never trained on: a system
text between turns, two messages of the user in a row, a reply first. `arrange`
makes turns of them that the template takes, and leaves alone what it takes
anyway. Nothing is left out, and what a message becomes does not depend on the
replies after it: a conversation that goes on begins as it did before.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gemmakv.chat._messages import Message
from gemmakv.chat._tools import result_text
from gemmakv.errors import renamed

SYSTEM_ROLES = ("system", "developer")
GAP = "\n\n"  # between texts that become one
_PLACE = re.compile(r"\bmessages\[(\d+)\]")
_THOUGHTS = ("reasoning", "reasoning_content")
_ROLES = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}


@dataclasses.dataclass(frozen=True)
class TurnRules:
    """The orders of roles that a template takes as they are.

    Attributes:
      system: a system text first.
      developer: one of the role "developer" first.
      system_alone: a system text that no turn of the user follows.
      systems: system texts anywhere, several of them.
      users: turns of the user after each other.
      replies: replies after each other.
      reply_first: a reply before any turn of the user.
      results: results of tools without a call before them.
    """

    system: bool = True
    developer: bool = True
    system_alone: bool = False
    systems: bool = False
    users: bool = False
    replies: bool = False
    reply_first: bool = False
    results: bool = False


ALTERNATING = TurnRules()
ANY_ORDER = TurnRules(*[True] * len(dataclasses.fields(TurnRules)))


class Arranged(NamedTuple):
    """Messages, and the places of those that they were made of: of each the
    first one's.
    """

    messages: list[Message]
    places: Sequence[int]


def arrange(
    messages: Sequence[Message], rules: Callable[[], TurnRules], opens: bool
) -> Arranged:
    """Makes turns of messages that a template takes; `opens`: a reply follows
    them.

    Neighbours of one role become one message, with a blank line between their
    texts. A system text between turns becomes the user's, one with what the
    user says after it. Results of tools follow their calls; those without a
    call become the user's text. A reply that comes first has an empty turn of
    the user before it. `rules` is called where they matter.
    """
    told = len(messages) > 1 and messages[0].role == "system"
    usual = _alternates(messages[1:] if told else messages)
    if usual and (not told or rules().system):
        return Arranged(list(messages), range(len(messages)))
    known = rules()
    turns = [_Turn(m.role, [m], place) for place, m in enumerate(messages)]
    if not known.results:
        turns = _place_results(turns)
    turns = _place_systems(turns, known, opens)
    turns = _join_neighbours(turns, known)
    if not known.reply_first:
        _open_first(turns)
    made = [merge(turn.messages, turn.role) for turn in turns]
    return Arranged(made, [turn.place for turn in turns])


def place_error(
    error: ValueError, place: Callable[[int], int]
) -> ValueError:
    """Makes the same error about messages at other places."""

    def moved(found: re.Match[str]) -> str:
        return f"messages[{place(int(found[1]))}]"

    return renamed(error, lambda words: _PLACE.sub(moved, words))


def merge(messages: Sequence[Message], role: str) -> Message:
    """Makes one message with the texts, parts, calls, thoughts and other keys
    of all. Where the names of who speaks differ, each text says whose it is.
    """
    if len(messages) == 1:
        [one] = messages
        return one if one.role == role else dataclasses.replace(one, role=role)
    speakers = [m for m in messages if m.role not in SYSTEM_ROLES] or messages
    names = {m.name for m in speakers}
    signs = len(names) > 1
    contents: list[Any] = []
    extra: dict[str, Any] = {}
    thoughts: dict[str, list[str]] = {}
    for message in messages:
        said: Any = message.content
        if (
            signs
            and message.name
            and (message.role not in SYSTEM_ROLES or speakers is messages)
        ):
            said = _signed(message.name, said)
        if said is not None:
            contents.append(said)
        extra |= message.extra
        for key in _THOUGHTS:
            text = message.extra.get(key)
            if isinstance(text, str) and text:
                thoughts.setdefault(key, []).append(text)
    extra |= {key: GAP.join(texts) for key, texts in thoughts.items()}
    return Message(
        role,
        _joined(contents),
        messages[-1].incomplete,
        name=None if signs else names.pop(),
        tool_calls=[call for one in messages for call in one.tool_calls],
        extra=extra,
    )


def probe_rules(render: Callable[[list[Message]], str]) -> TurnRules:
    """Finds what a template takes: `render` gives its text of messages, and
    raises for what it rejects.

    What a template takes has the texts of all messages in their order, with
    the same ends and openings of turns around them as where user and assistant
    alternate. One that fails at that is given everything as it is.
    """

    def gaps(order: str) -> list[str]:
        """Returns the texts before, between and after the messages; [] if one
        of these is missing.
        """
        marks = [chr(0xE000 + i) for i in range(len(order))]
        messages = [
            Message(_ROLES[role], mark) for role, mark in zip(order, marks)
        ]
        try:
            text = render(messages)
        except Exception:  # a template is anybody's code
            return []
        parts = re.split("([\ue000-\uf8ff])", text)
        return parts[::2] if parts[1::2] == marks else []

    plain = gaps("uauau")
    if not plain or plain[1:3] != plain[3:5]:
        return ANY_ORDER
    before = dict(zip("au", plain[1:3]))

    def stands(order: str) -> bool:
        found = gaps(order)
        return bool(found) and all(
            gap == before.get(role, gap)
            for gap, role in zip(found[1:], order[1:])
        )

    def systems() -> bool:
        # A system text that looks like a reply is none.
        return stands("ssua") and (
            stands("usuasuas") and gaps("usuasuas")[1] != before["a"]
        )

    return TurnRules(
        system=bool(gaps("suaua")),
        developer=bool(gaps("duaua")),
        system_alone=bool(gaps("s")) and stands("saua"),
        systems=systems(),
        users=stands("uuauuua"),
        replies=stands("uaauaaau"),
        reply_first=stands("auau"),
    )


@dataclasses.dataclass
class _Turn:
    """Messages that are to be one, of `role`; `place`: of the first of them.

    `joins`: with a turn of the same role after it, whatever the rules are.
    """

    role: str
    messages: list[Message]
    place: int
    joins: bool = False


def _alternates(messages: Iterable[Message]) -> bool:
    """Tells whether user and assistant take turns, without anybody else."""
    expected, other = "user", "assistant"
    for message in messages:
        if message.role != expected:
            return False
        expected, other = other, expected
    return True


def _place_results(turns: Iterable[_Turn]) -> list[_Turn]:
    """Results right after the calls whose they are, before what was said
    meanwhile; results of nothing as the user's text.
    """
    found: list[_Turn] = []
    names: dict[Any, str] = {}  # of functions, by the ids of their calls
    ids: set[Any] = set()  # of the calls that may have results now
    end = -1  # where the next of these results belongs
    for turn in turns:
        [message] = turn.messages
        if turn.role == "assistant":
            if end != len(found) or found[-1].role != "assistant":
                ids, end = set(), -1
            found.append(turn)
            for call in message.tool_calls:
                ids.add(call.get("id"))
                names[call.get("id")] = call["function"]["name"]
            if ids:
                end = len(found)
        elif turn.role != "tool":
            found.append(turn)
        elif end == len(found) or end >= 0 and message.tool_call_id in ids:
            found.insert(end, turn)
            end += 1
        else:
            name = names.get(message.tool_call_id)
            said = Message("user", result_text(message, name))
            found.append(_Turn("user", [said], turn.place))
    return found


def _place_systems(
    turns: Sequence[_Turn], rules: TurnRules, opens: bool
) -> list[_Turn]:
    """System texts where they may stand; others as the user's."""
    count = 0
    while count < len(turns) and turns[count].role in SYSTEM_ROLES:
        count += 1
    head, rest = list(turns[:count]), list(turns[count:])
    # Where no reply follows, the user may speak yet.
    heard = rest[0].role != "assistant" if rest else not opens
    if not rules.system or not rules.system_alone and not heard:
        rest, head = [*head, *rest], []
    for turn in head:
        if turn.role == "developer" and not rules.developer:
            turn.role = "system"
    if head and not rules.systems:
        said = [turn.messages[0] for turn in head]
        head = [_Turn(head[0].role, said, head[0].place)]
    for turn in rest:
        if turn.role in SYSTEM_ROLES:
            turn.role = "system" if rules.systems else "user"
            turn.joins = not rules.systems
    return [*head, *rest]


def _join_neighbours(turns: Iterable[_Turn], rules: TurnRules) -> list[_Turn]:
    stands = {"user": rules.users, "assistant": rules.replies}
    found: list[_Turn] = []
    for turn in turns:
        last = found[-1] if found else None
        if (
            last is not None
            and last.role == turn.role
            and (last.joins or not stands.get(turn.role, True))
        ):
            last.messages += turn.messages
            last.joins = turn.joins
        else:
            found.append(turn)
    return found


def _open_first(turns: list[_Turn]) -> None:
    """Puts a user's turn before the first reply."""
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            turns.insert(i, _Turn("user", [Message("user", "")], turn.place))
        if turn.role not in SYSTEM_ROLES:
            return


def _signed(name: str, content: Any) -> Any:
    """Puts the name of the speaker before a content."""
    if isinstance(content, str):
        return f"{name}: {content.strip()}" if content.strip() else content
    if not content:
        return content
    first, *others = content
    return [{**first, "text": f"{name}: {first['text'].strip()}"}, *others]


def _joined(contents: Sequence[Any]) -> Any:
    """Contents as one: text, or parts if any of them has parts; None of
    none.
    """
    if all(isinstance(content, str) for content in contents):
        said = [text for text in contents if text.strip()]
        if not said:
            return contents[0] if contents else None
        return GAP.join([said[0], *(text.strip() for text in said[1:])])
    parts: list[Mapping[str, Any]] = []
    texts: list[list[str]] = []  # of each part, in pieces
    for content in contents:
        added = _parts(content)
        # Templates trim parts: the blank line stands within one.
        if parts and added and _agree(parts[-1], added[0]):
            first = added.pop(0)
            parts[-1] = {**parts[-1], **first}
            if not first["text"].strip():
                pass
            elif len(texts[-1]) > 1 or texts[-1][0].strip():
                texts[-1] += [GAP, first["text"].strip()]
            else:
                texts[-1] = [first["text"]]
        parts += added
        texts += [[part["text"]] for part in added]
    return [
        {**part, "text": "".join(pieces)} for part, pieces in zip(parts, texts)
    ]


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tells whether two parts say the same of their texts."""
    return all(
        one[key] == other[key]
        for key in one.keys() & other.keys() - {"text", "cache_control"}
    )


def _parts(content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content.strip() else []
    return list(content)
