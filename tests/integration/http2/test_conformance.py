"""HTTP/2 and gRPC as their documents demand them of a server, case by case, on both transports.

The asyncio transport holds every case. Where grpc.aio does otherwise, the data file says what it does, and why that is
let be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from factories.servers.tiny_service import SERVING, FixedConfig, health_of, tiny
from factories.wire.conformance import HELLO, OK, Case, call, cases
from factories.wire.raw_client import Seen, frames_from

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEVIATIONS = Path(__file__).resolve().parents[2] / "data" / "http2" / "grpc_deviations.json"
CASES = {case.name: case for case in cases()}
# The stream of a call behind each case.
_LAST = 1001


async def outcome_of(case: Case, address: str) -> tuple[str, int]:
    """Send a case and calls behind it; return what became of it once that is known.

    "ignored": nothing had come of it when the calls behind it were answered, one after the other.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    seen, last = Seen(), _LAST
    try:
        with contextlib.suppress(OSError):
            writer.write((b"" if case.raw else HELLO) + case.data + call(stream=last))
            await writer.drain()
        async for frame in frames_from(reader):
            seen.take(*frame)
            if last in seen.status:
                # The connection lives.
                found = seen.outcome(case.stream)
                if found is not None or last == _LAST + 4:
                    return found or ("ignored", 0)
                last += 2
                writer.write(call(stream=last))
        seen.is_closed = True
        return seen.outcome(case.stream) or ("connection", -1)
    finally:
        writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asyncio_server() -> AsyncIterator[str]:
    """Address of one server for all cases: each has a connection of its own, and none may harm those after it."""
    async with tiny(FixedConfig(transport="asyncio")) as (service, running, _):
        yield running.address
        service.servicer.release.set()


@pytest.mark.parametrize("name", list(CASES))
async def test_the_asyncio_transport_keeps_to_it(name: str, asyncio_server: str) -> None:
    case = CASES[name]
    found = await asyncio.wait_for(outcome_of(case, asyncio_server), 60)
    assert (found[0] == "connection") if case.kind == "closed" else found == (case.kind, case.code)


def rough(kind: str, code: int) -> str:
    """Return the part of an outcome that matters: "connection" (it ended), "served", or "refused" (or nothing)."""
    if kind in ("connection", "closed"):
        return "connection"
    return "served" if (kind, code) == ("grpc", OK) else "refused"


async def test_grpc_keeps_to_it_but_for_what_is_known() -> None:
    """A deviation that is gone, or a new one, has to be looked at; the server lives through all of them."""
    known = json.loads(DEVIATIONS.read_text())["cases"]
    found = {}
    async with tiny(FixedConfig(transport="grpc")) as (service, running, _):
        for name, case in CASES.items():
            outcome = rough(*await asyncio.wait_for(outcome_of(case, running.address), 60))
            if outcome != rough(case.kind, case.code):
                found[name] = outcome
        service.servicer.release.set()
        assert await health_of(running.address) == SERVING
    assert found == known
