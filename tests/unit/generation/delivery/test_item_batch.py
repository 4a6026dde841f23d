"""Items of one Score or Embed on their way through the engine: a window of them, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from penstock.common.errors import Internal, InvalidArgument, PenstockError, ResourceExhausted
from penstock.generation.core.request import (
    FinishedOutput,
    Logprob,
    PositionLogprobs,
    Purpose,
    Request,
    RequestOutput,
    RequestTimings,
    StartedOutput,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.delivery.item_batch import ItemBatch
from penstock.generation.options.score_embed_commands import ScoreItem, followers


class Hub:
    """Hub that keeps submitted requests until the test lets them end."""

    def __init__(self, refuse_after: int | None = None, error: PenstockError | None = None) -> None:
        self.submitted: list[Request] = []
        self.is_attached = False
        self._refuse_after = refuse_after
        self._error = error

    def attach(self, stream: Any) -> None:
        self.is_attached = True

    def detach(self, stream: Any) -> None:
        self.is_attached = False

    def submit(self, request: Request, stream: Any) -> None:
        if self._error is not None and len(self.submitted) == self._refuse_after:
            raise self._error
        self.submitted.append(request)


def requests(count: int) -> list[Request]:
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    return [
        Request(f"r{index}", [1, 2], params, 0.0, purpose=Purpose.SCORE, first_needed_row=0) for index in range(count)
    ]


def end(request: Request, error: PenstockError | None = None, *, has_result: bool = True) -> RequestOutput:
    timings = RequestTimings(None, None, None, None, 0.0)
    logprobs = (PositionLogprobs(Logprob(int(request.request_id[1:]), -1.0, 1)),) if has_result else ()
    finished = FinishedOutput((), 2, 0, 0, timings, None, error=error)
    return RequestOutput(request, StartedOutput(0, logprobs), (), finished)


async def begun(batch: ItemBatch) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(batch.run())
    await asyncio.sleep(0)
    return task


def names(hub: Hub) -> list[str]:
    return [request.request_id for request in hub.submitted]


async def test_no_more_than_the_window_is_in_the_engine_and_results_keep_their_order() -> None:
    hub, items = Hub(), requests(5)
    batch = ItemBatch(hub, items, "items", 2, {})
    task = await begun(batch)
    assert names(hub) == ["r0", "r1"]
    batch.deliver(1, [end(items[1])])
    assert names(hub) == ["r0", "r1", "r2"]
    batch.deliver(2, [end(items[2]), end(items[0])])
    batch.deliver(3, [end(items[4]), end(items[3])])
    results = await task
    assert [result.logprobs[0].chosen.token_id for result in results] == [0, 1, 2, 3, 4]
    assert not hub.is_attached


async def test_items_with_the_prompt_of_an_earlier_one_wait_for_it() -> None:
    pairs = [([1, 2], [3]), ([9], [3]), ([1, 2], [4]), ([1, 2], [5])]
    after = followers(ScoreItem(prompt, continuation) for prompt, continuation in pairs)
    assert after == {0: [2, 3]}
    hub, items = Hub(), requests(4)
    batch = ItemBatch(hub, items, "items", 8, after)
    task = await begun(batch)
    assert names(hub) == ["r0", "r1"]
    batch.deliver(1, [end(items[0])])
    assert names(hub) == ["r0", "r1", "r2", "r3"]
    batch.deliver(2, [end(item) for item in items[1:]])
    assert len(await task) == 4


async def test_the_first_error_ends_the_call_and_nothing_more_is_submitted() -> None:
    hub, items = Hub(), requests(4)
    batch = ItemBatch(hub, items, "items", 2, {})
    task = await begun(batch)
    batch.deliver(1, [end(items[0], Internal("broken", reason="DECODING_FAILED"))])
    with pytest.raises(Internal):
        await task
    assert names(hub) == ["r0", "r1"]
    assert not hub.is_attached


async def test_what_the_engine_says_of_one_item_names_it() -> None:
    hub = Hub(refuse_after=1, error=InvalidArgument("prompt", "must fit"))
    with pytest.raises(InvalidArgument) as caught:
        await ItemBatch(hub, requests(3), "items", 2, {}).run()
    assert caught.value.field == "items[1]"


async def test_a_full_queue_fails_the_call() -> None:
    hub = Hub(refuse_after=1, error=ResourceExhausted("full", reason="QUEUE_FULL"))
    with pytest.raises(ResourceExhausted):
        await ItemBatch(hub, requests(3), "items", 2, {}).run()
    assert not hub.is_attached


async def test_an_item_that_was_aborted_has_no_result() -> None:
    hub, items = Hub(), requests(1)
    batch = ItemBatch(hub, items, "items", 2, {})
    task = await begun(batch)
    batch.deliver(1, [end(items[0], has_result=False)])
    with pytest.raises(PenstockError) as caught:
        await task
    assert caught.value.reason == "ABORTED"
