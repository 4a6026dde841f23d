"""Deltas that wait for a client's reader: merged, bounded, and cut into messages that clients can receive."""

from __future__ import annotations

from penstock.router.requests.delta_buffer import DeltaBuffer, PendingDelta
from penstock.v1 import common_pb2


def entry() -> common_pb2.PositionLogprobs:
    token = common_pb2.TokenLogprob(token_id=150_000, logprob=-12.5, rank=150_000, text=" extraordinary")
    return common_pb2.PositionLogprobs(chosen=token, top=[token] * 20)


def with_logprobs(num_tokens: int) -> PendingDelta:
    one = entry()
    return PendingDelta(0, "text" * num_tokens, token_ids=list(range(num_tokens)), logprobs=[one] * num_tokens)


def test_log_probabilities_that_fit_no_message_are_cut_between_tokens() -> None:
    delta = with_logprobs(8000)
    parts = list(delta.messages())
    assert len(parts) > 1
    for part in parts:
        assert len(part.token_ids) == len(part.logprobs)
        assert sum(position.ByteSize() + 4 for position in part.logprobs) + len(part.text) < 4 << 20
    assert "".join(part.text for part in parts) == delta.text
    assert [token for part in parts for token in part.token_ids] == delta.token_ids


def test_without_ids_the_log_probabilities_are_still_all_there() -> None:
    delta = with_logprobs(8000)
    delta.token_ids = []
    assert sum(len(part.logprobs) for part in delta.messages()) == 8000


def test_what_fits_is_one_message() -> None:
    delta = with_logprobs(100)
    assert list(delta.messages()) == [delta]


def test_merged_deltas_beyond_the_bound_are_a_slow_readers() -> None:
    buffer = DeltaBuffer(1024)
    assert buffer.put(PendingDelta(0, "a" * 2000))
    assert not buffer.put(PendingDelta(0, "a"))
