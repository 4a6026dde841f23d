"""One returned sequence of a request: its ids, where they are on their way to text, and who gets the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.common.errors import PenstockError
from penstock.router.chat.chat_output import ChatParser
from penstock.router.requests.delta_buffer import DeltaBuffer
from penstock.text.text_decoder import TextDecoder
from penstock.v1 import common_pb2, tokenizer_pb2


class TextSink(Protocol):
    """A request, as whatever turns its ids into text needs it."""

    decode_options: tokenizer_pb2.DecodeStreamOpen
    buffer: DeltaBuffer
    # Nothing more is wanted.
    closed: bool
    # Pieces whose text has not come back.
    undecoded: int
    # The last message that had text of this request: its time counts once.
    last_batch: object | None
    detokenize_seconds: float

    def on_text(self, piece: Piece, text: str, now: float) -> None:
        """Text of `piece` is there. `now`: time.monotonic()."""

    def fail(self, error: PenstockError) -> None:
        """End with `error`."""


class ReturnedSequence:
    """Ids emitted so far, and where they are on their way to text."""

    __slots__ = (
        "decoded",
        "decoder",
        "decoder_epoch",
        "index",
        "last_piece",
        "last_text_at",
        "parser",
        "result",
        "sink",
        "stream_id",
        "token_ids",
    )

    def __init__(self, sink: TextSink, index: int, parser: ChatParser | None) -> None:
        self.sink = sink
        self.index = index
        # Everything backends emitted, over all attempts: what a move resumes from.
        self.token_ids: list[int] = []
        # How many of them are text by now.
        self.decoded = 0
        # Where the router decodes by itself.
        self.decoder: TextDecoder | None = None
        # The DecodeStream connection that knows `stream_id`; another one needs the sequence opened again.
        self.decoder_epoch = 0
        self.stream_id = 0
        # Set by the backend's last delta of this sequence.
        self.result: common_pb2.SequenceResult | None = None
        # The last of its ids that went to the detokenizer; later ones join them while they wait to be sent.
        self.last_piece: Piece | None = None
        self.parser = parser
        self.last_text_at: float | None = None


class Piece:
    """Ids of one sequence on their way through the tokenizer."""

    __slots__ = ("is_sent", "logprobs", "result", "sequence", "tensors", "token_ids")

    def __init__(
        self,
        sequence: ReturnedSequence,
        token_ids: list[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        result: common_pb2.SequenceResult | None,
        tensors: Sequence[common_pb2.StepTensors],
    ) -> None:
        """`token_ids` is the piece's own from now on."""
        self.sequence = sequence
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.tensors = tensors
        # Set on the last piece of the sequence.
        self.result = result
        # From then on it is what it is.
        self.is_sent = False

    def extend(
        self,
        token_ids: list[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        result: common_pb2.SequenceResult | None,
        tensors: Sequence[common_pb2.StepTensors],
    ) -> None:
        """Take the ids that follow, too."""
        self.token_ids += token_ids
        if logprobs:
            self.logprobs = [*self.logprobs, *logprobs]
        if tensors:
            self.tensors = [*self.tensors, *tensors]
        self.result = result
