"""inputs_embeds at the generation service: on a stream of their own and on a session, refused, bounded, let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from factories.engine.step_gate import held_after
from factories.models.checkpoints import reference_model
from factories.servers.generation import Client, generation_service, request, token_ids
from factories.servers.sessions import Session
from google.rpc import status_pb2
from penstock.common.errors import InvalidArgument, PenstockError, ResourceExhausted, from_status
from penstock.v1 import common_pb2, config_pb2, generation_pb2, model_pb2
from penstock_client._tensors import set_rows

pytestmark = pytest.mark.asyncio(loop_scope="module")
HIDDEN = 48
ROWS = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5)) * 0.2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder) as running:
        yield running
        await running.until_idle()


def embedded(rows: Any = ROWS, prompt: Any = (), **fields: Any) -> generation_pb2.GenerateRequest:
    message = request(prompt, **fields)
    set_rows(message.inputs_embeds, rows)
    return message


def hub(client: Client) -> Any:
    """The running service's own hub."""
    service: Any = client.running.service
    return service._lifecycle.core.hub


async def test_ids_are_those_of_transformers(client: Client, folder: Path) -> None:
    model: Any = reference_model(folder)
    expected = model.generate(inputs_embeds=ROWS[None], max_new_tokens=40, do_sample=False, eos_token_id=None)
    outcome = await client.generate(embedded(config={"max_new_tokens": 40}))
    assert outcome.error is None
    assert outcome.ids() == expected[0].tolist()
    assert outcome.started.prompt_tokens == outcome.finished.usage.prompt_tokens == len(ROWS)
    again = await client.generate(embedded(config={"max_new_tokens": 40}))
    assert again.ids() == outcome.ids()
    assert again.started.cached_tokens == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_narrow_numbers_are_what_they_are_in_float32(client: Client, dtype: torch.dtype) -> None:
    narrow = ROWS.to(dtype)
    assert embedded(narrow).inputs_embeds.ByteSize() < embedded(ROWS).inputs_embeds.ByteSize()
    wanted = await client.generate(embedded(narrow.float()))
    assert (await client.generate(embedded(narrow))).ids() == wanted.ids()


async def test_rows_before_ids_and_a_constraint(client: Client, folder: Path) -> None:
    table = reference_model(folder).get_input_embeddings()
    ids = list(range(50, 70))
    expected = await client.generate(request(ids))
    rows = table(torch.tensor(ids)).detach()
    outcome = await client.generate(embedded(rows[:7], ids[7:], inputs_embeds_before_ids=True))
    assert outcome.ids() == expected.ids()
    constraint = config_pb2.Constraint(regex="[ab]{4}")
    wanted = await client.generate(request(ids, constraint=constraint))
    assert (await client.generate(embedded(rows, constraint=constraint))).ids() == wanted.ids()


async def test_a_seed_and_resumed_ids_go_on_alike(client: Client) -> None:
    config = {"do_sample": True, "max_new_tokens": 12}
    whole = (await client.generate(embedded(config=config, seed=3))).ids()
    rest = await client.generate(embedded(config=config, seed=3, resumed_token_ids=[token_ids(*whole[:5])]))
    assert rest.ids() == whole[5:]


async def test_a_session_has_them_beside_others(client: Client) -> None:
    session = Session(client)
    alone = {"rows": (await client.generate(embedded())).ids(), "ids": (await client.generate(request())).ids()}
    with held_after(0):
        await session.submit(embedded(request_id="rows"), handle=1)
        await session.submit(request(request_id="ids"))
        await session.submit(embedded(-ROWS, request_id="gone"))
        bad = embedded(request_id="bad")
        bad.inputs_embeds.shape[0] = 3
        await session.submit(bad)
        await client.until(lambda load: load.waiting_requests + load.running_requests == 3)
        await session.abort("gone")
    await session.rest()
    assert session.ids("ids") == alone["ids"]
    deltas = [(event.delta.seq, token) for event in session.events("rows") for token in event.delta.token_ids]
    assert [token for _, token in sorted([*deltas, *session.rows(1)])] == alone["rows"]
    # Cut off, or at its own end where the abort came too late.
    assert session.events("gone")[-1].WhichOneof("event") in ("error", "finished")
    (refusal,) = session.events("bad")
    error = from_status(status_pb2.Status.FromString(refusal.error.status_details))
    assert isinstance(error, InvalidArgument)
    assert error.field == "inputs_embeds"


def changed(**fields: Any) -> generation_pb2.GenerateRequest:
    """A request whose tensor has other fields."""
    message = embedded()
    tensor = {"dtype": message.inputs_embeds.dtype, "shape": [20, HIDDEN], "data": message.inputs_embeds.data, **fields}
    message.inputs_embeds.CopyFrom(common_pb2.Tensor(**tensor))
    return message


