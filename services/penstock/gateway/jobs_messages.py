"""Batches and answers to lines as messages of JobsService."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.jobs.job_records import BatchRecord, BatchState, KeptAnswer
from penstock.v1 import jobs_pb2

# Bytes of an answer in one message.
PIECE_BYTES = 256 << 10
_STATUSES = {state: jobs_pb2.BatchStatus.Value(f"BATCH_STATUS_{state.name}") for state in BatchState}


def batch_message(record: BatchRecord) -> jobs_pb2.Batch:
    """Return the message of a batch."""
    return jobs_pb2.Batch(
        id=record.batch_id,
        status=_STATUSES[record.state],
        endpoint=record.endpoint,
        completion_window=record.window,
        metadata=record.metadata,
        input_file_id=record.input_file,
        created_at=record.created,
        expires_at=record.expires,
        started_at=record.began,
        cancelling_at=record.cancelling,
        ended_at=record.ended,
        total_lines=record.total,
        completed_lines=record.completed,
        failed_lines=record.failed,
        output_file_id=record.output_file or "",
        error_file_id=record.error_file or "",
        problems=[
            jobs_pb2.BatchProblem(code=one.code, message=one.message, line=one.line, field=one.param or "")
            for one in record.problems
        ],
    )


def answer_messages(kept: KeptAnswer) -> Iterator[jobs_pb2.ReadAnswersResponse]:
    """Yield the messages of one answer: several for a long one."""
    data = memoryview(kept.answer)
    for begin in range(0, len(data), PIECE_BYTES):
        yield jobs_pb2.ReadAnswersResponse(
            line=kept.number,
            custom_id=kept.custom_id,
            has_failed=kept.has_failed,
            answer=bytes(data[begin : begin + PIECE_BYTES]),
            is_partial=begin + PIECE_BYTES < len(data),
        )
