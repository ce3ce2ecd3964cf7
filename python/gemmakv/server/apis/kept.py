"""Conversations that the server keeps, as requests name them."""

from __future__ import annotations

from typing import Any

from gemmakv.conversations import new_id
from gemmakv.server.apis.call import Call
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.history import History
from gemmakv.server.service.requests import Past


def history_of(service: ChatService) -> History | None:
    """Gives the sessions of a service, if it keeps any."""
    return service.keeper if isinstance(service.keeper, History) else None


def kept(call: Call, param: str | None = None) -> History:
    """Gives the sessions, which the field `param` asks for. Raises
    RequestError if none are kept.
    """
    found = history_of(call.service)
    if found is None:
        raise RequestError(
            400,
            f"{param or 'sessions'}: this server keeps no conversations; it "
            "does when started with --sessions DIR",
            param=param,
            code="sessions_off",
        )
    return found


def owner_in(call: Call) -> str:
    """Gives the tenant's name in records. Raises RequestError as `kept`."""
    return kept(call).owner(call.owner)


def past_of(
    call: Call,
    session: str | None,
    system: str | None = None,
    replaces: str | None = None,
) -> Past | None:
    """Gives the past of a request that names a `session`, else None. `system`
    takes the place of the session's own; `replaces` is the session's last
    turn, if the new one takes its place. Raises RequestError.
    """
    if session is None:
        if replaces is not None:
            raise invalid("replaces", "expected a session with it, found none")
        return None
    kept(call, "session")
    return Past(new_id("resp"), session, system=system, replaces=replaces)


def named(past: Past | None) -> dict[str, Any]:
    """Gives the field of an answer that names the session and its last turn."""
    if past is None:
        return {}
    return {"session": {"id": past.session, "turn": past.id}}
