"""The routes: what each takes, who answers, and what with."""

from __future__ import annotations

import functools
from typing import Any

from gemmakv.server import (
    _anthropic,
    _cache,
    _completion,
    _documents,
    _embeddings,
    _llama,
    _ollama,
    _openai,
    _page,
    _responses,
    _sessions,
)
from gemmakv.server._http import NDJSON, SSE, Call
from gemmakv.server._openapi import RouteOf, document_of

OPENAPI = "/openapi.json"


async def _openapi_document(call: Call) -> None:
    await call.answer(document())


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI document of all routes."""
    return document_of(ROUTES)


_SESSION = "/v1/sessions/{session}"
_RESPONSE = "/v1/responses/{response}"

ROUTES: tuple[RouteOf, ...] = (
    # OpenAI's.
    RouteOf("POST", "/v1/chat/completions", _openai.chat_completions,
            "OpenAI's chat completions; `session` goes on with a session",
            body=_openai.ChatBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/completions", _openai.completions,
            "OpenAI's completions",
            body=_openai.CompletionBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/embeddings", _embeddings.embeddings,
            "OpenAI's embeddings, which a model that writes text refuses",
            body=_embeddings.EmbeddingsBody,
            answer=_embeddings.EmbeddingList),
    RouteOf("GET", "/v1/models", _openai.models, "The model's names",
            query=_openai.ModelsQuery),
    RouteOf("GET", "/v1/models/{model:path}", _openai.model,
            "The model of one name"),
    RouteOf("POST", "/v1/responses", _responses.create,
            "OpenAI's responses",
            body=_responses.ResponsesBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/responses/input_tokens", _responses.input_tokens,
            "The tokens that a response would read",
            body=_responses.InputTokensBody, answer=_responses.InputTokens),
    RouteOf("GET", _RESPONSE + "/input_items", _responses.input_items,
            "What a kept response was given",
            query=_responses.ItemsQuery, answer=_responses.ItemList),
    RouteOf("GET", _RESPONSE, _responses.get, "A response that is kept",
            query=_responses.RetrieveQuery, stream=SSE),
    RouteOf("DELETE", _RESPONSE, _responses.delete, "Forgets a response"),
    # Our own.
    RouteOf("POST", "/v1/sessions", _sessions.create, "Makes a session",
            body=_sessions.CreateBody, answer=_sessions.SessionObject),
    RouteOf("GET", "/v1/sessions", _sessions.sessions,
            "Sessions, the newest first",
            query=_sessions.ListQuery, answer=_sessions.SessionList),
    RouteOf("GET", "/v1/sessions/tree", _sessions.tree,
            "Sessions, the newest first, and what each branches off",
            query=_sessions.ListQuery, answer=_sessions.SessionTree),
    RouteOf("POST", "/v1/sessions/import", _sessions.take_in,
            "A session of an exported document",
            body=_documents.Document, answer=_sessions.ImportedSession),
    RouteOf("GET", _SESSION + "/export", _sessions.export,
            "The session as a document", answer=_documents.Document),
    RouteOf("GET", _SESSION, _sessions.session, "The session and its turns",
            answer=_sessions.SessionWithTurns),
    RouteOf("POST", _SESSION, _sessions.rename, "Another name",
            body=_sessions.RenameBody, answer=_sessions.SessionObject),
    RouteOf("DELETE", _SESSION, _sessions.delete, "Deletes the session",
            answer=_sessions.SessionDeleted),
    RouteOf("POST", _SESSION + "/fork", _sessions.fork,
            "Another session with the same turns",
            body=_sessions.ForkBody, answer=_sessions.SessionObject),
    RouteOf("POST", _SESSION + "/rewind", _sessions.rewind,
            "Makes a turn the last one; null: there are none any more",
            body=_sessions.RewindBody, answer=_sessions.SessionObject),
    RouteOf("GET", "/v1/cache", _cache.stats,
            "What the prefix cache has, and did",
            answer=_cache.CacheObject),
    RouteOf("DELETE", "/v1/cache", _cache.clear, "Forgets everything",
            query=_cache.ClearQuery, answer=_cache.CacheCleared),
    RouteOf("POST", "/v1/cache/match", _cache.match,
            "How many tokens of a prompt need no computing",
            body=_cache.PromptBody, answer=_cache.MatchObject),
    RouteOf("POST", "/v1/cache/pins", _cache.pin,
            "Computes the beginning of prompts, and keeps it in RAM",
            body=_cache.PromptBody, answer=_cache.PinObject),
    RouteOf("GET", "/v1/cache/pins", _cache.pins, "What the key has pinned",
            answer=_cache.PinList),
    RouteOf("DELETE", "/v1/cache/pins/{pin}", _cache.unpin, "Unpins it",
            answer=_cache.PinDeleted),
    # Anthropic's.
    RouteOf("POST", "/v1/messages", _anthropic.messages,
            "Anthropic's messages",
            body=_anthropic.MessagesBody, stream=SSE),
    RouteOf("POST", "/v1/messages/count_tokens", _anthropic.count_tokens,
            "The tokens of messages", body=_anthropic.CountBody),
    # Ollama's.
    RouteOf("POST", "/api/chat", _ollama.chat, "Ollama's chat",
            body=_ollama.ChatBody, stream=NDJSON),
    RouteOf("POST", "/api/generate", _ollama.generate, "Ollama's completions",
            body=_ollama.GenerateBody, stream=NDJSON),
    RouteOf("POST", "/api/embed", _embeddings.ollama_embed,
            "Ollama's embeddings, which a model that writes text refuses",
            body=_embeddings.OllamaEmbedBody,
            answer=_embeddings.OllamaEmbeddings),
    RouteOf("POST", "/api/embeddings", _embeddings.ollama_embeddings,
            "Their former form, of one text",
            body=_embeddings.OllamaEmbeddingBody,
            answer=_embeddings.OllamaEmbedding),
    RouteOf("GET", "/api/tags", _ollama.tags, "The model"),
    RouteOf("GET", "/api/ps", _ollama.ps, "The model, which is loaded"),
    RouteOf("POST", "/api/show", _ollama.show, "What the model is",
            body=_ollama.ShowBody),
    RouteOf("GET", "/api/version", _ollama.version,
            "The version of Ollama's API"),
    # llama-server's.
    RouteOf("POST", "/completion", _completion.completion,
            "llama-server's completions",
            body=_completion.CompletionBody,
            answer=dict[str, Any] | list[dict[str, Any]], stream=SSE),
    RouteOf("POST", "/tokenize", _llama.tokenize, "Tokens of a text",
            body=_llama.TokenizeBody),
    RouteOf("POST", "/detokenize", _llama.detokenize, "The text of tokens",
            body=_llama.DetokenizeBody),
    RouteOf("POST", "/apply-template", _llama.apply_template,
            "Messages as the model reads them", body=_llama.TemplateBody),
    RouteOf("GET", "/props", _llama.props, "What is served, and how"),
    RouteOf("GET", "/slots", _llama.slots,
            "Room for continuations, and how much of it is taken",
            query=_llama.SlotsQuery, answer=list[_llama.Slot]),
    # Operators'.
    RouteOf("GET", "/health", _llama.health, "Whether requests are served",
            answer=_llama.Health, open=True),
    RouteOf("GET", "/health/ready", _llama.health,
            "Whether requests are served", answer=_llama.Health, open=True),
    RouteOf("GET", "/health/live", _llama.live, "Whether the process runs",
            answer=_llama.Health, open=True),
    RouteOf("GET", "/metrics", _llama.metrics, "Metrics for Prometheus",
            answer=str),
    RouteOf("GET", OPENAPI, _openapi_document, "This document", open=True),
    RouteOf("GET", "/", _page.index, "A page to chat, in a browser",
            answer=str, text="text/html", open=True),
    RouteOf("GET", _page.FOLDER + "{file}", _page.file,
            "What the page is made of: styles, scripts",
            answer=str, text="text/*", open=True),
)  # fmt: skip
