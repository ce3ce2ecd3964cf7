"""anthropic for Python."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from cases import (
    KEY,
    MODEL,
    QUESTION,
    SCHEMA,
    URL,
    WEATHER,
    City,
    case,
    city,
    expect,
    rain,
)
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
given = {"model": MODEL, "max_tokens": 24,
         "messages": [{"role": "user", "content": QUESTION}]}  # fmt: skip
TOOL = {
    "name": "rain",
    "description": "Tells the rain.",
    "input_schema": SCHEMA,
}


class Trip(BaseModel):
    city: City


with case("chat"):
    whole = client.messages.create(**given, system="Be brief.")
    expect(whole.content[0].text, whole)
with case("stream"):
    with client.messages.stream(**given, system="Be brief.") as stream:
        last = stream.get_final_message()
    expect(last.content[0].text == whole.content[0].text, last)
with case("async"):
    again = asyncio.run(
        AsyncAnthropic(base_url=URL, auth_token=KEY).messages.create(**given)
    )
    expect(again.content[0].text, again)
with case("tool"):
    messages = [{"role": "user", "content": WEATHER}]
    more = {"model": MODEL, "max_tokens": 60, "tools": [TOOL]}
    for streamed in (False, True):
        if streamed:
            with client.messages.stream(**more, messages=messages) as stream:
                called = stream.get_final_message()
        else:
            called = client.messages.create(**more, messages=messages)
        [call] = [block for block in called.content if block.type == "tool_use"]
        expect(call.input == {"city": "Rome"}, call)
        result = {"type": "tool_result", "tool_use_id": call.id,
                  "content": rain("Rome")}  # fmt: skip
        told = client.messages.create(
            **more,
            messages=[
                *messages, {"role": "assistant", "content": called.content},
                {"role": "user", "content": [result]},
            ],
        )  # fmt: skip
        expect(told.stop_reason, told)
with case("tool runner"):

    @beta_tool(name="rain")
    def rain_in(city: str) -> str:
        """Tells how much rain fell in a city."""
        return rain(city)

    seen = list(client.beta.messages.tool_runner(
        model=MODEL, max_tokens=60, messages=messages, tools=[rain_in]
    ))  # fmt: skip
    read = [
        one.usage.input_tokens + one.usage.cache_read_input_tokens
        + one.usage.cache_creation_input_tokens for one in seen
    ]  # fmt: skip
    # The second request has all of the first, or the server has kept it.
    expect(len(seen) == 2 and read[1] > read[0], read)
with case("structured"):
    made = client.messages.parse(**given, output_format=Trip)
    expect(made.parsed_output.city in ("Rome", "Oslo"), made)
    raw = client.messages.create(
        **given,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    city(raw.content[0].text)
with case("count tokens"):
    counted = client.messages.count_tokens(
        model=MODEL, messages=given["messages"], tools=[TOOL]
    )
    expect(counted.input_tokens > 10, counted)
with case("models"):
    expect(MODEL in [model.id for model in client.models.list()])
