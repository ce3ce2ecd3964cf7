"""LlamaIndex's OpenAILike."""

import asyncio

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    """A trip to a city."""

    city: City


given = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": KEY,
         "max_tokens": 60, "max_retries": 0,
         "context_window": 8192}  # fmt: skip
llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, **given)
loop = asyncio.new_event_loop()  # connections belong to one
asked = [ChatMessage(role="user", content=QUESTION)]
with case("chat"):
    expect(llm.chat(asked).message.content)
    expect(loop.run_until_complete(llm.achat(asked)).message.content)
with case("stream"):
    expect("".join(c.delta or "" for c in llm.stream_chat(asked)))
with case("completions"):
    plain = OpenAILike(is_chat_model=False, **given)
    expect(plain.complete(QUESTION).text)
    expect("".join(c.delta or "" for c in plain.stream_complete(QUESTION)))
with case("tool"):
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(rain)], llm=llm, streaming=False
    )

    async def ask():
        return await agent.run(WEATHER)

    said = loop.run_until_complete(ask())
    expect(said.tool_calls, said)
with case("structured"):
    trip = llm.structured_predict(Trip, PromptTemplate("A trip to Rome."))
    expect(trip.city in ("Rome", "Oslo"), trip)
with case("structured, native"):
    native = OpenAILike(
        is_chat_model=True, is_function_calling_model=True,
        should_use_structured_outputs=True, **given,
    )  # fmt: skip
    trip = native.structured_predict(Trip, PromptTemplate("A trip to Rome."))
    expect(trip.city in ("Rome", "Oslo"), trip)
