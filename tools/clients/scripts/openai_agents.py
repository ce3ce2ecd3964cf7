"""openai-agents, over chat completions and responses."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from openai import AsyncOpenAI
from pydantic import BaseModel


@function_tool
def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    city: City


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


async def ask(model, kind):
    with case(f"{kind} chat"):
        agent = Agent(name="one", instructions="Be brief.", model=model)
        said = await Runner.run(agent, QUESTION)
        expect(said.final_output, said)
        items = said.to_input_list() + [{"role": "user", "content": "And?"}]
        expect((await Runner.run(agent, items)).final_output)
    with case(f"{kind} stream"):
        stream = Runner.run_streamed(agent, QUESTION)
        events = [event async for event in stream.stream_events()]
        expect(stream.final_output, events)
    with case(f"{kind} tool"):
        agent = Agent(name="one", model=model, tools=[rain])
        said = await Runner.run(agent, WEATHER)
        expect(len(said.raw_responses) >= 2, said)
        stream = Runner.run_streamed(agent, WEATHER)
        [event async for event in stream.stream_events()]
        expect(len(stream.raw_responses) >= 2, stream)
    with case(f"{kind} handoff"):
        other = Agent(name="other", model=model)
        agent = Agent(
            name="one", model=model, handoffs=[other],
            model_settings=ModelSettings(
                tool_choice="transfer_to_other", max_tokens=60,
                parallel_tool_calls=False,
            ),
        )  # fmt: skip
        said = await Runner.run(agent, QUESTION)
        expect(said.last_agent.name == "other", said)
    with case(f"{kind} structured"):
        agent = Agent(name="one", model=model, output_type=Trip)
        said = await Runner.run(agent, "Rome")
        expect(said.final_output.city in ("Rome", "Oslo"), said)
    with case(f"{kind} tool, structured"):
        agent = Agent(name="one", model=model, tools=[rain], output_type=Trip)
        said = await Runner.run(agent, WEATHER)
        expect(len(said.raw_responses) >= 2, said)
        expect(said.final_output.city in ("Rome", "Oslo"), said)


async def main():
    await ask(OpenAIChatCompletionsModel(MODEL, client), "chat")
    await ask(OpenAIResponsesModel(MODEL, client), "responses")


asyncio.run(main())
