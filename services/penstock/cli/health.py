"""Command `penstock health`, for people and for container health checks."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.cli.console import say
from penstock.common.config import ChannelConfig
from penstock.common.errors import StartupError
from penstock.serving.channels import open_channel

SERVING = health_pb2.HealthCheckResponse.SERVING


def run_health(addresses: list[str], timeout: float, tls_ca: str | None) -> int:
    """Print one line per address; return 0 when all are SERVING, else 1. Raises StartupError for an unreadable file."""
    try:
        return asyncio.run(_check_all(addresses, timeout, ChannelConfig(channel_tls_ca=tls_ca)))
    except StartupError as error:
        # Services have a longer name for this flag.
        raise StartupError(error.message.replace("--channel-tls-ca", "--tls-ca"), flag="--tls-ca") from error


async def _check_all(addresses: list[str], timeout: float, config: ChannelConfig) -> int:
    answers = await asyncio.gather(*(_check(address, timeout, config) for address in addresses))
    for address, answer in zip(addresses, answers, strict=True):
        say(f"{address} {answer}")
    return 0 if all(answer == "SERVING" for answer in answers) else 1


async def _check(address: str, timeout: float, config: ChannelConfig) -> str:
    """Return the status's name, or the reason for which there is none."""
    async with open_channel(address, config) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return "no answer" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
