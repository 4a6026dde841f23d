"""Session stream to one backend: many requests on it, one message for an engine step or a few.

The path of every token begins here. A message is walked once, its ids go to the tokenizer as one message, and there is
no task or await for a single token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from penstock.common.errors import (
    CODE_BY_NUMBER,
    Aborted,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    from_status,
)
from penstock.common.logging import get_logger
from penstock.router.aio import Wakeup
from penstock.router.backends.expectations import (
    NO_LIMIT,
    BrokenPromise,
    Expectations,
    WrongTokens,
    expectations_of,
)
from penstock.router.backends.outliers import Outcome, Probe, outcome_of
from penstock.router.backends.session_commands import packed
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import Loss, RequestState
from penstock.router.requests.returned_sequence import ReturnedSequence
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Batch, Detokenizer
from penstock.serving.transport import StreamCall
from penstock.v1 import common_pb2, generation_pb2, model_pb2

_log = get_logger("penstock.router")
# A backend may see a deadline pass a little earlier than this process.
_DEADLINE_SLACK_SECONDS = 1.0
# In place of the number of the next frame: none may come before Started, and none after the last token.
_NOT_STARTED, _ENDED = -1, -2
# A stall timeout is counted in this many looks.
FORGOTTEN_LOOKS = 8
# Reasons of requests on a backend with a broken engine: of those in the step, and of all others.
STEP_REASONS = frozenset(("STEP_FAILED", "ENGINE_FAILED"))


class Attempt:
    """One attempt of a request at one backend. Frames carry its id and epoch back."""

    __slots__ = (
        "_session",
        "end_seq",
        "epoch",
        "expectations",
        "expected_seq",
        "handle",
        "last_delta",
        "num_frames",
        "plain",
        "probe",
        "quiet_looks",
        "repeats_ended",
        "seen_reports",
        "seen_seq",
        "state",
        "wire_id",
    )

    def __init__(
        self,
        session: BackendSession,
        state: RequestState,
        wire_id: str,
        epoch: int,
        handle: int,
        expectations: Expectations,
        probe: Probe | None,
    ) -> None:
        self._session = session
        self.state = state
        self.wire_id = wire_id
        self.epoch = epoch
        # The number that marks its plain tokens.
        self.handle = handle
        self.expectations = expectations
        self.probe = probe
        # Every attempt counts from 0.
        self.expected_seq = _NOT_STARTED
        # Set while plain tokens come one after the other, so that each costs no search: the sequence that they are of,
        # and the number of the first that would be more than were asked for.
        self.plain: ReturnedSequence | None = None
        self.end_seq = 0
        # The delta that ends the last sequence, and the number of frames with it. It waits for Finished to confirm it.
        self.last_delta: generation_pb2.TokenDelta | None = None
        self.num_frames = 0
        # Looks in a row that found it where it was; see look_for_forgotten.
        self.quiet_looks, self.seen_seq = 0, self.expected_seq
        # Number of load reports at the first look.
        self.seen_reports: int | None = None
        # True when some sequence had ended before: it was sent to the backend again, which may go on with it.
        self.repeats_ended = any(sequence.result is not None for sequence in state.sequences.values())

    @property
    def has_begun(self) -> bool:
        """True once Started has come."""
        return self.expected_seq != _NOT_STARTED

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
        on_step_failed: Callable[[Suspect], None] = lambda _: None,
        *,
        info: model_pb2.GetModelInfoResponse | None = None,
        on_outcome: Callable[[Outcome, Probe | None, bool], None] = lambda *_: None,
        on_no_adapter: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make it. `on_step_failed`: a request was in a step of the backend's engine that broke; `on_outcome` is called
        for every attempt, as it goes, with its probe and True once it had begun; `on_no_adapter` with the name of an
        adapter that the backend turned out not to have.

        `info` is about the backend's model: what its answers are held against.
        """
        self._call = call
        self._backend = backend
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._on_step_failed = on_step_failed
        # Number of messages so far, heartbeats included: signs of life.
        self.frames = 0
        # As the last look for forgotten requests found it.
        self._seen_frames = 0
        self._info = info
        self._vocab_size = (info.vocab_size if info is not None else 0) or NO_LIMIT
        self._eos_ids = frozenset(info.eos_token_ids if info is not None else ())
        self._on_outcome = on_outcome
        self._on_no_adapter = on_no_adapter
        self._attempts: dict[str, Attempt] = {}
        # Of them, those that use idle capacity only.
        self.idle_in_flight = 0
        self._by_handle: dict[int, Attempt] = {}
        self._last_handle = 0
        self._commands: deque[generation_pb2.SessionRequest] = deque()
        self._packs = info is not None and info.takes_session_commands
        self._wakeup = Wakeup()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Number of requests at this backend."""
        return len(self._attempts)

    def suspects(self) -> list[Suspect]:
        """Return the requests at this backend."""
        return [attempt.state.suspect for attempt in self._attempts.values()]

    def submit(self, state: RequestState, command: generation_pb2.SessionRequest, probe: Probe | None = None) -> None:
        """Start an attempt. `command` carries its id and epoch, and belongs to the session from now on."""
        request = command.submit
        # A request for more than ids gets no handle: its tokens come as deltas, never as plain rows.
        if not state.spec.wants_logprobs and not state.spec.wants_tensors:
            self._last_handle = command.handle = self._last_handle + 1
        expected = expectations_of(state.spec, request, self._info, time.monotonic())
        attempt = Attempt(self, state, request.request_id, request.attempt_epoch, command.handle, expected, probe)
        self._attempts[attempt.wire_id] = attempt
        self.idle_in_flight += state.spec.is_idle_only
        if attempt.handle:
            self._by_handle[attempt.handle] = attempt
        state.attempt = attempt
        self._commands.append(command)
        self._wakeup.set()

    def abort(self, attempt: Attempt) -> None:
        """Forget an attempt and tell the backend."""
        if self._forget(attempt) and not self._closed:
            self._note(attempt, Outcome.NEUTRAL)
            command = generation_pb2.SessionAbort(request_id=attempt.wire_id, attempt_epoch=attempt.epoch)
            self._commands.append(generation_pb2.SessionRequest(abort=command))
            self._wakeup.set()

    def lose(self) -> None:
        """Give up every attempt: the stream is gone, and its requests need another backend."""
        self._closed = True
        attempts, self._attempts = self._attempts, {}
        self.idle_in_flight = 0
        self._by_handle.clear()
        for attempt in attempts.values():
            if attempt.probe is not None:
                # The loss itself is the backend's, whatever number of attempts it had.
                self._note(attempt, Outcome.LOST)
            attempt.state.on_lost(Loss(None, self._backend))

    def look_for_forgotten(self, known: int, reports: int) -> None:
        """Give up attempts that have stood still for FORGOTTEN_LOOKS looks while the backend always had fewer
        requests (`known`) than were sent to it: others keep the session busy, and nobody else would notice.

        A look at a session that was silent since the last one says nothing: its messages may be on their way. `reports`
        is the number of those that tell so: one that is older than an attempt says nothing about it.
        """
        if self.frames == self._seen_frames:
            return
        self._seen_frames = self.frames
        is_short = known < len(self._attempts)
        for attempt in list(self._attempts.values()):
            if attempt.seen_reports is None:
                attempt.seen_reports = reports
            is_quiet = is_short and reports > attempt.seen_reports and attempt.expected_seq == attempt.seen_seq
            attempt.quiet_looks = attempt.quiet_looks + 1 if is_quiet else 0
            attempt.seen_seq = attempt.expected_seq
            if attempt.quiet_looks >= FORGOTTEN_LOOKS:
                self._break_off(attempt, "a request that it forgot")

    async def run_writer(self) -> None:
        """Send commands until the stream breaks."""
        while True:
            while self._commands:
                # Commands of requests that came together take one system call.
                commands = list(self._commands)
                self._commands.clear()
                await self._call.write_all(packed(commands) if self._packs else commands)
            await self._wakeup.wait()

    async def run_reader(self) -> None:
        """Take messages until the stream ends, which does not happen while the backend lives."""
        await self._call.run(self._take)

    def _take(self, message: generation_pb2.SessionResponse) -> None:
        self.frames += 1
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
            return 0
        try:
            if kind == "delta":
                return self._on_delta(attempt, event.delta, batch, now)
            if kind == "finished":
                return self._on_finished(attempt, event.finished, batch)
            if kind == "started":
                self._on_started(attempt, event.started, now)
            elif kind == "error":
                self._on_error(attempt, event.error, now)
            else:
                raise BrokenPromise("an event of no kind")
        except BrokenPromise as broken:
            state = attempt.state
            self._break_off(attempt, str(broken))
            if isinstance(broken, WrongTokens) and state.num_tokens > state.tokens_before:
                # They may have been read: they cannot be taken back, and an end with OK would confirm them.
                state.fail(_broken(str(broken)))
        return 0

    def _on_started(self, attempt: Attempt, started: generation_pb2.Started, now: float) -> None:
        if attempt.expected_seq != _NOT_STARTED:
            raise BrokenPromise("started twice")
        attempt.expectations.check_started(started)
        attempt.expected_seq = 0
        self._note(attempt, Outcome.STARTED)
        attempt.state.on_started(started, now)

    def _on_tokens(self, tokens: generation_pb2.SessionTokens, batch: Batch) -> int:
        # Copies as lists: every access to a message's own field costs more than the copy.
        handles, seqs, token_ids = tokens.handles[:], tokens.seqs[:], tokens.token_ids[:]
        if not len(handles) == len(seqs) == len(token_ids):
            self._on_outcome(Outcome.PROTOCOL, None, True)
            raise _broken("columns of different lengths")
        if token_ids and max(token_ids) >= self._vocab_size:
            self._break_off_where(handles, token_ids, lambda _, one: one >= self._vocab_size, "an id of no token")
        if not self._eos_ids.isdisjoint(token_ids):
            # The model's own; an attempt may have others, or none.
            self._break_off_where(handles, token_ids, _is_end, "tokens after the end of their sequence")
        attempts, add, taken = self._by_handle, self._detokenizer.add, 0
        for handle, seq, token_id in zip(handles, seqs, token_ids, strict=True):  # once a token
            attempt = attempts.get(handle)
            if attempt is None:
                self._metrics.stale_frames.inc()
                continue
            if seq != attempt.expected_seq:
                self._break_off(attempt, _out_of_order(attempt, seq))
                continue
            attempt.expected_seq = seq + 1
            sequence = attempt.plain or self._plain_of(attempt, seq)
            if sequence is None:
                continue
            if seq >= attempt.end_seq:
                self._break_off(attempt, "more tokens than were asked for")
                continue
            sequence.token_ids.append(token_id)
            add(batch, sequence, [token_id])
            taken += 1
        return taken

    def _plain_of(self, attempt: Attempt, seq: int) -> ReturnedSequence | None:
        """Return the sequence of plain tokens from number `seq` on; None where it ended."""
        sequence = attempt.state.sequence(0)
        if sequence.result is None:
            attempt.plain = sequence
            attempt.end_seq = seq + attempt.expectations.budget - len(sequence.token_ids)
            return sequence
        if 0 in attempt.expectations.ends:
            self._break_off(attempt, "tokens after the end of their sequence")
        return None

    def _break_off_where(
        self, handles: Sequence[int], token_ids: Sequence[int], is_broken: Callable[[Attempt, int], bool], what: str
    ) -> None:
        for handle, token_id in zip(handles, token_ids, strict=True):
            attempt = self._by_handle.get(handle)
            if attempt is not None and is_broken(attempt, token_id):
                self._break_off(attempt, what)

    def _on_delta(self, attempt: Attempt, delta: generation_pb2.TokenDelta, batch: Batch, now: float) -> int:
        state, seq, expected = attempt.state, delta.seq, attempt.expectations
        if seq != attempt.expected_seq:
            raise BrokenPromise(_out_of_order(attempt, seq))
        attempt.expected_seq = seq + 1
        # It may have any number of tokens, and may end its sequence.
        attempt.plain = None
        index = delta.index
        if index >= state.spec.num_sequences:
            raise BrokenPromise("a sequence that was not asked for")
        if index in expected.ends:
            raise BrokenPromise("tokens after the end of their sequence")
        sequence = state.sequences.get(index) or state.sequence(index)
        if sequence.result is not None:
            # It ended in an earlier attempt; the backend was asked again only for the request's other sequences.
            return 0
        # A copy as a list: every access to a message's own field costs more than the copy.
        ids = delta.token_ids[:]
        is_last = delta.HasField("finished")
        expected.check_tokens(ids, len(sequence.token_ids) + len(ids), is_last=is_last)
        expected.check_extras(delta, ids)
        if is_last:
            return self._on_last_delta(attempt, sequence, delta, ids, batch, now)
        sequence.token_ids += ids
        logprobs = delta.logprobs if state.spec.wants_logprobs else ()
        tensors = delta.tensors if state.spec.wants_tensors else ()
        self._detokenizer.add(batch, sequence, ids, logprobs, None, tensors)
        return len(ids)

    def _on_last_delta(
        self,
        attempt: Attempt,
        sequence: ReturnedSequence,
        delta: generation_pb2.TokenDelta,
        ids: list[int],
        batch: Batch,
        now: float,
    ) -> int:
        """Take the delta that ends a sequence. The one that ends the last of them is kept for Finished."""
        state, expected, result = attempt.state, attempt.expectations, delta.finished
        if result.index != sequence.index:
            raise BrokenPromise("the end of another sequence")
        skip = state.decode_options
        text_of = partial(
            self._detokenizer.text_of,
            skip_special_tokens=skip.skip_special_tokens if skip.HasField("skip_special_tokens") else True,
        )
        expected.check_end(result, [*sequence.token_ids, *ids], now, text_of)
        expected.ends[sequence.index] = result
        # Finished would tell of sequences that were repeated, too: such an attempt ends without it.
        if not attempt.repeats_ended and len(expected.ends) == state.spec.num_sequences:
            attempt.last_delta, attempt.num_frames = delta, attempt.expected_seq
            attempt.expected_seq = _ENDED
            return 0
        self._end_sequence(sequence, delta, ids, batch)
        if attempt.repeats_ended and state.all_sequences_ended:
            self.abort(attempt)
            state.on_backend_finished(None)
        return len(ids)

    def _end_sequence(
        self, sequence: ReturnedSequence, delta: generation_pb2.TokenDelta, ids: list[int], batch: Batch
    ) -> None:
        sequence.token_ids += ids
        self._detokenizer.add(batch, sequence, ids, delta.logprobs, delta.finished, delta.tensors)
        sequence.result = delta.finished

    def _on_finished(self, attempt: Attempt, finished: generation_pb2.Finished, batch: Batch) -> int:
        """Take the end of a request: only if it is as promised, the last tokens count."""
        state, delta = attempt.state, attempt.last_delta
        if any(one.finish_reason == common_pb2.FINISH_REASON_ABORTED for one in finished.sequences):
            # Its operator ended the request there, or a drain did: no lie, and no end of the request.
            self._forget(attempt)
            self._note(attempt, Outcome.INTERNAL)
            state.on_lost(Loss(None, self._backend))
            return 0
        if delta is None:
            raise BrokenPromise("finished before its sequences were")
        attempt.expectations.check_finished(finished, attempt.num_frames)
        ids = delta.token_ids[:]
        self._end_sequence(state.sequence(delta.index), delta, ids, batch)
        self._forget(attempt)
        self._note(attempt, Outcome.FINISHED)
        state.on_backend_finished(finished)
        return len(ids)

    def _on_error(self, attempt: Attempt, error: generation_pb2.RequestError, now: float) -> None:
        failure = _failure_of(error)
        if failure.reason in STEP_REASONS:
            # The process goes. Only a request that was in the step may be the cause.
            if failure.reason == "STEP_FAILED":
                self._on_step_failed(attempt.state.suspect)
            self._forget(attempt)
            self._note(attempt, Outcome.LOST)
            attempt.state.on_lost(Loss(None, self._backend))
            return
        if isinstance(failure, DeadlineExceeded) and not _may_be_late(attempt, now):
            raise BrokenPromise("a deadline that has not passed")
        self._forget(attempt)
        self._note(attempt, outcome_of(failure))
        if failure.reason == "ADAPTER_NOT_FOUND" and attempt.state.spec.adapter:
            # It was unloaded there a moment ago. Others may have it.
            self._on_no_adapter(attempt.state.spec.adapter)
            attempt.state.on_lost(Loss(failure, self._backend))
            return
        if failure.reason == "ADAPTER_DIFFERS":
            # Its weights are others here. New streams may have them all the same.
            attempt.state.on_lost(Loss(failure, self._backend))
            return
        # A stream that has begun cannot be shed: when this backend has no room for it, it cannot be moved here.
        is_elsewhere = isinstance(failure, ResourceExhausted) and attempt.state.has_tokens
        if isinstance(failure, Unavailable) or is_elsewhere:
            attempt.state.on_lost(Loss(failure, self._backend))
        elif isinstance(failure, InvalidArgument) and failure.field == "resumed_token_ids":
            # A field of the router's request, not of the client's.
            why = "the backend was lost after tokens were sent and no other can go on after them"
            attempt.state.fail(Aborted(why, reason="BACKEND_LOST"))
        else:
            attempt.state.fail(failure)

    def _forget(self, attempt: Attempt) -> bool:
        """Forget an attempt, so that its further frames are stale; False when it is forgotten already."""
        self._by_handle.pop(attempt.handle, None)
        if self._attempts.pop(attempt.wire_id, None) is None:
            return False
        self.idle_in_flight -= attempt.state.spec.is_idle_only
        return True

    def _break_off(self, attempt: Attempt, what: str) -> None:
        """Give an attempt up: the backend broke the protocol, so its further frames cannot be trusted."""
        _log.warning("backend broke the protocol", backend=self._backend, what=what)
        self._note(attempt, Outcome.PROTOCOL)
        attempt.probe = None
        self.abort(attempt)
        attempt.state.on_lost(Loss(_broken(what), self._backend))

    def _note(self, attempt: Attempt, outcome: Outcome) -> None:
        self._on_outcome(outcome, attempt.probe, attempt.has_begun)


def _failure_of(error: generation_pb2.RequestError) -> PenstockError:
    """Return a request's error. Raises BrokenPromise."""
    status = status_pb2.Status(code=error.code, message=error.message)
    try:
        if error.status_details:
            status = status_pb2.Status.FromString(error.status_details)
        failure = from_status(status)
    except DecodeError:
        raise BrokenPromise("a status that is none") from None
    if not error.code or error.code not in CODE_BY_NUMBER or status.code != error.code:
        raise BrokenPromise("an error without a code")
    return failure


def _may_be_late(attempt: Attempt, now: float) -> bool:
    """True when the deadline has passed. One that waits is ended as soon as it cannot end in time any more."""
    deadline = attempt.state.timings.deadline
    return deadline is not None and (not attempt.has_begun or now >= deadline - _DEADLINE_SLACK_SECONDS)


def _is_end(attempt: Attempt, token_id: int) -> bool:
    eos_ids = attempt.expectations.eos_ids
    return eos_ids is not None and token_id in eos_ids


def _out_of_order(attempt: Attempt, seq: int) -> str:
    if attempt.expected_seq == _NOT_STARTED:
        return "tokens before Started"
    if attempt.expected_seq == _ENDED:
        return "tokens after the end of their sequence"
    return "frames are missing" if seq > attempt.expected_seq else "a frame came twice"


def _broken(what: str) -> Internal:
    return Internal(f"the backend broke the protocol: {what}", reason="BACKEND_PROTOCOL")
