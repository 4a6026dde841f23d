"""`uniqueItems` of items that are a few known values: their subsets, in the order of the schema."""

from __future__ import annotations

import itertools
import math
from typing import Any

from penstock.generation.grammar.schemas.document import write_json

_MAX_LISTED = 256


def subsets(values: list[Any], least: int, most: int | None) -> list[dict[str, Any]] | None:
    """Return schemas of arrays without an equal pair; None where they would be too many.

    As many lengths as there is room for: any output is right, but not any right output is made.
    """
    distinct = list({write_json(value): value for value in values}.values())
    most = len(distinct) if most is None else min(most, len(distinct))
    found: list[dict[str, Any]] = []
    for length in range(least, most + 1):
        if len(found) + math.comb(len(distinct), length) > _MAX_LISTED:
            break
        for chosen in itertools.combinations(distinct, length):
            items = [{"const": value} for value in chosen]
            one: dict[str, Any] = {"type": "array", "items": False, "minItems": length, "maxItems": length}
            found.append(one | ({"prefixItems": items} if items else {}))
    return found or None
