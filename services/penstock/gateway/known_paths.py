"""Requests for an unknown path or method: the path that is probably meant, and the methods that exist."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Match, Route

# Prefixes that clients add to a path, or leave out, because of their base URL.
_PREFIXES = frozenset(("v1", "api", "openai", "anthropic"))


def meant(path: str, routes: Sequence[BaseRoute]) -> str | None:
    """Return the path of a route that differs from `path` only by its prefix; None if there is none."""
    core = _core(path)
    if not core:
        return None
    for route in routes:
        if isinstance(route, Route) and _is_alike(core, _core_of_route(route.path)):
            return _shown(route.path)
    return None


def methods_of(scope: Mapping[str, Any], routes: Sequence[BaseRoute]) -> list[str]:
    """Return the methods that a request's path takes, in order."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(dict(scope))[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


def _core(path: str) -> list[str]:
    """Parts of a path after the prefix of the API."""
    parts = [part for part in path.split("/") if part]
    while parts and parts[0] in _PREFIXES:
        parts.pop(0)
    return parts


# Of the routes' own paths alone, which are few.
_core_of_route = functools.cache(_core)


def _is_alike(asked: list[str], known: list[str]) -> bool:
    if len(asked) != len(known):
        return False
    return all(there.startswith("{") or here == there for here, there in zip(asked, known, strict=True))


def _shown(path: str) -> str:
    return path.replace("{name:path}", "NAME").replace("{name}", "NAME").replace("{item}", "ITEM")
