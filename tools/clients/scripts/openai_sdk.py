"""openai for Python."""

import asyncio

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
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
asked = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "rain", "description": "Tells the rain.", "parameters": SCHEMA,
        "strict": True}  # fmt: skip
given = {"model": MODEL, "messages": asked, "max_tokens": 24}


class Trip(BaseModel):
    city: City


with case("chat"):
    whole = client.chat.completions.create(**given)
    expect(whole.choices[0].message.content, whole)
with case("stream"):
    chunks = list(
        client.chat.completions.create(
            **given, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(
        c.choices[0].delta.content or "" for c in chunks if c.choices
    )
    expect(text == whole.choices[0].message.content, text)
    expect(chunks[-1].usage.total_tokens, chunks[-1])
    with client.chat.completions.stream(**given) as stream:
        expect(stream.get_final_completion().choices[0].message.content == text)
with case("async"):
    again = asyncio.run(
        AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY).chat.completions.create(
            **given
        )
    )
    expect(again.choices[0].message.content == text, again)
with case("tool"):
    messages = [{"role": "user", "content": WEATHER}]
    tools = [{"type": "function", "function": TOOL}]
    for streamed in (False, True):
        if streamed:
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=tools
            ) as stream:
                called = stream.get_final_completion().choices[0]
        else:
            called = client.chat.completions.create(
                model=MODEL, messages=messages, tools=tools
            ).choices[0]
        [call] = called.message.tool_calls
        expect(called.finish_reason == "tool_calls", called)
        city(call.function.arguments)
        told = client.chat.completions.create(
            model=MODEL, tools=tools,
            messages=[*messages, called.message,
                      {"role": "tool", "tool_call_id": call.id,
                       "content": rain("Rome")}],
        )  # fmt: skip
        expect(told.choices[0].finish_reason, told)
with case("structured"):
    made = client.chat.completions.parse(**given, response_format=Trip)
    expect(made.choices[0].message.parsed.city in ("Rome", "Oslo"), made)
with case("completions"):
    text = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4
    )
    expect(text.choices[0].text, text)
with case("responses"):
    first = client.responses.create(model=MODEL, input=QUESTION)
    expect(first.output_text, first)
    with client.responses.stream(
        model=MODEL, input="And of Spain?", previous_response_id=first.id
    ) as stream:
        expect(stream.get_final_response().output_text, stream)
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Trip
    )
    expect(parsed.output_parsed.city in ("Rome", "Oslo"), parsed)
with case("responses tool"):
    tools = [{"type": "function", **TOOL}]
    items = [{"role": "user", "content": WEATHER}]
    called = client.responses.create(model=MODEL, input=items, tools=tools)
    [call] = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id,
              "output": rain("Rome")}  # fmt: skip
    told = client.responses.create(
        model=MODEL, input=[*items, *called.output, result], tools=tools
    )
    expect(told.status, told)
with case("models"):
    expect(MODEL in [model.id for model in client.models.list()])
