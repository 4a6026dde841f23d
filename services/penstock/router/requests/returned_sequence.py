"""One returned sequence of a live request, as the router keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.router.chat.chat_output import ChatParser
    from penstock.router.requests.request_state import LiveRequest
    from penstock.router.tokenizer.detokenize import Piece
    from penstock.text.text_decoder import TextDecoder
    from penstock.v1 import common_pb2


class ReturnedSequence:
    """Ids emitted so far, and where they are on their way to text."""

    __slots__ = (
        "decoded",
        "decoder",
        "decoder_epoch",
        "index",
        "last_piece",
        "last_text_at",
        "live",
        "parser",
        "result",
        "stream_id",
        "token_ids",
    )

    def __init__(self, live: LiveRequest, index: int, parser: ChatParser | None) -> None:
        self.live = live
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
