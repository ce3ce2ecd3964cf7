"""Answers, streamed and not, against the types of the clients of OpenAI,
Anthropic and Ollama, strictly.

    python tools/clients/strict.py [--model FILE]

The clients' types take fields that they do not know, and leave out checks where
an answer is read without `_strict_response_validation`. Here every answer is
read with it, and then walked: each value has the type of its field, and a field
that the type does not have is an error unless it is listed below. Without
--model the model is tiny and random.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import ollama
import openai
import pydantic
from serving import NAME, serving

# Fields that are ours, by the type that has them.
OURS = {
    "ChatCompletion": {"timings", "session", "cache"},
    "ChatCompletionChunk": {"timings", "session", "cache"},
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "Completion": {"timings", "cache"},
    "Message": {"session"},
    # OpenAI's own answers have them, and no type does.
    "Response": {"frequency_penalty", "presence_penalty", "store",
                 "dropped_messages"},
    # Of version 2, which demands it; version 3 has it no more.
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    # Of both OpenAI's and Anthropic's lists.
    "Model": {"max_model_len"},
    "ModelInfo": {"object", "created", "owned_by", "max_model_len"},
}
USER = [{"role": "user", "content": "Where to?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "rain", "description": "Rain.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": True}
CLAUDE_TOOL = {"name": "rain", "input_schema": SCHEMA, "strict": True}
FORMAT = {"name": "trip", "schema": SCHEMA, "strict": True}


def check(value: Any, path: str) -> None:
    """Raises for what the types of an answer do not have."""
    if isinstance(value, pydantic.BaseModel):
        kind = type(value)
        name = kind.__name__.partition("[")[0]
        more = set(value.model_extra or ()) - OURS.get(name, set())
        if more:
            raise TypeError(f"{path}: {kind.__name__} has no {sorted(more)}")
        # As the type has it, with nothing made of anything else.
        kind.model_validate_json(
            value.model_dump_json(by_alias=True, warnings="error")
        )
        for field in kind.model_fields:
            check(getattr(value, field), f"{path}.{field}")
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            check(one, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            check(one, f"{path}.{key}")


def _unfinished(client: openai.OpenAI, body: Any) -> Iterable[Any]:
    """A completion's stream, where finish_reason is null until the end: so it
    is in OpenAI's streams, and their type has no null.
    """
    chunks = list(client.completions.create(**body))
    *before, last = (choice for chunk in chunks for choice in chunk.choices)
    assert last.finish_reason
    for choice in before:
        choice.finish_reason = choice.finish_reason or "stop"
    return chunks


class Run:
    """Named cases, each of which gives answers to be checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = 0
        self.cases = 0
        self.failed: list[str] = []

    def __call__(self, case: str, work: Callable[[], Any]) -> None:
        self.cases += 1
        try:
            found = work()
            if not isinstance(found, Iterable) or hasattr(found, "model_dump"):
                found = [found]
            count = 0
            for answer in found:
                check(answer, type(answer).__name__)
                count += 1
            if not count:
                raise ValueError("expected answers, found none")
            self.answers += count
        except Exception:
            self.failed.append(f"{case}: {traceback.format_exc(limit=-3)}")

    def print(self) -> int:
        version = importlib.metadata.version(self.name)
        good = self.cases - len(self.failed)
        print(f"{self.name} {version}: {good} of {self.cases} cases, "
              f"{self.answers} answers and events")  # fmt: skip
        for line in self.failed:
            print(f"  {line}")
        return len(self.failed)


