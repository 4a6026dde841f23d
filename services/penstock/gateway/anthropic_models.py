"""Models in the form of Anthropic's API, version 2023-06-01 (https://docs.anthropic.com/en/api/models-list)."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from penstock.common.errors import InvalidArgument

# Time of this process's start, which OpenAI's form of the list tells, too.
_STARTED = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
_LIMIT = re.compile("[0-9]{1,4}")
_DEFAULT_LIMIT, _MOST = "20", 1000


def anthropic_model(name: str) -> dict[str, Any]:
    """Return a model of a list, or alone."""
    return {"type": "model", "id": name, "display_name": name, "created_at": _STARTED}


def anthropic_models(names: Sequence[str], query: str) -> dict[str, Any]:
    """Return the page of the list that the query of the URL asks for. Raises InvalidArgument naming its parameter."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = asked.get("limit", _DEFAULT_LIMIT)
    if _LIMIT.fullmatch(limit) is None or not 1 <= int(limit) <= _MOST:
        raise InvalidArgument("limit", f"must be from 1 to {_MOST}")
    if "after_id" in asked and "before_id" in asked:
        raise InvalidArgument("before_id", "does not go together with after_id")
    begin, end = 0, len(names)
    if "after_id" in asked:
        begin = _place(names, asked, "after_id") + 1
        end = min(begin + int(limit), len(names))
        has_more = end < len(names)
    elif "before_id" in asked:
        end = _place(names, asked, "before_id")
        begin = max(0, end - int(limit))
        has_more = begin > 0
    else:
        end = min(int(limit), len(names))
        has_more = end < len(names)
    shown = names[begin:end]
    return {
        "data": [anthropic_model(name) for name in shown],
        "has_more": has_more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _place(names: Sequence[str], asked: dict[str, str], parameter: str) -> int:
    try:
        return names.index(asked[parameter])
    except ValueError:
        raise InvalidArgument(parameter, "must be the id of a model of the list") from None
