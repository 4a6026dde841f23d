"""Fan-out of engine steps to streams: one message per step, bounded, every request ends once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from penstock.common.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.delivery.deltas import DeltaMaker
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.delivery.item_batch import ItemBatch
from penstock.generation.delivery.streams import MessageBuffer, RequestStream, SessionStream
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.stats import EngineLoad, EngineStats, StepSample
from penstock.generation.metrics import EngineFigures, GenerationMetrics
from prometheus_client import CollectorRegistry, generate_latest

TIMINGS = RequestTimings(0.1, 0.1, 0.1, 0.2, 0.3)


class Engine:
    """Engine that remembers its calls."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.errors: dict[str, PenstockError | None] = {}
        self.refusal: PenstockError | None = None

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request.request_id)

    def abort(self, request_ids: list[str], error: PenstockError | None = None, /) -> None:
        self.aborted.extend(request_ids)
        self.errors.update(dict.fromkeys(request_ids, error))


class Harness:
    """A hub over a remembered engine, and steps made by hand."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.registry = CollectorRegistry()
        self.metrics = GenerationMetrics(self.registry, "tiny")
        self.hub = OutputHub(self.engine, self.metrics, lambda: 7)
        self.requests: dict[str, Request] = {}

    def session(self, *names: str, bound: int = 8) -> SessionStream:
        session = SessionStream(bound)
        self.hub.attach(session)
        for name in names:
            maker = maker_of(name)
            self.hub.submit(maker.request, session)
            session.add(maker)
            self.requests[name] = maker.request
        return session

    def stream(self, name: str, *, bound: int = 8, interval: int = 1) -> RequestStream:
        maker = maker_of(name, interval)
        stream = RequestStream(maker, bound)
        self.hub.submit(maker.request, stream)
        self.hub.attach(stream)
        self.requests[name] = maker.request
        return stream

    def step(self, *outputs: tuple[str, dict[str, Any]]) -> None:
        blank: dict[str, Any] = {"started": None, "deltas": (), "finished": None}
        self.hub.deliver(7, [RequestOutput(self.requests[name], **{**blank, **what}) for name, what in outputs])


def maker_of(name: str, interval: int = 1) -> DeltaMaker:
    return DeltaMaker(Request(name, [1, 2], SamplingParams(9), 0.0, attempt_epoch=3), "tiny", interval)


def delta(seq: int, *ids: int, index: int = 0, finish: SequenceFinish | None = None) -> Emission:
    return Emission(index, ids, finish=finish, seq=seq)


def finished(error: PenstockError | None = None, last_seq: int | None = 0) -> FinishedOutput:
    ends = (SequenceFinish(0, FinishReason.ERROR if error else FinishReason.LENGTH, 1),)
    return FinishedOutput(ends, 2, 1, 0, TIMINGS, last_seq, error=error)


async def drained(buffer: MessageBuffer[Any]) -> list[Any]:
    return [message async for message in buffer]


async def test_a_session_gets_one_message_per_step_with_every_event() -> None:
    harness = Harness()
    session = harness.session("a", "b")
    harness.step(
        ("a", {"started": StartedOutput(0), "deltas": (delta(0, 5),)}),
        ("b", {"started": StartedOutput(0), "deltas": (delta(0, 6),)}),
    )
    first = await anext(aiter(session.buffer))
    harness.step(("a", {"deltas": (delta(1, 7),), "finished": finished()}), ("b", {"finished": finished()}))
    session.half_close()
    (second,) = await drained(session.buffer)
    assert [(event.request_id, event.attempt_epoch, event.WhichOneof("event")) for event in first.events] == [
        ("a", 3, "started"),
        ("a", 3, "delta"),
        ("b", 3, "started"),
        ("b", 3, "delta"),
    ]
    assert [event.WhichOneof("event") for event in second.events] == ["delta", "finished", "finished"]
    assert first.step == 7


async def test_two_sessions_get_their_own_shares_only() -> None:
    harness = Harness()
    one, two = harness.session("a"), harness.session("b")
    harness.step(("a", {"finished": finished()}), ("b", {"finished": finished()}))
    for session, name in ((one, "a"), (two, "b")):
        session.half_close()
        (message,) = await drained(session.buffer)
        assert [event.request_id for event in message.events] == [name]


async def test_a_failed_request_ends_with_its_error_and_the_session_goes_on() -> None:
    harness = Harness()
    session = harness.session("a", "b")
    late = DeadlineExceeded("too late", reason="DEADLINE_EXCEEDED")
    harness.step(("a", {"deltas": (delta(0, 5),), "finished": finished(late)}))
    first = await anext(aiter(session.buffer))
    harness.step(("b", {"finished": finished()}))
    session.half_close()
    (second,) = await drained(session.buffer)
    assert [event.WhichOneof("event") for event in first.events] == ["delta", "error"]
    assert first.events[1].error.code == 4
    assert second.events[0].WhichOneof("event") == "finished"


async def test_prompt_logprobs_travel_in_a_message_of_their_own() -> None:
    harness = Harness()
    session = harness.session("a", "b", "c")
    big = StartedOutput(0, prompt_logprobs=(PositionLogprobs(None),) * 40_000)
    harness.step(("a", {"started": StartedOutput(0)}), ("b", {"started": big}), ("c", {"started": big}))
    session.buffer.close()
    messages = await drained(session.buffer)
    assert [[event.request_id for event in message.events] for message in messages] == [["a"], ["b"], ["c"]]


def with_logprobs(num_tokens: int, *, seq: int = 0, index: int = 0) -> Emission:
    """All tokens of a sequence at once, each with 20 alternatives."""
    entry = Logprob(150_000, -12.5, 150_000)
    finish = SequenceFinish(index, FinishReason.LENGTH, num_tokens)
    return Emission(index, (5,) * num_tokens, (PositionLogprobs(entry, (entry,) * 20),) * num_tokens, finish, seq=seq)


async def test_many_logprobs_in_one_step_travel_in_several_messages() -> None:
    """However much ends in one step: a message too large to send would end the session of all its requests."""
    harness = Harness()
    session = harness.session("a", "b", "c")
    deltas = tuple(with_logprobs(3000, seq=index, index=index) for index in range(3))
    harness.step(("a", {"deltas": deltas}), ("b", {"deltas": deltas[:1]}), ("c", {"finished": finished()}))
    session.buffer.close()
    messages = await drained(session.buffer)
    assert all(message.ByteSize() < 4 << 20 for message in messages)
    events = [event for message in messages for event in message.events]
    assert [(event.request_id, event.delta.seq) for event in events] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
        ("c", 0),
    ]
    assert all(len(event.delta.logprobs) == 3000 for event in events[:4])


async def test_a_burst_that_fits_no_message_is_cut_and_numbered_anew() -> None:
    harness = Harness()
    session = SessionStream(64)
    params = SamplingParams(9, mode=BeamOptions(num_beams=2), num_return_sequences=2)
    maker = DeltaMaker(Request("a", [1, 2], params, 0.0), "tiny", 1)
    harness.hub.attach(session)
    harness.hub.submit(maker.request, session)
    session.add(maker)
    harness.requests["a"] = maker.request
    deltas = (with_logprobs(20_000), with_logprobs(20_000, seq=1, index=1))
    harness.step(("a", {"deltas": deltas, "finished": finished(last_seq=1)}))
    session.half_close()
    messages = await drained(session.buffer)
    assert all(message.ByteSize() < 4 << 20 for message in messages)
    *parts, last = [event for message in messages for event in message.events]
    assert [event.delta.seq for event in parts] == list(range(len(parts)))
    assert last.finished.last_seq == len(parts) - 1
    for index in range(2):
        own = [event.delta for event in parts if event.delta.index == index]
        assert sum(len(part.token_ids) for part in own) == sum(len(part.logprobs) for part in own) == 20_000
        assert [part.HasField("finished") for part in own] == [False] * (len(own) - 1) + [True]


async def test_a_refusal_is_an_event_of_its_own() -> None:
    session = SessionStream(8)
    session.refuse(4, "a", 1, InvalidArgument("config.top_p", "must be in [0, 1]"))
    session.buffer.close()
    (message,) = await drained(session.buffer)
    assert (message.step, message.events[0].request_id, message.events[0].error.code) == (4, "a", 3)


async def test_a_stream_ends_with_finished_and_then_its_status() -> None:
    harness = Harness()
    stream = harness.stream("a")
    late = DeadlineExceeded("too late", reason="DEADLINE_EXCEEDED")
    harness.step(("a", {"finished": finished(late)}))
    reader = aiter(stream.buffer)
    assert (await anext(reader)).HasField("finished")
    with pytest.raises(DeadlineExceeded):
        await anext(reader)


async def test_a_slow_reader_is_cut_off_and_its_requests_aborted() -> None:
    harness = Harness()
    session = harness.session("a", "b", bound=2)
    for seq in range(3):
        harness.step(("a", {"deltas": (delta(seq, 5),)}))
    assert sorted(harness.engine.aborted) == ["a", "b"]
    with pytest.raises(ResourceExhausted) as cut:
        await drained(session.buffer)
    assert cut.value.reason == "SLOW_READER"
    harness.step(("a", {"finished": finished()}), ("b", {"finished": finished()}))
    assert harness.hub.num_live == 0


async def test_leaving_aborts_what_is_live_and_its_last_word_is_awaited() -> None:
    harness = Harness()
    stream = harness.stream("a")
    harness.hub.detach(stream)
    assert harness.engine.aborted == ["a"]
    assert harness.hub.num_live == 1
    idle = asyncio.create_task(harness.hub.wait_idle())
    harness.step(("a", {"finished": finished()}))
    await idle
    assert harness.hub.num_live == 0


async def test_a_live_id_cannot_be_used_twice_but_a_finished_one_can() -> None:
    harness = Harness()
    harness.stream("a")
    with pytest.raises(InvalidArgument) as refused:
        harness.stream("a")
    assert (refused.value.field, refused.value.reason) == ("request_id", "DUPLICATE_REQUEST_ID")
    harness.step(("a", {"finished": finished()}))
    harness.stream("a")
    assert harness.engine.submitted == ["a", "a"]


async def test_a_refused_request_leaves_nothing_behind() -> None:
    harness = Harness()
    harness.engine.refusal = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=1)
    with pytest.raises(ResourceExhausted):
        harness.stream("a")
    assert harness.hub.num_live == 0


async def test_half_closing_lets_live_requests_finish() -> None:
    harness = Harness()
    session = harness.session("a")
    session.half_close()
    assert not session.buffer.closed
    harness.step(("a", {"finished": finished()}))
    assert session.buffer.closed


async def test_closing_the_streams_ends_idle_sessions() -> None:
    harness = Harness()
    session = harness.session()
    harness.hub.close_streams()
    assert await drained(session.buffer) == []


async def test_a_broken_engine_ends_every_stream() -> None:
    harness = Harness()
    stream, session = harness.stream("a"), harness.session("b")
    harness.hub.fail_all(Internal("the engine has failed", reason="ENGINE_FAILED"))
    for buffer in (stream.buffer, session.buffer):
        with pytest.raises(Internal):
            await drained(buffer)
    assert harness.hub.num_live == 0


async def test_an_interval_merges_deltas_of_a_sequence_and_stays_gapless() -> None:
    harness = Harness()
    stream = harness.stream("a", interval=3)
    for seq in range(4):
        harness.step(("a", {"deltas": (delta(2 * seq, seq), delta(2 * seq + 1, 10 + seq, index=1))}))
    harness.step(("a", {"finished": finished(last_seq=7)}))
    messages = await drained(stream.buffer)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert [(entry.seq, entry.index, list(entry.token_ids)) for entry in deltas] == [
        (0, 0, [0, 1, 2]),
        (1, 1, [10, 11, 12]),
        (2, 0, [3]),
        (3, 1, [13]),
    ]
    assert messages[-1].finished.last_seq == 3


async def test_steps_and_requests_show_in_the_metrics() -> None:
    harness = Harness()
    harness.metrics.read_engine(
        lambda: EngineFigures(
            EngineLoad(running_requests=1, kv_blocks_total=8, kv_blocks_used=2),
            EngineStats(generated_tokens=3, prompt_tokens=2),
        )
    )
    harness.stream("a")
    harness.step(("a", {"started": StartedOutput(0), "deltas": (delta(0, 5),)}))
    harness.step(("a", {"deltas": (delta(1, 6), delta(2, 7, index=1)), "finished": finished()}))
    harness.metrics.step(StepSample(2, 3, 0.001, 0.01, 0.001))
    text = generate_latest(harness.registry).decode()
    for line in (
        'penstock_num_requests_running{model_name="tiny"} 1.0',
        'penstock_kv_cache_usage_perc{model_name="tiny"} 0.25',
        'penstock_generation_tokens_total{model_name="tiny"} 3.0',
        'penstock_prompt_tokens_total{model_name="tiny"} 2.0',
        'penstock_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'penstock_inter_token_latency_seconds_count{model_name="tiny"} 2.0',
        'penstock_e2e_request_latency_seconds_bucket{le="0.5",model_name="tiny"} 1.0',
        'penstock_request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'penstock_iteration_tokens_total_sum{model_name="tiny"} 3.0',
    ):
        assert line in text, line


async def test_a_session_that_waits_gets_heartbeats_and_one_that_has_frames_gets_none() -> None:
    harness = Harness()
    session = harness.session("a")
    harness.hub.beat()
    assert [(message.heartbeat, message.step) for message in session.buffer._messages] == [(True, 7)]
    harness.hub.beat()
    assert len(session.buffer._messages) == 1, "a reader that is behind has signs of life enough"
    session.buffer._messages.clear()
    harness.step(("a", {"deltas": (delta(0, 5),)}))
    session.buffer._messages.clear()
    harness.hub.beat()
    assert not session.buffer._messages, "it was told something since the last beat"
    harness.hub.beat()
    assert len(session.buffer._messages) == 1


async def test_a_session_without_requests_gets_no_heartbeat() -> None:
    harness = Harness()
    session, _ = harness.session(), harness.stream("b")
    harness.hub.beat()
    assert not session.buffer._messages


async def test_the_hub_is_busy_while_requests_are_live() -> None:
    harness = Harness()
    waiting = asyncio.ensure_future(harness.hub.wait_busy())
    await asyncio.sleep(0)
    assert not waiting.done()
    harness.session("a")
    await waiting
    harness.step(("a", {"finished": finished()}))
    again = asyncio.ensure_future(harness.hub.wait_busy())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_an_abort_that_comes_as_a_preparation_ends_is_kept() -> None:
    hub = Harness().hub

    async def work() -> str:
        # It runs after the work is done and before its waiter is awake.
        asyncio.get_running_loop().call_soon(hub.abort, ["a"])
        return "made"

    with pytest.raises(Cancelled) as aborted:
        await hub.prepare("a", work())
    assert aborted.value.reason == "ABORTED"
    assert not hub.live_ids()

    async def more() -> str:
        return "made"

    assert await hub.prepare("a", more()) == "made"


async def test_after_a_drain_readers_that_ask_elsewhere_are_told_and_others_get_what_there_is() -> None:
    harness = Harness()
    harness.session("moved")
    harness.stream("cut")
    items = ItemBatch(harness.hub, [maker_of("item").request], "items", 1, {})
    scored = asyncio.ensure_future(items.run())
    held = asyncio.Event()
    prepared = asyncio.ensure_future(harness.hub.prepare("prepared", held.wait()))
    await asyncio.sleep(0)
    assert harness.hub.end_drained() == 4
    reasons = {name: None if error is None else error.reason for name, error in harness.engine.errors.items()}
    assert reasons == {"moved": "DRAIN_GRACE_OVER", "item": "DRAIN_GRACE_OVER", "cut": None}
    with pytest.raises(Unavailable) as told:
        await prepared
    assert told.value.reason == "DRAIN_GRACE_OVER"
    harness.hub.deliver(7, [RequestOutput(items._requests[0], None, (), finished(harness.engine.errors["item"]))])
    with pytest.raises(Unavailable):
        await scored


class AdapterCounts:
    """Requests of each adapter."""

    def __init__(self) -> None:
        self.counts: dict[Adapter, int] = {}

    def acquire(self, adapter: Adapter) -> None:
        self.counts[adapter] = self.counts.get(adapter, 0) + 1

    def release(self, adapter: Adapter) -> None:
        self.counts[adapter] -= 1


async def test_a_request_holds_its_adapter_until_its_last_word() -> None:
    harness, counts = Harness(), AdapterCounts()
    harness.hub = OutputHub(harness.engine, harness.metrics, lambda: 7, counts)
    adapter = Adapter("a", Path(), "1", 8, (), 0, None)
    makers = [maker_of(name) for name in ("ended", "stranded", "refused")]
    for maker in makers:
        maker.request.adapter = adapter
    session = harness.session()
    for maker in makers[:2]:
        harness.hub.submit(maker.request, session)
        session.add(maker)
        harness.requests[maker.request.request_id] = maker.request
    harness.engine.refusal = Unavailable("no", reason="DRAINING")
    with pytest.raises(Unavailable):
        harness.hub.submit(makers[2].request, session)
    assert counts.counts == {adapter: 2}
    harness.step(("ended", {"finished": finished()}))
    assert counts.counts == {adapter: 1}
    harness.hub.fail_all(Internal("broken", reason="ENGINE_FAILED"))
    assert counts.counts == {adapter: 0}


async def test_steps_that_wait_for_a_sessions_reader_share_a_message() -> None:
    harness = Harness()
    session = harness.session("a")
    harness.step(("a", {"started": StartedOutput(0), "deltas": (delta(0, 5),)}))
    for seq in range(1, 6):
        harness.step(("a", {"deltas": (delta(seq, 5 + seq),)}))
    session.refuse(9, "b", 1, InvalidArgument("config", "is wrong"))
    session.buffer.close()
    (message,) = await drained(session.buffer)
    assert [event.WhichOneof("event") for event in message.events] == ["started", *["delta"] * 6, "error"]
    assert [event.delta.seq for event in message.events[1:-1]] == list(range(6))
    assert (message.step, message.heartbeat) == (9, False)


async def test_a_heartbeat_that_waits_goes_with_the_step_behind_it() -> None:
    harness = Harness()
    session = harness.session("a")
    session.beat(6)
    session.beat(6)
    harness.step(("a", {"started": StartedOutput(0)}))
    session.buffer.close()
    (message,) = await drained(session.buffer)
    assert (len(message.events), message.step, message.heartbeat) == (1, 7, False)


async def test_a_shared_message_is_not_larger_than_its_bound() -> None:
    harness = Harness()
    session = harness.session("a", bound=100)
    for seq in range(90):
        harness.step(("a", {"deltas": (delta(seq, *range(100_000, 101_000)),)}))
    session.buffer.close()
    messages = await drained(session.buffer)
    # Each step is some 3 KiB.
    assert all(32 << 10 < message.ByteSize() <= 64 << 10 for message in messages[:-1])
    assert [event.delta.seq for message in messages for event in message.events] == list(range(90))


async def test_a_requests_own_stream_has_one_message_for_each_event() -> None:
    harness = Harness()
    stream = harness.stream("a")
    harness.step(("a", {"started": StartedOutput(0), "deltas": (delta(0, 5),)}))
    harness.step(("a", {"deltas": (delta(1, 6),)}))
    stream.buffer.close()
    kinds = [message.WhichOneof("event") for message in await drained(stream.buffer)]
    assert kinds == ["started", "delta", "delta"]
