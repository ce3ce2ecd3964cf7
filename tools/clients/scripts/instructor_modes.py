"""instructor, in each of its modes for the APIs of OpenAI and Anthropic."""

from collections.abc import Iterable

import instructor
from anthropic import Anthropic
from cases import KEY, MODEL, URL, City, case, expect
from openai import OpenAI
from pydantic import BaseModel


class Trip(BaseModel):
    """A trip to a city."""

    city: City


def ask(client, mode, **more):
    parallel = "PARALLEL" in mode.name
    made = client.create(
        response_model=Iterable[Trip] if parallel else Trip, max_retries=1,
        messages=[{"role": "user", "content": "A trip to Rome."}],
        **more,
    )  # fmt: skip
    [trip] = made if parallel else [made]
    expect(trip.city in ("Rome", "Oslo"), trip)


openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
anthropic = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
for mode in (
    instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT,
    instructor.Mode.PARALLEL_TOOLS, instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON,
    instructor.Mode.JSON_O1, instructor.Mode.FUNCTIONS,
    instructor.Mode.RESPONSES_TOOLS,
    instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
):  # fmt: skip
    with case(mode.name):
        client = instructor.from_openai(openai, mode=mode)
        ask(client, mode, model=MODEL)
with case("stream"):
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    *_, last = client.create_partial(
        response_model=Trip, model=MODEL, max_retries=1,
        messages=[{"role": "user", "content": "A trip to Rome."}],
    )  # fmt: skip
    expect(last.city in ("Rome", "Oslo"), last)
for mode in instructor.Mode:
    if mode.name.startswith("ANTHROPIC"):
        with case(mode.name):
            client = instructor.from_anthropic(anthropic, mode=mode)
            ask(client, mode, model=MODEL, max_tokens=100)
