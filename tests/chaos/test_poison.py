"""A poison request beside neighbours: it takes two processes, ends as INTERNAL POISON, and no neighbour notices."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from factories.chaos.poison import NEIGHBOURS, Seen, deployment

# The ordinary run has it with scripted backends: tests/integration/router/test_poison.py.
pytestmark = pytest.mark.chaos
TRIES = int(os.environ.get("PENSTOCK_POISON_TRIES", "20"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "1"))


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Rows of a table that is printed in the end."""
    head = "| backends | transport | tries | as promised | crashes | endings | exact | longest pause p50 | max |"
    made = [head, "|---|---|---|---|---|---|---|---|---|"]
    yield made
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(made))


def row(count: int, transport: str, tries: list[Seen]) -> str:
    """One row of the table."""
    pauses = sorted(one.pause for one in tries)
    endings = sorted({one.ending for one in tries} | {reason for one in tries for reason in one.lost})
    exact = f"{sum(one.exact for one in tries)} of {len(tries) * NEIGHBOURS}"
    crashes = ", ".join(map(str, sorted({one.crashes for one in tries})))
    good = sum(one.is_as_promised for one in tries)
    pause = f"{pauses[len(pauses) // 2]:.2f} s | {pauses[-1]:.2f} s"
    return f"| {count} | {transport} | {len(tries)} | {good} | {crashes} | {', '.join(endings)} | {exact} | {pause} |"


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
@pytest.mark.parametrize("count", [2, 3, 4])
async def test_a_poison_takes_two_processes_and_no_neighbour(count: int, transport: str, lines: list[str]) -> None:
    rng = random.Random(f"{SEED} {count} {transport}")
    async with deployment(count, transport) as running:
        await running.undisturbed()
        tries = [await running.strike(rng) for _ in range(TRIES)]
    lines.append(row(count, transport, tries))
    assert all(one.is_as_promised for one in tries), tries
