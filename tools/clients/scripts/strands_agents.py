"""strands-agents, over each API that it can be pointed at."""

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.llamacpp import LlamaCppModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


@tool
def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Trip(BaseModel):
    """A trip to a city."""

    city: City


openai = {"client_args": {"base_url": f"{URL}/v1", "api_key": KEY},
          "model_id": MODEL}  # fmt: skip
headers = {"headers": {"Authorization": f"Bearer {KEY}"}}
MODELS = {
    "chat": lambda: OpenAIModel(**openai),
    "responses": lambda: OpenAIResponsesModel(**openai),
    "anthropic": lambda: AnthropicModel(
        client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL,
        max_tokens=60,
    ),
    "ollama": lambda: OllamaModel(
        URL, model_id=MODEL, ollama_client_args=headers
    ),
    "llamacpp": lambda: LlamaCppModel(base_url=URL, model_id=MODEL),
}  # fmt: skip
for name, made in MODELS.items():

    def agent(made=made, **more):
        one = made()
        if hasattr(one, "client") and type(one) is LlamaCppModel:
            one.client.headers["Authorization"] = f"Bearer {KEY}"
        return Agent(model=one, callback_handler=None, **more)

    with case(f"{name} stream"):  # it streams all
        one = agent(system_prompt="Be brief.")
        expect(str(one(QUESTION)).strip())
        expect(str(one("And of Spain?")).strip())
    with case(f"{name} tool"):
        one = agent(tools=[rain])
        one(WEATHER)
        parts = [part for m in one.messages for part in m["content"]]
        expect(any("toolResult" in part for part in parts), one.messages)
    with case(f"{name} structured"):
        said = agent()("Rome", structured_output_model=Trip)
        expect(said.structured_output.city in ("Rome", "Oslo"), said)
