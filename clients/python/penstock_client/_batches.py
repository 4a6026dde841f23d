"""Batches as both clients send and read them: lines to messages, pieces to answers, and a wait with an end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.v1 import jobs_pb2

from penstock_client._exceptions import DeadlineExceeded, PenstockError, Unavailable

# Bytes of lines in one message.
_PIECE_BYTES = 256 << 10
# States of a batch that has not ended.
_LIVE = (
    jobs_pb2.BATCH_STATUS_VALIDATING,
    jobs_pb2.BATCH_STATUS_IN_PROGRESS,
    jobs_pb2.BATCH_STATUS_CANCELLING,
)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to one line. `line` counts from 1; `answer` is OpenAI's object of it."""

    line: int
    custom_id: str
    has_failed: bool
    answer: Mapping[str, Any]

    @property
    def body(self) -> Mapping[str, Any] | None:
        """The endpoint's own answer; None where there is none, because the batch ended before the line."""
        response = self.answer.get("response")
        return None if response is None else response["body"]


def is_live(batch: jobs_pb2.Batch) -> bool:
    """True for a batch that has not ended."""
    return batch.status in _LIVE


def submit_requests(
    lines: Iterable[bytes | str | Mapping[str, Any]],
    endpoint: str,
    completion_window: str | None,
    metadata: Mapping[str, str] | None,
    expires_after: float | None,
) -> Iterator[jobs_pb2.SubmitBatchRequest]:
    """Yield the messages of a submission, a piece of lines at a time in memory."""
    new = jobs_pb2.NewBatch(
        endpoint=endpoint,
        completion_window=completion_window,
        metadata=metadata,
        expires_after_seconds=expires_after,
    )
    yield jobs_pb2.SubmitBatchRequest(batch=new)
    held = bytearray()
    for line in lines:
        held += _line(line)
        while len(held) >= _PIECE_BYTES:
            yield jobs_pb2.SubmitBatchRequest(lines=bytes(held[:_PIECE_BYTES]))
            del held[:_PIECE_BYTES]
    if held:
        yield jobs_pb2.SubmitBatchRequest(lines=bytes(held))


def file_requests(
    input_file_id: str, endpoint: str, completion_window: str | None, metadata: Mapping[str, str] | None
) -> Iterator[jobs_pb2.SubmitBatchRequest]:
    """Yield the only message of a batch of a file that is there."""
    new = jobs_pb2.NewBatch(
        endpoint=endpoint, completion_window=completion_window, metadata=metadata, input_file_id=input_file_id
    )
    yield jobs_pb2.SubmitBatchRequest(batch=new)


class SentRequests:
    """Messages of a submission, as gRPC reads them. It would lose an error of their making: `check` raises it."""

    def __init__(self, messages: Iterator[jobs_pb2.SubmitBatchRequest]) -> None:
        self._messages = messages
        self._error: Exception | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> jobs_pb2.SubmitBatchRequest:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise

    def check(self) -> None:
        """Raise what ended the messages, if anything did."""
        if self._error is not None:
            raise self._error


def _line(line: bytes | str | Mapping[str, Any]) -> bytes:
    if isinstance(line, Mapping):
        line = json.dumps(line)
    data = line.encode() if isinstance(line, str) else bytes(line)
    return data.rstrip(b"\r\n") + b"\n"


class AnswerReader:
    """Joins the pieces of answers."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: jobs_pb2.ReadAnswersResponse) -> BatchAnswer | None:
        """Take a message; return an answer that it makes whole."""
        self._held += piece.answer
        if piece.is_partial:
            return None
        answer = json.loads(self._held)
        self._held.clear()
        return BatchAnswer(piece.line, piece.custom_id, piece.has_failed, answer)


class BatchWait:
    """Pauses between two looks at a batch, within a time; a gateway that is away is asked again."""

    def __init__(self, poll_seconds: float, timeout: float | None) -> None:
        self._poll_seconds = poll_seconds
        self._end = None if timeout is None else time.monotonic() + timeout

    def pause(self, error: PenstockError | None = None) -> float:
        """Return the seconds of the next pause. Raises DeadlineExceeded, and `error` unless it may pass."""
        if error is not None and not isinstance(error, Unavailable):
            raise error
        if self._end is not None and time.monotonic() + self._poll_seconds > self._end:
            raise error or DeadlineExceeded("the batch has not ended in time", reason="DEADLINE_EXCEEDED")
        return self._poll_seconds
