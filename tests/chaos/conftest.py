"""A deployment for the tests of one file, a new one after a test that failed, and the table at the end of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio
from factories.chaos.deployment import STALL_SECONDS, Deployment, deployment
from factories.chaos.invariants import Invariants
from factories.chaos.streams import Stream, Undisturbed
from factories.chaos.table import TABLE

_FAILED = pytest.StashKey[bool]()


@dataclass
class Chaos:
    """A deployment, the ids that it gave when nothing was wrong, and what must hold after each case."""

    deployment: Deployment
    undisturbed: Undisturbed
    invariants: Invariants


class Deployments:
    """The present deployment of a file: `get` starts one where there is none."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._undisturbed = Undisturbed()
        self._exits = AsyncExitStack()
        self._chaos: Chaos | None = None

    async def get(self) -> Chaos:
        """Return it, warm: what processes start once (threads, connections) is there."""
        if self._chaos is None:
            try:
                running = await self._exits.enter_async_context(deployment(self._transport))
                self._chaos = await self._warm(running)
            except BaseException:
                await self.end()
                raise
        return self._chaos

    async def end(self) -> None:
        """End it."""
        self._chaos = None
        await self._exits.aclose()

    async def _warm(self, running: Deployment) -> Chaos:
        undisturbed, invariants = self._undisturbed, Invariants(running, self._undisturbed)
        for number in range(4):
            for sampling in ("greedy", "seeded"):
                await undisturbed.ids(running, sampling, number)
        await asyncio.gather(*(Stream(running, "greedy", number % 4).run() for number in range(16)))
        await invariants.hold()
        return Chaos(running, undisturbed, invariants)


@pytest.fixture(scope="module", params=["asyncio", pytest.param("grpc", marks=pytest.mark.chaos)])
def transport(request: pytest.FixtureRequest) -> str:
    """Transport of every service."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployments(transport: str) -> AsyncIterator[Deployments]:
    """Deployments of one file, one after the other."""
    made = Deployments(transport)
    yield made
    await made.end()


@pytest_asyncio.fixture(loop_scope="module")
async def chaos(deployments: Deployments, request: pytest.FixtureRequest) -> AsyncIterator[Chaos]:
    """Deployment at rest. A test that fails takes it along: the next one is not judged by what was left."""
    yield await deployments.get()
    if request.node.stash.get(_FAILED, True):
        await deployments.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test failed, for its fixtures."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


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
