"""Values of every wrong type, and the words of Python and protobuf that no error of Penstock may have."""

from __future__ import annotations

import re
from typing import Any

# What the interpreter, json, numpy and protobuf say of a wrong value.
FOREIGN = re.compile(
    r"Value out of range|cannot be interpreted|(not enough|too many) values|bad argument type|has no (attribute|len)"
    r"|not subscriptable|(is not|object is not) (iterable|callable|JSON)|not JSON serializable|must be real number"
    r"|incorrect type|but expected one of|invalid literal|could not convert|unhashable|unexpected keyword"
    r"|required (positional|keyword)|argument of type|unsupported operand|Protocol message|Parse error|codec can't"
    r"|dictionary update|cannot convert|out of bounds|Couldn't build|'<' not supported|recursion depth|Error\("
    r"|NoneType|expected (str|int|bytes)"
)


class Odd:
    """An object of no type that anything takes."""


DEEP: list[Any] = []
for _ in range(30):
    DEEP = [DEEP]

WRONG_VALUES: tuple[Any, ...] = (
    Odd(),
    Odd,
    -1,
    1 << 40,
    10**40,
    -(10**40),
    1.5,
    float("nan"),
    float("inf"),
    True,
    "a text",
    "\ud800",
    "",
    b"bytes",
    [],
    {},
    (),
    [None],
    [Odd()],
    ["a"],
    [-1],
    [1.5],
    [[Odd()]],
    [["a"]],
    [[-1]],
    [(1,)],
    (1,),
    (1, 2, 3),
    ("a", "b"),
    {"a": 1},
    {1: "a"},
    {(1,): "a"},
    {"a": Odd()},
    {1, 2},
    1j,
    range(3),
    DEEP,
)
