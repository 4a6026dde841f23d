"""Buffer for the output of one client stream: merged while the reader is behind, bounded in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from penstock.router.aio import Wakeup
from penstock.router.chat.tool_calls import ToolCallPiece
from penstock.router.requests.delta_pace import DeltaPace
from penstock.v1 import common_pb2

# Generous estimates of the bytes of a delta's parts on the wire.
_ID_BYTES, _LOGPROB_BYTES, _CALL_BYTES = 5, 48, 96
# Bytes of tensors and log-probabilities in one message: with the rest, below the 4 MiB that clients receive by
# default.
MAX_MESSAGE_BYTES = 3 << 20
# Tokens that always fit, with 20 alternatives each.
_SMALL = 64


@dataclass(slots=True)
class PendingDelta:
    """New output of returned sequence `index`. Lists are owned by the delta."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
    # One per token, or none.
    tensors: list[common_pb2.StepTensors] = field(default_factory=list)

    def size(self) -> int:
        """Estimate of the bytes on the wire (ASCII text is assumed; the bound need not be precise)."""
        size = len(self.text) + len(self.reasoning) + _ID_BYTES * len(self.token_ids)
        if self.logprobs:
            size += _LOGPROB_BYTES * len(self.logprobs) * (1 + len(self.logprobs[0].top))
        if self.tool_calls:
            size += sum(_CALL_BYTES + len(call.arguments) for call in self.tool_calls)
        if self.tensors:
            size += sum(one.ByteSize() for one in self.tensors)
        return size

    def merge(self, other: PendingDelta) -> None:
        """Append later output of the same sequence."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.tool_calls += other.tool_calls
        self.tensors += other.tensors

    def messages(self) -> Iterable[PendingDelta]:
        """Return the delta itself, or parts that each fit a message; the first has the text and tool calls."""
        if not self.tensors and len(self.logprobs) <= _SMALL:
            return (self,)
        sizes = self._token_bytes()
        return (self,) if sum(sizes) <= MAX_MESSAGE_BYTES else self._parts(sizes)

    def _token_bytes(self) -> list[int]:
        """Estimate the bytes of each token's tensors and log-probabilities."""
        tensors, logprobs = self.tensors, self.logprobs
        sizes = [one.ByteSize() for one in tensors] if tensors else [0] * len(logprobs)
        for place, position in enumerate(logprobs):
            sizes[place] += _LOGPROB_BYTES * (1 + len(position.top))
        return sizes

    def _parts(self, sizes: list[int]) -> Iterator[PendingDelta]:
        begin, size = 0, 0
        for place, more in enumerate(sizes):
            if place > begin and size + more > MAX_MESSAGE_BYTES:
                yield self._part(begin, place)
                begin, size = place, 0
            size += more
        yield self._part(begin, len(sizes))

    def _part(self, begin: int, end: int) -> PendingDelta:
        part = PendingDelta(self.index) if begin else replace(self)
        part.token_ids, part.logprobs = self.token_ids[begin:end], self.logprobs[begin:end]
        part.tensors = self.tensors[begin:end]
        return part


class DeltaBuffer:
    """Deltas in order; at most one waits for each sequence. The reader is the stream's handler."""

    __slots__ = ("_bytes", "_max_bytes", "_waiting", "coalesced", "pace", "wakeup")

    def __init__(self, max_bytes: int) -> None:
        self._waiting: dict[int, PendingDelta] = {}
        self._bytes = 0
        self._max_bytes = max_bytes
        self.wakeup = Wakeup()
        self.coalesced = 0
        # Decides when deltas wake the reader up; None: at once, as the first one does.
        self.pace: DeltaPace | None = None

    def put(self, delta: PendingDelta) -> bool:
        """Queue or merge a delta; False when the reader is further behind than the limit."""
        self._bytes += delta.size()
        waiting = self._waiting.get(delta.index)
        if waiting is None:
            self._waiting[delta.index] = delta
        elif self._bytes > self._max_bytes:
            return False
        else:
            # The reader is, or will be, woken up for the one that waits.
            waiting.merge(delta)
            self.coalesced += 1
            return True
        if self.pace is None:
            self.wakeup.set()
        else:
            self.pace.wake(self.wakeup)
        return True

    @property
    def has_deltas(self) -> bool:
        """True while anything waits."""
        return bool(self._waiting)

    def take(self) -> list[PendingDelta]:
        """Remove and return everything that waits."""
        if not self._waiting:
            return []
        deltas = list(self._waiting.values())
        self._waiting = {}
        self._bytes = 0
        return deltas

    def clear(self) -> None:
        """Drop everything that waits: nobody will read it."""
        self._waiting = {}
        self._bytes = 0
