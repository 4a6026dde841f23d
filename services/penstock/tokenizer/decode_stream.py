"""Decoder of many sequences on one DecodeStream: a request message is an engine step, and has one response."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.text.stop_strings import ReadyText
from penstock.text.text_decoder import TextDecoder
from penstock.text.thoughts import Thought
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.v1 import common_pb2
from penstock.v1 import tokenizer_pb2 as pb


@dataclass(frozen=True)
class DecodeLimits:
    """Limits of one DecodeStream."""

    max_sequences: int = 4096
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256


def _thought(message: common_pb2.Thought) -> Thought:
    return Thought(message.opens, tuple(message.closes), message.is_open)


class SequenceError(Exception):
    """Error that ends one sequence; its text is the result's `error`."""


class DecodeSession:
    """Live sequences of one DecodeStream call. Not for two threads at a time."""

    def __init__(
        self, factory: DetokenizerFactory, limits: DecodeLimits, *, serves: Callable[[str], bool], id_limit: int
    ) -> None:
        """Make it. `serves(name)` is True for this model's names; ids below `id_limit` can be decoded."""
        self._factory = factory
        self._limits = limits
        self._serves = serves
        self._id_limit = id_limit
        self._sequences: dict[int, TextDecoder] = {}
        # Counts of the last message, for metrics.
        self.tokens = 0
        self.characters = 0

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._sequences)

    def process(self, request: pb.DecodeStreamRequest) -> pb.DecodeStreamResponse:
        """Decode a message: one result per item, in order, except for items that drop their sequence."""
        begin = time.perf_counter()
        response = pb.DecodeStreamResponse()
        add, live = response.results.add, self._sequences.get
        tokens = characters = 0
        for item in request.items:  # this loop runs once a token: its order and its local names are for speed
            stream_id = item.stream_id
            sequence = live(stream_id)
            try:
                if sequence is None or item.finish or item.drop or item.HasField("open"):
                    ready = self._begin_or_end(stream_id, item)
                    if ready is None:
                        continue
                    text, matched = ready
                else:
                    ids = item.token_ids[:]  # a copy: each access to a message's own field costs more
                    tokens += len(ids)
                    text, matched = sequence.push(ids), None
                    if sequence.stops is not None:
                        text, matched = sequence.stops.push(text)
            except (SequenceError, IndexError) as error:
                self._sequences.pop(stream_id, None)
                add(stream_id=stream_id, error=self._describe(error))
                continue
            result = add()
            result.stream_id = stream_id
            if text:
                characters += len(text)
                result.text = text
            if matched is not None:
                result.matched_stop_string = matched
        self.tokens, self.characters = tokens, characters
        response.detokenize_seconds = time.perf_counter() - begin
        return response

    def _begin_or_end(self, stream_id: int, item: pb.DecodeStreamItem) -> ReadyText | None:
        """Take an item that is the first or the last of its sequence, or both. None: it has no answer."""
        sequence = self._sequences.get(stream_id)
        if sequence is None or item.HasField("open"):
            if item.drop and not item.HasField("open"):
                return None  # the caller drops a sequence that failed here
            sequence = self._open(stream_id, item)
        text = sequence.push(item.token_ids)
        if item.drop:
            del self._sequences[stream_id]
            return None
        if item.finish:
            del self._sequences[stream_id]
            matched = item.matched_stop_string if item.HasField("matched_stop_string") else None
            return sequence.finish(text, matched)
        return ReadyText(text) if sequence.stops is None else sequence.stops.push(text)

    def _open(self, stream_id: int, item: pb.DecodeStreamItem) -> TextDecoder:
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
        sequence = TextDecoder(
            self._factory.make(skip, options.kept_special_tokens),
            options.stop_strings,
            options.include_stop_string_in_output,
            _thought(options.thought) if options.HasField("thought") else None,
        )
        sequence.replay(
            options.prefix_token_ids,
            options.resumed_token_ids,
            is_cut=options.prefix_is_cut,
            with_open_end=options.return_open_end,
        )
        self._sequences[stream_id] = sequence
        return sequence

    def _check_stops(self, options: pb.DecodeStreamOpen) -> None:
        longest = self._limits.max_stop_string_chars
        if len(options.stop_strings) > self._limits.max_stop_strings:
            raise SequenceError(f"INVALID_STOP_STRINGS: at most {self._limits.max_stop_strings}")
        thought = options.thought
        if options.HasField("thought") and not (
            0 < len(thought.closes) <= self._limits.max_stop_strings
            and all(0 < len(one) <= longest for one in (thought.opens, *thought.closes))
        ):
            raise SequenceError(f"INVALID_THOUGHT: its markers have 1 to {longest} characters")
        if any(not 0 < len(stop) <= longest for stop in options.stop_strings):
            raise SequenceError(f"INVALID_STOP_STRINGS: each has 1 to {longest} characters")

    def _describe(self, error: SequenceError | IndexError) -> str:
        if isinstance(error, IndexError):
            return f"ID_OUTSIDE_VOCABULARY: ids must be below {self._id_limit}"
        return str(error)
