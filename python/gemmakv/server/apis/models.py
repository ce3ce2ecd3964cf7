"""The routes that list the model, once for each of its names."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, NotRequired

from fastapi import Query as QueryField
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.errors import brief
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Query
from gemmakv.server.apis.routing import router
from gemmakv.server.service.errors import invalid

ROUTER = router()
_STARTED = int(time.time())


class ModelsQuery(Query):
    """Anthropic's pages."""

    limit: int | None = Field(None, ge=1, le=1000)
    after_id: str | None = None
    before_id: str | None = None
    client_version: str | None = Field(None, description="Codex says it.")


class Model(TypedDict):
    """OpenAI's fields, those of llama-server in `meta`, and Anthropic's for
    its clients.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    meta: dict[str, int]
    type: NotRequired[Literal["model"]]
    display_name: NotRequired[str]
    created_at: NotRequired[str]
    lifecycle: NotRequired[str]
    max_input_tokens: NotRequired[int]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    first_id: NotRequired[str | None]
    last_id: NotRequired[str | None]
    has_more: NotRequired[bool]
    models: NotRequired[list[dict[str, Any]]]


@ROUTER.get(
    "/v1/models", response_model=ModelList, summary="The model's names"
)
async def models(
    call: CallDep, query: Annotated[ModelsQuery, QueryField()]
) -> Response:
    """Lists the model's names. Anthropic's clients also get fields of pages."""
    names = call.served
    first = _place(names, "after_id", query.after_id, -1) + 1
    end = _place(names, "before_id", query.before_id, len(names))
    within = names[first:end]
    shown = within[: query.limit]
    if query.before_id is not None and query.limit is not None:
        shown = within[-query.limit :]  # those next to it
    found: ModelList = {
        "object": "list",
        "data": [_model(call, name) for name in shown],
    }
    if "anthropic-version" in call.headers:
        found["first_id"] = shown[0] if shown else None
        found["last_id"] = shown[-1] if shown else None
        found["has_more"] = len(shown) < len(within)
    if query.client_version is not None:
        found["models"] = [_codex_model(call, name) for name in shown]
    return JsonResponse(found)


@ROUTER.get(
    "/v1/models/{model:path}",
    response_model=Model,
    summary="The model of one name",
)
async def model(call: CallDep, model: str) -> Response:
    call.check_model(model)
    return JsonResponse(_model(call, model))


def _place(
    names: list[str], field: str, wanted: str | None, absent: int
) -> int:
    """Gives the place of the name that a field of the query has. Raises
    RequestError.
    """
    if wanted is None:
        return absent
    if wanted not in names:
        raise invalid(
            field,
            f"expected a model that is served ({' or '.join(names)}), found "
            + brief(wanted),
        )
    return names.index(wanted)


def _model(call: Call, name: str) -> Model:
    config, context = call.service.gemma.config, call.service.context
    found: Model = {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "gemmakv",
        "max_model_len": context,
        "meta": {  # llama-server's
            "n_vocab": config.vocab_size,
            "n_ctx": context,
            "n_ctx_train": config.context_length,
            "n_embd": config.hidden_size,
        },
    }
    if "anthropic-version" in call.headers:
        more: Any = {
            "type": "model",
            "display_name": name,
            "created_at": time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(_STARTED)
            ),
            "lifecycle": "active",
            "max_input_tokens": context,
        }
        found.update(more)
    return found


def _codex_model(call: Call, name: str) -> dict[str, Any]:
    """Makes the entry of a model for Codex, which needs all of these fields."""
    can_think = call.service.prompts.can_think
    efforts = ("low", "medium", "high") if can_think else ()
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "default_reasoning_level": efforts[1] if efforts else None,
        "supported_reasoning_levels": [
            {"effort": effort, "description": effort} for effort in efforts
        ],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": "",
        "model_messages": None,
        "supports_reasoning_summaries": False,
        "default_reasoning_summary": "none",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "function",
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "supports_image_detail_original": False,
        "context_window": call.service.context,
        "max_context_window": call.service.context,
        "auto_compact_token_limit": None,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "supports_search_tool": False,
        "use_responses_lite": False,
    }
