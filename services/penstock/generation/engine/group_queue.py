"""Groups in scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from penstock.generation.engine.group import SequenceGroup


class GroupQueue:
    """Groups sorted by `SequenceGroup.key`. Finding is O(log n); inserting and removing move memory, not objects.

    Keys never change, so the order stays: no later group with an equal priority passes an earlier one.
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        # Number of prompt tokens of all groups here, computed or not.
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    @property
    def first(self) -> SequenceGroup:
        """Group that is first in the order. Raises IndexError when the queue is empty."""
        return self._groups[0]

    @property
    def last(self) -> SequenceGroup:
        """Group that is preempted first. Raises IndexError when the queue is empty."""
        return self._groups[-1]

    def add(self, group: SequenceGroup) -> None:
        """Insert `group` at its place."""
        insort(self._groups, group, key=lambda other: other.key)
        self.prompt_tokens += len(group.request.prompt_token_ids)

    def remove(self, group: SequenceGroup) -> None:
        """Remove `group`. Raises KeyError when it is not in the queue."""
        index = bisect_left(self._groups, group.key, key=lambda other: other.key)
        if index == len(self._groups) or self._groups[index] is not group:
            raise KeyError("group is not in this queue")
        del self._groups[index]
        self.prompt_tokens -= len(group.request.prompt_token_ids)
