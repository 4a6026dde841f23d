"""WriteWeights over gRPC: all of an update or none, refused by name, with both clients, by token, through a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from factories.engine.step_gate import held_after
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from factories.servers.router import running_router
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    from_rpc_error,
)
from penstock.v1 import common_pb2, model_pb2
from penstock_client import AsyncClient
from penstock_client import Client as SyncClient
from penstock_client._channel import END, AsyncExchange
from prometheus_client import generate_latest
from safetensors.torch import load_file

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPEN: dict[str, Any] = {"kernels": "torch", "write_weights": True}
NORM = "model.norm.weight"
HIDDEN = 48
# Tokens of a request that runs while weights are made.
LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    return {seed: tiny_checkpoint(root / f"seed-{seed}", seed=seed) for seed in (0, 1)}


@pytest_asyncio.fixture(loop_scope="module")
async def service(folders: dict[int, Path]) -> AsyncIterator[Client]:
    async with generation_service(folders[0], **OPEN) as client:
        yield client


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def greedy(tokens: int = 10) -> Any:
    return request(config={"max_new_tokens": tokens}, stop={"ignore_eos": True})


async def ids(service: Client) -> list[int]:
    outcome = await service.generate(greedy())
    assert outcome.error is None
    return outcome.ids()


async def info(service: Client) -> model_pb2.GetModelInfoResponse:
    response: model_pb2.GetModelInfoResponse = await service.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    return response


def started(*tensors: model_pb2.WeightTensor, model: str = "") -> model_pb2.WriteWeightsRequest:
    return model_pb2.WriteWeightsRequest(start=model_pb2.WriteWeightsStart(model=model, tensors=tensors))


def norm(shape: tuple[int, ...] = (HIDDEN,), dtype: Any = common_pb2.D_TYPE_FLOAT32) -> model_pb2.WeightTensor:
    return model_pb2.WeightTensor(name=NORM, dtype=dtype, shape=shape)


def chunk(data: bytes) -> model_pb2.WriteWeightsRequest:
    return model_pb2.WriteWeightsRequest(chunk=data)


async def refusal(service: Client, *messages: model_pb2.WriteWeightsRequest, **call: Any) -> PenstockError:
    """Send messages, each after the answer to the one before, and the end; return what the call ends with."""
    exchange = AsyncExchange(service.model.WriteWeights, **call)
    try:
        for message in messages:
            await exchange.send(message)
            answer = await exchange.read()
            assert answer is not END
            assert answer.HasField("received_bytes")
        await exchange.end()
        await exchange.read()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it was not refused")


async def test_the_model_goes_on_with_new_weights_by_both_clients(folders: dict[int, Path]) -> None:
    async with generation_service(folders[1], kernels="torch") as fresh:
        after = await ids(fresh)
        assert not (await info(fresh)).can_write_weights
    async with generation_service(folders[0], **OPEN) as service:
        before, address = await ids(service), service.running.address
        assert before != after
        facts = await info(service)
        assert (facts.can_write_weights, facts.weights_version) == (True, 0)
        async with AsyncClient(address) as client:
            written = await client.write_weights(stored(folders[1]))
        assert (written.weights_version, written.num_bytes) == (1, sum(t.nbytes for t in stored(folders[1]).values()))
        assert (await info(service)).weights_version == 1
        outcome = await service.generate(greedy())
        assert outcome.ids() == after
        assert (outcome.finished.first_weights_version, outcome.finished.last_weights_version) == (1, 1)

        def back() -> int:
            # numpy's arrays do as well.
            arrays = {name: tensor.numpy() for name, tensor in stored(folders[0]).items()}
            with SyncClient(address) as client:
                return client.write_weights(arrays, model=facts.model).weights_version

        assert await asyncio.to_thread(back) == 2
        assert await ids(service) == before
        metrics = generate_latest(service.running.registry).decode()
        assert "penstock_weights_version 2.0" in metrics
        assert f"penstock_weights_written_bytes_total {2.0 * written.num_bytes}" in metrics
        assert "penstock_weights_pause_seconds_count 2.0" in metrics


async def test_a_live_stream_keeps_its_blocks_and_is_told_both_versions(
    folders: dict[int, Path], service: Client
) -> None:
    async with AsyncClient(service.running.address) as client:
        with held_after(5) as gate:
            live = asyncio.create_task(service.generate(greedy(LONG)))
            await service.until(lambda load: load.kv_blocks_used > 0)
            writing = asyncio.create_task(client.write_weights(stored(folders[1])))
            used = (await service.load()).kv_blocks_used
            while not writing.done():
                gate.allow(1)
                await asyncio.wait([writing], timeout=0.1)
            written = await writing
            assert (await service.load()).kv_blocks_used >= used
            gate.open()
            outcome = await live
        assert outcome.error is None
        assert len(outcome.ids()) == LONG
        first, last = outcome.finished.first_weights_version, outcome.finished.last_weights_version
        assert (first, last) == (written.weights_version - 1, written.weights_version)
        await client.write_weights(stored(folders[0]))


async def test_a_stream_that_a_pause_holds_goes_on_with_weights_that_are_written_meanwhile(
    folders: dict[int, Path], service: Client
) -> None:
    async with AsyncClient(service.running.address) as client:
        with held_after(5) as gate:
            live = asyncio.create_task(service.generate(greedy(LONG)))
            await service.until(lambda load: load.kv_blocks_used > 0 and gate.is_spent)
            pausing = asyncio.create_task(client.pause())
            await service.until(lambda load: load.draining)
            gate.open()
            assert (await pausing).live_requests == 1
        held = await service.load()
        for seed in (0, 1):
            written = await client.write_weights(stored(folders[seed]))
        load = await service.load()
        assert (load.kv_blocks_used, load.step) == (held.kv_blocks_used, held.step)
        await client.resume()
        outcome = await live
        assert len(outcome.ids()) == LONG
        first, last = outcome.finished.first_weights_version, outcome.finished.last_weights_version
        assert (first, last) == (written.weights_version - 2, written.weights_version)
        await client.write_weights(stored(folders[0]))


async def test_a_wrong_message_is_refused_by_its_field_and_changes_nothing(service: Client) -> None:
    before, version = await ids(service), (await info(service)).weights_version
    data = torch.ones(HIDDEN).numpy().tobytes()
    bias = model_pb2.WeightTensor(name="model.layers.0.self_attn.q_proj.bias", dtype=1, shape=(HIDDEN,))
    cases: list[tuple[list[model_pb2.WriteWeightsRequest], str, str]] = [
        ([], "start", "must come first"),
        ([chunk(data)], "start", "must come first"),
        ([started()], "tensors", "at least one"),
        ([started(*[norm()] * 1000)], "tensors", "at most"),
        ([started(norm(), norm())], "tensors[1].name", "twice"),
        ([started(model_pb2.WeightTensor(name="x", dtype=1))], "tensors[0].name", "a tensor of this model"),
        ([started(norm((HIDDEN, 1)))], "tensors[0].shape", f"of {NORM} must be [{HIDDEN}]"),
        ([started(norm(dtype=common_pb2.D_TYPE_INT64))], "tensors[0].dtype", f"of {NORM} must be one of float32"),
        ([started(bias)], "tensors", "they run as one product"),
        ([started(norm()), started(norm())], "chunk", "must follow start"),
        ([started(norm()), chunk(b"")], "chunk", "must have bytes"),
        ([started(norm()), chunk(data[:7])], "chunk", f"7 of {len(data)} bytes"),
        ([started(norm()), chunk(data + b"x")], "chunk", f"after {len(data)} bytes"),
        ([started(norm()), chunk(data), chunk(b"x")], "chunk", f"after {len(data)} bytes"),
        ([started(norm()), chunk(b"\xff" * len(data))], "tensors", f"{NORM} has a number that is not finite"),
    ]
    for messages, field, words in cases:
        error = await refusal(service, *messages)
        assert isinstance(error, InvalidArgument), error
        assert error.field == field, (field, error)
        assert words in error.message, error
    error = await refusal(service, started(norm(), model="other"))
    assert error.reason == "MODEL_NOT_FOUND"
    assert await ids(service) == before
    assert (await info(service)).weights_version == version


async def test_bytes_may_end_anywhere_and_one_update_runs_at_a_time(folders: dict[int, Path], service: Client) -> None:
    before, tensors = await ids(service), stored(folders[1])
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    names = [
        model_pb2.WeightTensor(name=name, dtype=common_pb2.D_TYPE_FLOAT32, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    step = len(data) // 7 + 3
    exchange = service.model.WriteWeights()
    await exchange.write(started(*names))
    assert (await exchange.read()).received_bytes == 0
    error = await refusal(service, started(norm()))
    assert (type(error), error.reason) == (FailedPrecondition, "BUSY")
    for begin in range(0, len(data), step):
        assert await ids(service) == before
        await exchange.write(chunk(data[begin : begin + step]))
        assert (await exchange.read()).received_bytes == min(begin + step, len(data))
    await exchange.done_writing()
    assert (await exchange.read()).written.num_bytes == len(data)
    assert await ids(service) != before
    # A caller that leaves takes its bytes along.
    version = (await info(service)).weights_version
    left = service.model.WriteWeights()
    await left.write(started(*names))
    await left.read()
    await left.write(chunk(data[:step]))
    left.cancel()
    async with AsyncClient(service.running.address) as client:
        while True:
            try:
                written = await client.write_weights(stored(folders[0]))
                break
            except FailedPrecondition as error:
                # The service has not heard yet that the other caller left.
                if error.reason != "BUSY":
                    raise
    assert written.weights_version == version + 1
    assert await ids(service) == before


async def test_it_is_off_bounded_and_for_those_with_the_token(folders: dict[int, Path], tmp_path: Path) -> None:
    async with generation_service(folders[0], kernels="torch") as service:
        error = await refusal(service, started(norm()))
        assert (type(error), error.reason) == (FailedPrecondition, "WRITE_WEIGHTS_OFF")
        assert "--write-weights" in error.message
    async with generation_service(folders[0], **{**OPEN, "model_access": "off"}) as service:
        assert (await refusal(service, started(norm()))).reason == "MODEL_ACCESS_OFF"
    tokens = tmp_path / "tokens"
    tokens.write_text("trainer\n")
    settings = {**OPEN, "max_write_weights_memory": "100", "model_access_token_file": str(tokens)}
    async with generation_service(folders[0], **settings) as service:
        assert isinstance(await refusal(service, started(norm())), Unauthenticated)
        error = await refusal(service, started(norm()), metadata=(("authorization", "Bearer trainer"),))
        assert (type(error), error.reason) == (ResourceExhausted, "WEIGHTS_TOO_LARGE")
        assert "--max-write-weights-memory" in error.message


async def test_a_router_writes_to_its_backend_and_tells_the_versions(tmp_path: Path) -> None:
    async with (
        generation_service(text_checkpoint(tmp_path), **OPEN) as service,
        running_router(backend=(service.running.address,)) as router,
        AsyncClient(router.server.address) as client,
    ):
        with pytest.raises(InvalidArgument, match=NORM):
            await client.write_weights({NORM: torch.ones(3)})
        written = await client.write_weights({NORM: torch.ones(HIDDEN)})
        assert written.weights_version == 1
        answer = await client.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)
        assert (answer.finished.first_weights_version, answer.finished.last_weights_version) == (1, 1)
