"""Scripted backend that emits only as many steps as a test allows, and the ends of streams before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.router import Answer, backend, collect
from penstock.common.errors import from_rpc_error
from penstock.v1 import config_pb2

TOKENS = 40
WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)
IDS = list(count_up(TOKENS)(None))  # type: ignore[arg-type]


def held(**knobs: Any) -> EmittingBackend:
    """A backend that emits TOKENS tokens, but only as many steps as it is allowed."""
    return backend(**{"script": count_up(TOKENS), "allowance": 0, **knobs})


async def status_of(call: Any) -> tuple[grpc.StatusCode, Any]:
    """Return the code and error by which a stream failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), from_rpc_error(caught.value)


def stop_after(count: int, action: Callable[[], Any]) -> Callable[[Answer], Any]:
    """Do `action` once, when `count` ids have arrived (deltas may be merged)."""
    done = False

    async def on_delta(answer: Answer) -> None:
        nonlocal done
        if not done and sum(len(delta.token_ids) for delta in answer.deltas) >= count:
            done = True
            await action()

    return on_delta
