"""Candidates for a request, with the place of each: a list that is made once and used for many requests."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol, TypeVar


class Keyed(Protocol):
    """Something with a key."""

    @property
    def key(self) -> str:
        """Key that is unique among them."""


KeyedT = TypeVar("KeyedT", bound=Keyed)


class CandidateList(list[KeyedT]):
    """Candidates that do not change any more."""

    @cached_property
    def places(self) -> dict[str, int]:
        """Place of each by its key, made when it is first asked for."""
        return {one.key: place for place, one in enumerate(self)}
