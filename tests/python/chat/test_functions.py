"""Python functions as tools: what is said of them, and how they are called."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Optional,
    TypedDict,
)

import pytest

from gemmakv import Generation, Message, ToolCall, tool_schema
from gemmakv.chat._functions import call_function, is_async
from gemmakv.chat._tools import tool_use
from gemmakv.errors import ArgumentError


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclasses.dataclass
class Place:
    city: str
    height: float = 0


class Span(TypedDict, total=False):
    days: int


class Model:
    """Looks as a model of pydantic does."""

    def __init__(self, value: int) -> None:
        self.value = value

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "$defs": {"n": {"type": "integer"}},
                "properties": {"value": {"$ref": "#/$defs/n"}}}  # fmt: skip

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Model:
        return cls(**fields)

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {"value": self.value}


def taker_of(kind: Any) -> Any:
    """A function with one parameter, x, of that type."""

    def taker(x: Any) -> None: ...

    taker.__annotations__ = {"x": kind}
    return taker


def properties(function: Any) -> dict[str, Any]:
    schema = tool_schema(function)["function"]["parameters"]
    assert isinstance(schema["properties"], dict)
    return schema["properties"]


def test_a_schema() -> None:
    def rain(city: str, days: int = 1) -> float:
        """Gives the rain
        that is expected.

        Args:
          city: its name,
            as people say it.
          days (int): how many.

        Returns:
          days: none of these.
        """
        return 0.0

    assert tool_schema(rain) == {
        "type": "function",
        "function": {
            "name": "rain",
            "description": "Gives the rain that is expected.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {
                        "type": "string",
                        "description": "its name, as people say it.",
                    },
                    "days": {"type": "integer", "description": "how many."},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def test_types() -> None:
    def f(
        unit: Unit,
        place: Place,
        span: Span,
        model: Model,
        pair: tuple[int, str],
        places: list[Place] | None = None,
        kind: Literal["a", "b"] = "a",
        either: int | str = 1,
        table: dict[str, float] | None = None,
        some: Optional[bool] = None,  # noqa: UP045
        note: Annotated[str, "any words"] = "",
        unknown: Nowhere = None,  # type: ignore[name-defined] # noqa: F821
        bare=0,  # type: ignore[no-untyped-def]
    ) -> None: ...

    place = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "height": {"type": "number"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert properties(f) == {
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "place": place,
        "span": {
            "type": "object",
            "properties": {"days": {"type": "integer"}},
            "additionalProperties": False,
        },
        "model": {
            "type": "object",
            "properties": {"value": {"$ref": "#/$defs/n"}},
        },
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "places": {"type": "array", "items": place, "nullable": True},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "table": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "nullable": True,
        },
        "some": {"type": "boolean", "nullable": True},
        "note": {"type": "string", "description": "any words"},
        "unknown": {},
        "bare": {},
    }
    parameters = tool_schema(f)["function"]["parameters"]
    assert parameters["$defs"] == {"n": {"type": "integer"}}
    assert parameters["required"] == ["unit", "place", "span", "model", "pair"]


def test_styles_of_docstrings() -> None:
    def numpy(a: str, b: int) -> None:
        """Says so.

        Parameters
        ----------
        a : str
            The first,
            of two.
        b
            The second.

        Returns
        -------
        b : int
            None of these.
        """

    def rest(a: str, b: int) -> None:
        """Says so.

        :param a: the first,
            of two.
        :param int b: the second.
        :returns: nothing.
        """

    for function in (numpy, rest):
        said = tool_schema(function)["function"]
        assert said["description"] == "Says so."
        notes = {k: v["description"] for k, v in properties(function).items()}
        assert {k: v.lower() for k, v in notes.items()} == {
            "a": "the first, of two.",
            "b": "the second.",
        }


def test_what_has_no_schema() -> None:
    def many(*args: int) -> None: ...
    def more(**kwargs: int) -> None: ...
    def placed(a: int, /) -> None: ...

    for function in (many, more, placed, lambda a: a, 3):
        with pytest.raises(ArgumentError, match="^function: expected"):
            tool_schema(function)  # type: ignore[arg-type]


def test_other_callables() -> None:
    class Caller:
        def __call__(self, a: int) -> int:
            return a

        def method(self, a: int) -> int:
            """Gives it."""
            return a

        async def later(self, a: int) -> int:
            return a

    caller = Caller()
    for one, name in (
        (caller, "Caller"),
        (caller.method, "method"),
        (functools.partial(caller.method), "method"),
    ):
        assert tool_schema(one)["function"]["name"] == name
        assert properties(one) == {"a": {"type": "integer"}}
        assert call_function(one, {"a": 2}) == 2
        assert not is_async(one)
    assert is_async(caller.later)
    use = tool_use([caller, caller.method])
    assert use is not None
    assert [t["function"]["name"] for t in use.tools] == ["Caller", "method"]


def test_docstrings_of_other_callables() -> None:
    def rain(city: str, days: int) -> None:
        """Gives the rain.

        Args:
          days: how many.
        """

    class Caller:
        def __call__(self, a: int) -> None:
            """Calls it."""

    part = functools.partial(functools.partial(rain), "Rome")
    said = tool_schema(part)["function"]
    assert said["description"] == "Gives the rain."
    assert properties(part)["days"]["description"] == "how many."
    part.__doc__ = "Gives that of Rome."
    assert tool_schema(part)["function"]["description"] == part.__doc__
    assert tool_schema(Caller())["function"]["description"] == "Calls it."
    bare = functools.partial(lambda a: a)
    bare.func.__name__ = "bare"
    assert "description" not in tool_schema(bare)["function"]


def test_models_that_share_a_name() -> None:
    """Each keeps its own fields."""
    pydantic = pytest.importorskip("pydantic")

    def model(field: str) -> Any:
        inner = pydantic.create_model("Inner", **{field: (int, ...)})
        return pydantic.create_model("Outer", inner=(inner, ...))

    one, two = model("a"), model("b")

    def f(x: Any, y: Any, z: Any) -> None: ...

    f.__annotations__ = {"x": one, "y": two, "z": one}
    parameters = tool_schema(f)["function"]["parameters"]
    fields = {}
    for name, said in parameters["properties"].items():
        place = said["properties"]["inner"]["$ref"].removeprefix("#/$defs/")
        fields[name] = list(parameters["$defs"][place]["properties"])
    assert fields == {"x": ["a"], "y": ["b"], "z": ["a"]}
    assert len(parameters["$defs"]) == 2


class Stay(TypedDict):
    days: int
    where: NotRequired[Annotated[Place, "the place"]]


@dataclasses.dataclass
class Trip:
    by: Unknown  # type: ignore[name-defined]  # noqa: F821
    stay: Stay


def test_fields_that_may_be_missing_or_are_of_an_unknown_type() -> None:
    def f(trip: Trip) -> Trip:
        return trip

    place = properties(taker_of(Place))["x"]
    stay = {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "where": {**place, "description": "the place"},
        },
        "required": ["days"],
        "additionalProperties": False,
    }
    assert properties(f)["trip"]["properties"] == {"by": {}, "stay": stay}
    given = {"by": 5, "stay": {"days": 1, "where": {"city": "Rome"}}}
    assert call_function(f, {"trip": given}) == Trip(
        5, {"days": 1, "where": Place("Rome")}
    )


def test_arguments_become_what_annotations_say() -> None:
    def f(
        unit: Unit,
        places: list[Place],
        pair: tuple[int, float],
        model: Model,
        some: str | None,
        span: Span | None = None,
    ) -> tuple[Any, ...]:
        return unit, places, pair, model.value, some, span

    found = call_function(
        f,
        {
            "unit": "kelvin",
            "places": [{"city": "Rome", "height": 3}],
            "pair": [1, 2],
            "model": {"value": 5},
            "span": {"days": 1},
        },
    )
    assert found == (
        Unit.KELVIN, [Place("Rome", 3.0)], (1, 2.0), 5, None, {"days": 1},
    )  # fmt: skip


class Leg(NamedTuple):
    place: Place
    unit: Unit = Unit.KELVIN


class Chain(NamedTuple):
    rest: list[Chain]


@dataclasses.dataclass
class Person:
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: expected one")


ROME, ANN = {"city": "Rome"}, {"name": "Ann"}


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (Place | Person, ROME, Place("Rome")),
        (Place | Person, ANN, Person("Ann")),
        (Place | Person, {"name": ""}, {"name": ""}),
        (Place | Person, {**ROME, **ANN}, {**ROME, **ANN}),
        (Place | Person, {"city": 5}, {"city": 5}),
        (Person | Place | None, None, None),
        (Optional[Unit], "celsius", Unit.CELSIUS),  # noqa: UP045
        (Unit | int, "celsius", Unit.CELSIUS),
        (Unit | int, 5, 5),
        (Unit | str, "other", "other"),
        (str | Unit, "celsius", "celsius"),
        (int | float, 1, 1),
        (bool | float, 1, 1.0),
        (Literal["a"] | Unit, "kelvin", Unit.KELVIN),
        (list[Unit | Place], ["kelvin", ROME], [Unit.KELVIN, Place("Rome")]),
        (list[int] | list[Unit], ["kelvin"], [Unit.KELVIN]),
        (dict[str, Unit] | str, {"a": "kelvin"}, {"a": Unit.KELVIN}),
        (Model | str, {"value": 5}, 5),
        (Model | str, "text", "text"),
        (tuple[Unit, int] | None, ["kelvin", 1], (Unit.KELVIN, 1)),
        (tuple[Unit, int] | tuple[int], [1], (1,)),
        (tuple[tuple[Unit], Leg] | int, [["kelvin"], [ROME]],
         ((Unit.KELVIN,), Leg(Place("Rome")))),
        (Sequence[Unit], ["kelvin"], [Unit.KELVIN]),
        (Leg, [ROME, "celsius"], Leg(Place("Rome"), Unit.CELSIUS)),
        (Leg | None, [ROME], Leg(Place("Rome"))),
        (Leg | str, [], []),
        (Leg, [], []),
        (Chain, [[]], Chain([])),
        (Annotated[Unit | Place, "any"], "kelvin", Unit.KELVIN),
    ],
)
def test_a_value_of_several_types(kind: Any, value: Any, made: Any) -> None:
    def f(x: Any) -> Any:
        return x.value if isinstance(x, Model) else x

    f.__annotations__ = {"x": kind}
    found = call_function(f, {"x": value})
    assert (found, type(found)) == (made, type(made))


def test_a_named_tuple_is_described() -> None:
    place = properties(taker_of(Place))["x"]
    assert properties(taker_of(Leg))["x"] == {
        "type": "array",
        "prefixItems": [place, properties(taker_of(Unit))["x"]],
        "minItems": 1,
        "maxItems": 2,
    }
    pair = properties(taker_of(tuple[tuple[int], int]))["x"]
    assert pair["prefixItems"][0]["prefixItems"] == [{"type": "integer"}]
    assert properties(taker_of(Chain))["x"]["prefixItems"] == [
        {"type": "array", "items": {"type": "array"}}
    ]


def test_results() -> None:
    call = ToolCall("1", "f", {})

    def said(value: object) -> object:
        message = call.result(value)
        assert (message.role, message.name, message.tool_call_id) == (
            "tool", "f", "1",
        )  # fmt: skip
        return message.content

    assert said("text") == "text"
    assert said({"a": [Place("Rome")]}) == {
        "a": [{"city": "Rome", "height": 0}]
    }
    assert said(Place("Rome")) == {"city": "Rome", "height": 0}
    assert said(Model(3)) == {"value": 3}
    assert said([1, Unit.KELVIN]) == '[1, "kelvin"]'
    assert said(1.5) == "1.5" and said(None) == "null"
    assert said({"a": object}) == {"a": str(object)}
    assert said(float("nan")) == "nan"


def test_the_message_of_a_generation(tiny: Any) -> None:
    import gemmakv

    cache = gemmakv.create_kv_cache(tiny.config)
    reply = tiny.generate(cache, "the", max_tokens=3)
    assert isinstance(reply, Generation)
    assert reply.message == Message("assistant", reply.text)
    full = dataclasses.replace(
        reply,
        text="",
        tool_calls=[ToolCall("1", "f", {"a": 1})],
        reasoning="so",
        finish_reason="cancelled",
    )
    assert full.message == Message(
        "assistant",
        None,
        True,
        tool_calls=[ToolCall("1", "f", {"a": 1}).to_dict()],
        extra={"reasoning": "so"},
    )


def degrees(unit: Unit, day: Literal["today", "tomorrow"]) -> object:
    return unit, day


def test_a_decorator_of_another_module_keeps_the_types() -> None:
    far: dict[str, Any] = {"__name__": "far"}
    exec(
        "import functools\n"
        "def traced(function):\n"
        "    @functools.wraps(function)\n"
        "    def call(*given, **named):\n"
        "        return function(*given, **named)\n"
        "    return call\n",
        far,
    )
    traced = far["traced"](degrees)
    assert tool_schema(traced) == tool_schema(degrees)
    assert call_function(traced, {"unit": "kelvin", "day": "today"}) == (
        Unit.KELVIN,
        "today",
    )
    part = functools.partial(traced, day="today")
    assert call_function(part, {"unit": "celsius"}) == (Unit.CELSIUS, "today")
