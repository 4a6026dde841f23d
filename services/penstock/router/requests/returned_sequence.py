"""Returned sequence of a request: its ids, their progress towards text, and the receiver of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.common.errors import PenstockError
from penstock.router.chat.chat_output import ChatParser
from penstock.router.chat.reasoning_tokens import ReasoningTokens
from penstock.router.requests.delta_buffer import DeltaBuffer
from penstock.text.text_decoder import TextDecoder
from penstock.v1 import common_pb2, tokenizer_pb2


class TextReceiver(Protocol):
    """A request, as seen by the code that turns its ids into text."""

    decode_options: tokenizer_pb2.DecodeStreamOpen
    buffer: DeltaBuffer
    # True once nothing more is wanted.
    closed: bool
    # Number of pieces that have no text yet.
    undecoded: int
    # The last message that had text of this request: a message's time counts once.
    last_batch: object | None
    detokenize_seconds: float

    def on_text(self, piece: Piece, text: str, now: float) -> None:
        """Take the text of `piece`. `now` is a time of time.monotonic()."""

    def fail(self, error: PenstockError) -> None:
        """End the request with `error`."""


class ReturnedSequence:
    """Ids of a returned sequence emitted so far, and their progress towards text."""

    __slots__ = (
        "decoded",
        "decoder",
        "decoder_epoch",
        "index",
        "is_over",
        "last_piece",
        "last_text_at",
        "parser",
        "reasoning",
        "receiver",
        "result",
        "stream_id",
        "token_ids",
    )

    def __init__(self, receiver: TextReceiver, index: int, parser: ChatParser | None) -> None:
        self.receiver = receiver
        self.index = index
        # All ids that backends emitted, over all attempts; a move resumes from them.
        self.token_ids: list[int] = []
        # Number of them that are text by now.
        self.decoded = 0
        # Set if the router itself decodes.
        self.decoder: TextDecoder | None = None
        # The DecodeStream connection that knows `stream_id`; another one needs the sequence opened again.
        self.decoder_epoch = 0
        self.stream_id = 0
        # Set by the backend's last delta of this sequence.
        self.result: common_pb2.SequenceResult | None = None
        # The last of its ids at the detokenizer; later ones join them while they wait to be sent.
        self.last_piece: Piece | None = None
        self.parser = parser
        # True once no more of its text is wanted, although its backend continues.
        self.is_over = False
        self.reasoning = ReasoningTokens()
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
        """Make a piece; it owns `token_ids` from now on."""
        self.sequence = sequence
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.tensors = tensors
        # Set on the last piece of the sequence.
        self.result = result
        # Nothing is added to it after it was sent.
        self.is_sent = False

    def extend(
        self,
        token_ids: list[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        result: common_pb2.SequenceResult | None,
        tensors: Sequence[common_pb2.StepTensors],
    ) -> None:
        """Add the ids that follow."""
        self.token_ids += token_ids
        if logprobs:
            self.logprobs = [*self.logprobs, *logprobs]
        if tensors:
            self.tensors = [*self.tensors, *tensors]
        self.result = result
