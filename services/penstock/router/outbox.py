"""Output of one client stream that waits for its reader: merged while the reader is behind, bounded in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.router.tool_calls import ToolCallPiece
from penstock.router.wakeup import Wakeup
from penstock.v1 import common_pb2

# Estimates of what a part of a delta takes on the wire, generously.
_ID_BYTES, _LOGPROB_BYTES, _CALL_BYTES = 5, 48, 96


@dataclass(slots=True)
class PendingDelta:
    """New output of returned sequence `index`. Lists are owned by the delta."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)

    def size(self) -> int:
        """About how many bytes this is on the wire (ASCII text assumed; the bound is no precise one)."""
        size = len(self.text) + len(self.reasoning) + _ID_BYTES * len(self.token_ids)
        if self.logprobs:
            size += _LOGPROB_BYTES * len(self.logprobs) * (1 + len(self.logprobs[0].top))
        if self.tool_calls:
            size += sum(_CALL_BYTES + len(call.arguments) for call in self.tool_calls)
        return size

    def merge(self, other: PendingDelta) -> None:
        """Append later output of the same sequence."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.tool_calls += other.tool_calls


class Outbox:
    """Deltas in order, at most one per sequence waiting. The reader is the stream's handler."""

    __slots__ = ("_bytes", "_max_bytes", "_waiting", "coalesced", "wakeup")

    def __init__(self, max_bytes: int) -> None:
        self._waiting: dict[int, PendingDelta] = {}
        self._bytes = 0
        self._max_bytes = max_bytes
        self.wakeup = Wakeup()
        self.coalesced = 0

    def put(self, delta: PendingDelta) -> bool:
        """Queue or merge a delta; False when the reader is further behind than the bound."""
        self._bytes += delta.size()
        waiting = self._waiting.get(delta.index)
        if waiting is None:
            self._waiting[delta.index] = delta
        elif self._bytes > self._max_bytes:
            return False
        else:
            waiting.merge(delta)
            self.coalesced += 1
        self.wakeup.set()
        return True

    @property
    def has_deltas(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def take(self) -> list[PendingDelta]:
        """Everything that waits."""
        if not self._waiting:
            return []
        deltas = list(self._waiting.values())
        self._waiting = {}
        self._bytes = 0
        return deltas

    def clear(self) -> None:
        """Forget what waits: nobody will read it."""
        self._waiting = {}
        self._bytes = 0
