"""Command `penstock health`, for people and for container health checks."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.cli.client.silence import silence_of, with_own_flags
from penstock.cli.console import say
from penstock.common.config import ChannelConfig
from penstock.common.credentials import check_channel_files
from penstock.common.errors import StartupError
from penstock.common.ports import ROUTER_PORT
from penstock.common.proxies import through_proxy
from penstock.serving.channels import open_channel

SERVING = health_pb2.HealthCheckResponse.SERVING


def run_health(
    addresses: list[str], timeout: float, tls: bool, tls_ca: str | None, client_cert: str | None, client_key: str | None
) -> int:
    """Print one line per address; return 0 when all are SERVING, else 1. Raises StartupError for an unreadable file."""
    config = ChannelConfig(
        channel_tls=tls, channel_tls_ca=tls_ca, channel_tls_cert=client_cert, channel_tls_key=client_key
    )
    try:
        check_channel_files(config)
        return asyncio.run(_check_all(addresses, timeout, config))
    except StartupError as error:
        raise with_own_flags(error) from error


async def _check_all(addresses: list[str], timeout: float, config: ChannelConfig) -> int:
    answers = await asyncio.gather(*(_check(address, timeout, config) for address in addresses))
    for address, answer in zip(addresses, answers, strict=True):
        say(f"{address} {answer}")
    return 0 if all(answer == "SERVING" for answer in answers) else 1


async def _check(address: str, timeout: float, config: ChannelConfig) -> str:
    """Return the status's name, or the reason why there is none."""
    async with open_channel(address, config) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return str(error.code().name)
        else:
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    cause = await asyncio.to_thread(
        silence_of,
        address,
        tls=bool(config.channel_tls or config.channel_tls_ca or config.channel_tls_cert),
        tls_ca=config.channel_tls_ca,
        client_cert=config.channel_tls_cert,
        client_key=config.channel_tls_key,
        name=None,
    )
    if cause.flag == "--address":
        return "no answer" + (f": {through}" if (through := through_proxy(address)) else "")
    return cause.message.removeprefix(f"{address} ")


commands = typer.Typer(add_completion=False)


@commands.command()
def health(
    addresses: Annotated[
        list[str] | None, typer.Argument(metavar="[ADDRESS]...", help="host:port of each server; the router's default.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 3.0,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS; trust the system's CAs.")] = False,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS; trust this CA (PEM).")] = None,
    client_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate for mutual TLS (PEM).")] = None,
    client_key: Annotated[str | None, typer.Option(metavar="FILE", help="Key of --client-cert (PEM).")] = None,
) -> None:
    """Ask servers whether they are ready; exit code 0 when all are SERVING. Needs no bearer token.

    Inside a service's container no address is needed: it asks by PENSTOCK_HEALTH_SOCKET, whatever the TLS settings.
    """
    raise typer.Exit(
        run_health(addresses or [f"127.0.0.1:{ROUTER_PORT}"], timeout, tls, tls_ca, client_cert, client_key)
    )
