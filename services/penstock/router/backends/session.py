"""One Session stream to one backend: many requests on it, one message per engine step.

The path of every token begins here: a step's message is walked once, its ids go to the tokenizer as one message, and no
task or await is spent on a single token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from penstock.common.errors import (
    Aborted,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    from_status,
)
from penstock.router.aio import Wakeup
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import Loss, RequestState
from penstock.router.tokenizer.detokenize import Batch, Detokenizer
from penstock.serving.transport import StreamCall
from penstock.v1 import generation_pb2


class Attempt:
    """One try of a request at one backend. Frames carry its id and epoch back."""

    __slots__ = ("_session", "epoch", "expected_seq", "handle", "repeats_ended", "state", "wire_id")

    def __init__(self, session: BackendSession, state: RequestState, wire_id: str, epoch: int, handle: int) -> None:
        self._session = session
        self.state = state
        self.wire_id = wire_id
        self.epoch = epoch
        # By which its plain tokens are told.
        self.handle = handle
        # None: take what comes first, since a resumed attempt may go on counting or begin again.
        self.expected_seq: int | None = 0 if epoch == 0 else None
        # Some sequence had ended before: the backend was given it again and may go on with it.
        self.repeats_ended = any(sequence.result is not None for sequence in state.sequences.values())

    def abort(self) -> None:
        """Tell the backend to stop, and forget the try."""
        self._session.abort(self)


class BackendSession:
    """Used from one event loop. The number of commands waiting is bounded by the number of admitted requests."""

    def __init__(
        self,
        call: StreamCall[generation_pb2.SessionResponse],
        backend: str,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        on_frame: Callable[[], None],
    ) -> None:
        """`on_frame` is called whenever the backend gives a sign of life."""
        self._call = call
        self._backend = backend
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._on_frame = on_frame
        self._attempts: dict[str, Attempt] = {}
        self._by_handle: dict[int, Attempt] = {}
        self._last_handle = 0
        self._commands: deque[generation_pb2.SessionRequest] = deque()
        self._wakeup = Wakeup()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests at this backend."""
        return len(self._attempts)

    def submit(self, state: RequestState, command: generation_pb2.SessionRequest) -> None:
        """Start an attempt: `command`, from now on the session's own, carries its id and epoch."""
        request = command.submit
        # Who wants more than ids gets deltas, and rows of nobody.
        if not state.spec.wants_logprobs and not state.spec.wants_tensors:
            self._last_handle = command.handle = self._last_handle + 1
        attempt = Attempt(self, state, request.request_id, request.attempt_epoch, command.handle)
        self._attempts[attempt.wire_id] = attempt
        if attempt.handle:
            self._by_handle[attempt.handle] = attempt
        state.attempt = attempt
        self._commands.append(command)
        self._wakeup.set()

    def abort(self, attempt: Attempt) -> None:
        """Forget an attempt and tell the backend."""
        if self._forget(attempt) and not self._closed:
            command = generation_pb2.SessionAbort(request_id=attempt.wire_id, attempt_epoch=attempt.epoch)
            self._commands.append(generation_pb2.SessionRequest(abort=command))
            self._wakeup.set()

    def lose(self, error: PenstockError | None, death: int | None) -> None:
        """The stream is gone: every request on it needs another backend."""
        self._closed = True
        attempts, self._attempts = self._attempts, {}
        self._by_handle.clear()
        for attempt in attempts.values():
            attempt.state.on_lost(Loss(error, death, self._backend))

    async def run_writer(self) -> None:
        """Send commands until the stream breaks."""
        while True:
            while self._commands:
                # Of requests that came together: one system call.
                commands = list(self._commands)
                self._commands.clear()
                await self._call.write_all(commands)
            await self._wakeup.wait()

    async def run_reader(self) -> None:
        """Take messages until the stream ends, which with a live backend it never does."""
        await self._call.run(self._take)

    def _take(self, message: generation_pb2.SessionResponse) -> None:
        self._on_frame()
        now = time.monotonic()
        batch = Batch()
        tokens = 0
        try:
            for event in message.events:
                tokens += self._on_event(event, batch, now)
        finally:
            # What came before a message broke off counts.
            if tokens:
                self._metrics.generation_tokens.inc(tokens)
            if batch.pieces:
                self._detokenizer.send(batch)

    def _on_event(self, event: generation_pb2.SessionEvent, batch: Batch, now: float) -> int:
        """Returns how many tokens it brought. Raises Internal when it makes no sense."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            return self._on_tokens(event.tokens, batch)
        attempt = self._attempts.get(event.request_id)
        if attempt is None or attempt.epoch != event.attempt_epoch:
            self._metrics.stale_frames.inc()
        elif kind == "delta":
            return self._on_delta(attempt, event.delta, batch)
        elif kind == "started":
            attempt.state.on_started(event.started, now)
        elif kind == "finished":
            self._on_finished(attempt, event.finished, batch)
        elif kind == "error":
            self._on_error(attempt, event.error)
        return 0

    def _on_tokens(self, tokens: generation_pb2.SessionTokens, batch: Batch) -> int:
        # Lists at once: every look at a message's own costs more than the copy.
        handles, seqs, token_ids = tokens.handles[:], tokens.seqs[:], tokens.token_ids[:]
        if not len(handles) == len(seqs) == len(token_ids):
            raise _broken("columns of different lengths")
        attempts, add, taken = self._by_handle, self._detokenizer.add, 0
        for handle, seq, token_id in zip(handles, seqs, token_ids, strict=True):  # once a token
            attempt = attempts.get(handle)
            if attempt is None:
                self._metrics.stale_frames.inc()
                continue
            if seq != attempt.expected_seq and not self._may_follow(attempt, seq):
                continue
            attempt.expected_seq = seq + 1
            state = attempt.state
            sequence = state.sequences.get(0) or state.sequence(0)
            if sequence.result is None:
                sequence.token_ids.append(token_id)
                add(batch, sequence, [token_id])
                taken += 1
        return taken

    def _may_follow(self, attempt: Attempt, seq: int) -> bool:
        """True when a delta that is not the expected one is the first of its attempt."""
        if attempt.expected_seq is None:
            return True
        if seq > attempt.expected_seq:
            self._break_off(attempt, "frames are missing")
        else:
            self._metrics.stale_frames.inc()
        return False

    def _on_delta(self, attempt: Attempt, delta: generation_pb2.TokenDelta, batch: Batch) -> int:
        state, seq = attempt.state, delta.seq
        if seq != attempt.expected_seq and not self._may_follow(attempt, seq):
            return 0
        attempt.expected_seq = seq + 1
        index = delta.index
        if index >= state.spec.num_sequences:
            self._break_off(attempt, "a sequence that nobody asked for")
            return 0
        sequence = state.sequences.get(index) or state.sequence(index)
        if sequence.result is not None:
            # It ended in an earlier attempt; the backend was asked again for its sisters only.
            return 0
        # A list at once: every look at a message's own costs more than the copy.
        ids = delta.token_ids[:]
        sequence.token_ids += ids
        if delta.HasField("finished"):
            self._detokenizer.add(batch, sequence, ids, delta.logprobs, delta.finished, delta.tensors)
            sequence.result = delta.finished
            if attempt.repeats_ended and state.all_sequences_ended:
                self.abort(attempt)
                state.on_backend_finished(None)
        else:
            logprobs = delta.logprobs if state.spec.wants_logprobs else ()
            tensors = delta.tensors if state.spec.wants_tensors else ()
            self._detokenizer.add(batch, sequence, ids, logprobs, None, tensors)
        return len(ids)

    def _on_finished(self, attempt: Attempt, finished: generation_pb2.Finished, batch: Batch) -> None:
        state = attempt.state
        for result in finished.sequences:
            if result.index >= state.spec.num_sequences:
                break
            sequence = state.sequence(result.index)
            if sequence.result is None:
                # The last delta did not say so (an abort between steps): flush what the tokenizer holds back.
                self._detokenizer.add(batch, sequence, [], (), result)
                sequence.result = result
        if not state.all_sequences_ended:
            self._break_off(attempt, "finished before its sequences were")
            return
        self._forget(attempt)
        state.on_backend_finished(finished)

    def _on_error(self, attempt: Attempt, error: generation_pb2.RequestError) -> None:
        self._forget(attempt)
        status = status_pb2.Status(code=error.code, message=error.message)
        if error.status_details:
            try:
                status = status_pb2.Status.FromString(error.status_details)
            except DecodeError:
                attempt.state.on_lost(Loss(_broken("a status that is none"), None, self._backend))
                return
        failure = from_status(status)
        # A stream that has begun cannot be shed: a backend without room for it is one that it cannot be moved to.
        is_elsewhere = isinstance(failure, ResourceExhausted) and attempt.state.has_tokens
        if isinstance(failure, Unavailable) or is_elsewhere:
            attempt.state.on_lost(Loss(failure, None, self._backend))
        elif isinstance(failure, InvalidArgument) and failure.field == "resumed_token_ids":
            # The router's field, not the client's.
            why = "the backend was lost after tokens were sent and no other can go on after them"
            attempt.state.fail(Aborted(why, reason="BACKEND_LOST"))
        else:
            attempt.state.fail(failure)

    def _forget(self, attempt: Attempt) -> bool:
        """Take what still comes of it for stale; False when it is forgotten already."""
        self._by_handle.pop(attempt.handle, None)
        return self._attempts.pop(attempt.wire_id, None) is not None

    def _break_off(self, attempt: Attempt, what: str) -> None:
        """The backend does not keep to the protocol: this attempt cannot be trusted any further."""
        self.abort(attempt)
        attempt.state.on_lost(Loss(_broken(what), None, self._backend))


def _broken(what: str) -> Internal:
    return Internal(f"the backend broke the protocol: {what}", reason="BACKEND_PROTOCOL")
