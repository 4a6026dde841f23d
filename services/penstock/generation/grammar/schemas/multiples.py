"""`multipleOf` of fractions that binary numbers do not have, as 0.1: what is written must be a multiple for validators.

They divide binary numbers: 1.2 / 0.1 is 11.999999999999998. So of the decimal multiples only those are written whose
quotient is whole in binary, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from penstock.generation.grammar.schemas.document import WrittenFloat
from penstock.generation.grammar.schemas.refusal import Refusal

# Most multiples that are listed one by one, and the denominator of those that are written in an unbounded range.
_MAX_LISTED = 2000
_BINARY = 4
# Most states of the automaton that tells the multiples of a number.
_MAX_STATES = 10_000


def exact_multiples(schema: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the words that stand for `multipleOf` and the bounds of a number; None: those it has are exact.

    Raises Refusal.
    """
    factor = _fraction(schema.get("multipleOf"))
    if factor is None or factor <= 0 or Fraction(float(factor)) == factor:
        return None
    low, high = _bound(schema, "minimum", factor), _bound(schema, "maximum", factor)
    is_whole = schema.get("type") in ("integer", ["integer"])
    if low is not None and high is not None and high - low < _MAX_LISTED:
        values = [_written(number * factor) for number in range(low, high + 1) if _divides(number * factor, factor)]
        return {"enum": [value for value in values if not is_whole or isinstance(value, int)]}
    step = Fraction(factor.numerator, 1 if is_whole else math.gcd(factor.denominator, _BINARY))
    if step.numerator > _MAX_STATES:
        raise Refusal(path, "multipleOf", "is not supported with so many digits")
    bounds = {name: schema[name] for name in _BOUNDS if name in schema}
    return {**bounds, "multipleOf": _written(step)}


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _bound(schema: Mapping[str, Any], name: str, factor: Fraction) -> int | None:
    """Return the least, or greatest, number of times that `factor` may be taken."""
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
