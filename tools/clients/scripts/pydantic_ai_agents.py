"""pydantic-ai, over each API that it can be pointed at."""

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect, rain
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Trip(BaseModel):
    """A trip to a city."""

    city: City


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "anthropic": AnthropicModel(
        MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)
    ),
}


def rain_in(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain(city)


rain_in.__name__ = "rain"

for name, model in MODELS.items():
    with case(f"{name} chat"):
        agent = Agent(model, instructions="Be brief.")
        said = agent.run_sync(QUESTION)
        expect(said.output, said)
        more = agent.run_sync(
            "And of Spain?", message_history=said.all_messages()
        )
        expect(more.output, more)
    with case(f"{name} stream"):
        streamed = agent.run_stream_sync(QUESTION)
        expect([text for text in streamed.stream_text()], streamed)
    with case(f"{name} tool"):
        done = Agent(model, tools=[rain_in]).run_sync(WEATHER)
        expect(len(done.all_messages()) >= 4, done.all_messages())
    if name != "anthropic":
        with case(f"{name} tool, structured"):
            agent = Agent(
                model, tools=[rain_in], output_type=NativeOutput(Trip)
            )
            done = agent.run_sync(WEATHER)
            expect(len(done.all_messages()) >= 4, done.all_messages())
    for form in ToolOutput, NativeOutput, PromptedOutput:
        if name == "anthropic" and form is NativeOutput:
            continue  # it takes no model for one that can
        with case(f"{name} {form.__name__}"):
            trip = Agent(model, output_type=form(Trip)).run_sync("Rome")
            expect(trip.output.city in ("Rome", "Oslo"), trip)
