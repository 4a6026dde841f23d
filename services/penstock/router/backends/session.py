"""Session stream to one backend: many requests on it, one message per engine step.

The path of every token begins here. A step's message is walked once, its ids go to the tokenizer as one message, and
there is no task or await for a single token.
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
    """One attempt of a request at one backend. Frames carry its id and epoch back."""

    __slots__ = ("_session", "epoch", "expected_seq", "handle", "repeats_ended", "state", "wire_id")

    def __init__(self, session: BackendSession, state: RequestState, wire_id: str, epoch: int, handle: int) -> None:
        self._session = session
        self.state = state
        self.wire_id = wire_id
        self.epoch = epoch
        # The number that marks its plain tokens.
        self.handle = handle
        # None: take any first one, since a resumed attempt may go on counting or begin again.
        self.expected_seq: int | None = 0 if epoch == 0 else None
        # True when some sequence had ended before: it was sent to the backend again, which may go on with it.
        self.repeats_ended = any(sequence.result is not None for sequence in state.sequences.values())

    def abort(self) -> None:
        """Tell the backend to stop, and forget the attempt."""
        self._session.abort(self)


class BackendSession:
    """One Session call and its attempts. Belongs to one event loop.

    Admission bounds the number of requests, and so the number of commands that wait.
    """

    def __init__(
        self,
        call: StreamCall[generation_pb2.SessionResponse],
        backend: str,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        on_frame: Callable[[], None],
    ) -> None:
        """Make it. `on_frame` is called at every message: a sign of life."""
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
        """Number of requests at this backend."""
        return len(self._attempts)

    def submit(self, state: RequestState, command: generation_pb2.SessionRequest) -> None:
        """Start an attempt. `command` carries its id and epoch, and belongs to the session from now on."""
        request = command.submit
        # A request for more than ids gets no handle: its tokens come as deltas, never as plain rows.
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
        """Give up every attempt: the stream is gone, and its requests need another backend."""
        self._closed = True
        attempts, self._attempts = self._attempts, {}
        self._by_handle.clear()
        for attempt in attempts.values():
            attempt.state.on_lost(Loss(error, death, self._backend))

    async def run_writer(self) -> None:
        """Send commands until the stream breaks."""
        while True:
            while self._commands:
                # Commands of requests that came together take one system call.
                commands = list(self._commands)
                self._commands.clear()
                await self._call.write_all(commands)
            await self._wakeup.wait()

    async def run_reader(self) -> None:
        """Take messages until the stream ends, which does not happen while the backend lives."""
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
            # Pieces from before the bad event count.
            if tokens:
                self._metrics.generation_tokens.inc(tokens)
            if batch.pieces:
                self._detokenizer.send(batch)

    def _on_event(self, event: generation_pb2.SessionEvent, batch: Batch, now: float) -> int:
        """Take one event and return its number of tokens. Raises Internal when the event breaks the protocol."""
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
        # Copies as lists: every access to a message's own field costs more than the copy.
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
            self._break_off(attempt, "a sequence that was not asked for")
            return 0
        sequence = state.sequences.get(index) or state.sequence(index)
        if sequence.result is not None:
            # It ended in an earlier attempt; the backend was asked again only for the request's other sequences.
            return 0
        # A copy as a list: every access to a message's own field costs more than the copy.
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
                # The last delta had no result (an abort between steps): flush the text that the tokenizer holds back.
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
        # A stream that has begun cannot be shed: when this backend has no room for it, it cannot be moved here.
        is_elsewhere = isinstance(failure, ResourceExhausted) and attempt.state.has_tokens
        if isinstance(failure, Unavailable) or is_elsewhere:
            attempt.state.on_lost(Loss(failure, None, self._backend))
        elif isinstance(failure, InvalidArgument) and failure.field == "resumed_token_ids":
            # A field of the router's request, not of the client's.
            why = "the backend was lost after tokens were sent and no other can go on after them"
            attempt.state.fail(Aborted(why, reason="BACKEND_LOST"))
        else:
            attempt.state.fail(failure)

    def _forget(self, attempt: Attempt) -> bool:
        """Forget an attempt, so that its further frames are stale; False when it is forgotten already."""
        self._by_handle.pop(attempt.handle, None)
        return self._attempts.pop(attempt.wire_id, None) is not None

    def _break_off(self, attempt: Attempt, what: str) -> None:
        """Give an attempt up: the backend broke the protocol, so its further frames cannot be trusted."""
        self.abort(attempt)
        attempt.state.on_lost(Loss(_broken(what), None, self._backend))


def _broken(what: str) -> Internal:
    return Internal(f"the backend broke the protocol: {what}", reason="BACKEND_PROTOCOL")
