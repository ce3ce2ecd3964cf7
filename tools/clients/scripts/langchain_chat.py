"""langchain-openai, langchain-anthropic or langchain-ollama, by $CLIENT."""

import asyncio
import os
from importlib import import_module

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel


@tool
def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    """A trip to a city."""

    city: City


client = os.environ["CLIENT"]
module = import_module(client.replace("-", "_"))
if client == "langchain-openai":
    given = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY,
             "max_tokens": 60, "max_retries": 0,
             "stream_usage": True}  # fmt: skip
    CHATS = {
        "chat": module.ChatOpenAI(**given),
        "responses": module.ChatOpenAI(**given, use_responses_api=True),
    }
    METHODS = ("json_schema", "function_calling", "json_mode")
elif client == "langchain-anthropic":
    CHATS = {"chat": module.ChatAnthropic(
        model=MODEL, base_url=URL, api_key=KEY, max_tokens=60, max_retries=0
    )}  # fmt: skip
    METHODS = ("json_schema", "function_calling")
else:
    headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
    CHATS = {"chat": module.ChatOllama(
        model=MODEL, base_url=URL, num_predict=60, client_kwargs=headers
    )}  # fmt: skip
    METHODS = ("json_schema", "json_mode")

loop = asyncio.new_event_loop()  # they share the connections of one
for name, chat in CHATS.items():
    with case(f"{name}"):
        expect(chat.invoke(QUESTION).text)
        expect(loop.run_until_complete(chat.ainvoke(QUESTION)).text)
    with case(f"{name} stream"):
        expect("".join(chunk.text for chunk in chat.stream(QUESTION)))
    with case(f"{name} tool"):
        bound = chat.bind_tools([rain])
        messages = [HumanMessage(WEATHER)]
        called = bound.invoke(messages)
        expect(called.tool_calls, called)
        messages += [called, *map(rain.invoke, called.tool_calls)]
        told = bound.invoke(messages)
        expect(told.response_metadata, told)
        pieces = None
        for chunk in bound.stream(messages[:1]):
            pieces = chunk if pieces is None else pieces + chunk
        expect(pieces.tool_calls[0]["args"] == {"city": "Rome"}, pieces)
    for method in METHODS:
        with case(f"{name} {method}"):
            made = chat.with_structured_output(Trip, method=method).invoke(
                'A trip to Rome, as JSON: {"city": "..."}.'
            )
            expect(made.city in ("Rome", "Oslo"), made)
