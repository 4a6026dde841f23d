"""Batches and answers as messages: long answers are cut, and the client joins them."""

from __future__ import annotations

import json

import pytest
from penstock.gateway.jobs_messages import PIECE_BYTES, answer_messages, batch_message
from penstock.jobs.job_records import BatchRecord, BatchState, KeptAnswer, LineProblem
from penstock.v1 import jobs_pb2
from penstock_client._batches import AnswerReader, submit_requests


@pytest.mark.parametrize("size", [1, PIECE_BYTES // 2, 3 * PIECE_BYTES])
def test_answers_of_any_size_are_joined_again(size: int) -> None:
    answer = {"custom_id": "a", "response": {"status_code": 200, "body": {"text": "x" * size}}}
    messages = list(answer_messages(KeptAnswer(7, "a", False, json.dumps(answer).encode())))
    assert max(message.ByteSize() for message in messages) < PIECE_BYTES + 64
    assert [message.is_partial for message in messages] == [True] * (len(messages) - 1) + [False]
    reader = AnswerReader()
    *none, whole = [reader.feed(message) for message in messages]
    assert set(none) <= {None}
    assert whole is not None
    assert (whole.line, whole.custom_id, whole.has_failed, whole.answer) == (7, "a", False, answer)


@pytest.mark.parametrize("state", BatchState)
def test_every_state_has_a_status(state: BatchState) -> None:
    record = BatchRecord("batch_1", "me", "file-1", "/v1/completions", "24h", state, 1.0, 2.0)
    message = batch_message(record)
    assert message.status == jobs_pb2.BatchStatus.Value(f"BATCH_STATUS_{state.name}")
    assert not message.HasField("started_at")


def test_a_problem_of_the_file_has_no_line() -> None:
    problems = (LineProblem("empty_file", "no lines"), LineProblem("invalid_body", "body: no", 2, "body"))
    record = BatchRecord("b", "me", "f", "/v1/completions", "24h", BatchState.FAILED, 1.0, 2.0, problems=problems)
    first, second = batch_message(record).problems
    assert (first.HasField("line"), first.field) == (False, "")
    assert (second.line, second.field) == (2, "body")


def test_lines_of_all_kinds_become_lines_in_pieces() -> None:
    lines = [b'{"a": 1}\r\n', '{"b": "\u00e9"}', {"c": 3}]
    new, *parts = submit_requests([*lines, b"y" * (2 * PIECE_BYTES)], "/v1/completions", None, None, None)
    assert not new.batch.HasField("completion_window")
    data = b"".join(part.lines for part in parts)
    assert data.split(b"\n")[:3] == [b'{"a": 1}', '{"b": "\u00e9"}'.encode(), b'{"c": 3}']
    assert data.endswith(b"y\n")
    assert max(len(part.lines) for part in parts) == PIECE_BYTES
