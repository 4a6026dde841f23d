"""Metrics of workers, asked over HTTP."""

from __future__ import annotations

import io
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from penstock.common.histograms import StepHistogram
from penstock.serving.metrics_endpoint import start_metrics_server
from penstock.serving.summed_metrics import SummedMetrics
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.exposition import generate_latest


class CutShort(BaseHTTPRequestHandler):
    """Dies within its answer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"things_total 5\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a busy machine is not one that does not answer."""
    monkeypatch.setattr("penstock.serving.summed_metrics.FETCH_SECONDS", 60.0)


@contextmanager
def worker(things: int) -> Iterator[str]:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(things)
    bound = start_metrics_server(registry, "127.0.0.1", 0, is_ready=lambda: True)
    yield f"127.0.0.1:{bound.port}"
    bound.close()


@contextmanager
def dying_worker() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), CutShort) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def things(metrics: SummedMetrics) -> float | None:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry.get_sample_value("things_total")


def test_workers_are_asked_directly_whatever_proxy_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    metrics = SummedMetrics()
    with worker(3) as one, worker(4) as two:
        metrics.add("1", one)
        metrics.add("2", two)
        assert things(metrics) == 7


def test_a_worker_that_dies_within_its_answer_does_not_spoil_the_sum() -> None:
    metrics = SummedMetrics()
    with worker(3) as one, dying_worker() as two:
        metrics.add("1", one)
        metrics.add("2", two)
        assert things(metrics) == 3


def test_the_latest_exemplar_of_a_bucket_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was replaced is counted with its last words."""
    pages = {}
    for place, trace in enumerate(("a" * 32, "b" * 32)):
        registry = CollectorRegistry()
        histogram = StepHistogram("wait_seconds", "Waits.", {}, (1.0, 2.0), registry)
        histogram.observe_traced(0.5, trace)
        histogram.observe_traced(1.5, trace if place == 0 else "")
        pages[f"http://worker-{place}/metrics"] = generate_latest(registry)

    class Direct:
        def open(self, request: urllib.request.Request, timeout: float) -> io.BytesIO:
            assert "openmetrics" in request.headers["Accept"]
            return io.BytesIO(pages[request.full_url])

    monkeypatch.setattr("penstock.serving.summed_metrics._DIRECT", Direct())
    metrics = SummedMetrics(with_exemplars=True)
    metrics.add("1", "worker-0")
    metrics.add("2", "worker-1")
    registry = CollectorRegistry()
    registry.register(metrics)
    assert "trace_id" in generate_latest(registry).decode()
    metrics.retire("1")
    lines = generate_latest(registry).decode().splitlines()
    buckets = [line.split(" # ") for line in lines if "_bucket" in line]
    assert [count.split()[-1] for count, *_ in buckets] == ["2.0", "4.0", "4.0"]
    assert [exemplar[0].split('"')[1][0] for _, *exemplar in buckets[:2]] == ["b", "a"]
