"""Conversion of inputs_embeds one at a time, and room for them, also where callers leave amid it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from penstock.common.errors import ResourceExhausted
from penstock.generation.core.prompt_embeds import PromptEmbeds
from penstock.generation.core.tensors import TensorData
from penstock.generation.wire import embeds_intake
from penstock.generation.wire.embeds_intake import EmbedsIntake

TENSOR = TensorData("float32", (2, 1), bytes(8))
PATIENCE_SECONDS = 60.0


class Held:
    """A conversion that takes until it is let go."""

    def __init__(self) -> None:
        self.began, self.let_go = threading.Semaphore(0), threading.Event()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, *_: Any) -> PromptEmbeds:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.began.release()
        assert self.let_go.wait(PATIENCE_SECONDS)
        with self._lock:
            self.running -= 1
        return PromptEmbeds(bytearray(8), 2, 2, (b"",))

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.began.acquire, timeout=PATIENCE_SECONDS)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(embeds_intake, "to_prompt_embeds", held)
    yield held
    held.let_go.set()


async def taken_in(intake: EmbedsIntake) -> PromptEmbeds:
    with intake.room(TENSOR, 0):
        return await intake.convert(TENSOR, 2)


async def test_a_conversion_that_nobody_waits_for_keeps_its_turn_and_its_room_until_it_ends(held: Held) -> None:
    intake = EmbedsIntake("float32", 4, 16, 2.5)
    left = asyncio.create_task(taken_in(intake))
    await held.until_begun()
    following = asyncio.create_task(taken_in(intake))
    # More than once, as by an abort and the end of its session.
    for _ in range(3):
        left.cancel()
        await asyncio.wait([left, following], timeout=0.05)
    assert held.running == held.most == 1
    with pytest.raises(ResourceExhausted), intake.room(TENSOR, 0):
        pass
    held.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (await following).num_tokens == 2
    assert held.most == 1
    with intake.room(TensorData("float32", (4, 1), bytes(16)), 0):
        pass


async def test_one_that_waits_for_its_turn_leaves_at_once(held: Held) -> None:
    intake = EmbedsIntake("float32", 4, 16, 2.5)
    first = asyncio.create_task(taken_in(intake))
    await held.until_begun()
    waiting = asyncio.create_task(taken_in(intake))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    with intake.room(TENSOR, 0):
        pass
    held.let_go.set()
    await first
    assert held.most == 1
