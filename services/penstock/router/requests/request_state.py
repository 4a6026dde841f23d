"""State of one request: its specification, emitted output, deltas waiting for the reader, and its end.

Everything happens on the event loop. Backends and the tokenizer call `on_*`, which never wait; the stream's handler is
woken through `buffer.wakeup` and writes, moves the request to another backend, or ends the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.common.errors import Internal, PenstockError, ResourceExhausted
from penstock.common.idle_only import IDLE_TENANT
from penstock.common.logging import get_logger
from penstock.common.pace import Demand
from penstock.common.tracing import Span
from penstock.router.chat.chat_output import ChatParser
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.delta_buffer import DeltaBuffer, PendingDelta
from penstock.router.requests.returned_sequence import Piece, ReturnedSequence
from penstock.router.requests.suspect import Suspect
from penstock.v1 import common_pb2, generation_pb2, tokenizer_pb2

_log = get_logger("penstock.router")
# Ends of answers by the model, or by limits on its content. Any other end cut the answer.
_NOT_CUT = (
    common_pb2.FINISH_REASON_STOP_EOS,
    common_pb2.FINISH_REASON_STOP_TOKEN,
    common_pb2.FINISH_REASON_CONSTRAINT_DONE,
)


class AttemptHandle(Protocol):
    """Present attempt of a request at some backend."""

    def abort(self) -> None:
        """Tell the backend to stop, and forget the attempt."""


@dataclass(slots=True)
class Loss:
    """Reason why an attempt is over although the request is not."""

    # The backend's own error, if it sent one.
    error: PenstockError | None
    backend: str


@dataclass(slots=True)
class Timings:
    """Times of one request; seconds, and time.monotonic() for `*_at`."""

    received_at: float
    template: float | None = None
    tokenize: float | None = None
    route: float = 0.0
    first_token_at: float | None = None
    deadline: float | None = None
    started_at: float | None = None


@dataclass(slots=True)
class RequestSpec:
    """A request after validation, tokenisation and defaults, ready for an attempt at any backend."""

    request_id: str
    # The request for backends, without request_id, attempt_epoch and resumed ids.
    template: generation_pb2.GenerateRequest
    num_sequences: int
    decode_options: tokenizer_pb2.DecodeStreamOpen
    make_parser: Callable[[], ChatParser] | None = None
    wants_token_ids: bool = False
    wants_logprobs: bool = False
    wants_tensors: bool = False
    model: str = ""
    # Name of the adapter; empty: none.
    adapter: str = ""
    # Its size, for forecasts.
    demand: Demand | None = None
    session: str = ""
    prefix_hashes: list[int] = field(default_factory=list)
    # The router's own warnings, for Started.
    warnings: tuple[str, ...] = ()

    @property
    def is_idle_only(self) -> bool:
        """True when it uses idle capacity only."""
        return self.template.fair_share_key == IDLE_TENANT


class RequestState:
    """State of one request; the module's docstring names its callers. Implements TextReceiver."""

    def __init__(
        self,
        spec: RequestSpec,
        timings: Timings,
        drop: Callable[[Iterable[ReturnedSequence]], None],
        metrics: RouterMetrics,
        max_buffered: int,
    ) -> None:
        """Make the state.

        `drop` is called once, with the sequences that need no more text. At most `max_buffered` bytes wait for the
        reader.
        """
        self.spec = spec
        self.timings = timings
        self.decode_options = spec.decode_options
        self.buffer = DeltaBuffer(max_buffered)
        self.sequences: dict[int, ReturnedSequence] = {}
        self.started: generation_pb2.Started | None = None
        # Fingerprint of the tokens' adapter; empty: there is none, or its backend does not report it.
        self.adapter_digest = ""
        self.finished: generation_pb2.Finished | None = None
        self.error: PenstockError | None = None
        self.loss: Loss | None = None
        self.attempt: AttemptHandle | None = None
        # Span of the present attempt; None: no attempt, or no trace.
        self.attempt_span: Span | None = None
        # Number of attempts so far; the attempt_epoch of the next one.
        self.attempts = 0
        # Tokens when the present attempt began.
        self.tokens_before = 0
        self.moves = 0
        # Its part in crashes of backends.
        self.suspect = Suspect(timings.received_at)
        self.lost_on: set[str] = set()
        # Pieces at the tokenizer.
        self.undecoded = 0
        self.last_batch: object | None = None
        self.detokenize_seconds = 0.0
        self.closed = False
        self._drop = drop
        self._metrics = metrics
        self._sends_empty = spec.wants_token_ids or spec.wants_logprobs or spec.wants_tensors
        self._backend_finished: generation_pb2.Finished | None = None
        # Text that token healing added beyond the prompt: every answer begins with it.
        self._healed_text = ""
        # Set while the stream's handler waits, if the transport can write without it: it takes index, text and ids of
        # a delta, or refuses them.
        self.write_now: Callable[[int, str, Sequence[int]], bool] | None = None
        # Called once, when the request is over for any reason.
        self.on_close: Callable[[], None] | None = None

    @property
    def has_tokens(self) -> bool:
        """True once any backend has emitted a token."""
        return any(sequence.token_ids for sequence in self.sequences.values())

    @property
    def num_tokens(self) -> int:
        """Number of tokens that backends have emitted, over all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences.values())

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thoughts, over all sequences."""
        return sum(sequence.reasoning.total for sequence in self.sequences.values())

    @property
    def all_sequences_ended(self) -> bool:
        """True once the last token of every returned sequence is known."""
        return len(self.sequences) >= self.spec.num_sequences and all(
            sequence.result is not None for sequence in self.sequences.values()
        )

    def sequence(self, index: int) -> ReturnedSequence:
        """Return sequence `index`; a new one is made."""
        found = self.sequences.get(index)
        if found is None:
            make = self.spec.make_parser
            found = self.sequences[index] = ReturnedSequence(self, index, make() if make else None)
        return found

    def on_started(self, started: generation_pb2.Started, now: float) -> None:
        """Note that a backend began; only the first time counts, and the adapter of the first token."""
        if not self.has_tokens:
            self.adapter_digest = started.adapter_digest
        if self.started is None:
            self.started = started
            self._healed_text = started.healed_text
            self.timings.started_at = now
            self.buffer.wakeup.set()

    def on_backend_finished(self, finished: generation_pb2.Finished | None) -> None:
        """Take the backend's Finished (None: it was lost after the last token). The stream ends after the last text."""
        self.attempt = None
        self._end_attempt_span()
        self._backend_finished = finished or generation_pb2.Finished()
        if self.undecoded == 0:
            self._complete()

    def on_lost(self, loss: Loss) -> None:
        """Note that the attempt ended before the request; the handler will find another backend."""
        self.attempt = None
        self.lost_on.add(loss.backend)
        self._end_attempt_span(loss.error.reason if loss.error is not None else "BACKEND_LOST")
        if self.closed:
            return
        if self.all_sequences_ended:
            self.on_backend_finished(None)
            return
        self.loss = loss
        self.buffer.wakeup.set()

    def on_text(self, piece: Piece, text: str, now: float) -> None:
        """Take the text of `piece`. The per-token path."""
        self.undecoded -= 1
        if self.closed:
            return
        sequence = piece.sequence
        last = sequence.last_text_at
        sequence.last_text_at = now
        if last is not None:
            self._metrics.inter_token.observe_one(now - last)
        else:
            text = self._healed_text + text
            if self.timings.first_token_at is None and piece.token_ids:
                self.timings.first_token_at = now
        parser = sequence.parser
        if parser is not None:
            try:
                self._on_chat_text(sequence, parser, piece, text)
            except Exception as error:
                # A model may write anything. It must not end other streams of this step.
                _log.error("a chat's text was not understood", request_id=self.spec.request_id, exc_info=error)
                self.fail(Internal("the text of the answer could not be parsed", reason="CHAT_FORMAT"))
        elif text or (self._sends_empty and piece.token_ids):
            self._on_plain_text(piece, text)
        if self._backend_finished is not None and self.undecoded == 0:
            self._complete()

    def fail(self, error: PenstockError) -> None:
        """End the stream with `error`, and abort the attempt at the backend."""
        if not self.closed:
            self.error = error
            self.close()
            self.buffer.clear()
            self.buffer.wakeup.set()

    def close(self) -> None:
        """Free the resources at backend and tokenizer: no more output is wanted."""
        if self.closed:
            return
        self.closed = True
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.abort()
        if self.attempt_span is not None:
            self.attempt_span.fail_by(self.error)
            self._end_attempt_span()
        self._drop(self.sequences.values())
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def release(self) -> None:
        """Break the reference cycles, so that everything is freed at once. The handler calls it last.

        A request left to the garbage collector keeps its messages until then; that cost a tenth of this process's time.
        """
        self.last_batch = None
        # A raised error has the frames of the handler in its traceback.
        self.error = self.loss = None
        for sequence in self.sequences.values():
            sequence.last_piece = None
        self.sequences = {}

    def _end_attempt_span(self, reason: str = "") -> None:
        span, self.attempt_span = self.attempt_span, None
        if span is not None:
            if reason:
                span.fail(reason)
            span.end()

    def _on_plain_text(self, piece: Piece, text: str) -> None:
        spec = self.spec
        if self.write_now is not None and not spec.wants_logprobs and not spec.wants_tensors:
            token_ids = piece.token_ids if spec.wants_token_ids else ()
            if self.write_now(piece.sequence.index, text, token_ids):
                return
        self._put(PendingDelta(piece.sequence.index, text), piece)

    def _on_chat_text(self, sequence: ReturnedSequence, parser: ChatParser, piece: Piece, text: str) -> None:
        if sequence.is_over:
            return
        part = sequence.reasoning.feed(parser, text, len(piece.token_ids))
        if piece.result is not None:
            reason = piece.result.finish_reason
            is_stopped = reason == common_pb2.FINISH_REASON_STOP_STRING
            rest = parser.finish(is_cut=reason not in _NOT_CUT, is_stopped=is_stopped)
            sequence.reasoning.decide(rest)
            part.text += rest.text
            part.reasoning += rest.reasoning
            part.tool_calls += rest.tool_calls
        if part.text or part.reasoning or part.tool_calls or (self._sends_empty and piece.token_ids):
            delta = PendingDelta(sequence.index, part.text, reasoning=part.reasoning, tool_calls=part.tool_calls)
            self._put(delta, piece)
        if parser.is_plain:
            sequence.parser = None  # nothing is left to parse
        elif parser.is_over and piece.result is None:
            self._end_early(sequence)

    def _end_early(self, sequence: ReturnedSequence) -> None:
        """End the request once all its answers have ended, although its backend generates more than belongs to them."""
        sequence.is_over = True
        known = self.sequences.values()
        if len(known) < self.spec.num_sequences or any(one.result is None and not one.is_over for one in known):
            return
        for one in known:
            if one.result is None:
                one.result = common_pb2.SequenceResult(
                    index=one.index,
                    finish_reason=common_pb2.FINISH_REASON_STOP_EOS,
                    token_count=len(one.token_ids),
                )
        attempt = self.attempt
        if attempt is not None:
            attempt.abort()
        self.on_backend_finished(None)

    def _put(self, delta: PendingDelta, piece: Piece) -> None:
        if self.spec.wants_token_ids:
            delta.token_ids.extend(piece.token_ids)
        if self.spec.wants_logprobs:
            delta.logprobs.extend(piece.logprobs)
        if self.spec.wants_tensors:
            delta.tensors.extend(piece.tensors)
        if not self.buffer.put(delta):
            self._metrics.slow_readers.inc()
            self.fail(ResourceExhausted("the reader of this stream is too far behind", reason="SLOW_READER"))

    def _complete(self) -> None:
        """End the stream: every token has its text, and no backend sends more."""
        if self.closed:
            return
        self.finished = self._backend_finished
        self.close()
        self.buffer.wakeup.set()


def results_of(state: RequestState) -> list[common_pb2.SequenceResult]:
    """Results of the returned sequences that have ended, in order."""
    found = sorted(state.sequences.items())
    return [sequence.result for _, sequence in found if sequence.result is not None]