def with_value(value: float) -> generation_pb2.GenerateRequest:
    rows = ROWS.clone()
    rows[13, 7] = value
    return embedded(rows)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("inputs_embeds", changed(dtype=common_pb2.D_TYPE_INT64)),
        ("inputs_embeds", changed(dtype=common_pb2.D_TYPE_FLOAT16)),
        ("inputs_embeds", changed(dtype=77)),
        ("inputs_embeds", changed(shape=[])),
        ("inputs_embeds", changed(shape=[20, HIDDEN + 1])),
        ("inputs_embeds", changed(shape=[HIDDEN, 20])),
        ("inputs_embeds", changed(shape=[1, 20, HIDDEN])),
        ("inputs_embeds", changed(shape=[-20, HIDDEN])),
        ("inputs_embeds", changed(shape=[2**62, HIDDEN])),
        ("inputs_embeds", changed(data=b"")),
        ("inputs_embeds", generation_pb2.GenerateRequest(inputs_embeds=common_pb2.Tensor())),
        ("inputs_embeds", with_value(float("nan"))),
        ("inputs_embeds", with_value(float("-inf"))),
        ("prompt", embedded(prompt=range(21))),
        ("inputs_embeds_before_ids", request(inputs_embeds_before_ids=True)),
        ("config.token_healing", embedded(config={"token_healing": True})),
        ("config.negative_prompt_ids", embedded(config={"guidance_scale": 2.0})),
        ("output.prompt_logprobs", embedded(output={"prompt_logprobs": 1})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_refused_by_its_field_and_leaves_nothing(
    client: Client, field: str, message: generation_pb2.GenerateRequest
) -> None:
    outcome = await client.generate(message)
    assert outcome.events == []
    assert isinstance(outcome.error, InvalidArgument)
    assert outcome.error.field == field
    load = await client.load()
    assert (load.running_requests, load.waiting_requests, load.kv_blocks_used) == (0, 0, 0)
    assert hub(client).live_ids() == []


async def test_logprobs_of_the_prompt_are_there_where_every_row_has_an_id(client: Client, folder: Path) -> None:
    ids = list(range(60, 70))
    rows = reference_model(folder).get_input_embeddings()(torch.tensor(ids)).detach()
    wanted = await client.generate(request(ids, output={"prompt_logprobs": 2}))
    outcome = await client.generate(embedded(rows, ids, output={"prompt_logprobs": 2}))
    assert [entry.chosen.token_id for entry in outcome.started.prompt_logprobs[1:]] == ids[1:]
    for one, other in zip(outcome.started.prompt_logprobs, wanted.started.prompt_logprobs, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)


async def test_the_service_tells_the_size_of_a_row(client: Client) -> None:
    info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert (info.hidden_size, info.dtype) == (HIDDEN, common_pb2.D_TYPE_FLOAT32)


async def test_embeddings_are_bounded_by_request_and_altogether_and_let_go_at_the_end(folder: Path) -> None:
    size = ROWS.numel() * 4
    async with generation_service(folder, max_inputs_embeds_bytes=size, max_live_embeds_bytes=2 * size + 100) as client:
        outcome = await client.generate(embedded(torch.cat([ROWS, ROWS[:1]])))
        assert isinstance(outcome.error, InvalidArgument)
        assert f"{size} bytes of --max-inputs-embeds-bytes" in str(outcome.error)
        with held_after(0):
            # The half of the bytes on the wire, and as many in the model's float32.
            held = [asyncio.create_task(client.generate(embedded(rows))) for rows in (ROWS, ROWS.half())]
            await client.until(lambda load: load.waiting_requests + load.running_requests == 2)
            # The load counts a request a moment before it has handed its rows over.
            await client.until(lambda _: hub(client).embeds_bytes == 2 * size)
            refused = await client.generate(embedded(ROWS[:1]))
            assert refused.error is not None
            assert_full(refused.error)
            # Others go on.
            other = asyncio.create_task(client.generate(request()))
            await client.until(lambda load: load.waiting_requests + load.running_requests == 3)
        assert [outcome.error for outcome in await asyncio.gather(*held, other)] == [None] * 3
        assert hub(client).embeds_bytes == 0
        assert (await client.generate(embedded())).error is None


def assert_full(error: PenstockError) -> None:
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "QUEUE_FULL"
    assert "--max-live-embeds-bytes" in str(error)
    assert error.retry_after_seconds


async def test_one_request_alone_is_never_too_much_for_all(folder: Path) -> None:
    async with generation_service(folder, max_live_embeds_bytes=0) as client:
        for refused in (with_value(float("nan")), embedded(constraint=config_pb2.Constraint(regex="("))):
            assert (await client.generate(embedded())).error is None
            # Nor is anything held for one that was refused on the way.
            assert isinstance((await client.generate(refused)).error, InvalidArgument)
        assert (await client.generate(embedded())).error is None


async def test_a_caller_that_leaves_frees_its_blocks_and_its_rows(client: Client) -> None:
    call = client.generation.Generate(embedded(config={"max_new_tokens": 4000}))
    assert (await call.read()).HasField("started")
    assert hub(client).embeds_bytes == ROWS.numel() * 4
    call.cancel()
    await client.until_idle()
    assert hub(client).embeds_bytes == 0
