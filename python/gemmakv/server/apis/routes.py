"""The routes: what each takes, who answers, and what with."""

from __future__ import annotations

import functools
from typing import Any

from gemmakv.server.apis import (
    anthropic,
    cache,
    completion,
    documents,
    embeddings,
    llama,
    ollama,
    openai,
    page,
    responses,
    sessions,
)
from gemmakv.server.apis.http import NDJSON, SSE, Call
from gemmakv.server.apis.openapi import RouteOf, document_of

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
    RouteOf("POST", "/v1/chat/completions", openai.chat_completions,
            "OpenAI's chat completions; `session` goes on with a session",
            body=openai.ChatBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/completions", openai.completions,
            "OpenAI's completions",
            body=openai.CompletionBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/embeddings", embeddings.embeddings,
            "OpenAI's embeddings, which a model that writes text refuses",
            body=embeddings.EmbeddingsBody,
            answer=embeddings.EmbeddingList),
    RouteOf("GET", "/v1/models", openai.models, "The model's names",
            query=openai.ModelsQuery),
    RouteOf("GET", "/v1/models/{model:path}", openai.model,
            "The model of one name"),
    RouteOf("POST", "/v1/responses", responses.create,
            "OpenAI's responses",
            body=responses.ResponsesBody, stream=SSE, options=True),
    RouteOf("POST", "/v1/responses/input_tokens", responses.input_tokens,
            "The tokens that a response would read",
            body=responses.InputTokensBody, answer=responses.InputTokens),
    RouteOf("GET", _RESPONSE + "/input_items", responses.input_items,
            "What a kept response was given",
            query=responses.ItemsQuery, answer=responses.ItemList),
    RouteOf("GET", _RESPONSE, responses.get, "A response that is kept",
            query=responses.RetrieveQuery, stream=SSE),
    RouteOf("DELETE", _RESPONSE, responses.delete, "Forgets a response"),
    # Our own.
    RouteOf("POST", "/v1/sessions", sessions.create, "Makes a session",
            body=sessions.CreateBody, answer=sessions.SessionObject),
    RouteOf("GET", "/v1/sessions", sessions.sessions,
            "Sessions, the newest first",
            query=sessions.ListQuery, answer=sessions.SessionList),
    RouteOf("GET", "/v1/sessions/tree", sessions.tree,
            "Sessions, the newest first, and what each branches off",
            query=sessions.ListQuery, answer=sessions.SessionTree),
    RouteOf("POST", "/v1/sessions/import", sessions.take_in,
            "A session of an exported document",
            body=documents.Document, answer=sessions.ImportedSession),
    RouteOf("GET", _SESSION + "/export", sessions.export,
            "The session as a document", answer=documents.Document),
    RouteOf("GET", _SESSION, sessions.session, "The session and its turns",
            answer=sessions.SessionWithTurns),
    RouteOf("POST", _SESSION, sessions.rename, "Another name",
            body=sessions.RenameBody, answer=sessions.SessionObject),
    RouteOf("DELETE", _SESSION, sessions.delete, "Deletes the session",
            answer=sessions.SessionDeleted),
    RouteOf("POST", _SESSION + "/fork", sessions.fork,
            "Another session with the same turns",
            body=sessions.ForkBody, answer=sessions.SessionObject),
    RouteOf("POST", _SESSION + "/rewind", sessions.rewind,
            "Makes a turn the last one; null: there are none any more",
            body=sessions.RewindBody, answer=sessions.SessionObject),
    RouteOf("GET", "/v1/cache", cache.stats,
            "What the prefix cache has, and did",
            answer=cache.CacheObject),
    RouteOf("DELETE", "/v1/cache", cache.clear, "Forgets everything",
            query=cache.ClearQuery, answer=cache.CacheCleared),
    RouteOf("POST", "/v1/cache/match", cache.match,
            "How many tokens of a prompt need no computing",
            body=cache.PromptBody, answer=cache.MatchObject),
    RouteOf("POST", "/v1/cache/pins", cache.pin,
            "Computes the beginning of prompts, and keeps it in RAM",
            body=cache.PromptBody, answer=cache.PinObject),
    RouteOf("GET", "/v1/cache/pins", cache.pins, "What the key has pinned",
            answer=cache.PinList),
    RouteOf("DELETE", "/v1/cache/pins/{pin}", cache.unpin, "Unpins it",
            answer=cache.PinDeleted),
    # Anthropic's.
    RouteOf("POST", "/v1/messages", anthropic.messages,
            "Anthropic's messages",
            body=anthropic.MessagesBody, stream=SSE),
    RouteOf("POST", "/v1/messages/count_tokens", anthropic.count_tokens,
            "The tokens of messages", body=anthropic.CountBody),
    # Ollama's.
    RouteOf("POST", "/api/chat", ollama.chat, "Ollama's chat",
            body=ollama.ChatBody, stream=NDJSON),
    RouteOf("POST", "/api/generate", ollama.generate, "Ollama's completions",
            body=ollama.GenerateBody, stream=NDJSON),
    RouteOf("POST", "/api/embed", embeddings.ollama_embed,
            "Ollama's embeddings, which a model that writes text refuses",
            body=embeddings.OllamaEmbedBody,
            answer=embeddings.OllamaEmbeddings),
    RouteOf("POST", "/api/embeddings", embeddings.ollama_embeddings,
            "Their former form, of one text",
            body=embeddings.OllamaEmbeddingBody,
            answer=embeddings.OllamaEmbedding),
    RouteOf("GET", "/api/tags", ollama.tags, "The model"),
    RouteOf("GET", "/api/ps", ollama.ps, "The model, which is loaded"),
    RouteOf("POST", "/api/show", ollama.show, "What the model is",
            body=ollama.ShowBody),
    RouteOf("GET", "/api/version", ollama.version,
            "The version of Ollama's API"),
    # llama-server's.
    RouteOf("POST", "/completion", completion.completion,
            "llama-server's completions",
            body=completion.CompletionBody,
            answer=dict[str, Any] | list[dict[str, Any]], stream=SSE),
    RouteOf("POST", "/tokenize", llama.tokenize, "Tokens of a text",
            body=llama.TokenizeBody),
    RouteOf("POST", "/detokenize", llama.detokenize, "The text of tokens",
            body=llama.DetokenizeBody),
    RouteOf("POST", "/apply-template", llama.apply_template,
            "Messages as the model reads them", body=llama.TemplateBody),
    RouteOf("GET", "/props", llama.props, "What is served, and how"),
    RouteOf("GET", "/slots", llama.slots,
            "Room for continuations, and how much of it is taken",
            query=llama.SlotsQuery, answer=list[llama.Slot]),
    # Operators'.
    RouteOf("GET", "/health", llama.health, "Whether requests are served",
            answer=llama.Health, open=True),
    RouteOf("GET", "/health/ready", llama.health,
            "Whether requests are served", answer=llama.Health, open=True),
    RouteOf("GET", "/health/live", llama.live, "Whether the process runs",
            answer=llama.Health, open=True),
    RouteOf("GET", "/metrics", llama.metrics, "Metrics for Prometheus",
            answer=str),
    RouteOf("GET", OPENAPI, _openapi_document, "This document", open=True),
    RouteOf("GET", "/", page.index, "A page to chat, in a browser",
            answer=str, text="text/html", open=True),
    RouteOf("GET", page.FOLDER + "{file}", page.file,
            "What the page is made of: styles, scripts",
            answer=str, text="text/*", open=True),
)  # fmt: skip
