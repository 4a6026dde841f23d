"""Every fault at a random token of a stream: it goes on exactly, in time, and nothing is left behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from factories.chaos.faults import FAULTS, LONGEST_PAUSE_SECONDS, strike
from factories.chaos.table import TABLE

# The ordinary run has processes that are killed, hang, raise or go dark in tests/integration/router: test_processes.py,
# test_adapter_processes.py, test_engine_faults.py, test_lost_rank.py.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.chaos]
# Of each fault, over both transports and samplings.
TRIES = int(os.environ.get("PENSTOCK_CHAOS_TRIES", "50"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "1"))
SAMPLINGS = ("greedy", "seeded")


def cases() -> Iterator[object]:
    """Tries of each fault, greedy and seeded in turns."""
    for number in range(max(1, TRIES // 2)):
        for place, name in enumerate(FAULTS):
            sampling = SAMPLINGS[(number + place) % 2]
            yield pytest.param(name, sampling, number, id=f"{name}-{sampling}-{number}")


@pytest.mark.parametrize(("name", "sampling", "number"), [*cases()])
async def test_a_stream_meets_a_fault(
    chaos: object, transport: str, name: str, sampling: str, number: int, request: pytest.FixtureRequest
) -> None:
    fault = FAULTS[name]
    if transport not in fault.transports:
        pytest.skip(f"{name} is another fault's with {transport}")
    rng = random.Random(f"{SEED} {name} {transport} {number}")
    seen = await strike(fault, chaos.deployment, chaos.undisturbed, sampling, rng)
    await chaos.invariants.hold()
    TABLE.add(name, transport, seen)
    assert seen.exact or fault.reason
    # Speed is judged where the machine is this run's own: `make chaos`.
    if fault.silent and str(request.config.option.markexpr).startswith("chaos"):
        assert seen.pause <= LONGEST_PAUSE_SECONDS
