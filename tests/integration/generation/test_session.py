"""Session: many requests on one stream, one message per engine step."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.servers.generation import PATIENCE_SECONDS, Client, generation_service, request, text_checkpoint
from factories.servers.sessions import Session
from google.rpc import status_pb2
from penstock.common.errors import InvalidArgument, from_status
from penstock.generation.rpc.generation import GenerationServicer
from penstock.v1 import common_pb2, config_pb2, generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder = text_checkpoint(tmp_path_factory.mktemp("model"))
    async with generation_service(folder) as running:
        yield running


class Turn:
    """A call whose commands are all there at once, as a caller's are that come in one packet."""

    def __init__(self, *commands: generation_pb2.SessionRequest) -> None:
        self._commands = commands
        self.events: list[generation_pb2.SessionEvent] = []

    async def __aiter__(self) -> AsyncIterator[generation_pb2.SessionRequest]:
        for command in self._commands:
            yield command

    async def write(self, message: generation_pb2.SessionResponse) -> None:
        self.events += message.events

    def time_remaining(self) -> float | None:
        return None


def long(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(config={"max_new_tokens": 4000}, **fields)


async def test_requests_share_one_message_per_engine_step(client: Client) -> None:
    session = Session(client)
    with held_after(0):
        for number in range(4):
            await session.submit(request((number + 5, 6), request_id=f"r{number}", attempt_epoch=number))
        await client.until(lambda load: load.waiting_requests == 4)
    await session.rest()
    steps = [message.step for message in session.messages]
    assert steps == sorted(set(steps))
    assert max(len({event.request_id for event in message.events}) for message in session.messages) == 4
    for number in range(4):
        events = session.events(f"r{number}")
        assert session.kinds(f"r{number}") == ["started", *["delta"] * 8, "finished"]
        assert {event.attempt_epoch for event in events} == {number}
        assert [event.delta.seq for event in events[1:-1]] == list(range(8))
        alone = await client.generate(request((number + 5, 6)))
        assert session.ids(f"r{number}") == alone.ids()


async def test_plain_tokens_of_a_request_with_a_handle_are_rows(client: Client) -> None:
    session = Session(client)
    fields: dict[str, Any] = {"config": {"max_new_tokens": 8}}
    with held_after(0):
        await session.submit(request((5, 6), request_id="rows", **fields), handle=7)
        await session.submit(request((6, 6), request_id="others", **fields), handle=2**40)
        await session.submit(request((5, 6), request_id="deltas", **fields))
        await client.until(lambda load: load.waiting_requests == 3)
    await session.rest()
    # What says more than a token is an event of its own: the first delta comes with Started, the last with the result.
    assert session.kinds("rows") == ["started", "delta", "delta", "finished"]
    first, last = (event.delta for event in session.events("rows")[1:3])
    told = [(first.seq, *first.token_ids), *session.rows(7), (last.seq, *last.token_ids)]
    assert told == list(enumerate(session.ids("deltas")))
    assert len(session.rows(2**40)) == 6


async def test_deltas_that_are_more_than_a_token_are_no_rows(client: Client) -> None:
    session = Session(client)
    cases = {
        "logprobs": request((5, 6), output={"top_logprobs": 1}, request_id="logprobs"),
        "interval": request((5, 6), output={"stream_interval": 3}, request_id="interval"),
        "several": request(
            (5, 6), config={"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 8}, request_id="several"
        ),
    }
    for handle, message in enumerate(cases.values(), 1):
        await session.submit(message, handle=handle)
    await session.rest()
    assert session.rows(1) == session.rows(2) == []
    # Only the first of several sequences has rows.
    told = [event.delta for event in session.events("several") if event.HasField("delta")]
    assert sum(len(delta.token_ids) for delta in told) + len(session.rows(3)) == 16


async def test_a_refused_request_is_an_error_event_and_the_session_goes_on(client: Client) -> None:
    session = Session(client)
    await session.submit(request(config={"top_p": 2}, request_id="bad", attempt_epoch=1))
    await session.submit(request(request_id="good"))
    await session.rest()
    assert session.kinds("bad") == ["error"]
    (event,) = session.events("bad")
    error = from_status(status_pb2.Status.FromString(event.error.status_details))
    assert isinstance(error, InvalidArgument)
    assert (error.field, event.attempt_epoch, event.error.code) == ("config.top_p", 1, 3)
    assert session.kinds("good")[-1] == "finished"
    assert await session.call.code() is grpc.StatusCode.OK


async def test_refusals_are_counted_by_their_reason(client: Client) -> None:
    """At once, by the compiler of constraints, on a session and alone; what is accepted is none of them."""
    name = "penstock_requests_refused_total"

    def refused() -> Counter[str]:
        samples = [one for family in client.running.registry.collect() for one in family.samples if one.name == name]
        return Counter({one.labels["reason"]: int(one.value) for one in samples})

    before, session = refused(), Session(client)
    await session.submit(request(config={"top_p": 2}, request_id="bad"))
    await session.submit(request(request_id="worse", constraint=config_pb2.Constraint(regex="(")))
    with held_after(1):
        await session.submit(long(request_id="good"))
        while not session.kinds("good"):
            await session.next()
        assert (await client.generate(request(request_id="good"))).error is not None
    assert (await client.generate(request(config={"top_p": 2}))).error is not None
    while not session.kinds("worse"):
        await session.next()
    assert refused() - before == {"INVALID_FIELD": 3, "DUPLICATE_REQUEST_ID": 1}
    session.call.cancel()
    await client.until_idle()
    assert refused() - before == {"INVALID_FIELD": 3, "DUPLICATE_REQUEST_ID": 1}


async def test_a_session_needs_request_ids_and_commands(client: Client) -> None:
    session = Session(client)
    await session.submit(request())
    await session.call.write(generation_pb2.SessionRequest())
    await session.rest()
    fields = [
        from_status(status_pb2.Status.FromString(event.error.status_details)).field for event in session.events("")
    ]
    assert fields == ["request_id", "command"]


async def test_commands_of_one_message_are_carried_out_in_their_order(client: Client) -> None:
    session = Session(client)
    commands = [generation_pb2.SessionRequest(submit=request(request_id=f"r{number}")) for number in range(3)]
    commands.append(generation_pb2.SessionRequest(submit=long(request_id="gone")))
    commands.append(generation_pb2.SessionRequest(abort=generation_pb2.SessionAbort(request_id="gone")))
    lists = generation_pb2.SessionCommands(commands=commands)
    # No list is in a list, and a bad command does not keep the others.
    lists.commands.append(generation_pb2.SessionRequest(commands=generation_pb2.SessionCommands()))
    lists.commands.append(generation_pb2.SessionRequest(submit=request(request_id="last")))
    await session.call.write(generation_pb2.SessionRequest(commands=lists))
    await session.rest()
    for name in ("r0", "r1", "r2", "last"):
        assert session.events(name)[-1].HasField("finished")
    (bad,) = session.events("")
    assert from_status(status_pb2.Status.FromString(bad.error.status_details)).field == "command"
    last = session.events("gone")[-1]
    if last.HasField("finished"):
        (end,) = last.finished.sequences
        assert end.finish_reason == common_pb2.FINISH_REASON_ABORTED
        assert end.token_count < 4000
    else:
        assert last.error.code == grpc.StatusCode.ABORTED.value[0]


async def test_an_abort_ends_that_request_only_and_frees_its_blocks(client: Client) -> None:
    session = Session(client)
    with held_after(0):
        await session.submit(long(request_id="gone", attempt_epoch=2))
        await session.submit(long(request_id="stays"))
        await client.until(lambda load: load.waiting_requests == 2)
    while not session.kinds("gone"):
        await session.next()
    await session.abort("gone", attempt_epoch=1)
    await session.abort("gone", attempt_epoch=2)
    await session.abort("never-there")
    while "finished" not in session.kinds("gone"):
        await session.next()
    (end,) = session.events("gone")[-1].finished.sequences
    assert end.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert end.token_count == len(session.ids("gone")) < 4000
    assert (await client.until(lambda load: load.running_requests == 1)).waiting_requests == 0
    session.call.cancel()
    await client.until_idle()


async def test_a_requests_own_timeout_ends_it_and_the_session_goes_on(client: Client) -> None:
    session = Session(client)
    await session.submit(long(request_id="late", timeout_seconds=0.2))
    await session.submit(request(request_id="good"))
    await session.rest()
    assert session.kinds("late")[-1] == "error"
    assert session.events("late")[-1].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert session.kinds("good")[-1] == "finished"
    await client.until_idle()


async def test_a_session_that_goes_away_takes_its_requests_along(client: Client) -> None:
    session = Session(client)
    for number in range(3):
        await session.submit(long(request_id=f"r{number}"))
    await session.next()
    session.call.cancel()
    await client.until_idle()


async def test_half_closing_lets_live_requests_finish(client: Client) -> None:
    session = Session(client)
    await session.submit(request(request_id="r"))
    await session.rest()
    assert session.kinds("r")[-1] == "finished"


async def test_an_id_that_is_live_anywhere_is_refused(client: Client) -> None:
    session, other = Session(client), Session(client)
    with held_after(1):
        await session.submit(long(request_id="same"))
        await session.next()
        await other.submit(request(request_id="same"))
        await other.rest()
        assert other.kinds("same") == ["error"]
        alone = await client.generate(request(request_id="same"))
    assert isinstance(alone.error, InvalidArgument)
    assert alone.error.field == "request_id"
    await session.next()
    assert set(session.kinds("same")) == {"started", "delta"}
    session.call.cancel()
    await client.until_idle()
    assert (await client.generate(request(request_id="same"))).error is None


async def test_many_requests_over_two_sessions_each_end_once(client: Client) -> None:
    async def run(name: str) -> Session:
        session = Session(client)
        for number in range(20):
            message = request((number + 1, 9), request_id=f"{name}{number}", config={"max_new_tokens": 1 + number % 7})
            await session.submit(message)
        await session.rest()
        return session

    for name, session in zip("ab", await asyncio.gather(run("a"), run("b")), strict=True):
        ends: dict[str, int] = defaultdict(int)
        for message in session.messages:
            for event in message.events:
                ends[event.request_id] += event.HasField("finished")
        assert ends == {f"{name}{number}": 1 for number in range(20)}
        assert all(len(session.ids(f"{name}{number}")) == 1 + number % 7 for number in range(20))
    await client.until_idle()


def made_later(kind: str) -> generation_pb2.GenerateRequest:
    """A request of which something is made before it is submitted."""
    if kind == "constraint":
        return long(request_id="late", constraint=config_pb2.Constraint(regex="[ab]{3000}"))
    rows = common_pb2.Tensor(dtype=common_pb2.D_TYPE_FLOAT32, shape=[2, 48], data=bytes(4 * 2 * 48))
    return long(prompt=(), request_id="late", inputs_embeds=rows)


@pytest.mark.parametrize("kind", ["embeds", "constraint"])
async def test_an_abort_or_a_second_request_right_behind_one_that_is_prepared_finds_it(
    client: Client, kind: str
) -> None:
    service: Any = client.running.service
    servicer = GenerationServicer(service._lifecycle, service._metrics)
    abort = generation_pb2.SessionAbort(request_id="late")
    turn = Turn(
        generation_pb2.SessionRequest(submit=made_later(kind)),
        generation_pb2.SessionRequest(submit=request(request_id="late", attempt_epoch=1)),
        generation_pb2.SessionRequest(abort=abort),
    )
    await asyncio.wait_for(servicer.Session(turn, turn), PATIENCE_SECONDS)
    details = [event.error.status_details for event in turn.events if event.HasField("error")]
    errors = [from_status(status_pb2.Status.FromString(one)) for one in details]
    assert [error.reason for error in errors] == ["DUPLICATE_REQUEST_ID", "ABORTED"]
    assert (await client.load()).waiting_requests == 0
