"""Writer of one client stream: Started, deltas as they come, Finished; and a move when a backend is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from penstock.common.errors import Aborted, Cancelled, PenstockError, Unavailable
from penstock.common.tracing import exemplar
from penstock.router.frontend import convert
from penstock.router.frontend.parts import Parts
from penstock.router.keys.key_account import KeyAccount
from penstock.router.metrics import UNKNOWN_MODEL
from penstock.router.requests.attempt_spans import describe_answer
from penstock.router.requests.delta_buffer import PendingDelta
from penstock.router.requests.prompt_length import num_prompt_tokens
from penstock.router.requests.request_state import RequestState, results_of
from penstock.router.requests.returned_sequence import ReturnedSequence
from penstock.router.tokenizer.pipeline import Prompt
from penstock.serving.transport import ServerCall
from penstock.v1 import common_pb2, generation_pb2, text_pb2

# Characters of one echo delta: far below the default limit of clients.
_ECHO_CHARS = 256 << 10
_ENDED_BY_MODEL = (
    common_pb2.FINISH_REASON_STOP_EOS,
    common_pb2.FINISH_REASON_STOP_TOKEN,
    common_pb2.FINISH_REASON_STOP_STRING,
    # The grammar of a forced call.
    common_pb2.FINISH_REASON_CONSTRAINT_DONE,
)


@dataclass(frozen=True, slots=True)
class StreamKind:
    """Difference between Generate and Chat."""

    name: str
    # The operation's name in traces.
    operation: str
    response: type[text_pb2.GenerateTextResponse] | type[text_pb2.ChatResponse]
    delta: Callable[[int, PendingDelta], convert.PublicResponse]


GENERATE = StreamKind("Generate", "text_completion", text_pb2.GenerateTextResponse, convert.text_delta)
CHAT = StreamKind("Chat", "chat", text_pb2.ChatResponse, convert.chat_delta)


class StreamWriter:
    """Writes one stream; lives in its handler."""

    def __init__(
        self,
        state: RequestState,
        prompt: Prompt,
        kind: StreamKind,
        parts: Parts,
        context: ServerCall,
        time_left: Callable[[], float | None],
        account: KeyAccount | None = None,
    ) -> None:
        self._state = state
        self._prompt = prompt
        self._response = kind.response
        self._make_delta = kind.delta
        self._parts = parts
        self._write = context.write
        # If the transport can write without a task, a delta for a reader that keeps up wakes no handler.
        self._writes_at_once, self._try_write = context.writes_at_once, context.try_write
        self._time_left = time_left
        self._account = account
        self._next_seq = 0
        # `_write_now` reuses it for every token: making a message takes longer than all its other work.
        self._reused = kind.response()
        self._reused_delta = self._reused.delta
        # Messages that the reader took.
        self.num_written = 0
        self._has_started = False
        # The limit of a wait for another service.
        self._wait_limit: asyncio.Timeout | None = None

    async def run(self, echo: str) -> None:
        """Write until Finished. Raises the stream's error: a loss is Unavailable before a delta, Aborted after one."""
        try:
            await self._run(echo)
        except PenstockError as error:
            if self._has_started:
                await self._write_failed()
            if isinstance(error, Unavailable | Aborted):
                raise self.as_seen(error) from None
            raise
        except grpc.aio.InternalError:
            # A write failed: grpc noticed the client's end before it cancelled this handler.
            raise Cancelled("the client is gone", reason="CLIENT_GONE") from None
        finally:
            if self._state.buffer.coalesced:
                self._parts.metrics.coalesced.inc(self._state.buffer.coalesced)

    def stop_waiting(self) -> None:
        """Cancel the wait for another service: the request has failed, and no answer can change that."""
        if self._wait_limit is not None:
            self._wait_limit.reschedule(asyncio.get_running_loop().time())

    async def _run(self, echo: str) -> None:
        state, buffer = self._state, self._state.buffer
        while True:
            if not self._has_started and (state.started is not None or state.finished is not None):
                await self._write_started()
                await self._write_echo(echo)
            if self._has_started and buffer.has_deltas:
                await self._parts.turn_limiter.enter()
            deltas = buffer.take() if self._has_started else ()
            for merged in deltas:
                for delta in merged.messages():
                    await self._write_delta(delta)
            if deltas:
                # From the second on: the first token is not kept waiting.
                buffer.pace = self._parts.delta_pace
                continue
            if state.error is not None:
                raise state.error
            if state.finished is not None:
                await self._write_finished(state.finished)
                return
            if state.loss is not None:
                async with self._unless_failed():
                    await self._parts.attempts.recover(state)
            else:
                await self._wait()

    @asynccontextmanager
    async def _unless_failed(self) -> AsyncIterator[None]:
        """Guard a wait for another service. Raises the request's error if it failed before or meanwhile."""
        state = self._state
        if state.error is not None:
            raise state.error
        try:
            async with asyncio.timeout(None) as self._wait_limit:
                yield
        except TimeoutError:
            if state.error is not None:
                raise state.error from None
            raise
        finally:
            self._wait_limit = None

    async def _fill(self, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        if self._parts.token_texts.fill_known(logprobs):
            return
        async with self._unless_failed():
            await self._parts.token_texts.fill(logprobs, self._time_left())

    async def _wait(self) -> None:
        state = self._state
        if self._has_started and self._writes_at_once:
            state.write_now = self._write_now
        try:
            await state.buffer.wakeup.wait()
        finally:
            state.write_now = None

    def _write_now(self, index: int, text: str, token_ids: Sequence[int]) -> bool:
        """Write a delta while the handler waits; False when earlier ones wait. The per-token path."""
        if self._state.buffer.has_deltas or self._parts.delta_pace.hold_seconds:
            return False
        delta = self._reused_delta
        delta.seq, delta.index, delta.text = self._next_seq, index, text
        if self._state.spec.wants_token_ids:
            delta.token_ids[:] = token_ids
        if not self._try_write(self._reused):
            return False
        self._next_seq += 1
        self.num_written += 1
        return True

    async def _write_delta(self, delta: PendingDelta) -> None:
        if delta.logprobs:
            await self._fill(delta.logprobs)
        seq = self._next_seq
        self._next_seq = seq + 1
        await self._write(self._make_delta(seq, delta))
        self.num_written += 1

    async def _write_started(self) -> None:
        spec = self._state.spec
        started = generation_pb2.Started()
        if self._state.started is not None:
            started.CopyFrom(self._state.started)
        started.request_id = spec.request_id
        started.seed = spec.template.seed
        started.prompt_tokens = self._num_prompt_tokens
        started.warnings.extend(spec.warnings)
        if started.prompt_logprobs:
            await self._fill(started.prompt_logprobs)
        message = self._response(started=convert.check_size(started))
        self._has_started = True
        await self._write(message)

    @property
    def _num_prompt_tokens(self) -> int:
        return num_prompt_tokens(self._state.spec.template, len(self._prompt.token_ids))

    async def _write_echo(self, echo: str) -> None:
        if not echo:
            return
        for index in range(self._state.spec.num_sequences):
            for begin in range(0, len(echo), _ECHO_CHARS):
                delta = PendingDelta(index, echo[begin : begin + _ECHO_CHARS])
                if self._state.spec.wants_token_ids and begin == 0:
                    delta.token_ids = self._prompt.token_ids
                await self._write_delta(delta)

    async def _write_finished(self, backend: generation_pb2.Finished) -> None:
        finished = self._finished(backend, results_of(self._state))
        self._observe(finished)
        describe_answer(self._state, finished)
        if self._account is not None:
            # First: a usage that the client has seen is in the ledger, whatever happens to this process.
            await self._account.finish(finished.usage.prompt_tokens, finished.usage.completion_tokens)
        await self._write(self._response(finished=convert.check_size(finished)))

    async def _write_failed(self) -> None:
        """Write the Finished of a stream that ends with an error; its backend's figures are unknown."""
        sequences = [self._state.sequence(index) for index in range(self._state.spec.num_sequences)]
        results = [sequence.result or _failed(sequence) for sequence in sequences]
        finished = self._finished(generation_pb2.Finished(), results)
        describe_answer(self._state, finished)
        message = self._response(finished=finished)
        if self._account is not None:
            await self._account.finish(finished.usage.prompt_tokens, finished.usage.completion_tokens, "BROKEN")
        # The client may be gone; that is not a further failure.
        with suppress(grpc.aio.InternalError):
            await self._write(message)

    def _finished(
        self, backend: generation_pb2.Finished, results: Sequence[common_pb2.SequenceResult]
    ) -> generation_pb2.Finished:
        finished = generation_pb2.Finished(
            sequences=[self._result(result) for result in results],
            usage=self._usage(backend),
            timings=self._timings(backend),
            attempts=self._state.attempts,
            first_weights_version=backend.first_weights_version,
            last_weights_version=backend.last_weights_version,
        )
        if self._next_seq:
            finished.last_seq = self._next_seq - 1
        return finished

    def _result(self, result: common_pb2.SequenceResult) -> common_pb2.SequenceResult:
        sequence = self._state.sequences[result.index]
        copy = common_pb2.SequenceResult()
        copy.CopyFrom(result)
        if self._state.moves:
            copy.token_count = len(sequence.token_ids)
            # The last backend knows only its own part of the sum.
            copy.ClearField("cumulative_logprob")
        parser = sequence.parser
        # An answer that is complete has ended, even if the backend generated more until it was cut.
        if parser is not None and (
            parser.is_over or (parser.ends_in_tool_calls and copy.finish_reason in _ENDED_BY_MODEL)
        ):
            copy.finish_reason = common_pb2.FINISH_REASON_TOOL_CALLS
        return copy

    def _usage(self, backend: generation_pb2.Finished) -> common_pb2.Usage:
        state = self._state
        usage = common_pb2.Usage()
        usage.CopyFrom(backend.usage)
        usage.prompt_tokens = self._num_prompt_tokens
        if state.moves or not usage.completion_tokens:
            usage.completion_tokens = sum(len(sequence.token_ids) for sequence in state.sequences.values())
        if state.started is not None:
            usage.cached_tokens = state.started.cached_tokens
        usage.reasoning_tokens = state.reasoning_tokens
        return usage

    def _timings(self, backend: generation_pb2.Finished) -> common_pb2.StageTimings:
        times = self._state.timings
        timings = common_pb2.StageTimings(
            route_seconds=times.route,
            detokenize_seconds=self._state.detokenize_seconds,
            total_seconds=time.monotonic() - times.received_at,
        )
        if times.template is not None:
            timings.template_seconds = times.template
        if times.tokenize is not None:
            timings.tokenize_seconds = times.tokenize
        if times.first_token_at is not None:
            timings.time_to_first_token_seconds = times.first_token_at - times.received_at
        theirs = backend.timings
        if theirs.HasField("queue_seconds"):
            timings.queue_seconds = theirs.queue_seconds
        if theirs.HasField("prefill_seconds"):
            timings.prefill_seconds = theirs.prefill_seconds
        if theirs.HasField("decode_seconds"):
            timings.decode_seconds = theirs.decode_seconds
        return timings

    def _observe(self, finished: generation_pb2.Finished) -> None:
        metrics = self._parts.metrics
        metrics.observe_timings(finished.timings, exemplar())
        metrics.observe_model(self._state.spec.model or UNKNOWN_MODEL, finished)
        metrics.prompt_tokens.inc(finished.usage.prompt_tokens)
        metrics.cached_tokens.inc(finished.usage.cached_tokens)
        metrics.request_tokens.observe(finished.usage.completion_tokens)
        for result in finished.sequences:
            reason = common_pb2.FinishReason.Name(result.finish_reason).removeprefix("FINISH_REASON_").lower()
            metrics.finished(reason).inc()

    def as_seen(self, error: PenstockError) -> PenstockError:
        """Turn `error` into the client's view: for it, a stream without a written delta has not begun."""
        if not self._next_seq:
            return Unavailable(error.message, reason=error.reason, retry_after_seconds=error.retry_after_seconds or 1.0)
        aborted = Aborted(error.message, reason=error.reason)
        aborted.metadata["last_seq"] = str(self._next_seq - 1)
        return aborted


def _failed(sequence: ReturnedSequence) -> common_pb2.SequenceResult:
    return common_pb2.SequenceResult(
        index=sequence.index, finish_reason=common_pb2.FINISH_REASON_ERROR, token_count=len(sequence.token_ids)
    )
