"""LoadModel's next message: a cancellation that comes with it is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.rpc.model import ModelServicer
from penstock.v1 import model_pb2


async def test_a_cancellation_that_comes_with_a_message_is_not_lost() -> None:
    """Python 3.11's asyncio.wait_for returns the message then."""
    servicer = ModelServicer(cast("Any", None), cast("Any", None), GenerationServiceConfig(model="none"))

    async def messages(message: asyncio.Future[model_pb2.LoadModelRequest]) -> AsyncIterator[Any]:
        yield await message

    # The number of turns of the event loop between the message and the cancellation.
    for turns in range(3):
        message: asyncio.Future[model_pb2.LoadModelRequest] = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(servicer._next(messages(message)))
        for _ in range(4):
            await asyncio.sleep(0)
        message.set_result(model_pb2.LoadModelRequest())
        for _ in range(turns):
            await asyncio.sleep(0)
        is_cancelled = call.cancel()
        # Later the message may have been taken.
        assert is_cancelled or turns > 0
        if is_cancelled:
            with pytest.raises(asyncio.CancelledError):
                await call
