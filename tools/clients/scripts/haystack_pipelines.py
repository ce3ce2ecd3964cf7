"""haystack's generators for OpenAI's API."""

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from haystack.components.agents import Agent
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel


def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    city: City


given = {"model": MODEL, "api_base_url": f"{URL}/v1",
         "api_key": Secret.from_token(KEY), "max_retries": 0}  # fmt: skip
for name, kind, most, form in (
    ("chat", OpenAIChatGenerator, "max_completion_tokens", "response_format"),
    ("responses", OpenAIResponsesChatGenerator, "max_output_tokens",
     "text_format"),
):  # fmt: skip
    more = {most: 60}
    asked = [ChatMessage.from_user(QUESTION)]
    with case(f"{name} chat"):
        made = kind(**given, generation_kwargs=more)
        expect(made.run(messages=asked)["replies"][0].text)
    with case(f"{name} stream"):
        pieces = []
        streamed = kind(
            **given, generation_kwargs=more, streaming_callback=pieces.append
        )
        expect(streamed.run(messages=asked)["replies"][0].text and pieces)
    with case(f"{name} tool"):
        agent = Agent(chat_generator=kind(**given),
                      tools=[create_tool_from_function(rain)])  # fmt: skip
        said = agent.run(messages=[ChatMessage.from_user(WEATHER)])
        roles = [message.role.value for message in said["messages"]]
        expect("tool" in roles, said["messages"])
    with case(f"{name} structured"):
        made = kind(**given, generation_kwargs={**more, form: Trip})
        said = made.run(messages=asked)["replies"][0].text
        Trip.model_validate_json(said)
    with case(f"{name} tool, structured"):
        agent = Agent(
            chat_generator=kind(
                **given, tools_strict=True, generation_kwargs={form: Trip}
            ),
            tools=[create_tool_from_function(rain)],
        )
        said = agent.run(messages=[ChatMessage.from_user(WEATHER)])
        Trip.model_validate_json(said["last_message"].text)
