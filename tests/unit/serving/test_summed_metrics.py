"""Metrics of workers, asked over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from penstock.serving.metrics_endpoint import start_metrics_server
from penstock.serving.summed_metrics import SummedMetrics
from prometheus_client import CollectorRegistry, Counter


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
