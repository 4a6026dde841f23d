"""Many sequences on one DecodeStream: one request message is one engine step, answered by one response message."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.tokenizer.detokenizer import Detokenizer, DetokenizerFactory
from penstock.tokenizer.stop_strings import Emission, StopStrings
from penstock.v1 import tokenizer_pb2 as pb


@dataclass(frozen=True)
class DecodeLimits:
    """Of one DecodeStream."""

    max_sequences: int = 4096
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256


class SequenceError(Exception):
    """Ends one sequence; its text is the result's `error`."""


class DecodeSession:
    """The live sequences of one DecodeStream call. Not for two threads at a time."""

    def __init__(
        self, factory: DetokenizerFactory, limits: DecodeLimits, *, serves: Callable[[str], bool], id_limit: int
    ) -> None:
        """`serves` says whether a model name is ours; ids below `id_limit` can be decoded."""
        self._factory = factory
        self._limits = limits
        self._serves = serves
        self._id_limit = id_limit
        self._sequences: dict[int, _Sequence] = {}
        # Of the last message, for metrics.
        self.tokens = 0
        self.characters = 0

    def __len__(self) -> int:
        """Live sequences."""
        return len(self._sequences)

    def process(self, request: pb.DecodeStreamRequest) -> pb.DecodeStreamResponse:
        """One result per item, in order, except for items that drop their sequence."""
        begin = time.perf_counter()
        response = pb.DecodeStreamResponse()
        add = response.results.add
        self.tokens = self.characters = 0
        for item in request.items:
            stream_id = item.stream_id
            try:
                emission = self._advance(stream_id, item)
            except SequenceError as error:
                self._sequences.pop(stream_id, None)
                add(stream_id=stream_id, error=str(error))
                continue
            if emission is None:
                continue
            self.characters += len(emission.text)
            if emission.matched is None:
                add(stream_id=stream_id, text=emission.text)
            else:
                add(stream_id=stream_id, text=emission.text, matched_stop_string=emission.matched)
        response.detokenize_seconds = time.perf_counter() - begin
        return response

    def _advance(self, stream_id: int, item: pb.DecodeStreamItem) -> Emission | None:
        sequence = self._sequences.get(stream_id)
        if sequence is None or item.HasField("open"):
            if item.drop and not item.HasField("open"):
                return None  # the other end gave up on a sequence that has failed here
            sequence = self._open(stream_id, item)
        ids = item.token_ids
        self.tokens += len(ids)
        try:
            text = sequence.detokenizer.push(ids) if ids else ""
        except IndexError:
            raise self._outside() from None
        if item.drop:
            del self._sequences[stream_id]
            return None
        if item.finish:
            del self._sequences[stream_id]
            matched = item.matched_stop_string if item.HasField("matched_stop_string") else None
            return sequence.finish(text, matched)
        return Emission(text) if sequence.stops is None else sequence.stops.push(text)

    def _open(self, stream_id: int, item: pb.DecodeStreamItem) -> _Sequence:
        if stream_id in self._sequences:
            raise SequenceError("STREAM_ID_IN_USE: open is allowed in the first item only")
        if not item.HasField("open"):
            raise SequenceError("UNKNOWN_STREAM_ID: the first item of a sequence needs open")
        if len(self._sequences) >= self._limits.max_sequences:
            raise SequenceError(f"TOO_MANY_SEQUENCES: at most {self._limits.max_sequences} on one stream")
        options = item.open
        if not self._serves(options.model):
            raise SequenceError("MODEL_NOT_FOUND: this tokenizer serves another model")
        self._check_stops(options)
        skip = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
        sequence = _Sequence(self._factory.make(skip), options.stop_strings, options.include_stop_string_in_output)
        try:
            sequence.replay(options.prefix_token_ids, options.resumed_token_ids)
        except IndexError:
            raise self._outside() from None
        self._sequences[stream_id] = sequence
        return sequence

    def _check_stops(self, options: pb.DecodeStreamOpen) -> None:
        longest = self._limits.max_stop_string_chars
        if len(options.stop_strings) > self._limits.max_stop_strings:
            raise SequenceError(f"INVALID_STOP_STRINGS: at most {self._limits.max_stop_strings}")
        if any(not 0 < len(stop) <= longest for stop in options.stop_strings):
            raise SequenceError(f"INVALID_STOP_STRINGS: each has 1 to {longest} characters")

    def _outside(self) -> SequenceError:
        return SequenceError(f"ID_OUTSIDE_VOCABULARY: ids must be below {self._id_limit}")


class _Sequence:
    """One sequence: ids to text, then text past its stop strings."""

    __slots__ = ("_include_stop", "detokenizer", "stops")

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], include_stop: bool) -> None:
        self.detokenizer = detokenizer
        self._include_stop = include_stop
        # Most sequences have none: their text passes as it is.
        self.stops = StopStrings(stop_strings, include_stop) if stop_strings else None

    def replay(self, prefix: Sequence[int], resumed: Sequence[int]) -> None:
        """Take the state that a sequence has after `prefix` (context only) and `resumed` (text sent already)."""
        if prefix:
            self.detokenizer.push(prefix)
        if resumed:
            text = self.detokenizer.push(resumed)
            if self.stops is not None:
                self.stops.push(text)

    def finish(self, text: str, matched: str | None) -> Emission:
        text += self.detokenizer.finish()
        if self.stops is None:
            if matched is None:
                return Emission(text)
            self.stops = StopStrings((), self._include_stop)
        return self.stops.finish(text, matched)
