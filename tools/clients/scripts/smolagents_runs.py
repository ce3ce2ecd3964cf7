"""smolagents: its model, and agents that call tools and write code."""

from typing import ClassVar

from cases import KEY, MODEL, QUESTION, URL, WEATHER, case, expect
from cases import rain as rain_of
from smolagents import CodeAgent, OpenAIModel, Tool, ToolCallingAgent


class Rain(Tool):
    name = "rain"
    description = "Tells how much rain fell in a city."
    inputs: ClassVar = {
        "city": {"type": "string", "description": "The city.",
                 "enum": ["Rome", "Oslo"]},
    }  # fmt: skip
    output_type = "string"

    def forward(self, city):
        return rain_of(city)


model = OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=60)
asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
with case("chat"):
    expect(model.generate(asked).content)
with case("stream"):
    expect("".join(d.content or "" for d in model.generate_stream(asked)))
with case("tool"):
    agent = ToolCallingAgent([Rain()], model, max_steps=3, verbosity_level=0)
    expect(agent.run(WEATHER) == "3 mm", agent.memory.steps)
    agent = ToolCallingAgent(
        [Rain()], model, max_steps=3, verbosity_level=0, stream_outputs=True
    )
    expect(agent.run(WEATHER) == "3 mm", agent.memory.steps)
for structured in False, True:
    with case("code, structured" if structured else "code"):
        # The model writes no sensible code: requests are to be taken.
        agent = CodeAgent(
            [Rain()], model, max_steps=1, verbosity_level=0,
            use_structured_outputs_internally=structured,
        )  # fmt: skip
        agent.run(WEATHER)
