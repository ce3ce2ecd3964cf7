"""AutoGen's clients and teams."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_core.models import UserMessage
from autogen_ext.models.anthropic import AnthropicChatCompletionClient
from autogen_ext.models.ollama import OllamaChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from pydantic import BaseModel


async def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    city: City


os.environ["OLLAMA_API_KEY"] = KEY
INFO = {"vision": False, "function_calling": True, "json_output": True,
        "family": "unknown", "structured_output": True}  # fmt: skip
MODELS = {
    "chat": lambda: OpenAIChatCompletionClient(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=60,
        model_info=INFO,
    ),
    "anthropic": lambda: AnthropicChatCompletionClient(
        model=MODEL, base_url=URL, api_key=KEY, max_tokens=60, model_info=INFO
    ),
    "ollama": lambda: OllamaChatCompletionClient(
        model=MODEL, host=URL, model_info=INFO,
    ),
}  # fmt: skip


async def ask(name, made):
    question = UserMessage(content=QUESTION, source="user")
    with case(f"{name} chat"):
        expect((await made().create([question])).content)
    with case(f"{name} stream"):
        parts = [part async for part in made().create_stream([question])]
        expect(parts[-1].content, parts)
    with case(f"{name} tool"):
        agent = AssistantAgent(
            "one", made(), tools=[rain], reflect_on_tool_use=True
        )
        said = await agent.run(task=WEATHER)
        kinds = [type(message).__name__ for message in said.messages]
        expect("ToolCallExecutionEvent" in kinds, kinds)
    with case(f"{name} structured"):
        if name == "anthropic":
            said = await made().create([question], json_output=True)
            expect(said.content, said)
        else:
            said = await made().create([question], json_output=Trip)
            Trip.model_validate_json(said.content)
    if name != "chat":
        return
    with case("teams"):
        agents = [
            AssistantAgent(who, made(), description=f"The {who}.",
                           system_message=f"You are the {who}.")
            for who in ("writer", "critic", "editor")
        ]  # fmt: skip
        end = MaxMessageTermination(5)
        turns = RoundRobinGroupChat(agents, termination_condition=end)
        said = await turns.run(task=QUESTION)
        expect(len(said.messages) == 5, said)
        selected = SelectorGroupChat(agents, made(), termination_condition=end)
        said = await selected.run(task=QUESTION)
        expect(len(said.messages) == 5, said)


async def main():
    for name, made in MODELS.items():
        await ask(name, made)


asyncio.run(main())
