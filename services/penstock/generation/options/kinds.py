"""Kinds of options: conversion of a value from a proto field or a model's JSON file and back, and its checks.

A kind is a small object without state that a row of the table names. Here are plain numbers, flags and texts, and lists
of them; values with parts are in `compound_kinds`. Messages are only read and filled here, by attributes: no stub is
imported.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.generation.core.decoding_mode import AssistantSchedule, EarlyStopping

if TYPE_CHECKING:
    from penstock.generation.options.request_limits import RequestLimits

MAX_SEED = 2**63 - 1
OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"
TokenSequence = tuple[int, ...]
# Alternatives of a word to force: one of these must appear.
Alternatives = tuple[TokenSequence, ...]


class BadValue(Exception):
    """A value of the wrong type in a file; the text goes on from "generation_config.json of the model"."""


def refuse(field: str, text: str, reason: str | None = None) -> NoReturn:
    """Raise InvalidArgument for `field`, with `reason` or the default one."""
    from penstock.common.errors import InvalidArgument  # imports grpc: --help must not wait

    raise InvalidArgument(field, text) if reason is None else InvalidArgument(field, text, reason=reason)


def check_vocabulary(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidArgument naming `field` when an id is not from 0 to below `vocab_size`."""
    ids = list(ids)
    # A message cannot hold an id below 0, but a caller in this process can.
    if max(ids, default=0) >= vocab_size or min(ids, default=0) < 0:
        refuse(field, f"every id must be below {vocab_size}", OUT_OF_VOCABULARY)


def check_count(field: str, entries: Collection[Any], most: int) -> None:
    """Raise InvalidArgument when `field` has more than `most` entries."""
    if len(entries) > most:
        refuse(field, f"must have at most {most} entries")


