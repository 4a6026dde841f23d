"""Quotas and ledger while routers and backends die: no key is over, and the ledger is what clients saw."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from factories.chaos.key_run import key_run
from factories.servers.postgres import needs_postgres, running_postgres


async def _hurt(
    folder: Path, keys: int, requests: int, router_kills: int, backend_kills: int, ledger: str = ""
) -> None:
    """Send requests while processes are killed, then compare. `ledger`: by default a folder."""
    # Half of the keys have too little for their share of the requests.
    share = requests // keys * 14
    quotas = {f"key-{number}": {"tokens_per_day": share // 2 if number % 2 else share * 3} for number in range(keys)}
    async with key_run(folder, ledger or str(folder / "ledger"), quotas, seed=7) as run:
        moments = sorted(
            [("router", n) for n in range(router_kills)] + [("backend", n) for n in range(backend_kills)],
            key=lambda one: one[1],
        )
        part = -(-requests // (len(moments) + 1))
        for kind, number in [*moments, ("", 0)]:
            asking = asyncio.create_task(run.ask(part, at_once=32))
            begun = len(run.calls)
            await run.until_calls(begun + part // 2)
            if kind == "router":
                await run.kill_router(number % 2)
            elif kind == "backend":
                run.kill_backend(number % 2)
            await asking
        await run.until_at_rest()
        figures = run.check()
    assert figures["clients saw"].get("whole"), "something was answered"
    assert figures["refused by a quota"], "some key had used up its day"
    if out := os.environ.get("PENSTOCK_CHAOS_OUT"):
        text = "\n".join(f"{name}: {value}" for name, value in figures.items())
        await asyncio.to_thread(Path(out).write_text, text + "\n")
    sys.stdout.write(f"{figures}\n")


async def test_a_few_keys_and_a_kill_of_each_kind(tmp_path: Path) -> None:
    await _hurt(tmp_path, keys=4, requests=240, router_kills=1, backend_kills=1)


@pytest.mark.chaos
async def test_ten_thousand_requests_of_twenty_keys_with_kills(tmp_path: Path) -> None:
    await _hurt(tmp_path, keys=20, requests=10_000, router_kills=6, backend_kills=6)


@pytest.mark.chaos
@needs_postgres
async def test_two_thousand_requests_with_kills_on_postgresql(tmp_path: Path) -> None:
    with running_postgres() as server:
        await _hurt(tmp_path, keys=20, requests=2_000, router_kills=4, backend_kills=2, ledger=server.database())
