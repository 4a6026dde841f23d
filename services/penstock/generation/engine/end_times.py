"""Times that end requests: deadlines, latest starts, max_time; found without reading every request in every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.common.errors import DeadlineExceeded
from penstock.generation.engine.acceptance import must_end_in_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.generation.engine.group import SequenceGroup


Key = TypeVar("Key")


class DeadlineQueue(Generic[Key]):
    """Keys with one time each. `due` is O(1) until the earliest known time has come, then O(keys) once."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        # Never later than the earliest time; may be earlier after a `discard`.
        self._earliest = math.inf

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: Key) -> bool:
        return key in self._times

    @property
    def earliest(self) -> float:
        """Time before which nothing is due; infinite when nothing has a time."""
        return self._earliest

    def set(self, key: Key, time: float) -> None:
        """Make `key` due once `time` has passed."""
        self._times[key] = time
        self._earliest = min(self._earliest, time)

    def discard(self, key: Key) -> None:
        """Remove the limit of `key`."""
        self._times.pop(key, None)

    def due(self, now: float) -> list[Key]:
        """Remove and return the keys with a time before `now`, earliest first."""
        if now <= self._earliest:
            return []
        over = sorted((time, position) for position, time in enumerate(self._times.values()) if time < now)
        keys = list(self._times)
        due = [keys[position] for _, position in over]
        for key in due:
            del self._times[key]
        self._earliest = min(self._times.values(), default=math.inf)
        return due


class EndTimes:
    """Times of the live requests of one engine."""

    def __init__(self) -> None:
        self._deadlines: DeadlineQueue[SequenceGroup] = DeadlineQueue()
        self._max_times: DeadlineQueue[SequenceGroup] = DeadlineQueue()
        # Latest starts: a request that starts later cannot end before its deadline.
        self._latest_starts: DeadlineQueue[SequenceGroup] = DeadlineQueue()
        # Time before which no request has to end; it may be earlier than the first that has to. A plain attribute,
        # since each step reads it.
        self.earliest = math.inf

    @property
    def have_latest_starts(self) -> bool:
        """True while a request with a latest start waits."""
        return bool(self._latest_starts)

    def accept(self, group: SequenceGroup) -> None:
        """Note a request that begins to wait."""
        request = group.request
        if request.deadline is None:
            return
        self._deadlines.set(group, request.deadline)
        latest_start = group.expected.latest_start(request.deadline, group.expected.step_seconds)
        # A request without enough time from the start begins all the same: its caller may want the first tokens.
        if latest_start > request.arrival_time and must_end_in_time(request):
            self._latest_starts.set(group, latest_start)
        self._note_earliest()

    def begin(self, group: SequenceGroup) -> None:
        """Note that a request is admitted: its max_time counts from its first step."""
        self._latest_starts.discard(group)
        max_time, scheduled_at = group.request.params.max_time, group.report.scheduled_at
        if max_time is not None and scheduled_at is not None:
            self._max_times.set(group, scheduled_at + max_time)
            self._note_earliest()

    def forget(self, group: SequenceGroup) -> None:
        """Forget a request that has ended."""
        self._deadlines.discard(group)
        self._max_times.discard(group)
        self._latest_starts.discard(group)

    def too_late(self, now: float) -> Iterator[tuple[SequenceGroup, DeadlineExceeded]]:
        """Yield requests that passed their deadline or latest start, each with its error."""
        for group in self._deadlines.due(now):
            stage = "queue" if group.report.scheduled_at is None else "generation"
            yield group, _too_late("the deadline passed", stage)
        # Those that have ended by now are not among them.
        for group in self._latest_starts.due(now):
            yield group, wait_too_long()
        self._note_earliest()

    def over_max_time(self, now: float) -> Iterator[SequenceGroup]:
        """Yield requests that have reached their max_time."""
        due = self._max_times.due(now)
        self._note_earliest()
        yield from due

    def is_hopeless(self, group: SequenceGroup, now: float, step_seconds: float) -> bool:
        """True for a waiting request that must end in time, and cannot at this speed."""
        deadline = group.request.deadline
        if deadline is None or group not in self._latest_starts:
            return False
        return now > group.expected.latest_start(deadline, step_seconds)

    def _note_earliest(self) -> None:
        self.earliest = min(self._deadlines.earliest, self._max_times.earliest, self._latest_starts.earliest)


def wait_too_long() -> DeadlineExceeded:
    """Return the error of a request that waited until it could not end in time any more."""
    return _too_late("the deadline would pass before the answer is complete", "queue")


def _too_late(message: str, stage: str) -> DeadlineExceeded:
    return DeadlineExceeded(message, reason="DEADLINE_EXCEEDED", metadata={"stage": stage})
