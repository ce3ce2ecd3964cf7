"""A conversation that moves between machines through Redis or Valkey.

    python redis_sessions.py say chat-1 "My name is Anna."
    python redis_sessions.py say chat-1 "What is my name?"

Each run is a process of its own. Redis holds the messages of the conversation,
a few hundred bytes; keys and values are in the remote tier of the prefix cache,
once for all conversations that begin alike, and come from there where loading
is quicker than computing. Where the server is gone or has evicted them, the
answer is the same, only later. Needs a server (`--url`) and
`.venv/bin/pip install "gemmakv[redis]"`; GEMMAKV_PREFIX_CACHE_SECRET signs what
is stored.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import gemmakv


def say(
    gemma: gemmakv.Gemma, store: Any, key: str, text: str, max_tokens: int = 64
) -> gemmakv.Generation:
    """The reply to `text` in the conversation that `store` keeps at `key`."""
    messages = json.loads(store.get(key) or "[]")
    messages.append({"role": "user", "content": text})
    reply = gemma.chat(messages, max_tokens=max_tokens)
    messages.append({"role": "assistant", "content": reply.text})
    store.set(key, json.dumps(messages))
    return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["say", "forget"])
    parser.add_argument("key")
    parser.add_argument("text", nargs="?", default="Hello!")
    parser.add_argument("--url", default="redis://localhost:6379")
    parser.add_argument("--model", default="gemma-3-270m")
    args = parser.parse_args()

    import redis

    store = redis.Redis.from_url(args.url)
    if args.command == "forget":
        store.delete(args.key)
        return
    secret = os.environ.get("GEMMAKV_PREFIX_CACHE_SECRET")
    with gemmakv.PrefixCache(remote=args.url, remote_secret=secret) as prefix:
        gemma = gemmakv.Gemma.load(args.model, prefix_cache=prefix)
        reply = say(gemma, store, args.key, args.text)
    print(reply.text)
    usage = reply.usage
    print(
        f"({usage.prompt_tokens - usage.cached_tokens} tokens computed, "
        f"{usage.cached.get('remote', 0)} came from the server)"
    )


if __name__ == "__main__":
    main()
