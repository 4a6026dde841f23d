"""Health (grpc.health.v1) and server reflection (v1 and v1alpha), added to every server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
OVERALL = ""
_V1_FILE = "grpc_reflection/v1/reflection.proto"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Servicer of grpc.health.v1. A watcher that does not read holds up neither `set` nor other watchers.

    grpcio's own holds a lock during every write, and lacks List.
    """

    def __init__(self) -> None:
        self._status: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        # Set, and replaced, at every change.
        self._changed = asyncio.Event()

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the status of a service; its watchers get it."""
        if self._status.get(service) != status:
            self._status[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        answer = health_pb2.HealthListResponse()
        for name, status in self._status.items():
            answer.statuses[name].status = status
        return answer

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                last = status
                await context.write(health_pb2.HealthCheckResponse(status=status))
            else:
                await changed.wait()


class Health:
    """Health of each service and of the process as a whole (the empty name). NOT_SERVING until told otherwise.

    SERVING needs both: the process is up (`set_up`) and the service wants calls (`set_wanted`, e.g. not drained by an
    operator). The services that control it need only the first.
    """

    def __init__(self, services: tuple[str, ...], control: tuple[str, ...] = ()) -> None:
        self._control = frozenset(control)
        self._names = (OVERALL, *services)
        self._servicer = HealthServicer()
        self._up = False
        self._wanted = True

    async def add_to(self, server: grpc.aio.Server) -> None:
        """Register the health service; everything is NOT_SERVING."""
        self._publish()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    @property
    def is_serving(self) -> bool:
        return self._up and self._wanted

    async def set_up(self, up: bool) -> None:
        """Set that the process is warm (True), or that it is starting, stopping or broken (False)."""
        self._up = up
        self._publish()

    async def set_wanted(self, wanted: bool) -> None:
        """Set that the service takes calls (True) or was drained (False). No effect while the process is not up."""
        self._wanted = wanted
        self._publish()

    def _publish(self) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            is_serving = self._up if name in self._control else self.is_serving
            self._servicer.set(name, status.SERVING if is_serving else status.NOT_SERVING)


def add_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serve reflection under both names. grpcio has only v1alpha; v1's messages are the same on the wire."""
    _describe_v1()
    servicer: Any = ReflectionServicer((*services, HEALTH_SERVICE, *REFLECTION_SERVICES))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in REFLECTION_SERVICES
    ]
    server.add_generic_rpc_handlers(tuple(handlers))


def _describe_v1() -> None:
    """Put grpc.reflection.v1 itself into the descriptor pool, so that clients can look it up like any service."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
