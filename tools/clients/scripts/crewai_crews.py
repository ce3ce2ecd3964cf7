"""CrewAI's models and crews."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["OTEL_SDK_DISABLED"] = "true"
from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


@tool("rain")
def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    """A trip to a city."""

    city: City


for kind, base in {"hosted_vllm": f"{URL}/v1", "openai": f"{URL}/v1"}.items():
    given = {"model": f"{kind}/{MODEL}", "base_url": base, "api_key": KEY,
             "max_tokens": 60}  # fmt: skip
    if kind == "openai":
        given |= {"model": MODEL, "provider": "openai"}

    def crew(given=given, tools=(), **more):
        who = Agent(
            role="Guide", goal="Answer.", backstory="You travel.",
            llm=LLM(**given), tools=list(tools), max_iter=2,
        )  # fmt: skip
        task = Task(description=WEATHER, expected_output="A line.", agent=who,
                    **more)  # fmt: skip
        return Crew(agents=[who], tasks=[task]).kickoff()

    with case(f"{kind} chat"):
        expect(LLM(**given).call(QUESTION))
    with case(f"{kind} stream"):
        expect(LLM(**given, stream=True).call(QUESTION))
    with case(f"{kind} structured"):
        said = LLM(**given, response_format=Trip).call("Rome")
        trip = Trip.model_validate_json(said) if isinstance(said, str) else said
        expect(trip.city in ("Rome", "Oslo"), said)
    with case(f"{kind} tool"):
        expect(crew(tools=[rain]).raw)
    with case(f"{kind} crew, structured"):
        expect(crew(output_pydantic=Trip).pydantic)
