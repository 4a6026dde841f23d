"""JobsService on a port of its own beside HTTP's: `--jobs-port`."""

from __future__ import annotations

import asyncio

import grpc

from penstock.common.config import ServerConfig
from penstock.gateway.callers import Callers
from penstock.gateway.config import GatewayConfig
from penstock.gateway.jobs import Jobs
from penstock.gateway.jobs_servicer import JobsServicer
from penstock.gateway.places import Places
from penstock.v1 import jobs_pb2_grpc

SERVICE_NAME = "penstock.v1.JobsService"


class JobsPort:
    """JobsService as a service of its own server. Implements serving.server.Service and ChecksCallers.

    What it serves belongs to the gateway, which opens it before and closes it afterwards.
    """

    name = "jobs"
    grpc_services: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(self, config: GatewayConfig, jobs: Jobs, callers: Callers, places: Places) -> None:
        """Make it inside the event loop that will serve it."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._callers = callers
        self._servicer = JobsServicer(config, jobs, callers, places)

    def is_known(self, authorization: str | bytes | None) -> bool:
        """Reflection shows nothing but the protos, so it asks for no token."""
        return self._callers.is_known(authorization.encode() if isinstance(authorization, str) else authorization)

    def register(self, server: grpc.aio.Server) -> None:
        jobs_pb2_grpc.add_JobsServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Do nothing: the gateway has opened the store."""

    async def drain(self) -> None:
        """Do nothing: the gateway's places have ended the calls."""

    async def close(self) -> None:
        """Do nothing: the gateway closes the store."""

    def status_lines(self) -> list[str]:
        """Return no lines: the gateway has its own."""
        return []


def port_config(config: GatewayConfig) -> ServerConfig:
    """Return the configuration of the port: the gateway's address, certificate and bounds."""
    return ServerConfig(
        host=config.host,
        port=config.jobs_port,
        metrics_port=-1,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_client_ca=config.tls_client_ca,
        insecure_bind=config.insecure_bind,
        max_message_bytes=config.max_message_bytes,
        keepalive_seconds=config.keepalive_seconds,
        keepalive_timeout_seconds=config.keepalive_timeout_seconds,
        max_concurrent_rpcs=config.max_requests,
        request_seconds=config.body_seconds,
        handshake_seconds=config.header_seconds,
        anonymous_connections=config.anonymous_connections,
        anonymous_cpu_share=config.anonymous_cpu_share,
        request_buffer_bytes=config.max_bodies_bytes,
    )
