"""Tools whose arguments are more than JSON: what the model sees, and what the tool gets."""

import dataclasses
import datetime
import enum
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.kinds.function import make_tool


class Unit(enum.Enum):
    SECONDS = "s"
    MINUTES = "min"


class Span(BaseModel):
    """When it runs."""

    start: float
    stop: float = Field(description="the end, after the start")
    unit: Unit = Unit.SECONDS


class Where(TypedDict):
    street: str
    floor: NotRequired[int]


@dataclasses.dataclass
class Order:
    spans: list[Span]
    to: dict[str, str] | None = None


class Stop(TypedDict):
    at: Where
    spans: list[Span]


class Tree(BaseModel):
    title: str
    parts: "list[Tree]" = []


def plain(
    a: int,
    b: str | None = None,
    c: list[dict[str, float]] | None = None,
    d: Literal["x", "y"] = "x",
    e: Any = 1,
):
    """Do it.

    Args:
        a: One.
        b: Two.
        c: Three.
        d: Four.
        e: Five.
    """
    return a


def order(
    number: int,
    order: Order,
    spans: list[Span],
    where: Optional[Where] = None,  # noqa: UP045
    unit: Union[Unit, int] = Unit.SECONDS,  # noqa: UP007
    day: datetime.date | None = None,
    count: Annotated[int, Field(ge=1, description="how many")] = 1,
):
    """Order something.

    Args:
        number: Its number.
        order: What.
        spans: When.
        where: The address.
        unit: Of the times.
        day: The day.
    """
    return [number, order, spans, where, unit, day, count]


def test_plain_arguments_are_described_and_passed_as_before():
    tool = make_tool(plain)
    assert tool.schema == get_json_schema(plain)
    assert tool.call is plain


def test_declared_arguments_are_described_with_their_fields():
    function = make_tool(order).schema["function"]
    properties = function["parameters"]["properties"]
    assert list(properties) == ["number", "order", "spans", "where", "unit", "day", "count"]
    assert function["parameters"]["required"] == ["number", "order", "spans"]
    assert properties["number"] == {"type": "integer", "description": "Its number."}
    span = properties["spans"]["items"]
    assert properties["order"]["properties"]["spans"]["items"] == span
    assert span["properties"]["stop"] == {
        "type": "number",
        "description": "the end, after the start",
    }
    assert span["properties"]["unit"] == {"type": "string", "enum": ["s", "min"]}
    assert span["required"] == ["start", "stop"]
    where = properties["where"]
    assert (where["nullable"], where["required"], where["description"]) == (
        True,
        ["street"],
        "The address.",
    )
    assert where["properties"]["floor"] == {"type": "integer"}
    assert properties["unit"]["anyOf"] == [
        {"type": "string", "enum": ["s", "min"]},
        {"type": "integer"},
    ]
    assert properties["day"] == {
        "type": "string",
        "format": "date",
        "nullable": True,
        "description": "The day.",
    }
    assert properties["count"] == {"type": "integer", "minimum": 1, "description": "how many"}
    assert "$" not in str(function)
    assert "title" not in str(function)


def test_a_tool_gets_the_types_that_it_declared():
    span = {"start": 1, "stop": "2.5", "unit": "min"}
    arguments = {
        "number": 3,
        "order": {"spans": [span], "to": {"street": "a"}},
        "spans": [span],
        "day": "2026-01-02",
    }
    known = Span(start=1, stop=2.5, unit=Unit.MINUTES)
    assert make_tool(order).call(**arguments, unit="s", where=None, count=2) == [
        3,
        Order([known], {"street": "a"}),
        [known],
        None,
        Unit.SECONDS,
        datetime.date(2026, 1, 2),
        2,
    ]
    assert make_tool(order).call(number=1, order={"spans": []}, spans=[])[4:] == [
        Unit.SECONDS,
        None,
        1,
    ]


def test_arguments_that_do_not_fit_are_named_with_their_parts():
    call = make_tool(order).call
    with pytest.raises(
        ValueError,
        match=r"^order.spans.0.stop: Field required; spans: Input should be a valid list$",
    ):
        call(number=1, order={"spans": [{"start": 1}]}, spans=3)


def test_a_type_that_holds_itself_and_its_own_names_are_described():
    def show(tree: Tree) -> str:
        """Show it.

        Args:
            tree: What.
        """
        return tree.parts[0].title

    tool = make_tool(show)
    properties = tool.schema["function"]["parameters"]["properties"]["tree"]["properties"]
    assert properties["title"] == {"type": "string"}
    assert properties["parts"]["items"] == {"type": "object"}
    assert tool.call(tree={"title": "a", "parts": [{"title": "b"}]}) == "b"


def test_typed_dicts_inside_each_other_are_described():
    def go(stops: list[Stop] | None = None):
        """Go there.

        Args:
            stops: Where.
        """
        return stops

    tool = make_tool(go)
    stop = tool.schema["function"]["parameters"]["properties"]["stops"]["items"]
    assert stop["properties"]["at"]["required"] == ["street"]
    assert stop["properties"]["spans"]["items"]["required"] == ["start", "stop"]
    (gone,) = tool.call(stops=[{"at": {"street": "a"}, "spans": [{"start": 0, "stop": 1}]}])
    assert gone == {"at": {"street": "a"}, "spans": [Span(start=0, stop=1)]}


def test_methods_and_coroutines_are_tools_too():
    class Desk:
        async def book(self, span: Span):
            """Book it.

            Args:
                span: When.
            """
            return span.stop - span.start

    coroutine = make_tool(Desk().book).call(span={"start": 1, "stop": 3})
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    assert end.value.value == 2


def test_a_type_without_a_schema_is_told():
    class Mine: ...

    def take(mine: Mine):
        """Take it.

        Args:
            mine: It.
        """

    with pytest.raises(EpisodeError, match="the type of `mine`, Mine, has no schema"):
        make_tool(take)
