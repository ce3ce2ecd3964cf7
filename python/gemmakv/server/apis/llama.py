"""Routes of llama-server that clients and tools use, and those of operators."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from gemmakv.chat._messages import messages_of
from gemmakv.chat._templates import render
from gemmakv.server.apis.http import Call, loading
from gemmakv.server.apis.openai import refuse
from gemmakv.server.apis.sessions import history_of
from gemmakv.server.service.chat import TOO_LONG
from gemmakv.server.service.errors import RequestError, invalid, missing
from gemmakv.server.service.requests import parted
from gemmakv.tokenizers._tokenizer import with_bos


class TokenizeBody(msgspec.Struct, kw_only=True):
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]


class TemplateBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]


class SlotsQuery(msgspec.Struct, kw_only=True):
    fail_on_no_slot: int | None = None


class Health(msgspec.Struct):
    status: str = "ok"
    warnings: Annotated[
        list[str] | msgspec.UnsetType,
        msgspec.Meta(description="What fails while requests are served."),
    ] = msgspec.UNSET


class Slot(msgspec.Struct, kw_only=True):
    id: int
    n_ctx: int
    is_processing: bool


async def tokenize(call: Call) -> None:
    body, _ = await call.json(TokenizeBody)
    service = call.chat
    special = body.parse_special is not False  # the original's default

    def answer(content: str) -> bytes:
        ids: list[Any] = service.tokenizer.encode(content, special)
        if body.add_special:
            ids = with_bos(ids, service.gemma.config.bos_id)
        if body.with_pieces:
            ids = [{"id": i, "piece": _piece(call, i)} for i in ids]
        return msgspec.json.encode({"tokens": ids})

    await call.answer(await service.on_texts(answer, body.content))


async def detokenize(call: Call) -> None:
    body, _ = await call.json(DetokenizeBody)
    service = call.chat
    try:
        text = await service.on_texts(service.tokenizer.decode, body.tokens)
    except RequestError as error:
        words = error.message.removeprefix("ids: ")
        raise invalid("tokens", words) from None
    await call.answer({"content": text})


async def apply_template(call: Call) -> None:
    body, document = await call.json(TemplateBody)
    refuse(document, {"tools": ([],)})
    service = call.chat
    service.check_writes()

    def text() -> str:
        said, begun = parted(body.messages, service.template)
        segments = render(
            service.template,
            messages_of(said),
            tools=None,
            add_generation_prompt=True,
        )
        prompt = "".join(s.text for s in segments)
        return prompt + service.begun_text(begun)

    await call.answer({"prompt": await service.in_pool(text)})


async def props(call: Call) -> None:
    if call.scope["method"] == "POST":
        raise missing("body", "changing properties")
    service = call.chat
    await call.answer(
        {
            "default_generation_settings": {
                "n_ctx": service.context,
                "params": service.defaults,
                "is_processing": service.admission.running > 0,
            },
            "total_slots": call.settings.max_running,
            "model_alias": call.name,
            "build_info": f"gemmakv {call.settings.version}".rstrip(),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": service.gemma.chat_template or "",
            "chat_template_name": service.template.name,
            "chat_template_caps": {"supports_thinking": service.can_think},
            "sessions": history_of(service) is not None,
            "bos_token": _special(call, service.gemma.config.bos_id),
            "eos_token": _special(call, service.gemma.config.eos_ids[0]),
        }
    )


async def slots(call: Call) -> None:
    """A slot is room for a continuation; none has one of its own."""
    service = call.chat
    running = service.admission.running
    count = call.settings.max_running
    asked = call.query_of(SlotsQuery).fail_on_no_slot
    if asked and running >= count:
        raise RequestError(
            503, "all slots are in use", code="no_slot", retry_after=1
        )
    await call.answer(
        [
            Slot(id=i, n_ctx=service.context, is_processing=i < running)
            for i in range(count)
        ]
    )


async def live(call: Call) -> None:
    await call.answer(Health())


async def health(call: Call) -> None:
    if call.service is None:
        raise loading()
    if call.service.admission.draining:
        raise RequestError(503, "the server stops", code="server_stopping")
    # One that never can again until it is started again is to be told apart.
    # What may pass takes no server away: the others have the same folder, and
    # what needs no session is answered.
    history = history_of(call.service)
    warnings: list[str] = []
    if history is not None:
        warnings = await call.service.aside(history.health)
    await call.answer(Health(warnings=warnings or msgspec.UNSET))


async def metrics(call: Call) -> None:
    accept = call.headers.get("accept", "")
    text, kind = call.chat.counts.metrics_text(accept)
    await call.answer(text, headers={"content-type": kind})


def error_style(error: RequestError, request_id: str) -> tuple[int, object]:
    del request_id  # in a header
    kind = {
        401: "authentication_error", 403: "permission_error",
        404: "not_found_error", 503: "unavailable_error",
        500: "server_error",
    }.get(error.status, "invalid_request_error")  # fmt: skip
    if error.code == TOO_LONG:
        kind = "exceed_context_size_error"
    return error.status, {
        "error": {
            "code": error.status,
            "message": error.message,
            "type": kind,
            **error.more,
        }
    }


def _piece(call: Call, token: int) -> str | list[int]:
    """Its text, or its bytes if they are no text."""
    data = call.chat.tokenizer.token_bytes[token]
    if not data:
        return call.chat.tokenizer.piece_of(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def _special(call: Call, token: int) -> str:
    return call.chat.tokenizer.piece_of(token) if token >= 0 else ""
