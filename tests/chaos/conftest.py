"""A deployment for the tests of one file, and the table of what was seen at the end of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio
from factories.chaos.deployment import STALL_SECONDS, Deployment, deployment
from factories.chaos.invariants import Invariants
from factories.chaos.streams import Stream, Undisturbed
from factories.chaos.table import TABLE


@dataclass
class Chaos:
    """A deployment, the ids that it gave when nothing was wrong, and what must hold after each case."""

    deployment: Deployment
    undisturbed: Undisturbed
    invariants: Invariants


@pytest.fixture(scope="module", params=["asyncio", pytest.param("grpc", marks=pytest.mark.chaos)])
def transport(request: pytest.FixtureRequest) -> str:
    """Transport of every service."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(transport: str) -> AsyncIterator[Chaos]:
    """Warm: what processes start once (threads, connections) is there."""
    async with deployment(transport) as running:
        undisturbed = Undisturbed()
        invariants = Invariants(running, undisturbed)
        for number in range(4):
            for sampling in ("greedy", "seeded"):
                await undisturbed.ids(running, sampling, number)
        await asyncio.gather(*(Stream(running, "greedy", number % 4).run() for number in range(16)))
        await invariants.hold()
        yield Chaos(running, undisturbed, invariants)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table; write it where PENSTOCK_CHAOS_OUT says."""
    if not TABLE:
        return
    terminalreporter.write_line("")
    terminalreporter.write(TABLE.markdown())
    if out := os.environ.get("PENSTOCK_CHAOS_OUT"):
        words = (
            f"Written by `make chaos` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores, load average "
            f"{os.getloadavg()[0]:.1f} at the end, two backends, a stall timeout of {STALL_SECONDS:g} s. A try is one "
            "fault at a random token of a stream with three others beside it; exact: all four gave the ids of an "
            "undisturbed run. The pause is the longest time without a token after the fault, the prompt's second "
            "computation included."
        )
        TABLE.write(Path(out), words)
