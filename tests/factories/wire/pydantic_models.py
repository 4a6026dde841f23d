"""Models of pydantic by number, as programs declare them: each field drawn from what its types have schemas for."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import random
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from jsonschema import Draft202012Validator
from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyAddress,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    StringConstraints,
    ValidationError,
    create_model,
)


class Color(enum.Enum):
    """A choice of words."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(enum.IntEnum):
    """A choice of numbers."""

    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    """One side of a tagged union."""

    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    """The other side."""

    kind: Literal["dog"]
    name: str = Field(max_length=20)
    owner: Person | None = None


class Person(BaseModel):
    """A model inside others."""

    name: str = Field(max_length=30, description="full name")
    age: Annotated[int, Field(ge=0, le=130)]


class Tree(BaseModel):
    """A model that may hold itself."""

    value: int = Field(ge=0, le=99)
    children: list[Tree] = Field(default_factory=list, max_length=2)


class Strict(BaseModel):
    """A model of no other keys."""

    model_config = ConfigDict(extra="forbid")
    id: PositiveInt
    done: bool = False


class Loose(BaseModel):
    """A model that keeps any other key."""

    model_config = ConfigDict(extra="allow")
    title: str = Field(max_length=40)


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
_WORDS = (
    *(
        "name",
        "city",
        "score",
        "tags",
        "due",
        "owner",
        "items",
        "price",
        "notes",
        "kind_of",
        "level",
        "address",
        "total",
    ),
    *("email", "summary", "count", "ratio", "status", "meta", "parent"),
)
# Types that a field may have alone.
_SIMPLE: tuple[Any, ...] = (
    *(
        str,
        int,
        float,
        bool,
        Color,
        Level,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        uuid.UUID,
    ),
    *(UUID4, Decimal, Path, SecretStr, bytes, AnyUrl, ipaddress.IPv4Address, ipaddress.IPv6Address, IPvAnyAddress, Any),
    *(Base64Bytes, NonNegativeInt, Literal["yes", "no", "maybe"], Literal[1, 2, "three", None], ipaddress.IPv4Network),
    Annotated[str, StringConstraints(min_length=2, max_length=12)],
    Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}-[0-9]{3}$")],
    Annotated[int, Field(ge=1, le=5)],
    Annotated[int, Field(multiple_of=5, ge=0, lt=100)],
    Annotated[float, Field(gt=0, le=1)],
    Annotated[float, Field(multiple_of=0.1, ge=0, le=10)],
    Annotated[float, Field(multiple_of=0.01, ge=0)],
    *(Person, Tree, Strict, Loose, Pet, Cat),
)
# Types around others.
_AROUND: tuple[Callable[[Any], Any], ...] = (
    lambda one: one,
    lambda one: one,
    lambda one: one,
    lambda one: Optional[one],  # noqa: UP045 (a value, not an annotation)
    lambda one: list[one],
    lambda one: Annotated[list[one], Field(min_length=1, max_length=3)],
    lambda one: dict[str, one],
    lambda one: Annotated[dict[str, one], Field(min_length=1)],
    lambda one: dict[Color, one],
    lambda one: dict[uuid.UUID, one],
    lambda one: dict[Annotated[str, StringConstraints(min_length=1, max_length=9)], one],
    lambda one: tuple[one, int],
    lambda one: Union[one, str],  # noqa: UP007 (a value, not an annotation)
    lambda one: Annotated[set[Color], Field(max_length=2)],
    lambda one: set[Literal["a", "b", "c", "d"]],
)


def model_of(number: int) -> type[BaseModel]:
    """Return the model of a number: always the same one."""
    chance = random.Random(number)
    fields: dict[str, Any] = {}
    for name in chance.sample(_WORDS, chance.randint(1, 6)):
        kind = chance.choice(_AROUND)(chance.choice(_SIMPLE))
        if chance.random() < 0.3:
            fields[name] = (Optional[kind], None)  # noqa: UP045 (a value, not an annotation)
        elif chance.random() < 0.2:
            fields[name] = (kind, Field(description=f"the {name}", examples=["one"]))
        else:
            fields[name] = (kind, ...)
    extra: Any = chance.choice(["ignore", "ignore", "ignore", "forbid", "allow"])
    return create_model(f"Model{number}", __config__=ConfigDict(extra=extra), **fields)


def fault_of(model: type[BaseModel], text: str) -> str:
    """Return what is wrong with an answer, empty where it is right: JSON, and the schema with its formats."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    judge = Draft202012Validator(model.model_json_schema(), format_checker=Draft202012Validator.FORMAT_CHECKER)
    for wrong in judge.iter_errors(value):
        return f"schema: {wrong.json_path} {wrong.message}"[:300]
    return ""


def refusal_of(model: type[BaseModel], text: str) -> str:
    """Return why the model itself refuses an answer, empty where it takes it: it knows more than its schema says."""
    try:
        model.model_validate_json(text)
    except ValidationError as error:
        return f"{error.errors(include_url=False)[0]}"[:300]
    return ""
