"""A real server around a tiny service: errors, limits, metrics, life cycle."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import grpc
import pytest
from factories.servers.tiny_service import NAME, SERVING, TinyService, health_of, tiny
from penstock.common.config import ServerConfig
from penstock.common.errors import (
    InvalidArgument,
    ResourceExhausted,
    StartupError,
    Unavailable,
    from_rpc_error,
    trailing_metadata,
)
from penstock.common.ports import NEXT_METRICS_PORTS
from penstock.common.request_context import REQUEST_ID_KEY
from penstock.serving.channels import open_channel
from penstock.serving.server import RunningServer
from penstock.v1 import tokenizer_pb2 as pb


async def test_a_penstock_error_arrives_with_its_field() -> None:
    async with tiny() as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model="refuse"))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.reason) == ("model", "INVALID_FIELD")


async def test_an_unexpected_error_is_internal_and_keeps_its_text_to_itself() -> None:
    async with tiny() as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model="break"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert from_rpc_error(caught.value).reason == "INTERNAL"
        assert "secret" not in str(caught.value.details())


async def test_a_streaming_handler_raises_like_any_other_and_pushback_is_sent() -> None:
    async with tiny() as (service, _, stub):
        call = stub.DecodeStream()
        await call.write(pb.DecodeStreamRequest())
        assert (await call.read()).detokenize_seconds == 0
        await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=13)]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).retry_after_seconds == 0.25
        assert ("grpc-retry-pushback-ms", "250") in tuple(await call.trailing_metadata())
        await service.servicer.closed.wait()


def test_what_waiting_cannot_help_is_not_to_be_tried_again() -> None:
    trailers = dict(trailing_metadata(ResourceExhausted("too large", reason="RESPONSE_TOO_LARGE")))
    assert trailers["grpc-retry-pushback-ms"] == "-1"
    assert "grpc-retry-pushback-ms" not in dict(trailing_metadata(Unavailable("not yet", reason="STARTING")))


async def test_a_cancelled_stream_runs_the_handlers_cleanup_at_once() -> None:
    async with tiny() as (service, _, stub):
        call = stub.DecodeStream()
        await call.write(pb.DecodeStreamRequest())
        await call.read()
        call.cancel()
        await service.servicer.closed.wait()


@pytest.mark.parametrize("path", ["GetTokenizer", "DecodeStream"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(path: str) -> None:
    async with tiny() as (_, running, _), open_channel(running.address) as channel:
        if path == "GetTokenizer":
            answer = channel.unary_unary(f"/{NAME}/{path}")(b"\xff\xff\xff")
        else:
            call = channel.stream_stream(f"/{NAME}/{path}")()
            await call.write(b"\xff\xff\xff")
            answer = call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.reason == "MALFORMED_MESSAGE"


async def test_the_request_id_of_the_caller_is_kept_and_a_bad_one_replaced() -> None:
    async with tiny() as (_, _, stub):
        for sent, kept in (("abc-1", True), ("no spaces please", False)):
            call = stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=((REQUEST_ID_KEY, sent),))
            await call
            answered = dict(await call.trailing_metadata())[REQUEST_ID_KEY]
            assert (answered == sent) is kept
            assert answered


async def test_over_the_bound_of_calls_is_refused_at_once_while_health_still_answers() -> None:
    async with tiny(ServerConfig(max_concurrent_rpcs=1)) as (service, running, stub):
        first = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        await service.servicer.entered.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert from_rpc_error(caught.value).reason == "TOO_MANY_RPCS"
        assert await health_of(running.address) == SERVING
        service.servicer.release.set()
        assert (await first).vocab_size == 7


async def test_calls_are_counted_by_method_and_code() -> None:
    async with tiny() as (_, running, stub):
        await stub.GetTokenizer(pb.GetTokenizerRequest())
        await stub.GetTokenizer(pb.GetTokenizerRequest(model="refuse")).code()
        await running.calls.wait_idle()
        url = f"http://{running.addresses.metrics}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    labels = f'grpc_method="GetTokenizer",grpc_service="{NAME}",grpc_type="unary"'
    assert f"grpc_server_started_total{{{labels}}} 2.0" in text
    assert f'grpc_server_handled_total{{grpc_code="OK",{labels}}} 1.0' in text
    assert f'grpc_server_handled_total{{grpc_code="INVALID_ARGUMENT",{labels}}} 1.0' in text
    assert f"grpc_server_handling_seconds_count{{{labels}}} 2.0" in text


async def test_a_method_that_does_not_exist_gets_no_label() -> None:
    async with tiny() as (_, running, _), open_channel(running.address) as channel:
        call = channel.unary_unary("/made.up.Service/Method")(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert running.registry.get_sample_value("grpc_server_started_total") is None


@pytest.mark.parametrize("which", ["port", "metrics_port"])
async def test_a_taken_port_is_a_startup_error_naming_the_flag(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        running = RunningServer(TinyService(), ServerConfig(**{which: taken.getsockname()[1]}))
        with pytest.raises(StartupError) as caught:
            await running.listen()
        await running.stop(drain=False)
    assert caught.value.flag == "--" + which.replace("_", "-")


class UsualMetrics(ServerConfig):
    """Configuration of a service with a usual port for metrics."""


async def test_metrics_move_on_from_a_usual_port_that_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(UsualMetrics, "usual_metrics_port", port)
        running = RunningServer(TinyService(), UsualMetrics(metrics_port=None))
        try:
            bound = await running.listen()
            assert bound.metrics is not None
            assert int(bound.metrics.rpartition(":")[2]) in NEXT_METRICS_PORTS
            given = RunningServer(TinyService(), UsualMetrics(metrics_port=port))
            with pytest.raises(StartupError, match="is taken"):
                await given.listen()
            await given.stop(drain=False)
        finally:
            await running.stop(drain=False)


async def test_metrics_take_the_usual_port_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(UsualMetrics, "usual_metrics_port", port)
    running = RunningServer(TinyService(), UsualMetrics(metrics_port=None))
    try:
        assert (await running.listen()).metrics == f"127.0.0.1:{port}"
    finally:
        await running.stop(drain=False)


async def test_stop_waits_for_the_drain() -> None:
    async with tiny() as (service, running, stub):
        waiting = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        await service.servicer.entered.wait()
        await running.stop()
        assert (await waiting).vocab_size == 7


async def test_stop_does_not_wait_longer_than_the_grace() -> None:
    async with tiny(ServerConfig(drain_grace_seconds=0.1)) as (service, running, stub):
        service.drain = asyncio.Event().wait
        waiting = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        await service.servicer.entered.wait()
        await running.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting
