"""A real server around a tiny service: health, reflection, errors, limits, authentication, metrics, life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.channels import open_channel
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import InvalidArgument, ResourceExhausted, StartupError, from_rpc_error
from penstock.common.request_context import REQUEST_ID_KEY
from penstock.common.server import RunningServer, serve_in_process
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "penstock.v1.TokenizerService"
BUF = Path(sys.executable).parent / "buf"
PROTOS = Path(__file__).resolve().parents[2] / "protos"


class Servicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Behaves as the `model` field says."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.closed = asyncio.Event()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        if request.model == "wait":
            self.entered.set()
            await self.release.wait()
        if request.model == "refuse":
            raise InvalidArgument("model", "must not be 'refuse'")
        if request.model == "break":
            raise ValueError("a secret prompt")
        return pb.GetTokenizerResponse(model=request.model, vocab_size=7)

    async def DecodeStream(
        self, request_iterator: AsyncIterator[pb.DecodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.DecodeStreamResponse]:
        try:
            async for request in request_iterator:
                if request.items and request.items[0].stream_id == 13:
                    raise ResourceExhausted("slow reader", reason="SLOW_READER", retry_after_seconds=0.25)
                yield pb.DecodeStreamResponse(detokenize_seconds=len(request.items))
        finally:
            self.closed.set()


class TinyService:
    """The least that Service asks for."""

    name = "tokenizer"
    grpc_services = (NAME,)

    def __init__(self) -> None:
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.servicer = Servicer()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.set_serving: Callable[[bool], Awaitable[None]] | None = None

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        self.set_serving = set_serving

    async def start(self) -> None:
        await self.may_start.wait()

    def register(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self.servicer, server)

    async def drain(self) -> None:
        self.servicer.release.set()

    async def close(self) -> None:
        pass

    def status_lines(self) -> list[str]:
        return []


@contextlib.asynccontextmanager
async def tiny(
    config: ServerConfig | None = None, channel: ChannelConfig | None = None
) -> AsyncIterator[tuple[TinyService, RunningServer, Any]]:
    """(service, running server, stub) on a free port."""
    service = TinyService()
    async with (
        serve_in_process(service, config or ServerConfig()) as running,
        open_channel(running.address, channel or ChannelConfig()) as opened,
    ):
        yield service, running, tokenizer_pb2_grpc.TokenizerServiceStub(opened)


async def health_of(address: str, service: str = "", config: ChannelConfig | None = None) -> int:
    async with open_channel(address, config or ChannelConfig()) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status


async def test_health_is_not_serving_until_the_service_has_started() -> None:
    service = TinyService()
    service.may_start.clear()
    running = RunningServer(service, ServerConfig(metrics_port=0))
    await running.listen()
    try:
        starting = asyncio.create_task(running.start())
        assert await health_of(running.address) == NOT_SERVING
        assert await health_of(running.address, NAME) == NOT_SERVING
        service.may_start.set()
        await starting
        assert await health_of(running.address) == SERVING
        assert await health_of(running.address, NAME) == SERVING
    finally:
        await running.stop(drain=False)


async def test_watch_follows_a_drain_and_a_resume() -> None:
    async with tiny() as (service, running, _), open_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        await service.set_serving(False)
        assert (await watch.read()).status == NOT_SERVING
        await service.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_an_unknown_service_has_no_health() -> None:
    async with tiny() as (_, running, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(running.address, "penstock.v1.NoSuchService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_calls_through_either_reflection_protocol(protocol: str) -> None:
    async with tiny() as (_, running, _):
        url = f"http://{running.address}"
        base = ["curl", "--http2-prior-knowledge", "--protocol", "grpc", "--reflect-protocol", protocol]
        assert NAME in await buf(*base, "--list-services", url)
        answer = await buf(*base, "--data", '{"model": "m"}', f"{url}/{NAME}/GetTokenizer")
        assert re.search(r'"vocabSize":\s*7', answer)


async def buf(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        str(BUF), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=PROTOS
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_reflection_describes_itself_and_health() -> None:
    async with tiny() as (_, running, _):
        url = f"http://{running.address}"
        services = await buf(
            "curl",
            "--http2-prior-knowledge",
            "--protocol",
            "grpc",
            "--reflect-protocol",
            "grpc-v1",
            "--list-services",
            url,
        )
        assert services.split() == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            NAME,
        ]


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
        await asyncio.wait_for(service.servicer.closed.wait(), 5)


async def test_a_cancelled_stream_runs_the_handlers_cleanup_at_once() -> None:
    async with tiny() as (service, _, stub):
        call = stub.DecodeStream()
        await call.write(pb.DecodeStreamRequest())
        await call.read()
        call.cancel()
        await asyncio.wait_for(service.servicer.closed.wait(), 5)


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


async def test_a_message_over_the_limit_is_refused() -> None:
    async with tiny(ServerConfig(max_message_bytes=1024)) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model="x" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_pings_on_a_quiet_stream_are_welcome_unless_the_operator_limits_them() -> None:
    """grpc's default (five minutes between pings) ends long quiet streams with GOAWAY too_many_pings."""
    pinging = ChannelConfig(keepalive_seconds=0.1)
    strict_server = ServerConfig(min_ping_interval_seconds=300)
    async with tiny(None, pinging) as (service, _, stub), tiny(strict_server, pinging) as (_, _, strict):
        welcome = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
            await asyncio.wait_for(strict.GetTokenizer(pb.GetTokenizerRequest(model="wait")), 30)
        service.servicer.release.set()
        assert (await welcome).vocab_size == 7


async def test_a_peer_that_stops_answering_is_noticed_by_keepalive() -> None:
    config = ChannelConfig(keepalive_seconds=0.1, keepalive_timeout_seconds=0.2)
    async with (
        tiny() as (_, running, _),
        relay(running.address) as (through, freeze),
        open_channel(through, config) as channel,
    ):
        call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).DecodeStream()
        await call.write(pb.DecodeStreamRequest())
        await call.read()
        freeze.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.asynccontextmanager
async def relay(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """(address, freeze): passes bytes on in both directions until `freeze` is set, then keeps silent."""
    freeze = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    host, port = address.rsplit(":", 1)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not freeze.is_set():
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        tasks.update({asyncio.create_task(pump(reader, to_writer)), asyncio.create_task(pump(to_reader, writer))})

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", freeze
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def test_without_a_good_token_only_health_answers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first\nsecond\n")
    (tmp_path / "mine").write_text("second\n")
    (tmp_path / "wrong").write_text("third\n")
    async with tiny(ServerConfig(auth_token_file=str(tmp_path / "tokens"))) as (_, running, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await health_of(running.address) == SERVING
        for name, allowed in (("mine", True), ("wrong", False)):
            config = ChannelConfig(channel_token_file=str(tmp_path / name))
            async with open_channel(running.address, config) as channel:
                call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest())
                code = await call.code()
                assert (code is grpc.StatusCode.OK) is allowed


async def test_a_rotated_token_counts_from_the_next_call(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\n")
    channel = ChannelConfig(channel_token_file=str(tmp_path / "mine"))
    (tmp_path / "mine").write_text("new\n")
    async with tiny(ServerConfig(auth_token_file=str(tokens)), channel) as (_, _, stub):
        assert await stub.GetTokenizer(pb.GetTokenizerRequest()).code() is grpc.StatusCode.UNAUTHENTICATED
        (tmp_path / "next").write_text("new\n")
        (tmp_path / "next").replace(tokens)
        assert await stub.GetTokenizer(pb.GetTokenizerRequest()).code() is grpc.StatusCode.OK


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
        await asyncio.wait_for(running.stop(), 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting
