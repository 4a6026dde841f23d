"""Keywords that are expressed by combinations: `minProperties` and `maxProperties` of keys, `uniqueItems` of values.

llguidance counts members of objects, and a key that the schema does not name may come twice: then it is one property.
So `required` expresses the minimum, and at most one key of free choice counts towards it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from penstock.generation.grammar.schemas.refusal import Refusal

# Most combinations of keys, and of items, to list.
_MAX_LISTED = 128
# Ten values have 1024 sets, and five 326 orders of them.
_MAX_ARRAYS = 1024
_MAX_ORDERED = 512


def rewrite_counts(schema: dict[str, Any], path: str) -> None:
    """Replace the two keywords in place if llguidance would refuse or miscount them. Raises Refusal."""
    least, most = _count(schema, "minProperties"), _count(schema, "maxProperties")
    if least is None and most is None:
        return
    required = [name for name in schema.get("required", ()) if isinstance(name, str)]
    known = schema.get("properties") or {}
    optional = [name for name, one in known.items() if name not in required and one is not False]
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    fixed = len(set(required))
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    if most is not None and (most < fixed or (least or 0) > most):
        raise Refusal(path, "maxProperties", "allows no object")
    alternatives = []
    if least is not None and least > fixed:
        alternatives.append(_at_least(least, fixed, optional, is_open, path))
    if most is not None and (is_open or most < fixed + len(optional)):
        alternatives.append(_at_most(most, required, optional, is_open, path))
    for found in alternatives:
        if len(found) == 1 and not set(found[0]) & set(schema) - {"maxProperties", "minProperties"}:
            schema.update(found[0])
        else:
            schema.setdefault("allOf", [])
            schema["allOf"] = [*schema["allOf"], {"anyOf": found}]


def _at_least(least: int, fixed: int, optional: list[str], is_open: bool, path: str) -> list[dict[str, Any]]:
    missing = least - fixed
    found: list[dict[str, Any]] = []
    if missing <= len(optional):
        if math.comb(len(optional), missing) > _MAX_LISTED:
            raise Refusal(path, "minProperties", "is not supported with this number of optional keys")
        found += [{"required": list(names)} for names in itertools.combinations(optional, missing)]
    if is_open and missing - 1 <= len(optional) and math.comb(len(optional), missing - 1) <= _MAX_LISTED:
        for names in itertools.combinations(optional, missing - 1):
            others = {name: False for name in optional if name not in names}
            one = {"minProperties": least, **({"properties": others} if others else {})}
            found.append({**one, **({"required": list(names)} if names else {})})
    if found:
        return found
    if is_open:
        most = fixed + len(optional) + 1
        reason = f"is not supported above {most} here: a key that the schema does not name may come twice"
        raise Refusal(path, "minProperties", reason)
    raise Refusal(path, "minProperties", "allows no object: it has fewer keys")


def _at_most(most: int, required: list[str], optional: list[str], is_open: bool, path: str) -> list[dict[str, Any]]:
    room = most - len({*required})
    found: list[dict[str, Any]] = []
    if is_open and room >= len(optional):
        # With all of its keys, so that the others can be counted.
        found.append({"maxProperties": most, **({"required": optional} if optional else {})})
        if not optional:
            return found
    room = min(room, len(optional))
    if math.comb(len(optional), room) > _MAX_LISTED:
        raise Refusal(path, "maxProperties", "is not supported with this number of optional keys")
    for names in itertools.combinations(optional, room):
        others = {name: False for name in optional if name not in names}
        closed = (
            {"additionalProperties": False, "properties": dict.fromkeys([*required, *names], True) | others}
            if is_open
            else {}
        )
        found.append(closed or {"properties": others})
    return found


def _count(schema: dict[str, Any], name: str) -> int | None:
    value = schema.get(name)
    return None if value is None else int(value)


def subsets(values: list[Any], least: int, most: int | None) -> list[dict[str, Any]] | None:
    """Return schemas of arrays without an equal pair; None if they would be too many.

    A few values come in any order, more only in their own order: every set is there, but not in every order.
    """
    distinct = list({_identity(value): value for value in reversed(values)}.values())[::-1]
    lengths = range(least, (len(distinct) if most is None else min(most, len(distinct))) + 1)
    if sum(math.perm(len(distinct), length) for length in lengths) <= _MAX_ORDERED:
        arrays = [chosen for length in lengths for chosen in itertools.permutations(distinct, length)]
    elif sum(math.comb(len(distinct), length) for length in lengths) <= _MAX_ARRAYS:
        arrays = [chosen for length in lengths for chosen in itertools.combinations(distinct, length)]
    else:
        return None
    return [_array_of(chosen) for chosen in arrays] or None


def _array_of(values: Sequence[Any]) -> dict[str, Any]:
    one: dict[str, Any] = {"type": "array", "items": False, "minItems": len(values), "maxItems": len(values)}
    return one | ({"prefixItems": [{"const": value} for value in values]} if values else {})


def _identity(value: Any) -> Any:
    """Return a key that is equal for equal JSON values only: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _identity(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(_identity, value))
    return (isinstance(value, bool), value)
