"""Events of one request that travel to its caller, made from the engine's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.generation.core.request import Emission, FinishedOutput, Request, RequestOutput
from penstock.generation.delivery.delta_sizes import MAX_DELTA_BYTES, num_bytes, split, with_tensors
from penstock.generation.wire.convert import Event


class DeltaMaker:
    """Maker of one request's events, in order.

    With `stream_interval` > 1 deltas of a sequence are merged and renumbered. Deltas too large for a message are split.
    """

    def __init__(self, request: Request, model: str, stream_interval: int) -> None:
        self.request = request
        self.model = model
        # The session's number for the request; 0: the caller knows it by its id only.
        self.handle = 0
        has_tensors, in_one = request.params.tensors is not None, not request.params.mode.streams
        is_plain = stream_interval == 1 and not has_tensors and not in_one
        self._merger = None if is_plain else DeltaMerger(stream_interval, has_tensors)

    def plain_token(self, output: RequestOutput) -> Emission | None:
        """Return the delta of an engine step's output when it is only one token of sequence 0, else None."""
        if self._merger is not None or output.started is not None or output.finished is not None:
            return None
        if len(output.deltas) != 1:
            return None
        (delta,) = output.deltas
        is_plain = len(delta.token_ids) == 1 and not delta.index and delta.finish is None and not delta.logprobs
        return delta if is_plain else None

    def events(self, output: RequestOutput) -> Iterator[Event]:
        """Yield the events of one engine step."""
        if output.started is not None:
            yield output.started
        deltas, finished = output.deltas, output.finished
        if self._merger is not None:
            deltas = self._merger.merge(deltas, flush=finished is not None)
            finished = self._merger.renumber(finished)
        yield from deltas
        if finished is not None:
            yield finished


class DeltaMerger:
    """Merger that holds deltas back until it has `interval` tokens of a sequence, or the sequence ends."""

    def __init__(self, interval: int, has_tensors: bool = False) -> None:
        self._interval = interval
        self._has_tensors = has_tensors
        # Index of a sequence -> its held delta and the delta's bytes.
        self._held: dict[int, tuple[Emission, int]] = {}
        self._next_seq = 0

    def merge(self, deltas: tuple[Emission, ...], *, flush: bool) -> tuple[Emission, ...]:
        """Take a step's deltas and return the due ones; with `flush` all of them."""
        due: list[Emission] = []
        for delta in self._parts(deltas):
            held, size = self._held.pop(delta.index, (None, 0))
            more = num_bytes(delta)
            if held is not None and size + more > MAX_DELTA_BYTES:
                due.append(self._numbered(held))
                held, size = None, 0
            merged = _join(held, delta)
            if merged.finish is not None or len(merged.token_ids) >= self._interval:
                due.append(self._numbered(merged))
            else:
                self._held[delta.index] = merged, size + more
        if flush:
            due.extend(self._numbered(held) for held, _ in self._held.values())
            self._held.clear()
        return tuple(due)

    def renumber(self, finished: FinishedOutput | None) -> FinishedOutput | None:
        """Return `finished` with `last_seq` in the merged numbering."""
        if finished is None:
            return None
        return replace(finished, last_seq=self._next_seq - 1 if self._next_seq else None)

    def _parts(self, deltas: tuple[Emission, ...]) -> Iterable[Emission]:
        whole = map(with_tensors, deltas) if self._has_tensors else deltas
        return (part for delta in whole for part in split(delta))

    def _numbered(self, delta: Emission) -> Emission:
        numbered = replace(delta, seq=self._next_seq)
        self._next_seq += 1
        return numbered


def _join(held: Emission | None, delta: Emission) -> Emission:
    if held is None:
        return delta
    return replace(
        delta,
        token_ids=held.token_ids + delta.token_ids,
        logprobs=held.logprobs + delta.logprobs,
        tensors=held.tensors + delta.tensors,
    )
