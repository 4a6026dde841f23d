"""The router's half of DecodeStream, with a call that only remembers what was written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.router.detokenize import Batch, Detokenizer
from penstock.router.sequence import ReturnedSequence
from penstock.v1 import tokenizer_pb2


class Call:
    """A DecodeStream that takes everything and answers nothing."""

    def __init__(self) -> None:
        self.written: list[tokenizer_pb2.DecodeStreamRequest] = []

    async def write(self, request: tokenizer_pb2.DecodeStreamRequest) -> None:
        self.written.append(request)

    async def read(self) -> object:
        return await asyncio.Future()

    def open_sequences(self) -> set[int]:
        """What the tokenizer would keep after all of it."""
        kept: set[int] = set()
        for item in (item for request in self.written for item in request.items):
            if item.HasField("open"):
                kept.add(item.stream_id)
            if item.drop or item.finish:
                kept.discard(item.stream_id)
        return kept


def new_sequence() -> ReturnedSequence:
    live: Any = SimpleNamespace(closed=False, undecoded=0, decode_options=tokenizer_pb2.DecodeStreamOpen())
    return ReturnedSequence(live, 0, None)


async def test_drop_never_overtakes_the_item_that_opens_its_sequence() -> None:
    detokenizer, call = Detokenizer(max_outstanding=16), Call()
    detokenizer.connected()
    sequences = [new_sequence(), new_sequence()]
    for sequence in sequences:
        batch = Batch()
        detokenizer.add(batch, sequence, [1])
        detokenizer.send(batch)
    # Cancelled while both messages wait: the writer has not had its turn yet.
    detokenizer.drop(sequences)
    writer = asyncio.ensure_future(detokenizer.run_writer(call))
    await asyncio.sleep(0)
    writer.cancel()
    assert len(call.written) == 2
    assert call.open_sequences() == set()
