"""A conversation that moves between processes through Redis or Valkey.

    python redis_sessions.py say chat-1 "My name is Anna."
    python redis_sessions.py say chat-1 "What is my name?"

Each run is a process of its own: it fetches the conversation's bytes, goes on
without computing earlier turns again, and stores it. Needs `pip install redis`
and a server (`--url`).
"""

from __future__ import annotations

import argparse
from typing import Any

import gemmakv


def say(
    gemma: gemmakv.Gemma, store: Any, key: str, text: str, max_tokens: int = 64
) -> gemmakv.Generation:
    """The reply to `text` in the conversation that `store` keeps at `key`."""
    data = store.get(key)
    if data is None:
        session = gemmakv.Session(gemma)
    else:
        session = gemmakv.Session.from_bytes(gemma, data)
    reply = session.send(text, max_tokens=max_tokens)
    store.set(key, session.to_bytes())
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
    reply = say(gemmakv.Gemma.load(args.model), store, args.key, args.text)
    print(reply.text)
    print(
        f"({reply.usage.prompt_tokens} tokens computed, "
        f"{reply.usage.cached_tokens} came with the conversation)"
    )


if __name__ == "__main__":
    main()
