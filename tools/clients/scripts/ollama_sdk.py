"""ollama for Python."""

import ollama
from cases import (
    KEY,
    MODEL,
    QUESTION,
    SCHEMA,
    URL,
    WEATHER,
    case,
    city,
    expect,
    rain,
)

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
asked = [{"role": "user", "content": QUESTION}]
options = {"num_predict": 24, "num_ctx": 8192}

with case("chat"):
    whole = client.chat(MODEL, messages=asked, options=options).message.content
    expect(whole, whole)
with case("stream"):
    chunks = client.chat(MODEL, messages=asked, options=options, stream=True)
    text = "".join(chunk.message.content or "" for chunk in chunks)
    expect(text == whole, text)
with case("tool"):
    messages = [{"role": "user", "content": WEATHER}]
    called = client.chat(MODEL, messages=messages, tools=[rain]).message
    call = called.tool_calls[0]
    expect(call.function.arguments["city"] == "Rome", called)
    result = {"role": "tool", "tool_name": "rain", "content": rain("Rome")}
    told = client.chat(
        MODEL, messages=[*messages, called, result], tools=[rain]
    )
    expect(told.done_reason, told)
with case("structured"):
    made = client.chat(MODEL, messages=asked, format=SCHEMA, options=options)
    city(made.message.content)
with case("generate"):
    made = client.generate(
        MODEL, prompt=QUESTION, options=options, keep_alive=60
    )
    expect(made.response, made)
with case("models"):
    expect(client.list().models and client.show(MODEL), "models")
