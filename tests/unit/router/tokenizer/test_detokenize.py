"""The router's half of DecodeStream, with a call that only remembers what was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from penstock.router.requests.returned_sequence import ReturnedSequence
from penstock.router.tokenizer.detokenize import Batch, Detokenizer
from penstock.v1 import tokenizer_pb2


class Call:
    """A DecodeStream that takes everything and answers nothing."""

    def __init__(self) -> None:
        self.written: list[tokenizer_pb2.DecodeStreamRequest] = []

    async def write(self, request: tokenizer_pb2.DecodeStreamRequest) -> None:
        self.written.append(request)

    async def write_all(self, requests: Iterable[Any]) -> None:
        self.written += requests

    async def run(self, take: Callable[[Any], None]) -> None:
        await asyncio.Future()

    def cancel(self) -> None:
        pass

    def open_sequences(self) -> set[int]:
        """Return the sequences that the tokenizer would hold after all messages."""
        kept: set[int] = set()
        for item in (item for request in self.written for item in request.items):
            if item.HasField("open"):
                kept.add(item.stream_id)
            if item.drop or item.finish:
                kept.discard(item.stream_id)
        return kept


def new_sequence() -> ReturnedSequence:
    state: Any = SimpleNamespace(
        closed=False,
        failed=False,
        undecoded=0,
        decode_options=tokenizer_pb2.DecodeStreamOpen(),
        buffer=SimpleNamespace(coalesced=0),
        last_batch=None,
        detokenize_seconds=0.0,
        on_text=lambda *_: None,
    )
    state.fail = lambda _: setattr(state, "failed", True)
    return ReturnedSequence(state, 0, None)


def sent(call: Call) -> list[list[int]]:
    """Return the ids of every item, message by message."""
    return [[token for item in request.items for token in item.token_ids] for request in call.written]


def add(detokenizer: Detokenizer, sequence: ReturnedSequence, *ids: int) -> None:
    """Send one step with ids of one sequence."""
    batch = Batch()
    sequence.token_ids.extend(ids)
    detokenizer.add(batch, sequence, list(ids))
    if batch.pieces:
        detokenizer.send(batch)


async def test_cancelled_sequence_is_not_left_at_the_tokenizer() -> None:
    detokenizer, call = Detokenizer(max_outstanding=16), Call()
    detokenizer.connected()
    early, late = new_sequence(), new_sequence()
    add(detokenizer, early, 1)
    writer = asyncio.ensure_future(detokenizer.run_writer(call))
    await asyncio.sleep(0)
    add(detokenizer, late, 2)
    # One is known to the tokenizer, the other waits in a message that has not left yet.
    for sequence in (early, late):
        sequence.receiver.closed = True
        detokenizer.drop([sequence])
    await asyncio.sleep(0)
    writer.cancel()
    assert call.open_sequences() == set()


async def test_steps_that_wait_become_one_message_and_ids_of_a_sequence_one_item() -> None:
    detokenizer, call = Detokenizer(max_outstanding=64), Call()
    detokenizer.connected()
    one, two = new_sequence(), new_sequence()
    writer = asyncio.ensure_future(detokenizer.run_writer(call))
    for token in range(1, 8):
        add(detokenizer, one, token)
        add(detokenizer, two, 10 * token)
        await asyncio.sleep(0)
    assert sent(call) == [[1, 10], [2, 20]], "two messages are on their way"
    detokenizer._take(tokenizer_pb2.DecodeStreamResponse(results=[{"stream_id": 1}, {"stream_id": 2}]))
    await asyncio.sleep(0)
    writer.cancel()
    assert sent(call)[2:] == [[3, 4, 5, 6, 7, 30, 40, 50, 60, 70]]
    assert detokenizer.outstanding == 2
    assert one.receiver.buffer.coalesced == 4


async def test_what_was_not_answered_is_sent_again_to_the_next_tokenizer() -> None:
    detokenizer, call, second = Detokenizer(max_outstanding=64), Call(), Call()
    detokenizer.connected()
    sequence = new_sequence()
    writer = asyncio.ensure_future(detokenizer.run_writer(call))
    for token in range(1, 6):
        add(detokenizer, sequence, token)
        await asyncio.sleep(0)
    detokenizer._take(tokenizer_pb2.DecodeStreamResponse(results=[{"stream_id": 1, "text": "a"}]))
    writer.cancel()
    detokenizer.connected()
    writer = asyncio.ensure_future(detokenizer.run_writer(second))
    await asyncio.sleep(0)
    writer.cancel()
    assert sent(second) == [[2], [3, 4, 5]]
    assert list(second.written[0].items[0].open.resumed_token_ids) == [1]


async def test_steps_beyond_the_bound_fail_however_few_messages_they_are() -> None:
    detokenizer = Detokenizer(max_outstanding=4)
    detokenizer.connected()
    sequences = [new_sequence() for _ in range(6)]
    for sequence in sequences:
        add(detokenizer, sequence, 1)
    assert [sequence.receiver.failed for sequence in sequences] == [False] * 4 + [True] * 2