def as_written(value: float) -> float:
    """Return the shortest decimal for this float32: 0.7 instead of 0.699999988, the value on the wire."""
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of finite numbers, open below when `above` is set and open above when `below` is; None: no bound.

    `text` is the error text for a value outside, in place of the interval itself.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    text: str = ""

    def allow(self, value: float) -> bool:
        """True when `value` lies within; False for NaN and infinities."""
        # A whole number may be too large to become a float.
        if isinstance(value, float) and not math.isfinite(value):
            return False
        over_low = self.low is None or (value > self.low if self.above else value >= self.low)
        return over_low and (self.high is None or (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.low is None:
            return "must be finite"
        if self.high is None:
            return f"must be finite and {'>' if self.above else '>='} {self.low:g}"
        return f"must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"


POSITIVE, COUNT, SIZE, FINITE = Bounds(0.0, above=True), Bounds(1), Bounds(0), Bounds()
SHARE, CUTOFF, PENALTY = Bounds(0.0, 1.0), Bounds(0.0, 1.0, below=True), Bounds(-2.0, 2.0)
SEED_RANGE = Bounds(0, MAX_SEED, text="must be in [0, 2^63 - 1]")
AT_LEAST_ONE = Bounds(1, text="must be >= 1")


# Whole numbers of a file travel as uint32.
_MOST_WHOLE = 2**32 - 1


class OptionKind:
    """The kind of a value. Values are plain data; an empty list is unset, since proto3 cannot tell the two apart.

    `form` names the conversion of a value to the field in clients, `hint` is its type there; `type` is the type on the
    command line, for an option with a flag; `most` names the thing that the limit bounds. `field` is a path as errors
    name it, `limit` a field of RequestLimits.
    """

    form: str = "plain"
    hint: str = "Any"
    most: str = "at most {}"
    type: Any = str

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> Any:
        """Return the plain form of a set proto field; None: the same as unset.

        Raises InvalidArgument for a list beyond its bound, and for a value without a plain form.
        """
        return value

    def to_proto(self, message: Any, name: str, value: Any) -> None:
        """Set field `name` of `message`."""
        setattr(message, name, value)

    def from_json(self, name: str, value: Any) -> Any:
        """Return the plain form of a value of generation_config.json. Raises BadValue."""
        raise BadValue(f"has {name}, which no file can set")

    def check(self, value: Any, field: str) -> None:
        """Raise InvalidArgument for a value that is impossible in itself, apart from the row's bounds."""

    def check_limit(self, value: Any, field: str, limits: RequestLimits, limit: str) -> None:
        """Raise InvalidArgument for a value beyond `limit`. The conversion has checked most lists already."""

    def check_ids(self, value: Any, field: str, vocab_size: int) -> None:
        """Raise InvalidArgument for an id outside the vocabulary, and for entries that hold no id."""

    def to_param(self, value: Any) -> Any:
        """Return the value as SamplingParams has it."""
        return value


class Flag(OptionKind):
    """True or false."""

    hint, type = "bool", bool

    def from_json(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadValue(f"has {name} that is neither true nor false")
        return value


class Integer(OptionKind):
    """A whole number, at most the row's limit."""

    hint, type = "int", int

    def from_json(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadValue(f"has {name} that is not a number")
        if isinstance(value, float) and not value.is_integer():
            raise BadValue(f"has {name} that is not an integer")
        if value < 0:
            raise BadValue(f"has an impossible value: {name} must be >= 0")
        if value > _MOST_WHOLE:
            raise BadValue(f"has an impossible value: {name} must be at most {_MOST_WHOLE}")
        return int(value)

    def check_limit(self, value: int, field: str, limits: RequestLimits, limit: str) -> None:
        if limit and value > getattr(limits, limit):
            refuse(field, f"must be at most {getattr(limits, limit)}")


class Entries(Integer):
    """A number of alternatives in the answer; 0 is a value."""

    most = "0 to {}"

    def check_limit(self, value: int, field: str, limits: RequestLimits, limit: str) -> None:
        if not 0 <= value <= getattr(limits, limit):
            refuse(field, f"must be in [0, {getattr(limits, limit)}]")


class TokenId(Integer):
    """One id."""

    def check_ids(self, value: int, field: str, vocab_size: int) -> None:
        check_vocabulary(field, (value,), vocab_size)


class Number(OptionKind):
    """A number, which travels as a double."""

    hint, type = "float", float

    def from_json(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadValue(f"has {name} that is not a number")
        try:
            return float(value)
        except OverflowError as error:  # Python's JSON has integers of any length
            raise BadValue(f"has {name} that is not a finite number") from error


class Float32(Number):
    """A number that travels as a float32 and reads as it was written."""

    def from_proto(self, value: float, field: str, limits: RequestLimits, limit: str) -> float:
        return as_written(value)


class Text(OptionKind):
    """A name."""

    hint = "str"


class RouterText(Text):
    """Text that only the router accepts: it sends ids on."""

    form = "prompt"

    def from_proto(self, value: str, field: str, limits: RequestLimits, limit: str) -> NoReturn:
        refuse(field, "is for the router, which tokenizes it: send ids here")


class Choice(OptionKind):
    """One of an enum's values; UNSPECIFIED is unset."""

    def __init__(
        self, form: str, hint: str, numbers: Mapping[int, Enum], words: Mapping[Any, Enum], wrong: str
    ) -> None:
        """Take the proto's `numbers` and JSON's `words`; `wrong` is the error text for another JSON value."""
        self.form, self.hint, self.numbers, self._words, self._wrong = form, hint, numbers, words, wrong
        self._of = {value: number for number, value in numbers.items()}

    def from_proto(self, value: int, field: str, limits: RequestLimits, limit: str) -> Enum | None:
        if value and value not in self.numbers:
            refuse(field, "is none of the values of its enum")
        return self.numbers.get(value)

    def to_proto(self, message: Any, name: str, value: Enum) -> None:
        setattr(message, name, self._of[value])

    def from_json(self, name: str, value: Any) -> Enum:
        if not isinstance(value, (bool, str)) or value not in self._words:
            raise BadValue(f"has {name} that is {self._wrong}")
        return self._words[value]


class Numbers(OptionKind):
    """Whole numbers, as many as the row's limit."""

    form, hint = "numbers", "Sequence[int]"

    def from_proto(self, value: Collection[int], field: str, limits: RequestLimits, limit: str) -> TokenSequence:
        check_count(field, value, getattr(limits, limit))
        return tuple(value)

    def to_proto(self, message: Any, name: str, value: TokenSequence) -> None:
        getattr(message, name).extend(value)

    def from_json(self, name: str, value: Any) -> TokenSequence:
        if not isinstance(value, list) or not all(type(token_id) is int and token_id >= 0 for token_id in value):
            raise BadValue(f"has {name} that is not a list of ids")
        return tuple(value)


class TokenIds(Numbers):
    """Ids; clients may name one without a list."""

    form = "ids"

    def check_ids(self, value: TokenSequence, field: str, vocab_size: int) -> None:
        check_vocabulary(field, value, vocab_size)


class TokenIdOrIds(TokenIds):
    """Ids; a file may name a single one without a list."""

    hint = "int | Sequence[int]"

    def from_json(self, name: str, value: Any) -> TokenSequence:
        return super().from_json(name, value if isinstance(value, list) else [value])


class TokenSet(TokenIds):
    """Ids without an order."""

    def to_param(self, value: TokenSequence) -> frozenset[int]:
        return frozenset(value)


class PromptIdsKind(TokenIds):
    """Ids as long as a prompt: bounded by the size of a message and checked against the context."""

    form = "prompt"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> TokenSequence:
        return tuple(value.ids)

    def to_proto(self, message: Any, name: str, value: TokenSequence) -> None:
        getattr(message, name).ids.extend(value)

    def check_ids(self, value: TokenSequence, field: str, vocab_size: int) -> None:
        if not value:
            refuse(field, "must hold at least one token")
        super().check_ids(value, field, vocab_size)


class StopStringsKind(OptionKind):
    """Texts, not empty; clients may name one without a list."""

    form, hint = "strings", "str | Sequence[str]"

    def from_proto(self, value: Any, field: str, limits: RequestLimits, limit: str) -> tuple[str, ...]:
        return tuple(value)

    def check_limit(self, value: tuple[str, ...], field: str, limits: RequestLimits, limit: str) -> None:
        check_count(field, value, getattr(limits, limit))
        if not all(value):
            refuse(field, "must not hold an empty string")
        if any(len(text) > limits.max_stop_string_chars for text in value):
            refuse(field, f"every entry must be at most {limits.max_stop_string_chars} characters long")


_EARLY_STOPPING = {1: EarlyStopping.FALSE, 2: EarlyStopping.TRUE, 3: EarlyStopping.NEVER}
_SCHEDULES = {1: AssistantSchedule.CONSTANT, 2: AssistantSchedule.HEURISTIC, 3: AssistantSchedule.HEURISTIC_TRANSIENT}

FLAG, INTEGER, ENTRIES, TOKEN_ID, NUMBER, FLOAT32 = Flag(), Integer(), Entries(), TokenId(), Number(), Float32()
TEXT, ROUTER_TEXT, STOP_STRINGS = Text(), RouterText(), StopStringsKind()
NUMBERS, TOKEN_IDS, TOKEN_ID_OR_IDS, TOKEN_SET, PROMPT = (
    Numbers(),
    TokenIds(),
    TokenIdOrIds(),
    TokenSet(),
    PromptIdsKind(),
)
EARLY_STOPPING = Choice(
    "early_stopping",
    'bool | Literal["never"]',
    _EARLY_STOPPING,
    {True: EarlyStopping.TRUE, False: EarlyStopping.FALSE, "never": EarlyStopping.NEVER},
    'not true, false or "never"',
)
SCHEDULE = Choice(
    "schedule",
    'Literal["constant", "heuristic", "heuristic_transient"]',
    _SCHEDULES,
    {schedule.value: schedule for schedule in AssistantSchedule},
    "no known schedule",
)
