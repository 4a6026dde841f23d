"""OTLP/HTTP collector of traces: a server on a free port that keeps the spans which processes send it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it arrived; ids are hex digits, `parent` is empty for a root, `error` is the message of a status."""

    service: str
    trace_id: str
    span_id: str
    parent: str
    name: str
    kind: int
    begin: int
    end: int
    attributes: dict[str, Any] = field(hash=False)
    error: str


@dataclass
class Collector:
    """Collected spans. `until` waits for some of them."""

    endpoint: str
    _spans: list[CollectedSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, body: bytes) -> None:
        """Take one export."""
        spans = [
            _span(dict(map(_pair, resource.resource.attributes)), span)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self._spans += spans
            self._changed.notify_all()

    def until(self, condition: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """Block until `condition` holds for all spans so far; return them by their begin."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: condition(self._spans), PATIENCE_SECONDS)
            assert arrived, [(span.service, span.name) for span in self._spans]
            return sorted(self._spans, key=lambda span: span.begin)

    @property
    def spans(self) -> list[CollectedSpan]:
        """All spans so far."""
        with self._changed:
            return list(self._spans)


@contextmanager
def trace_collector() -> Iterator[Collector]:
    """Run a collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_traces = self.path == "/v1/traces"
            if is_traces:
                collector.add(body)
            self.send_response(200 if is_traces else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield collector
        server.shutdown()


def _pair(attribute: Any) -> tuple[str, Any]:
    return attribute.key, _value(attribute.value)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _span(resource: dict[str, Any], span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=resource["service.name"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=dict(map(_pair, span.attributes)),
        error=span.status.message,
    )
