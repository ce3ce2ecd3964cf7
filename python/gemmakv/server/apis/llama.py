"""Routes of llama-server that clients and tools use."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query as QueryField
from pydantic import BaseModel
from starlette.responses import Response

from gemmakv.chat._messages import messages_of
from gemmakv.chat._templates import render
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Body, Query, Whole
from gemmakv.server.apis.kept import history_of
from gemmakv.server.apis.routing import router
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    unexpected,
    unsupported,
)
from gemmakv.server.service.requests import split_reply
from gemmakv.tokenizers._tokenizer import with_bos

ROUTER = router()


class TokenizeBody(Body):
    """llama-server's form has `content`; vLLM's `prompt` or `messages`."""

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[Whole]
    model: str | None = None


class TemplateBody(Body):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class SlotsQuery(Query):
    fail_on_no_slot: int | None = None


class Slot(BaseModel):
    id: int
    n_ctx: int
    is_processing: bool
    id_task: int = -1


@ROUTER.post("/tokenize", summary="Tokens of a text")
async def tokenize(call: CallDep, body: TokenizeBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    service = call.service
    given = [
        name
        for name in ("content", "prompt", "messages")
        if getattr(body, name) is not None
    ]
    if len(given) != 1:
        raise unexpected(
            "content", "one of content, prompt, messages", given or None
        )
    if body.content is None:
        return await _tokens_for_vllm(call, body)
    special = body.parse_special is not False  # the original's default

    def tokens(content: str) -> list[Any]:
        ids: list[Any] = service.tokenizer.encode(content, special)
        if body.add_special:
            ids = with_bos(ids, service.gemma.config.bos_id)
        if body.with_pieces:
            ids = [{"id": i, "piece": _piece(call, i)} for i in ids]
        return ids

    found = await service.threads.run_texts(tokens, body.content)
    return JsonResponse({"tokens": found})


async def _tokens_for_vllm(call: Call, body: TokenizeBody) -> Response:
    """Answers in the form of vLLM, whose texts begin with a BOS."""
    service = call.service
    found: Any
    if body.messages is not None:
        if body.add_generation_prompt is False:
            raise unsupported(
                "add_generation_prompt", "a prompt without opening"
            )
        found = await service.prompts.chat_ids(body.messages, body.tools)
    elif body.add_special_tokens is False:
        found = await service.threads.run_texts(
            service.tokenizer.encode, body.prompt
        )
    else:
        found = await service.threads.run_texts(
            service.prompts.text_ids, body.prompt
        )
    ids = [int(token) for token in found]
    pieces = [service.tokenizer.piece_of(token) for token in ids]
    return JsonResponse(
        {
            "count": len(ids),
            "max_model_len": service.context,
            "tokens": ids,
            "token_strs": pieces if body.return_token_strs else None,
        }
    )


@ROUTER.post("/detokenize", summary="The text of tokens")
async def detokenize(call: CallDep, body: DetokenizeBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    service = call.service
    try:
        text = await service.threads.run_texts(
            service.tokenizer.decode, body.tokens
        )
    except RequestError as error:
        words = error.message.removeprefix("ids: ")
        raise invalid("tokens", words) from None
    # llama-server's name of it, and vLLM's.
    return JsonResponse({"content": text, "prompt": text})


@ROUTER.get("/tokenizer_info", summary="The tokenizer, in vLLM's form")
async def tokenizer_info(call: CallDep) -> Response:
    config = call.service.gemma.config
    return JsonResponse(
        {
            "tokenizer_class": type(call.service.tokenizer).__name__,
            "bos_token": _special(call, config.bos_id),
            "eos_token": _special(call, config.eos_ids[0]),
            "vocab_size": config.vocab_size,
            "model_max_length": call.service.context,
            "chat_template": call.service.gemma.chat_template,
        }
    )


@ROUTER.post("/apply-template", summary="Messages as the model reads them")
async def apply_template(call: CallDep, body: TemplateBody) -> Response:
    call.takes(body)
    service = call.service
    service.prompts.check_writes()

    def text() -> str:
        said, begun = split_reply(body.messages, service.prompts.template)
        segments = render(
            service.prompts.template,
            messages_of(said),
            tools=body.tools,
            add_generation_prompt=True,
        )
        prompt = "".join(s.text for s in segments)
        return prompt + service.prompts.begun_text(begun)

    return JsonResponse({"prompt": await service.threads.run(text)})


@ROUTER.get("/props", summary="What is served, and how")
async def props(call: CallDep) -> Response:
    service = call.service
    return JsonResponse(
        {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": service.context,
                "is_processing": service.admission.running > 0,
                "params": service.defaults,
                "prompt": "",
            },
            "total_slots": call.settings.max_running,
            "model_alias": call.model,
            "model_path": call.model,
            "build_info": f"gemmakv {call.settings.version}".rstrip(),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": service.gemma.chat_template or "",
            "chat_template_name": service.prompts.template.name,
            "chat_template_caps": {
                "supports_thinking": service.prompts.can_think
            },
            "sessions": history_of(service) is not None,
            "bos_token": _special(call, service.gemma.config.bos_id),
            "eos_token": _special(call, service.gemma.config.eos_ids[0]),
        }
    )


@ROUTER.get(
    "/slots",
    response_model=list[Slot],
    summary="Room for continuations, and how much of it is taken",
)
async def slots(
    call: CallDep, query: Annotated[SlotsQuery, QueryField()]
) -> Response:
    """Lists slots, each with room for a continuation. A continuation has no
    slot of its own, so which ones are taken means nothing.
    """
    service = call.service
    running = service.admission.running
    count = call.settings.max_running
    if query.fail_on_no_slot and running >= count:
        raise RequestError(
            503, "all slots are in use", code="no_slot", retry_after=1
        )
    return JsonResponse(
        [
            Slot(id=i, n_ctx=service.context, is_processing=i < running)
            for i in range(count)
        ]
    )


def _piece(call: Call, token: int) -> str | list[int]:
    """Gives the text of a token, or its bytes if they are not UTF-8."""
    data = call.service.tokenizer.token_bytes[token]
    if not data:
        return call.service.tokenizer.piece_of(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def _special(call: Call, token: int) -> str:
    return call.service.tokenizer.piece_of(token) if token >= 0 else ""
