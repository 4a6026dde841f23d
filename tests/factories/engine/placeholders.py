"""Arguments that name ids by their place in an answer. No transformers: the golden tool uses it, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def fill_ids(arguments: Mapping[str, Any], answer: Callable[[dict[str, Any]], list[int]]) -> dict[str, Any]:
    """Replace every "@0.4" by the id at 40 % of what `answer` gives for the arguments without such strings."""
    plain = {name: value for name, value in arguments.items() if not _holds_place(value)}
    if len(plain) == len(arguments):
        return plain
    ids = answer(plain)

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(entry) for entry in value]
        return ids[int(float(value[1:]) * len(ids))] if _holds_place(value) else value

    return {name: fill(value) for name, value in arguments.items()}


def _holds_place(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_place, value))
    return isinstance(value, str) and value.startswith("@")
