"""Traces with OpenTelemetry: the process's tracer, and its exporters: OTLP over HTTP, or lines of OTLP/JSON in a file.

Imported only if --tracing-endpoint is given; opentelemetry-sdk is imported here and nowhere else.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import Tracer as OtelTracer

from penstock import __version__
from penstock.common.config import FILE_ENDPOINT, ProcessConfig
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.proxies import is_this_machine
from penstock.common.tracing import Attributes, Span, SpanKind, TraceContext

_TRACES_PATH = "/v1/traces"
_KINDS = {kind: OtelKind[kind.name] for kind in SpanKind}
_log = get_logger("penstock.tracing")


class Tracing:
    """Tracer of a process; see common.tracing.Tracer. A thread sends spans; those that do not fit are dropped."""

    def __init__(self, config: ProcessConfig, service: str, exporter: SpanExporter) -> None:
        """Make it. `service`: the process's role, for the default of service.name."""
        resource = Resource.create(
            {"service.name": config.tracing_service_name or f"penstock-{service}", "service.version": __version__}
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.tracing_sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        self._exporter, self._timeout_seconds = exporter, config.tracing_timeout_seconds
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=config.tracing_max_spans,
                max_export_batch_size=min(512, config.tracing_max_spans),
                schedule_delay_millis=config.tracing_export_seconds * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("penstock", __version__)

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        begin: float | None = None,
    ) -> Span:
        """Begin a span of `parent`'s trace, which decides on sampling, or of a new one."""
        if parent is None:
            return _Span(self._tracer, None, name, kind, attributes, begin)
        remote = SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
            trace_state=TraceState.from_header([parent.state]) if parent.state else None,
        )
        return _Span(self._tracer, NonRecordingSpan(remote), name, kind, attributes, begin)

    def close(self) -> None:
        """Send the remaining spans; return when that is done, or given up after --tracing-timeout-seconds. Blocks."""
        # The library's own limit is 30 s. Shutting down an exporter ends its retries and makes it refuse the rest.
        limit = threading.Timer(self._timeout_seconds, self._exporter.shutdown)
        limit.daemon = True
        limit.start()
        try:
            self._provider.shutdown()
        finally:
            limit.cancel()


class _Span(Span):
    __slots__ = ("_span", "_tracer", "context")

    def __init__(
        self,
        tracer: OtelTracer,
        parent: OtelSpan | None,
        name: str,
        kind: SpanKind,
        attributes: Attributes | None,
        begin: float | None,
    ) -> None:
        self._tracer = tracer
        # An empty context without a parent: else the library looks for one in its own variable.
        self._span = tracer.start_span(
            name,
            set_span_in_context(parent) if parent is not None else Context(),
            _KINDS[kind],
            dict(attributes) if attributes else None,
            start_time=_wall_ns(begin),
        )
        made = self._span.get_span_context()
        self.context = TraceContext(
            f"{made.trace_id:032x}",
            f"{made.span_id:016x}",
            made.trace_flags.sampled,
            made.trace_state.to_header() if made.trace_state else "",
        )

    def start(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        begin: float | None = None,
    ) -> Span:
        return _Span(self._tracer, self._span, name, kind, attributes, begin)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def fail(self, reason: str, *, is_fault: bool = True) -> None:
        self._span.set_attribute("error.type", reason)
        if is_fault:
            self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(_wall_ns(at))


def _wall_ns(at: float | None) -> int:
    """Return a time.monotonic() (None: now) as nanoseconds since 1970."""
    now = time.time_ns()
    return now if at is None else now - round((time.monotonic() - at) * 1e9)


class FileExporter(SpanExporter):
    """Exporter into a file: a line for each batch, an OTLP/JSON ExportTraceServiceRequest. The OpenTelemetry
    Collector's file exporter writes the same, and its receiver reads it. Processes may share the file."""

    def __init__(self, path: str, max_bytes: int) -> None:
        """Open the file to append. Beyond `max_bytes`, spans are dropped. Raises StartupError."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"cannot write traces: {error.strerror}", flag="--tracing-endpoint") from error
        self._max_bytes = max_bytes
        self._is_full = False
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line in one call, so lines of several processes do not mix."""
        line = json.dumps(to_otlp_json(spans), separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return SpanExportResult.FAILURE
            try:
                if os.fstat(self._file).st_size + len(line) > self._max_bytes:
                    if not self._is_full:
                        self._is_full = True
                        _log.warning("the file of traces is full, spans are dropped", max_bytes=self._max_bytes)
                    return SpanExportResult.FAILURE
                os.write(self._file, line)
            except OSError as error:
                _log.warning("traces cannot be written", errno=error.errno)
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def to_otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Return spans of one process in OTLP's JSON form: ids are hex digits, 64-bit numbers are text.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
    """
    if not spans:
        return {"resourceSpans": []}
    scopes = [{"scope": {"name": "penstock", "version": __version__}, "spans": [_span_json(span) for span in spans]}]
    resource = {"attributes": _attributes_json(spans[0].resource.attributes)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}


def _span_json(span: ReadableSpan) -> dict[str, Any]:
    made: dict[str, Any] = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes_json(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        made["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.context.trace_state:
        made["traceState"] = span.context.trace_state.to_header()
    if span.status.description:
        made["status"]["message"] = span.status.description
    return made


def _attributes_json(attributes: Any) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value_json(value)} for key, value in attributes.items()]


def _value_json(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_value_json(one) for one in value]}}
    return {"stringValue": str(value)}


def start_tracing(config: ProcessConfig, service: str) -> Tracing:
    """Make the tracer of a process of the role `service`. Raises StartupError naming --tracing-endpoint."""
    endpoint = config.tracing_endpoint or ""
    if endpoint.startswith(FILE_ENDPOINT):
        path = endpoint.removeprefix(FILE_ENDPOINT)
        return Tracing(config, service, FileExporter(path, config.tracing_file_bytes))
    # Imported here, since it brings an HTTP client, which a file does not need.
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(endpoint)
    url = urlunsplit(parts._replace(path=_TRACES_PATH)) if parts.path in ("", "/") else endpoint
    session = requests.Session()
    # A collector on this machine is not behind the environment's proxy.
    session.trust_env = not is_this_machine(parts.hostname or "")
    exporter = OTLPSpanExporter(endpoint=url, timeout=config.tracing_timeout_seconds, session=session)
    return Tracing(config, service, exporter)
