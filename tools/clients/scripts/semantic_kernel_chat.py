"""semantic-kernel's service for OpenAI's API."""

import asyncio

from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatPromptExecutionSettings as Settings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Trip(BaseModel):
    city: City


@kernel_function(name="rain", description="Tells how much rain fell in a city.")
def rain(city: str) -> str:
    return rain_of(city)


async def main():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    asked = ChatHistory(system_message="Be brief.")
    asked.add_user_message(QUESTION)
    given = {"max_tokens": 60}
    with case("chat"):
        said = await service.get_chat_message_content(asked, Settings(**given))
        expect(str(said), said)
    with case("stream"):
        text = ""
        async for piece in service.get_streaming_chat_message_content(
            asked, Settings(**given)
        ):
            text += str(piece or "")
        expect(text, text)
    with case("tool"):
        kernel = Kernel()
        kernel.add_function("weather", rain)
        settings = Settings(
            function_choice_behavior=FunctionChoiceBehavior.Auto(), **given
        )
        history = ChatHistory()
        history.add_user_message(WEATHER)
        said = await service.get_chat_message_content(
            history, settings, kernel=kernel
        )
        expect(
            any(m.role == "tool" for m in history.messages), history.messages
        )
    with case("structured"):
        settings = Settings(response_format=Trip, **given)
        said = await service.get_chat_message_content(asked, settings)
        Trip.model_validate_json(str(said))


asyncio.run(main())