def of_openai(url: str) -> int:
    run = Run("openai")
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )
    loose = client.copy()
    loose._strict_response_validation = False
    chat: Any = client.chat.completions
    responses: Any = client.responses
    said: dict[str, dict[str, Any]] = {
        "plain": {"max_tokens": 8},
        "usage": {"max_tokens": 8, "n": 2, "seed": 3},
        "logprobs": {"max_tokens": 4, "logprobs": True, "top_logprobs": 3},
        "stop": {"max_tokens": 40, "stop": ["e", "a"]},
        "tool": {"tools": [TOOL], "tool_choice": "required",
                 "parallel_tool_calls": False, "max_tokens": 400},
        "tool, cut short": {"tools": [TOOL], "tool_choice": "required",
                            "max_tokens": 12},
        "tool or text": {"tools": [TOOL], "max_tokens": 8},
        "schema": {"response_format": {"type": "json_schema",
                                       "json_schema": FORMAT},
                   "max_tokens": 200},
        "object": {"response_format": {"type": "json_object"},
                   "max_tokens": 8},
    }  # fmt: skip
    for case, more in said.items():
        body = {"model": NAME, "messages": USER, **more}
        run(f"chat, {case}", lambda b=body: chat.create(**b))
        usage = {"include_usage": True}
        body = {**body, "stream": True, "stream_options": usage}
        run(f"chat, {case}, stream", lambda b=body: chat.create(**b))
    completions: Any = client.completions
    for case, more in {
        "plain": {}, "logprobs": {"logprobs": 2}, "logprobs 0": {"logprobs": 0},
        "echo": {"echo": True}, "several": {"prompt": ["a", "b"], "n": 2},
    }.items():  # fmt: skip
        body = {"model": NAME, "prompt": "Where to?", "max_tokens": 5, **more}
        run(f"completions, {case}", lambda b=body: completions.create(**b))
        body = {**body, "stream": True}
        run(f"completions, {case}, stream",
            lambda b=body: _unfinished(loose, b))  # fmt: skip
    for case, more in {
        "plain": {"max_output_tokens": 8},
        "instructions": {"instructions": "Be brief.", "max_output_tokens": 8},
        "logprobs": {"include": ["message.output_text.logprobs"],
                     "top_logprobs": 2, "max_output_tokens": 4},
        "tool": {"tools": [RESPONSES_TOOL], "tool_choice": "required",
                 "parallel_tool_calls": False, "max_output_tokens": 400},
        "tool, cut short": {"tools": [RESPONSES_TOOL],
                            "tool_choice": "required",
                            "max_output_tokens": 12},
        "schema": {"text": {"format": {"type": "json_schema", **FORMAT}},
                   "max_output_tokens": 200},
    }.items():  # fmt: skip
        body = {"model": NAME, "input": "Where to?", **more}
        run(f"responses, {case}", lambda b=body: responses.create(**b))
        body = {**body, "stream": True}
        run(f"responses, {case}, stream", lambda b=body: responses.create(**b))

    run("responses, truncation",
        lambda: responses.create(
            model=NAME, input="Where to?", max_output_tokens=4,
            truncation="auto"))  # fmt: skip
    run("responses, input tokens",
        lambda: responses.input_tokens.count(
            model=NAME, input="Where to?", tools=[RESPONSES_TOOL]))  # fmt: skip

    def items() -> list[Any]:
        call = {"type": "function_call", "call_id": "call_1", "name": "rain",
                "arguments": '{"city": "Rome", "days": 1}'}  # fmt: skip
        result = {"type": "function_call_output", "call_id": "call_1",
                  "output": "3 mm"}  # fmt: skip
        first = responses.create(
            model=NAME, input=[*USER, call, result], max_output_tokens=4
        )
        more = responses.create(
            model=NAME, input="More", previous_response_id=first.id,
            max_output_tokens=4,
        )  # fmt: skip
        found = responses.input_items.list(more.id, limit=2)
        shown = list(found)  # of all pages
        if len(shown) != 5:
            raise ValueError(f"expected 5 items, found {len(shown)}")
        return shown  # the page's type has no ids

    run("responses, input items", items)

    def gone_on() -> list[Any]:
        body = {"model": NAME, "max_output_tokens": 6}
        first = responses.create(input="Hello", **body)
        more = responses.create(
            input="More", previous_response_id=first.id, **body
        )
        return [first, more, responses.retrieve(more.id)]

    def tool_turns() -> list[Any]:
        body = {"model": NAME, "tools": [TOOL], "max_tokens": 400}
        first = chat.create(
            messages=USER, tool_choice="required", parallel_tool_calls=False,
            **body,
        )  # fmt: skip
        message = first.choices[0].message
        [call] = message.tool_calls
        json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "3 mm"}
        body["max_tokens"] = 8
        return [first, chat.create(messages=[*USER, message, result], **body)]

    run("responses, gone on from", gone_on)
    run("chat, a tool's result", tool_turns)
    run("models", lambda: list(client.models.list()))
    run("a model", lambda: client.models.retrieve(NAME))
    return run.print()


