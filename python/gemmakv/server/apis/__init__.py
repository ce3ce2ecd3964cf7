"""The routes, a module for each API.

A module has typed models of what a request may have and of what is answered,
named as the API's own clients name them, and a `ROUTER` with its routes.
`call` is what a route knows of its request, `fields` what bodies have in
common, `streams` how answers leave, `errors` how each API says what is wrong.
"""

from __future__ import annotations

from gemmakv.server.apis import (
    anthropic,
    cache,
    chat_completions,
    completion,
    completions,
    conversations,
    embeddings,
    health,
    llama,
    models,
    ollama,
    page,
    responses,
    sessions,
)

ROUTERS = (
    chat_completions.ROUTER,
    completions.ROUTER,
    embeddings.ROUTER,
    models.ROUTER,
    responses.ROUTER,
    conversations.ROUTER,
    sessions.ROUTER,
    cache.ROUTER,
    anthropic.ROUTER,
    ollama.ROUTER,
    completion.ROUTER,
    llama.ROUTER,
    health.ROUTER,
    health.METRICS,
    page.ROUTER,
)
