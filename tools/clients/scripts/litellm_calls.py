"""litellm, with each prefix that can be pointed at the server."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import json

import litellm
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

TOOLS = [{"type": "function", "function": {
    "name": "rain", "description": "Tells the rain.", "parameters": SCHEMA,
}}]  # fmt: skip
FORM = {"type": "json_schema",
        "json_schema": {"name": "trip", "schema": SCHEMA,
                        "strict": True}}  # fmt: skip
asked = [{"role": "user", "content": QUESTION}]
for kind, base in {
    "openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1",
    "text-completion-openai": f"{URL}/v1", "anthropic": URL,
    "ollama_chat": URL,
}.items():  # fmt: skip
    given = {"model": f"{kind}/{MODEL}", "api_base": base, "api_key": KEY,
             "max_tokens": 60, "num_retries": 0}  # fmt: skip

    def say(messages, given=given, **more):
        # It changes what it is given.
        return litellm.completion(
            **given, **json.loads(json.dumps({"messages": messages, **more}))
        )

    with case(f"{kind} chat"):
        expect(say(asked).choices[0].message.content)
    with case(f"{kind} stream"):
        chunks = say(asked, stream=True)
        expect("".join(c.choices[0].delta.content or "" for c in chunks))
    if kind == "text-completion-openai":
        continue
    with case(f"{kind} tool"):
        messages = [{"role": "user", "content": WEATHER}]
        called = say(messages, tools=TOOLS).choices[0].message
        [call, *_] = called.tool_calls
        city(call.function.arguments)
        messages += [called.model_dump(), {
            "role": "tool", "tool_call_id": call.id, "content": rain("Rome"),
        }]  # fmt: skip
        told = say(messages, tools=TOOLS)
        expect(told.choices[0].finish_reason, told)
    with case(f"{kind} structured"):
        city(say(asked, response_format=FORM).choices[0].message.content)
with case("responses"):
    said = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY,
        input=QUESTION, max_output_tokens=60,
    )  # fmt: skip
    expect(said.output, said)
