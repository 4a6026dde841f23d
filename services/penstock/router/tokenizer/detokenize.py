"""Decoder of the ids of whole engine steps: by the tokenizer's table if its decoder is one, else by a DecodeStream.

With a table (`use_table`) a step's text is there at once. Without it the ids of a step go out as one message, and their
text comes back in order. A message costs as much as tens of tokens, so few are in flight at a time, and the steps that
come meanwhile share one. When the tokenizer is lost, unanswered messages are kept. The next connection opens every
sequence again with the ids that are already text, and sends the rest again. Nothing is lost, and nothing comes twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from penstock.common.errors import Internal, PenstockError, ResourceExhausted, Unavailable
from penstock.router.aio import Wakeup
from penstock.router.chat.prompt_thought import to_thought
from penstock.router.requests.returned_sequence import Piece, ReturnedSequence
from penstock.serving.transport import StreamCall
from penstock.text.detokenizer import DecodeTable
from penstock.text.text_decoder import TextDecoder
from penstock.v1 import common_pb2, tokenizer_pb2

DecodeCall: TypeAlias = StreamCall[tokenizer_pb2.DecodeStreamResponse]
# Messages in flight to the tokenizer: one in progress, and one that is there when that is done.
_MAX_IN_FLIGHT = 2
# Steps in one message: few enough for the tokenizer to answer on its event loop.
_MAX_STEPS = 32
# Ids of a prompt that a DecodeStream sees as context: enough for a character, even between special tokens.
_MAX_CONTEXT_IDS = 64


class Batch:
    """One message: the pieces of one engine step, or of several."""

    __slots__ = ("pieces", "steps")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.steps = 1


class Detokenizer:
    """Turns ids of all requests into text. Belongs to one event loop.

    The tokenizer link runs `run_writer` and `run_reader` while it is connected.
    """

    def __init__(self, *, max_outstanding: int) -> None:
        """Make it. With more than `max_outstanding` unanswered messages the tokenizer does not keep up."""
        self._epoch = 0
        self._next_stream_id = 1
        self._outstanding: deque[Batch] = deque()
        # The tail of `_outstanding` that was not sent on this connection.
        self._unsent: deque[Batch] = deque()
        # Steps in `_outstanding`.
        self._steps = 0
        self._drops: list[int] = []
        self._wakeup = Wakeup()
        self._max_outstanding = max_outstanding
        self._table: DecodeTable | None = None
        # Messages answered so far.
        self.answers = 0

    def use_table(self, table: DecodeTable) -> None:
        """Decode here from now on. Call it before the first batch."""
        self._table = table

    def context(self, prompt: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
        """Return the end of a prompt, on which the text of its answer depends."""
        if self._table is None:
            return prompt[-_MAX_CONTEXT_IDS:]
        return self._table.context(prompt, skip_special_tokens)

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str | None:
        """Return the text of ids on their own, stop strings included; None if the tokenizer decodes."""
        if self._table is None:
            return None
        detokenizer = self._table.make(skip_special_tokens)
        try:
            return detokenizer.push(token_ids) + detokenizer.finish()
        except IndexError:
            return ""

    def add(
        self,
        batch: Batch,
        sequence: ReturnedSequence,
        token_ids: list[int],
        logprobs: Sequence[common_pb2.PositionLogprobs] = (),
        result: common_pb2.SequenceResult | None = None,
        tensors: Sequence[common_pb2.StepTensors] = (),
    ) -> None:
        """Put ids of `sequence` into `batch`, or add them to its waiting ids; with `result` they are its last.

        The list is kept.
        """
        receiver, last = sequence.receiver, sequence.last_piece
        if last is not None and not last.is_sent:
            last.extend(token_ids, logprobs, result, tensors)
            receiver.buffer.coalesced += 1
            return
        piece = sequence.last_piece = Piece(sequence, token_ids, logprobs, result, tensors)
        batch.pieces.append(piece)
        receiver.undecoded += 1

    def send(self, batch: Batch) -> None:
        """Queue a batch, or decode it. Fails its requests with Unavailable when the tokenizer is too far behind."""
        if self._table is not None:
            self._decode(batch, self._table)
            return
        if self._steps >= self._max_outstanding:
            error = Unavailable(
                "the tokenizer does not keep up", reason="TOKENIZER_OVERLOADED", retry_after_seconds=1.0
            )
            self._fail(batch.pieces, error)
            return
        self._steps += 1
        last = self._unsent[-1] if self._unsent else None
        if last is not None and last.steps < _MAX_STEPS:
            last.pieces += batch.pieces
            last.steps += 1
            return
        self._outstanding.append(batch)
        self._unsent.append(batch)
        self._wakeup.set()

    def _decode(self, batch: Batch, table: DecodeTable) -> None:
        begin = time.monotonic()
        texts = [_text_of(piece, table) for piece in batch.pieces]
        now = time.monotonic()
        self._deliver(batch, texts, now - begin, now)

    def drop(self, sequences: Iterable[ReturnedSequence]) -> None:
        """Make the tokenizer drop sequences that no request waits for any more."""
        for sequence in sequences:
            if sequence.stream_id and sequence.decoder_epoch == self._epoch and sequence.result is None:
                self._drops.append(sequence.stream_id)
                sequence.stream_id = 0
                self._wakeup.set()

    @property
    def outstanding(self) -> int:
        """Number of unanswered messages."""
        return len(self._outstanding)

    def fail_outstanding(self, error: PenstockError) -> None:
        """Give up the unanswered messages: their requests end with `error`."""
        batches, self._outstanding = self._outstanding, deque()
        self._unsent.clear()
        self._steps = 0
        for batch in batches:
            self._fail(batch.pieces, error)

    def connected(self) -> None:
        """Use a new DecodeStream: messages that the last one did not answer are sent again, in order."""
        self._epoch += 1
        self._drops.clear()
        for batch in self._outstanding:
            batch.pieces = [piece for piece in batch.pieces if not piece.sequence.receiver.closed]
        self._unsent = deque(self._outstanding)
        self._wakeup.set()

    async def run_writer(self, call: DecodeCall) -> None:
        """Send batches until the call breaks. Raises grpc.aio.AioRpcError or asyncio.InvalidStateError."""
        while True:
            while (self._unsent or self._drops) and len(self._outstanding) - len(self._unsent) < _MAX_IN_FLIGHT:
                if not self._unsent:
                    self._outstanding.append(Batch())
                    self._steps += 1
                    batch = self._outstanding[-1]
                else:
                    batch = self._unsent.popleft()
                await call.write(self._message(batch))
            await self._wakeup.wait()

    def _message(self, batch: Batch) -> tokenizer_pb2.DecodeStreamRequest:
        request = tokenizer_pb2.DecodeStreamRequest()
        add, epoch = request.items.add, self._epoch
        are_all_open = True
        for piece in batch.pieces:  # once a token
            piece.is_sent = True
            sequence = piece.sequence
            if sequence.stream_id and sequence.decoder_epoch == epoch:
                item = add()
                item.stream_id = sequence.stream_id
                item.token_ids.extend(piece.token_ids)
            elif sequence.receiver.closed:
                # Cancelled before the tokenizer knew of it.
                sequence.stream_id, are_all_open = 0, False
                continue
            else:
                item = self._open(request, piece)
            result = piece.result
            if result is not None:
                item.finish = True
                if result.HasField("stop_string"):
                    item.matched_stop_string = result.stop_string
        if not are_all_open:
            batch.pieces = [piece for piece in batch.pieces if piece.sequence.stream_id]
        if not self._unsent:
            # Last in the message: a drop before the item that opens its sequence would drop nothing.
            drops, self._drops = self._drops, []
            for stream_id in drops:
                add(stream_id=stream_id, drop=True)
        return request

    def _open(self, request: tokenizer_pb2.DecodeStreamRequest, piece: Piece) -> tokenizer_pb2.DecodeStreamItem:
        sequence = piece.sequence
        sequence.stream_id, sequence.decoder_epoch = self._next_stream_id, self._epoch
        self._next_stream_id += 1
        item = request.items.add(stream_id=sequence.stream_id, token_ids=piece.token_ids)
        item.open.CopyFrom(sequence.receiver.decode_options)
        item.open.resumed_token_ids.extend(sequence.token_ids[: sequence.decoded])
        return item

    async def run_reader(self, call: DecodeCall) -> None:
        """Take answers until the stream ends, which should never happen."""
        await call.run(self._take)

    def _take(self, response: tokenizer_pb2.DecodeStreamResponse) -> None:
        if not self._outstanding:
            raise Internal("the tokenizer answered a message that was never sent", reason="TOKENIZER_PROTOCOL")
        batch = self._outstanding.popleft()
        self.answers += 1
        self._steps -= batch.steps
        if self._unsent or self._drops:
            self._wakeup.set()
        if len(batch.pieces) != len(response.results):
            raise Internal("the tokenizer did not answer every item of a message", reason="TOKENIZER_PROTOCOL")
        texts = [_refused(one.error) if one.HasField("error") else one.text for one in response.results]
        self._deliver(batch, texts, response.detokenize_seconds, time.monotonic())

    def _deliver(self, batch: Batch, texts: Iterable[str | PenstockError], seconds: float, now: float) -> None:
        """Hand texts to their requests, one for each piece of the batch. The per-token path."""
        for piece, text in zip(batch.pieces, texts, strict=True):
            sequence = piece.sequence
            receiver = sequence.receiver
            if isinstance(text, str):
                sequence.decoded += len(piece.token_ids)
                if receiver.last_batch is not batch:
                    receiver.last_batch = batch
                    receiver.detokenize_seconds += seconds
                receiver.on_text(piece, text, now)
            else:
                sequence.stream_id = 0
                receiver.undecoded -= 1
                receiver.fail(text)

    def _fail(self, pieces: Iterable[Piece], error: PenstockError) -> None:
        for piece in pieces:
            piece.sequence.receiver.undecoded -= 1
            piece.sequence.receiver.fail(error)


def _refused(error: str) -> PenstockError:
    """Error of a request after the tokenizer answered its item with `error`, a code and an explanation."""
    if error.startswith("TOO_MANY_SEQUENCES"):
        return ResourceExhausted(
            "the tokenizer already decodes the most sequences that it may (its --max-sequences)",
            reason="TOO_MANY_SEQUENCES",
            retry_after_seconds=1.0,
        )
    return Internal("the answer could not be turned into text", reason="DETOKENIZE_FAILED")


def _text_of(piece: Piece, table: DecodeTable) -> str | PenstockError:
    """Decode a piece. The per-token path."""
    piece.is_sent = True
    sequence = piece.sequence
    try:
        decoder = sequence.decoder
        if decoder is None:
            decoder = sequence.decoder = _opened(sequence.receiver.decode_options, table)
        text = decoder.push(piece.token_ids)
    except IndexError:  # an id of the prompt or of the output: only this sequence ends
        return _refused("ID_OUTSIDE_VOCABULARY")
    if piece.result is not None:
        matched = piece.result.stop_string if piece.result.HasField("stop_string") else None
        return decoder.finish(text, matched).text
    return text if decoder.stops is None else decoder.stops.push(text).text


def _opened(options: tokenizer_pb2.DecodeStreamOpen, table: DecodeTable) -> TextDecoder:
    """Make the decoder of a new sequence. Raises IndexError when an id of the prompt is not in the table."""
    skip = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
    decoder = TextDecoder(
        table.make(skip, options.kept_special_tokens),
        options.stop_strings,
        options.include_stop_string_in_output,
        to_thought(options.thought) if options.HasField("thought") else None,
    )
    decoder.replay(options.prefix_token_ids, (), is_cut=options.prefix_is_cut, with_open_end=options.return_open_end)
    return decoder