def of_anthropic(url: str) -> int:
    run = Run("anthropic")
    client = anthropic.Anthropic(
        base_url=url,
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )
    for place, messages in (
        ("messages", client.messages),
        ("beta", client.beta.messages),
    ):
        create: Any = messages.create
        for case, more in {
            "plain": {"max_tokens": 8},
            "system": {"max_tokens": 8, "system": [
                {"type": "text", "text": "Be brief.",
                 "cache_control": {"type": "ephemeral"}}]},
            "stop": {"max_tokens": 60, "stop_sequences": ["e", "a"]},
            "tool": {"max_tokens": 400, "tools": [CLAUDE_TOOL],
                     "tool_choice": {"type": "any",
                                     "disable_parallel_tool_use": True}},
            "tool, cut short": {"max_tokens": 12, "tools": [CLAUDE_TOOL],
                                "tool_choice": {"type": "any"}},
            "schema": {"max_tokens": 200, "output_config": {
                "format": {"type": "json_schema", "schema": SCHEMA}}},
        }.items():  # fmt: skip
            body = {"model": NAME, "messages": USER, **more}
            run(f"{place}, {case}", lambda c=create, b=body: c(**b))
            body = {**body, "stream": True}
            run(f"{place}, {case}, stream", lambda c=create, b=body: c(**b))
        counted: Any = messages.count_tokens
        run(f"{place}, count_tokens",
            lambda c=counted: c(model=NAME, messages=USER))  # fmt: skip
    create = client.messages.create

    def diagnosed() -> list[Any]:
        body: dict[str, Any] = {"model": NAME, "messages": USER,
                                "max_tokens": 2}  # fmt: skip
        first = create(diagnostics={"previous_message_id": None}, **body)
        found = []
        for before in (first.id, "msg_none"):
            more = {**body, "diagnostics": {"previous_message_id": before},
                    "system": "Be brief."}  # fmt: skip
            answer = create(**more)
            if answer.diagnostics is None:
                raise ValueError("expected diagnostics, found none")
            found += [answer, *create(stream=True, **more)]
        return [first, *found]

    run("messages, diagnostics", diagnosed)
    run("messages, begun",
        lambda: create(
            model=NAME, max_tokens=4,
            messages=[*USER, {"role": "assistant", "content": "To"}],
        ))  # fmt: skip

    def tool_turns() -> list[Any]:
        body = {"model": NAME, "tools": [CLAUDE_TOOL]}
        first = create(
            messages=USER, max_tokens=400, **body,
            tool_choice={"type": "tool", "name": "rain",
                         "disable_parallel_tool_use": True},
        )  # fmt: skip
        [block] = first.content
        result = {
            "type": "tool_result", "tool_use_id": block.id, "content": "3 mm",
        }  # fmt: skip
        turns = [
            *USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        return [first, create(messages=turns, max_tokens=8, **body)]

    run("messages, a tool's result", tool_turns)
    run("models", lambda: list(client.models.list()))
    run("a model", lambda: client.models.retrieve(NAME))
    return run.print()


def of_ollama(url: str) -> int:
    run = Run("ollama")
    client = ollama.Client(host=url)
    chat: Any = client.chat
    generate: Any = client.generate
    options = {"num_predict": 8, "seed": 1}
    for case, more in {
        "plain": {}, "logprobs": {"logprobs": True, "top_logprobs": 2},
        "schema": {"format": SCHEMA, "options": {"num_predict": 200}},
        "tools": {"tools": [TOOL]},
    }.items():  # fmt: skip
        body = {"model": NAME, "options": options, **more}
        kinds = {"chat": chat, "generate": generate}
        for kind, call in kinds.items():
            said = {"messages": USER} if kind == "chat" else {"prompt": "a"}
            if kind == "generate" and case == "tools":
                continue
            for stream in (False, True):
                run(f"{kind}, {case}, stream {stream}",
                    lambda c=call, b={**body, **said, "stream": stream}:
                    c(**b))  # fmt: skip
    run("list", client.list)
    run("ps", client.ps)
    run("show", lambda: client.show(NAME))
    return run.print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="FILE")
    arguments = parser.parse_args()
    with serving("--default-max-tokens", "8", model=arguments.model) as url:
        bad = sum(of(url) for of in (of_openai, of_anthropic, of_ollama))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
