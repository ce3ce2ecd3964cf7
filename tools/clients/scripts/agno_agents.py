"""agno, over each API that it can be pointed at."""

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.ollama import Ollama
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from pydantic import BaseModel


def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    city: City


MODELS = {
    "chat": lambda: OpenAILike(id=MODEL, base_url=f"{URL}/v1", api_key=KEY),
    "responses": lambda: OpenAIResponses(
        id=MODEL, base_url=f"{URL}/v1", api_key=KEY
    ),
    "anthropic": lambda: Claude(
        id=MODEL, api_key=KEY, client_params={"base_url": URL}
    ),
    "ollama": lambda: Ollama(
        id=MODEL, host=URL,
        client_params={"headers": {"Authorization": f"Bearer {KEY}"}},
    ),
}  # fmt: skip


def finished(run):
    expect(run.status == "COMPLETED", run.content)
    return run


for name, made in MODELS.items():
    with case(f"{name} chat"):
        agent = Agent(model=made(), instructions="Be brief.", telemetry=False)
        expect(finished(agent.run(QUESTION)).content)
    with case(f"{name} stream"):
        events = list(agent.run(QUESTION, stream=True))
        expect(not [e for e in events if "Error" in e.event], events[-1])
        expect("".join(e.content or "" for e in events if "Content" in e.event))
    with case(f"{name} tool"):
        agent = Agent(model=made(), tools=[rain], telemetry=False)
        run = finished(agent.run(WEATHER))
        expect(run.tools and run.tools[0].result == rain("Rome"), run.messages)
    with case(f"{name} structured"):
        agent = Agent(model=made(), output_schema=Trip, telemetry=False)
        run = finished(agent.run("Rome"))
        expect(isinstance(run.content, Trip), run.content)
    with case(f"{name} tool, structured"):
        agent = Agent(
            model=made(), tools=[rain], output_schema=Trip, telemetry=False
        )
        run = finished(agent.run(WEATHER))
        expect(isinstance(run.content, Trip), run.content)
