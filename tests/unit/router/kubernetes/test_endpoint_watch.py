"""The watch of a service, against a scripted API: it follows changes, and outlives every failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from factories.servers.kubernetes_api import ScriptedApi, endpoint_slice, scripted_api
from factories.source_tree import ROOT
from penstock.router.backend_targets import KubernetesService
from penstock.router.config import RouterConfig
from penstock.router.kubernetes import endpoint_watch
from penstock.router.kubernetes.cluster_api import find_api
from penstock.router.kubernetes.endpoint_watch import EndpointWatch

SERVICE = KubernetesService("generation", "grpc", "models")
PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
TLS = ROOT / "tests/factories/servers/tls"
QUICK: dict[str, Any] = {"reconnect_min_seconds": 0.005, "kubernetes_retry_seconds": 0.02}
PATIENCE_SECONDS = 60.0


class Watching:
    """A watch that runs, and the addresses after each of its changes."""

    def __init__(self, api: ScriptedApi, **settings: Any) -> None:
        settings.setdefault("kubernetes_api", f"http://127.0.0.1:{api.port}")
        config = RouterConfig(**{**QUICK, **settings})
        self.changes: list[tuple[str, ...]] = []
        self.watch = EndpointWatch(SERVICE, find_api(config, {}, "k8s://generation:grpc"), config, self._note)

    def _note(self) -> None:
        self.changes.append(self.watch.addresses)

    async def until(self, *addresses: str) -> None:
        await until(lambda: self.watch.addresses == addresses)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watching(api: ScriptedApi, **settings: Any) -> AsyncIterator[Watching]:
    """Run a watch that must not end by itself."""
    running = Watching(api, **settings)
    task = asyncio.ensure_future(running.watch.run())
    try:
        yield running
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_are_followed() -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api, watching(api) as running:
        await running.until("10.0.0.1:50052")
        await until(lambda: api.num_open == 1)
        api.put(endpoint_slice("10.0.0.1", "10.0.0.2"))
        await running.until("10.0.0.1:50052", "10.0.0.2:50052")
        api.put(endpoint_slice("10.0.0.3", name="generation-b"))
        await running.until("10.0.0.1:50052", "10.0.0.2:50052", "10.0.0.3:50052")
        api.put(endpoint_slice("10.0.0.2", unready=("10.0.0.1",)))
        await running.until("10.0.0.2:50052", "10.0.0.3:50052")
        api.remove("generation-b")
        await running.until("10.0.0.2:50052")
        assert len(api.lists) == 1
        (path, query, token), *_ = api.lists
        assert (path, query["labelSelector"], token) == (PATH, ["kubernetes.io/service-name=generation"], "")


async def test_what_changes_nothing_is_not_told() -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api, watching(api) as running:
        await until(lambda: api.num_open == 1)
        api.put(endpoint_slice("10.0.0.1", unready=("10.0.0.9",)))
        api.put(endpoint_slice("10.0.0.1", "10.0.0.2"))
        await running.until("10.0.0.1:50052", "10.0.0.2:50052")
        assert running.changes == [("10.0.0.1:50052",), ("10.0.0.1:50052", "10.0.0.2:50052")]


async def test_a_watch_goes_on_where_the_last_one_ended() -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api, watching(api, kubernetes_watch_seconds=7) as running:
        await until(lambda: api.num_open == 1)
        api.put(endpoint_slice("10.0.0.2"))
        await running.until("10.0.0.2:50052")
        api.say({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "41"}}})
        api.end_watches()
        await until(lambda: len(api.watches) == 2)
        assert len(api.lists) == 1
        assert [query["resourceVersion"] for _, query, _ in api.watches] == [["1"], ["41"]]
        assert api.watches[0][1]["timeoutSeconds"] == ["7"]


async def test_versions_that_are_gone_are_listed_again() -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api:
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        api.first_events = [{"type": "ERROR", "object": gone}]
        async with watching(api) as running:
            await until(lambda: len(api.lists) == 2 and api.num_open == 1)
            api.put(endpoint_slice("10.0.0.2"))
            await running.until("10.0.0.2:50052")


async def test_addresses_outlive_the_api() -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api, watching(api) as running:
        await until(lambda: api.num_open == 1)
        api.failure = (503, b"the server is busy")
        api.break_off()
        await until(lambda: len(api.lists) >= 4)
        assert running.watch.addresses == ("10.0.0.1:50052",)
        api.slices = {}
        api.put(endpoint_slice("10.0.0.7"))
        api.failure = None
        await running.until("10.0.0.7:50052")
        assert running.changes == [("10.0.0.1:50052",), ("10.0.0.7:50052",)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b'{"items": 3, "metadata": {"resourceVersion": "1"}}',
        b'{"items": [{"metadata": {}}], "metadata": {"resourceVersion": "1"}}',
        b'{"items": [{"metadata": {"name": "a"}, "endpoints": [3], "ports": [{"name": "grpc", "port": 1}]}]}',
        b'{"items": []}',
        b'{"x": "' + b"x" * 5000 + b'"}',
        b"[" * 3000,
    ],
    ids=["empty", "text", "list", "null", "items", "no name", "endpoint", "no version", "large", "deep"],
)
async def test_an_answer_that_makes_no_sense_is_asked_for_again(body: bytes) -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api:
        api.body = body
        async with watching(api, max_endpoints_bytes=4096) as running:
            await until(lambda: len(api.lists) >= 3)
            api.body = None
            await running.until("10.0.0.1:50052")


@pytest.mark.parametrize("event", [{}, {"type": "ADDED", "object": 3}, {"type": "ERROR", "object": {}}, [], "x"])
async def test_an_event_that_makes_no_sense_leads_to_a_new_list(event: Any) -> None:
    async with scripted_api(endpoint_slice("10.0.0.1")) as api:
        api.first_events = [event]
        async with watching(api) as running:
            await until(lambda: len(api.lists) >= 2 and api.num_open == 1)
            api.put(endpoint_slice("10.0.0.2"))
            await running.until("10.0.0.2:50052")


async def test_what_the_api_says_against_it_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(endpoint_watch._log, "warning", lambda message, **fields: told.append(fields))
    forbidden = 'endpointslices is forbidden: User "x" cannot list'
    async with scripted_api() as api:
        api.failure = (403, json.dumps({"message": forbidden}).encode())
        async with watching(api) as running:
            await until(lambda: len(told) >= 2)
            assert told[0] == {"service": "models/generation", "cause": f"HTTP 403: {forbidden}"}
            assert running.changes == []


async def test_tls_trusts_the_account_and_the_token_is_read_for_each_call(tmp_path: Path) -> None:
    for name, text in {"token": "first\n", "ca.crt": (TLS / "ca.pem").read_text(), "namespace": "other"}.items():
        (tmp_path / name).write_text(text)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    async with scripted_api(endpoint_slice("10.0.0.1"), tls=tls) as api:
        place = {"kubernetes_api": f"https://127.0.0.1:{api.port}", "kubernetes_account": str(tmp_path)}
        async with watching(api, **place) as running:
            await running.until("10.0.0.1:50052")
            await until(lambda: api.num_open == 1)
            (tmp_path / "token").write_text("second")
            api.break_off()
            await until(lambda: len(api.lists) >= 2)
            assert [token for _, _, token in api.lists][:2] == ["first", "second"]
            assert api.lists[0][0] == PATH


async def test_another_certificate_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(endpoint_watch._log, "warning", lambda message, **fields: told.append(fields))
    # A certificate that did not sign the server's.
    for name, text in {"token": "first", "ca.crt": (TLS / "client.pem").read_text()}.items():
        (tmp_path / name).write_text(text)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    async with scripted_api(endpoint_slice("10.0.0.1"), tls=tls) as api:
        place = {"kubernetes_api": f"https://127.0.0.1:{api.port}", "kubernetes_account": str(tmp_path)}
        async with watching(api, **place) as running:
            await until(lambda: len(told) >= 2)
            assert "CERTIFICATE_VERIFY_FAILED" in told[0]["cause"]
            assert (running.changes, api.lists) == ([], [])
