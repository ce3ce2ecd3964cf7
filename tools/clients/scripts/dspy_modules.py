"""DSPy's modules, with its adapters."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["DSPY_CACHEDIR"] = os.environ["HOME"]
import dspy
from cases import KEY, MODEL, QUESTION, URL, WEATHER, City, case, expect
from cases import rain as rain_of


class Trip(dspy.Signature):
    """Name a city."""

    wish: str = dspy.InputField()
    city: City = dspy.OutputField()


def rain(city: City) -> str:
    """Tells how much rain fell in a city."""
    return rain_of(city)


class Caller(dspy.LM):
    """Knows that the model takes tools, which litellm does not."""

    supports_function_calling = True


for kind, base in {"openai": f"{URL}/v1", "anthropic": URL}.items():
    lm = Caller(
        f"{kind}/{MODEL}", api_base=base, api_key=KEY, max_tokens=60,
        temperature=0, cache=False, num_retries=0,
    )  # fmt: skip
    with case(f"{kind} chat"):
        expect(lm(QUESTION))
    for adapter in dspy.ChatAdapter(), dspy.JSONAdapter():
        name = type(adapter).__name__
        with case(f"{kind} {name}"), dspy.context(lm=lm, adapter=adapter):
            made = dspy.Predict(Trip)(wish="Somewhere warm.")
            expect(made.city in ("Rome", "Oslo"), made)
    with case(f"{kind} tool"), dspy.context(lm=lm, adapter=dspy.ChatAdapter(
        use_native_function_calling=True
    )):  # fmt: skip
        tool = dspy.Tool(rain)

        class Weather(dspy.Signature):
            question: str = dspy.InputField()
            tools: list[dspy.Tool] = dspy.InputField()
            calls: dspy.ToolCalls = dspy.OutputField()

        made = dspy.Predict(Weather)(question=WEATHER, tools=[tool])
        expect(made.calls.tool_calls[0].name == "rain", made)
