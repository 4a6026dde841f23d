"""Health and reflection of every server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import grpc
import pytest
from factories.servers.tiny_service import NAME, NOT_SERVING, SERVING, TinyService, health_of, tiny
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.config import ServerConfig
from penstock.serving import health
from penstock.serving.channels import open_channel
from penstock.serving.server import RunningServer

BUF = Path(sys.executable).parent / "buf"
PROTOS = Path(__file__).resolve().parents[3] / "protos"


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


async def test_a_process_makes_the_description_of_reflection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    health.add_reflection(grpc.aio.server(), ())
    monkeypatch.setattr("penstock.serving.health.text_format.Parse", lambda *_: pytest.fail("it is made again"))
    health.add_reflection(grpc.aio.server(), ())


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
