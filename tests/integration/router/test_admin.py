"""Admin and model calls at the router: forwarded to the backend that is named, for those who have the tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers import stack
from factories.servers.emitting_backend import count_up
from factories.servers.router import Router, backend, collect, generate, running_router
from penstock.common.errors import StartupError, from_rpc_error
from penstock.v1 import admin_pb2, admin_pb2_grpc, config_pb2, model_pb2, model_pb2_grpc

TO_LOAD = admin_pb2.WatchLoadRequest()


@contextlib.asynccontextmanager
async def stubs(router: Router) -> AsyncIterator[tuple[Any, Any]]:
    """Stubs of the admin and the model service at the router."""
    async with grpc.aio.insecure_channel(router.server.address) as channel:
        yield admin_pb2_grpc.GenerationAdminServiceStub(channel), model_pb2_grpc.ModelServiceStub(channel)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def to(address: str) -> tuple[tuple[str, str], ...]:
    return (("penstock-backend", address),)


async def failure(call: Any) -> Any:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_the_only_backend_needs_no_name_and_a_stream_is_forwarded() -> None:
    async with backend() as one, running_router(one) as router, stubs(router) as (admin, model):
        info = await model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert info.tokenizer_fingerprint == one.fingerprint
        reports = admin.WatchLoad(TO_LOAD)
        assert (await reports.read()).load.max_queued_requests == one.load().max_queued_requests
        reports.cancel()


async def test_of_several_backends_one_must_be_named_and_gets_the_call() -> None:
    async with (
        backend(model="a") as one,
        backend(model="b") as two,
        running_router(one, two) as router,
        stubs(router) as (_, model),
    ):
        request = model_pb2.GetModelInfoRequest()
        for each in (one, two):
            assert (await model.GetModelInfo(request, metadata=to(each.address))).model == each.model
        unnamed = await failure(model.GetModelInfo(request))
        assert (unnamed.code, unnamed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "metadata penstock-backend")
        assert one.address in unnamed.message
        assert (await failure(model.GetModelInfo(request, metadata=to("127.0.0.1:1")))).reason == "BACKEND_NOT_FOUND"


async def test_a_backend_of_another_tokenizer_is_reached_every_time() -> None:
    """It is dialled and left again and again: calls must neither meet a gap nor end with such a connection."""
    async with (
        backend() as one,
        backend(model="b", fingerprint="other") as two,
        running_router(one, two) as router,
        stubs(router) as (admin, model),
    ):
        reports = admin.WatchLoad(TO_LOAD, metadata=to(two.address))
        assert await reports.read()
        for _ in range(40):
            assert (await model.GetModelInfo(model_pb2.GetModelInfoRequest(), metadata=to(two.address))).model == "b"
        two.extra_load = 7
        while (await reports.read()).load.waiting_requests != 7:
            pass
        reports.cancel()


async def test_a_backends_own_error_comes_back() -> None:
    async with backend() as one, running_router(one) as router, stubs(router) as (admin, _):
        assert (await failure(admin.WarmUp(admin_pb2.WarmUpRequest()))).code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_call_whose_backend_is_given_up_says_so(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    async with (
        backend(allowance=1, script=count_up(100)) as one,
        running_router(one, stall_timeout_seconds=0.4) as router,
        stubs(router) as (admin, _),
    ):
        # The session of this stream is silent from its second token on.
        stream = router.stub.Generate(generate())
        reports = admin.WatchLoad(TO_LOAD)

        async def read_on() -> None:
            while True:
                await reports.read()

        error = await failure(read_on())
        stream.cancel()
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "BACKEND_LOST")


async def test_admin_tokens_are_for_admin_calls_only_and_the_others_are_not(tmp_path: Path) -> None:
    usual, admins = tmp_path / "usual", tmp_path / "admins"
    usual.write_text("caller\n")
    admins.write_text("operator\n")
    files = {"auth_token_file": str(usual), "admin_token_file": str(admins)}
    async with backend() as one, running_router(one, **files) as router, stubs(router) as (_, model):
        request = model_pb2.GetModelInfoRequest()
        for metadata in (None, bearer("caller"), bearer("nobody")):
            assert (await failure(model.GetModelInfo(request, metadata=metadata))).reason == "UNAUTHENTICATED"
        assert (await model.GetModelInfo(request, metadata=bearer("operator"))).model
        assert (await collect(router.stub.Generate(generate(), metadata=bearer("caller")))).finished
        with pytest.raises(grpc.aio.AioRpcError, match="bearer token"):
            await collect(router.stub.Generate(generate(), metadata=bearer("operator")))


async def test_without_a_file_the_usual_token_is_needed_on_loopback(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_text("caller\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(usual)) as router,
        stubs(router) as (_, model),
    ):
        request = model_pb2.GetModelInfoRequest()
        assert (await failure(model.GetModelInfo(request))).reason == "UNAUTHENTICATED"
        assert (await model.GetModelInfo(request, metadata=bearer("caller"))).model


async def test_without_a_file_a_public_address_refuses_and_names_the_flag(tmp_path: Path) -> None:
    usual, public = tmp_path / "usual", {"host": "0.0.0.0", "insecure_bind": True}
    usual.write_text("caller\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(usual), **public) as router,
        stubs(router) as (admin, model),
    ):
        for call in (
            model.GetModelInfo(model_pb2.GetModelInfoRequest(), metadata=bearer("caller")),
            admin.Drain(admin_pb2.DrainRequest(), metadata=bearer("caller")),
            admin.WatchLoad(TO_LOAD, metadata=bearer("caller")).read(),
        ):
            refused = await failure(call)
            assert refused.reason == "NO_ADMIN_TOKENS"
            assert "--admin-token-file" in refused.message
        assert (await collect(router.stub.Generate(generate(), metadata=bearer("caller")))).finished


async def test_a_file_that_cannot_be_read_is_said_at_the_start() -> None:
    with pytest.raises(StartupError) as caught:
        async with running_router(backend=("127.0.0.1:1",), admin_token_file="/no/such/file"):
            pass
    assert caught.value.flag == "--admin-token-file"


async def test_a_real_backend_is_looked_into_drained_and_resumed() -> None:
    memory = ("--kv-memory", "16MiB", "--host-kv-memory", "8MiB")
    process = stack.start("generation", *memory, "--threads", "1")
    try:
        stack.wait_serving(process.address, process)
        async with running_router(backend=(process.address,)) as router, stubs(router) as (admin, _):
            load = (await admin.GetLoad(admin_pb2.GetLoadRequest())).load
            stats = await admin.GetPoolStats(admin_pb2.GetPoolStatsRequest())
            assert load.kv_blocks_total == stats.load.kv_blocks_total > 0
            state = (await admin.DumpState(admin_pb2.DumpStateRequest())).state
            assert state.pool.total == load.kv_blocks_total
            await admin.ClearCache(admin_pb2.ClearCacheRequest())
            assert state.host_pool.total == load.host_blocks_total > 0
            pairs = [admin_pb2.BlockPair(source=0, destination=1)]
            assert (await admin.CopyBlocks(admin_pb2.CopyBlocksRequest(pairs=pairs))).blocks == 1
            swaps = [admin_pb2.BlockSwap(kind=1, source=1, destination=0)]
            assert (await admin.SwapBlocks(admin_pb2.SwapBlocksRequest(swaps=swaps))).blocks == 1
            swaps[0].source = load.kv_blocks_total
            refused = await failure(admin.SwapBlocks(admin_pb2.SwapBlocksRequest(swaps=swaps)))
            assert refused.field == "swaps[0].source"
            assert (await admin.WarmUp(admin_pb2.WarmUpRequest())).seconds > 0
            await admin.Drain(admin_pb2.DrainRequest())
            await router.until("backend_up", 0, backend=process.address)
            await admin.Resume(admin_pb2.ResumeRequest())
            await router.until("backend_up", 1, backend=process.address)
            assert (await admin.Pause(admin_pb2.PauseRequest(max_seconds=60))).max_seconds == 60
            await router.until("backend_up", 0, backend=process.address)
            await admin.Resume(admin_pb2.ResumeRequest())
            await router.until("backend_up", 1, backend=process.address)
            few = config_pb2.GenerationConfig(max_new_tokens=8)
            assert (await collect(router.stub.Generate(generate(config=few)))).finished
    finally:
        process.kill()
