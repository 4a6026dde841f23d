"""Clients that vanish, and services that get SIGTERM in the middle of streams."""

from __future__ import annotations

import asyncio
import sys

import pytest
from factories.engine.load import steps_of
from factories.servers.stack import Stack
from factories.wire.conversation import user
from penstock_client import AsyncClient

LONG = {"max_new_tokens": 150, "ignore_eos": True}
CLIENT = """
import sys
from penstock_client import Client
with Client(sys.argv[1]) as client:
    question = [{"role": "user", "content": "Count from 1 to 20."}]
    for delta in client.stream(question, max_new_tokens=3500, ignore_eos=True, return_token_ids=True):
        print(delta.seq, flush=True)
"""


async def test_killing_the_client_process_frees_its_blocks(stack: Stack) -> None:
    """SIGKILL after the first delta; both backends are idle again long before the answer's end."""
    addresses = [backend.address for backend in stack.generations]
    before = await steps_of(*addresses)
    arguments = [sys.executable, "-c", CLIENT, stack.address]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"0\n"
    process.kill()
    await process.wait()
    after = await steps_of(*addresses)
    assert sum(after) - sum(before) < 3000


async def _stop_during_streams(running: Stack, name: str) -> None:
    async with AsyncClient(running.address) as client:
        streams = [client.stream(user("Count from 1 to 20."), **LONG) for _ in range(8)]  # type: ignore[arg-type]
        await asyncio.gather(*(anext(stream) for stream in streams))
        process = next(one for one in running.processes if one.name == name)
        stopping = asyncio.create_task(asyncio.to_thread(process.terminate))
        completions = await asyncio.gather(*(stream.result() for stream in streams))
        assert [completion.usage.completion_tokens for completion in completions] == [150] * 8
        assert await stopping == 0, process.output()


async def test_sigterm_at_generation_finishes_its_streams_and_exits_0() -> None:
    """Every stream ends with all of its tokens."""
    with Stack() as running:
        await _stop_during_streams(running, "generation")


@pytest.mark.slow
async def test_sigterm_at_the_router_finishes_its_streams_and_exits_0() -> None:
    """Every stream ends with all of its tokens."""
    with Stack() as running:
        await _stop_during_streams(running, "router")
