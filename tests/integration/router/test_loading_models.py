"""Backends that are empty, load and unload: the router notices each change, at the same process, without a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.router import backend, collect, generate, running_router
from penstock.router.backends.discovery import resolve
from penstock.v1 import common_pb2, text_pb2
from penstock_client import AsyncClient, InvalidArgument


async def models(router: Any) -> dict[str, text_pb2.Model]:
    answer = await router.stub.ListModels(text_pb2.ListModelsRequest())
    return {model.name: model for model in answer.models}


async def test_a_backend_joins_and_leaves_with_its_model(tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path / "first")
    async with generation_service(None, kernels="torch") as empty, backend() as other:
        address = empty.running.address
        addresses = (other.address, address)
        async with (
            running_router(other, backend=addresses, resolver=resolve) as router,
            AsyncClient(router.server.address) as client,
        ):
            await router.until("backend_up", 1.0, backend=other.address)
            assert router.metric("backend_up", backend=address) == 0
            assert "first" not in await models(router)

            # By the router: it forwards the files, and the progress back.
            stages: list[str] = []
            await client.load_model(folder, backend=address, on_progress=lambda one: stages.append(one.stage))
            assert {"receive", "load_weights"} <= set(stages)
            await router.until("backend_up", 1.0, backend=address)
            assert (await models(router))["first"].state == common_pb2.MODEL_STATE_READY
            answer = await collect(router.stub.Generate(generate(model="first")))
            assert answer.finished.usage.completion_tokens > 0

            gone = await client.unload_model(grace=60.0, backend=address)
            assert gone.name == "first"
            await router.until("backend_up", 0.0, backend=address)
            assert (await models(router))["first"].backends == 0

            # Another name: the one before is nobody's any more.
            async with AsyncClient(address) as direct:
                await direct.load_model(folder, name="second")
            await router.until("backend_up", 1.0, backend=address)
            assert set(await models(router)) & {"first", "second"} == {"second"}
            assert (await collect(router.stub.Generate(generate(model="second")))).finished
            with pytest.raises(grpc.RpcError) as unknown:
                await collect(router.stub.Generate(generate(model="first")))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

            # A model of another tokenizer does not belong here; the next one does.
            await client.unload_model(backend=address)
            strange = text_checkpoint(tmp_path / "strange")
            (strange / "tokenizer.json").write_text((strange / "tokenizer.json").read_text() + "\n")
            async with AsyncClient(address) as direct:
                await direct.load_model(strange)
                await router.until("backend_up", 0.0, backend=address)
                assert (await direct.model_info()).state == common_pb2.MODEL_STATE_READY
                await direct.unload_model(grace=0.0)
            await client.load_model(folder, backend=address)
            # One call after the other: none meets the moment in which the router connects anew.
            for _ in range(3):
                await client.unload_model(grace=0.0, backend=address)
                await client.load_model(folder, backend=address)
            await router.until("backend_up", 1.0, backend=address)


async def test_a_stream_that_is_cut_short_is_refused_by_the_router_too(tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path / "first")
    async with generation_service(None) as empty, backend() as other:
        addresses = (other.address, empty.running.address)
        async with (
            running_router(other, backend=addresses, resolver=resolve) as router,
            AsyncClient(router.server.address) as client,
        ):
            await router.until("backend_up", 1.0, backend=other.address)
            (folder / "model.safetensors").write_bytes(b"no header at all")
            with pytest.raises(InvalidArgument) as refused:
                await client.load_model(folder, backend=empty.running.address)
            assert refused.value.reason == "MODEL_REFUSED"
