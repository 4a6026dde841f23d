"""The model opened through the router: forwarded on both transports, for those who have the tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.graph_driver import GraphDriver, call_of
from factories.servers.router import backend, running_router, until
from penstock.common.errors import from_rpc_error
from penstock.v1 import graphs_pb2, model_pb2, model_pb2_grpc

PROMPT = [5, 6, 7, 8]
LAYERS = 2


@contextlib.asynccontextmanager
async def model_stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield model_pb2_grpc.ModelServiceStub(channel)


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_graphs_tensors_and_draws_of_a_backend(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    folder = text_checkpoint(tmp_path)
    async with (
        generation_service(folder, transport=transport) as service,
        running_router(backend=(service.running.address,)) as router,
        model_stub(router.server.address) as stub,
    ):
        assert len((await stub.GetModelInfo(model_pb2.GetModelInfoRequest())).forward_graphs) == 9
        made = await stub.AllocateTensors(
            graphs_pb2.AllocateTensorsRequest(tensors=[graphs_pb2.TensorSpec(dtype=1, shape=[4])])
        )
        lease, handle = made.lease_id, made.handles[0]
        data = np.arange(4, dtype="<f4").tobytes()
        await stub.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=handle, data=data))
        read = await stub.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=handle))
        assert read.data == data
        async with GraphDriver(service.model, LAYERS) as direct, GraphDriver(stub, LAYERS) as driver:
            wanted = await direct.by_hand(PROMPT, 6)
            assert await driver.by_hand(PROMPT, 6) == wanted
            assert await driver.in_pool(PROMPT, 6, "x", lease_id=lease) == wanted
            await driver.call.done_writing()
            assert await driver.call.read() is grpc.aio.EOF
            assert await driver.call.code() is grpc.StatusCode.OK
        async with GraphDriver(stub, LAYERS) as driver:
            error = await driver.refused(call_of("nothing", {}))
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "GRAPH_NOT_FOUND")
        row = graphs_pb2.SampleRow(prompt_token_ids=[1])
        assert (await failure(stub.Sample(graphs_pb2.SampleRequest(rows=[row])))).field == "logits"
        freed = await stub.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease, all=True))
        assert (freed.tensors, freed.sequences) == (1, 1)


async def test_a_caller_that_leaves_leaves_nothing_at_the_backend(tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path)
    async with (
        generation_service(folder) as service,
        running_router(backend=(service.running.address,)) as router,
        model_stub(router.server.address) as stub,
    ):
        driver = GraphDriver(stub, LAYERS)
        await driver.run("block_0", {0: np.zeros((1, 4, 48), "<f4")}, sequence="x")
        running: Any = service.running.service
        access = running._lifecycle.core.access
        assert access.figures().used_blocks == 1
        driver.call.cancel()
        await until(lambda: not any(access.figures()._replace(blocks=0)))


async def test_its_own_tokens_hold_and_no_others(tmp_path: Path) -> None:
    files = {}
    for name in ("auth", "admin", "model"):
        path = tmp_path / name
        path.write_text(f"{name}\n")
        files[f"{name}_token_file"] = str(path)
    async with (
        backend() as one,
        running_router(one, **files) as router,
        model_stub(router.server.address) as stub,
    ):
        allocate, facts = graphs_pb2.AllocateTensorsRequest(), model_pb2.GetModelInfoRequest()
        for token in ("auth", "admin", "nobody"):
            metadata = (("authorization", f"Bearer {token}"),)
            assert (await failure(stub.AllocateTensors(allocate, metadata=metadata))).reason == "UNAUTHENTICATED"
            driver = GraphDriver(stub, LAYERS, authorization=f"Bearer {token}")
            assert (await driver.refused()).reason == "UNAUTHENTICATED"
        metadata = (("authorization", "Bearer model"),)
        # The scripted backend has no such call.
        assert (await failure(stub.AllocateTensors(allocate, metadata=metadata))).reason == "UNIMPLEMENTED"
        # Who runs the graphs has to know them: one client has one token.
        for token in ("model", "admin"):
            metadata = (("authorization", f"Bearer {token}"),)
            assert (await stub.GetModelInfo(facts, metadata=metadata)).model == one.model
        for token in ("auth", "nobody"):
            metadata = (("authorization", f"Bearer {token}"),)
            assert (await failure(stub.GetModelInfo(facts, metadata=metadata))).reason == "UNAUTHENTICATED"
        assert (await failure(stub.GetModelInfo(facts))).reason == "UNAUTHENTICATED"


async def test_facts_go_to_those_who_may_open_the_model(tmp_path: Path) -> None:
    """On loopback to callers of text, too; on another address to nobody else, unless there are operators' tokens."""
    for name in ("auth", "model"):
        (tmp_path / name).write_text(f"{name}\n")
    files = {f"{name}_token_file": str(tmp_path / name) for name in ("auth", "model")}
    facts, public = model_pb2.GetModelInfoRequest(), {"host": "0.0.0.0", "insecure_bind": True}
    for settings, known in (({}, {"auth", "model"}), (public, {"model"})):
        async with (
            backend() as one,
            running_router(one, **files, **settings) as router,
            model_stub(router.server.address) as stub,
        ):
            for token in ("auth", "model", "nobody"):
                call = stub.GetModelInfo(facts, metadata=(("authorization", f"Bearer {token}"),))
                if token in known:
                    assert (await call).model == one.model
                else:
                    assert (await failure(call)).reason == "UNAUTHENTICATED"


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_backend_that_is_away_is_told_whatever_the_call(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    async with backend() as one, running_router(one) as router, model_stub(router.server.address) as stub:
        await one.stop()
        await router.until("backend_up", 0.0, backend=one.address)
        for call in (
            stub.UnloadModel(model_pb2.UnloadModelRequest()),
            stub.FreeTensors(graphs_pb2.FreeTensorsRequest()),
            # Its caller has said all that it has to say.
            stub.LoadModel(iter(())).read(),
            stub.Forward(iter(())).read(),
        ):
            error = await failure(call)
            assert error.code is grpc.StatusCode.UNAVAILABLE, error
        await one.start()


async def test_a_public_router_refuses_without_them_though_it_has_admin_tokens(tmp_path: Path) -> None:
    admins = tmp_path / "admins"
    admins.write_text("operator\n")
    public = {"host": "0.0.0.0", "insecure_bind": True, "admin_token_file": str(admins)}
    async with (
        backend() as one,
        running_router(one, **public) as router,
        model_stub(router.server.address) as stub,
    ):
        metadata = (("authorization", "Bearer operator"),)
        error = await failure(stub.AllocateTensors(graphs_pb2.AllocateTensorsRequest(), metadata=metadata))
        assert error.reason == "MODEL_ACCESS_OFF"
        assert "--model-token-file" in error.message
        driver = GraphDriver(stub, LAYERS, authorization="Bearer operator")
        assert (await driver.refused()).reason == "MODEL_ACCESS_OFF"
