"""Attempt of a request at another engine: its calls of Generate, one for each returned sequence, as one request's
events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.router.engines.engine_codec import EngineChunk, EngineEnd
from penstock.router.engines.engine_request import EngineRequest
from penstock.v1 import common_pb2, generation_pb2

# Plain words of engines for ends that are none of a finished answer.
_ABORT = "abort"


@dataclass(slots=True)
class EngineSequence:
    """Returned sequence, and the call that generates it."""

    index: int
    call_id: str
    # Tokens with those of earlier attempts.
    num_tokens: int
    # The last of them; None: there is none.
    last_id: int | None
    # Read and not sent: they may be the last ones, or too few for a delta.
    held_ids: list[int] = field(default_factory=list)
    held_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    result: common_pb2.SequenceResult | None = None


class EngineAttempt:
    """Events of one attempt. `emit` gets each of them, without the request's id."""

    def __init__(
        self,
        request: EngineRequest,
        model: str,
        handle: int,
        emit: Callable[[generation_pb2.SessionEvent], None],
    ) -> None:
        self.request = request
        self.is_over = False
        self.sequences = [
            EngineSequence(
                index,
                f"{request.options.request_id}-{index}",
                len(resumed := request.resumed(index)),
                resumed[-1] if resumed else None,
            )
            for index in range(request.params.num_return_sequences)
        ]
        self._model = model
        self._handle = handle
        self._emit = emit
        self._seq = 0
        self._is_started = False
        self._cached_tokens = 0
        self._accepted_draft_tokens = self._draft_tokens = 0

    def begin(self) -> None:
        """End the sequences that had ended before: an engine cannot be asked for no token."""
        for sequence in self.sequences:
            if sequence.last_id is None:
                continue
            if sequence.last_id in self.request.eos_ids | self.request.stop_ids:
                self._end(sequence, EngineEnd("stop", token_id=sequence.last_id))
            elif sequence.num_tokens >= self.request.params.max_new_tokens:
                self._end(sequence, EngineEnd("length"))

    @property
    def live(self) -> list[EngineSequence]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.result is None]

    def take(self, sequence: EngineSequence, chunk: EngineChunk) -> None:
        """Take a message of a sequence's call."""
        if self.is_over:
            return
        if not self._is_started:
            self._start(chunk, len(self.request.resumed(sequence.index)))
        if sequence.result is not None:
            if chunk.token_ids or chunk.end is not None:
                # The session's checks refuse what follows an end.
                self._send(sequence, list(chunk.token_ids), chunk.logprobs, None)
            return
        if chunk.token_ids:
            sequence.held_ids += chunk.token_ids
            sequence.held_logprobs += chunk.logprobs
            sequence.num_tokens += len(chunk.token_ids)
            sequence.last_id = chunk.token_ids[-1]
        if chunk.end is not None:
            self._accepted_draft_tokens += chunk.end.accepted_draft_tokens
            self._draft_tokens += chunk.end.draft_tokens
            self._end(sequence, chunk.end)
        elif sequence.held_ids and not self._may_be_last(sequence):
            ids, sequence.held_ids = sequence.held_ids, []
            logprobs, sequence.held_logprobs = sequence.held_logprobs, []
            self._send(sequence, ids, logprobs, None)

    def end_in_time(self) -> None:
        """End what has not ended: max_time has passed."""
        if not self._is_started:
            self._start(EngineChunk(prompt_tokens=len(self.request.options.prompt_token_ids)), 0)
        for sequence in self.live:
            self._end(sequence, EngineEnd("max_time"))

    def _may_be_last(self, sequence: EngineSequence) -> bool:
        """True for tokens that wait for the next message: an end's tokens come with it, and so do those of an
        interval."""
        request = self.request
        return (
            sequence.last_id in request.eos_ids
            or sequence.last_id in request.stop_ids
            or sequence.num_tokens >= request.params.max_new_tokens
            or len(sequence.held_ids) < request.stream_interval
        )

    def _start(self, chunk: EngineChunk, resumed: int) -> None:
        self._is_started = True
        self._cached_tokens = chunk.cached_tokens
        params = self.request.params
        event = generation_pb2.SessionEvent()
        event.started.CopyFrom(
            generation_pb2.Started(
                request_id=self.request.options.request_id,
                model=self._model,
                generation_mode=common_pb2.GenerationMode.ValueType(params.generation_mode.value),
                seed=params.seed,
                # An engine that tells fewer tells another prompt's length.
                prompt_tokens=max(chunk.prompt_tokens - resumed, 0),
                cached_tokens=chunk.cached_tokens,
                warnings=self.request.warnings,
                prompt_logprobs=chunk.prompt_logprobs,
            )
        )
        self._emit(event)

    def _end(self, sequence: EngineSequence, end: EngineEnd) -> None:
        if end.reason == _ABORT:
            self._end_aborted()
            return
        if not self._is_started:
            self._start(EngineChunk(prompt_tokens=len(self.request.options.prompt_token_ids)), 0)
        result = common_pb2.SequenceResult(
            index=sequence.index, finish_reason=self._reason(sequence, end), token_count=sequence.num_tokens
        )
        if result.finish_reason == common_pb2.FINISH_REASON_STOP_STRING and end.text is not None:
            result.stop_string = end.text
        elif result.finish_reason == common_pb2.FINISH_REASON_STOP_TOKEN and sequence.last_id is not None:
            result.stop_token_id = sequence.last_id
        sequence.result = result
        ids, sequence.held_ids = sequence.held_ids, []
        self._send(sequence, ids, sequence.held_logprobs, result)
        if not self.live:
            self._finish([one.result for one in self.sequences if one.result is not None])

    def _reason(self, sequence: EngineSequence, end: EngineEnd) -> common_pb2.FinishReason.ValueType:
        """Return an end as our own. One that does not hold is found by the session's checks."""
        if end.reason == "length":
            return common_pb2.FINISH_REASON_LENGTH
        if end.reason == "max_time":
            return common_pb2.FINISH_REASON_MAX_TIME
        if end.reason != "stop":
            return common_pb2.FINISH_REASON_ERROR
        if end.text is not None:
            return common_pb2.FINISH_REASON_STOP_STRING
        token_id = sequence.last_id if end.token_id is None else end.token_id
        if token_id in self.request.stop_ids and token_id not in self.request.eos_ids:
            return common_pb2.FINISH_REASON_STOP_TOKEN
        if token_id not in self.request.eos_ids and self.request.options.constraint is not None:
            return common_pb2.FINISH_REASON_CONSTRAINT_DONE
        return common_pb2.FINISH_REASON_STOP_EOS

    def _end_aborted(self) -> None:
        """End a request that its engine's operator ended: it moves to another backend."""
        if not self._is_started:
            self._start(EngineChunk(prompt_tokens=len(self.request.options.prompt_token_ids)), 0)
        self._finish(
            [
                common_pb2.SequenceResult(index=one.index, finish_reason=common_pb2.FINISH_REASON_ABORTED)
                for one in self.sequences
            ]
        )

    def _finish(self, results: list[common_pb2.SequenceResult]) -> None:
        self.is_over = True
        event = generation_pb2.SessionEvent()
        finished = event.finished
        finished.sequences.extend(results)
        finished.usage.prompt_tokens = len(self.request.options.prompt_token_ids)
        finished.usage.completion_tokens = sum(result.token_count for result in results)
        finished.usage.cached_tokens = self._cached_tokens
        finished.usage.accepted_draft_tokens = self._accepted_draft_tokens
        finished.usage.rejected_draft_tokens = max(self._draft_tokens - self._accepted_draft_tokens, 0)
        if self._seq:
            finished.last_seq = self._seq - 1
        self._emit(event)

    def _send(
        self,
        sequence: EngineSequence,
        ids: list[int],
        logprobs: list[common_pb2.PositionLogprobs],
        result: common_pb2.SequenceResult | None,
    ) -> None:
        event, seq = generation_pb2.SessionEvent(), self._seq
        self._seq = seq + 1
        if self._handle and result is None and not logprobs and len(ids) == 1 and sequence.index == 0:
            rows = event.tokens
            rows.handles.append(self._handle)
            rows.seqs.append(seq)
            rows.token_ids.append(ids[0])
        else:
            delta = event.delta
            delta.seq, delta.index = seq, sequence.index
            delta.token_ids.extend(ids)
            delta.logprobs.extend(logprobs)
            if result is not None:
                delta.finished.CopyFrom(result)
        self._emit(event)
