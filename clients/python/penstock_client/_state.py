"""State of a stream, collected from its events: shared by the synchronous and the asynchronous stream."""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
from penstock.v1 import common_pb2, generation_pb2, text_pb2

from penstock_client._exceptions import Internal, PenstockError, Unavailable, stream_error, truncated_stream
from penstock_client._tensors import step_tensors
from penstock_client._types import Choice, Completion, Delta, LogprobEntry, ToolCall
from penstock_client.config import RetryConfig

Event = text_pb2.GenerateTextResponse | text_pb2.ChatResponse


def logprob_entry(entry: common_pb2.PositionLogprobs) -> LogprobEntry:
    """Return one position as a plain value."""
    top = tuple(LogprobEntry(one.token_id, one.text, one.logprob, one.rank, (), one.raw) for one in entry.top)
    chosen = entry.chosen
    return LogprobEntry(chosen.token_id, chosen.text, chosen.logprob, chosen.rank, top, chosen.raw)


class StreamState:
    """Folds events into choices and checks the protocol: gapless seq, Finished exactly once and last."""

    def __init__(self, retry: RetryConfig, timeout: float | None = None, through: str = "") -> None:
        """Begin empty; `timeout` in seconds is for all tries together. `through`: text about the proxy on the way."""
        self._through = through
        self.started: generation_pb2.Started | None = None
        self.finished: generation_pb2.Finished | None = None
        self.last_seq: int | None = None
        self.choices: dict[int, Choice] = {}
        self._retry = retry
        self._attempts = 1
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds until the request's deadline: the next try's timeout."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def feed(self, event: Event) -> Delta | None:
        """Take one event; the Delta in it, if it is one. Raises Internal when the stream breaks the protocol."""
        if self.finished is not None:
            raise Internal("an event came after Finished", reason="PROTOCOL")
        kind = event.WhichOneof("event")
        if kind == "delta":
            return self._delta(event.delta)
        if kind == "started":
            self.started = event.started
        elif kind == "finished":
            self._finish(event.finished)
        return None

    def _delta(self, proto: text_pb2.TextDelta | text_pb2.ChatDelta) -> Delta:
        seq = proto.seq
        if seq != (0 if self.last_seq is None else self.last_seq + 1):
            raise Internal("a delta is missing or came twice", reason="PROTOCOL")
        self.last_seq = seq
        reasoning = ""
        calls: tuple[ToolCall, ...] = ()
        if isinstance(proto, text_pb2.ChatDelta):
            reasoning = proto.reasoning
            if proto.tool_calls:
                calls = tuple(ToolCall(c.index, c.id, c.name, c.arguments) for c in proto.tool_calls)
        # Most have only text, and there is one for every token.
        ids: Any = proto.token_ids
        logprobs: Any = proto.logprobs
        tensors: Any = proto.tensors
        delta = Delta(
            seq,
            proto.index,
            proto.text,
            reasoning,
            calls,
            tuple(ids) if ids else (),
            tuple(map(logprob_entry, logprobs)) if logprobs else (),
            tuple(map(step_tensors, tensors)) if tensors else (),
        )
        self._collect(delta)
        return delta

    def _collect(self, delta: Delta) -> None:
        choice = self.choices.get(delta.index)
        if choice is None:
            choice = self.choices[delta.index] = Choice(delta.index)
        choice.text += delta.text
        if delta.reasoning:
            choice.reasoning += delta.reasoning
        if delta.token_ids:
            choice.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if delta.tensors:
            choice.tensors.extend(delta.tensors)
        for piece in delta.tool_calls:
            if piece.index < len(choice.tool_calls):
                known = choice.tool_calls[piece.index]
                whole = ToolCall(
                    known.index, known.id or piece.id, known.name + piece.name, known.arguments + piece.arguments
                )
                choice.tool_calls[piece.index] = whole
            else:
                choice.tool_calls.append(piece)

    def _finish(self, finished: generation_pb2.Finished) -> None:
        self.finished = finished
        for result in finished.sequences:
            choice = self.choices.setdefault(result.index, Choice(result.index))
            choice.finish_reason = common_pb2.FinishReason.Name(result.finish_reason).removeprefix("FINISH_REASON_")
            matched = result.WhichOneof("matched_stop")
            choice.stop_string = result.stop_string if matched == "stop_string" else None
            choice.stop_token_id = result.stop_token_id if matched == "stop_token_id" else None
            if result.HasField("cumulative_logprob"):
                choice.cumulative_logprob = result.cumulative_logprob

    def completion(self) -> Completion:
        """Return the collected answer. Raises Internal when the stream ended without Finished."""
        if self.finished is None or self.started is None:
            raise truncated_stream()
        return Completion(tuple(self.choices[i] for i in sorted(self.choices)), self.started, self.finished)

    def retry_delay(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before another try; raise the mapped error if there must be none."""
        mapped: PenstockError = stream_error(error, self.last_seq, self._through)
        if not isinstance(mapped, Unavailable) or self.started or self._attempts >= self._retry.max_attempts:
            raise mapped from error
        if mapped.retry_after_seconds is not None:
            delay = mapped.retry_after_seconds
        else:
            delay = min(self._retry.initial_backoff * 2 ** (self._attempts - 1), self._retry.max_backoff)
        delay *= random.uniform(0.5, 1.0)
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            raise mapped from error
        self._attempts += 1
        return delay
