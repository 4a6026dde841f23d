"""`multipleOf` of fractions that binary numbers do not have, as 0.1: validators must accept every written number.

Validators divide binary numbers: 1.2 / 0.1 is 11.999999999999998. So only those decimal multiples are written that
have a whole quotient in binary, too: the nearest to 0 are listed, and far from 0 those remain that binary numbers have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from penstock.generation.grammar.schemas.document import WrittenFloat
from penstock.generation.grammar.schemas.refusal import Refusal

# Most multiples to list one by one.
_MAX_LISTED = 10_000
# Denominator of the multiples beyond those: binary numbers have them.
_BINARY = 4
# Most states of the automaton that recognises the multiples of a number.
_MAX_STATES = 10_000
# Largest number with such a fraction: a double has it exactly.
_MOST = 10**15 - 1
# A quotient of any size rounds to a whole number if the factor's own relative error is at most this.
_SURE = Fraction(1, 2**54)


def exact_multiples(schema: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the keywords that replace `multipleOf` and the bounds of a number; None: the present ones are exact.

    Raises Refusal.
    """
    factor = _fraction(schema.get("multipleOf"))
    if factor is None or factor <= 0 or Fraction(float(factor)) == factor:
        return None
    low, high = _bound(schema, "minimum", factor), _bound(schema, "maximum", factor)
    is_whole = only_whole(schema)
    if low is not None and high is not None and high - low < _MAX_LISTED:
        return {"enum": _listed(factor, low, high, is_whole)}
    step = Fraction(factor.numerator, 1 if is_whole else math.gcd(factor.denominator, _BINARY))
    if step.numerator > _MAX_STATES:
        raise Refusal(path, "multipleOf", "is not supported with this number of digits")
    if abs(Fraction(float(factor)) / factor - 1) > _SURE:
        reason = f"of this fraction is supported between a minimum and a maximum with up to {_MAX_LISTED} multiples"
        raise Refusal(path, "multipleOf", f"{reason}: binary numbers show some larger ones as no multiples")
    beyond = {"type": "integer" if is_whole else "number", **_within(schema), "multipleOf": _written(step)}
    if is_whole:
        return beyond
    first, last = _nearest(low, high)
    return {"anyOf": [{"enum": _listed(factor, first, last, is_whole)}, beyond]}


def only_whole(schema: Mapping[str, Any]) -> bool:
    """True when the numbers of a schema are integers."""
    named = schema.get("type")
    return named == "integer" or (isinstance(named, list) and "integer" in named and "number" not in named)


def keep_multiples(values: Sequence[Any], factor: Any) -> list[Any] | None:
    """Return the values of an enum that are not numbers, or are multiples for validators; None: `factor` is exact."""
    exact = _fraction(factor)
    if exact is None or exact <= 0 or Fraction(float(exact)) == exact:
        return None
    return [value for value in values if (number := _fraction(value)) is None or _divides(number, exact)]


def _listed(factor: Fraction, first: int, last: int, is_whole: bool) -> list[int | WrittenFloat]:
    values = [_written(times * factor) for times in range(first, last + 1) if _divides(times * factor, factor)]
    return [value for value in values if not is_whole or isinstance(value, int)]


def _nearest(low: int | None, high: int | None) -> tuple[int, int]:
    """Return the multiples within the bounds that are nearest to 0, up to the most that are listed."""
    first, last = -(_MAX_LISTED // 2), _MAX_LISTED // 2
    if low is not None and low > first:
        first, last = low, low + _MAX_LISTED
    if high is not None and high < last:
        first, last = high - _MAX_LISTED if low is None else max(low, high - _MAX_LISTED), high
    return first, last


def _within(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema's bounds, and those of exact numbers where it has none, or further ones."""
    bounds = {name: schema[name] for name in _BOUNDS if name in schema}
    for words, limit in ((_BOUNDS[::2], -_MOST), (_BOUNDS[1::2], _MOST)):
        named = [bounds[word] for word in words if _fraction(bounds.get(word)) is not None]
        if not named or (max(named) < limit if limit < 0 else min(named) > limit):
            for word in words:
                bounds.pop(word, None)
            bounds[words[0]] = limit
    return bounds


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _bound(schema: Mapping[str, Any], name: str, factor: Fraction) -> int | None:
    """Return the smallest, or largest, allowed multiple of `factor`, as a number of times."""
    found = []
    for word in (name, f"exclusive{name.capitalize()}"):
        value = _fraction(schema.get(word))
        if value is None:
            continue
        times = value / factor
        inward = 1 if name == "minimum" else -1
        whole = math.ceil(times) if inward > 0 else math.floor(times)
        found.append(whole + inward if word != name and whole == times else whole)
    return None if not found else max(found) if name == "minimum" else min(found)


def _fraction(value: Any) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Fraction(Decimal(value.text if isinstance(value, WrittenFloat) else str(value)))


def _divides(value: Fraction, factor: Fraction) -> bool:
    quotient = float(value) / float(factor)
    return quotient == int(quotient)


def _written(value: Fraction) -> int | WrittenFloat:
    """Return a number as it is written: its denominator divides a power of ten."""
    if value.denominator == 1:
        return int(value)
    return WrittenFloat(f"{Decimal(value.numerator) / Decimal(value.denominator):f}")
