"""Adapters that operators load while the process serves: places of loads, and callers that give up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Event

import pytest
from factories.servers.router import until
from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_access import AdapterAccess
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.store import AdapterStore


@dataclass
class SlowFolders:
    """Folders whose check takes until `go_on`, and ends in a refusal."""

    began: Queue[str] = field(default_factory=Queue)
    go_on: Event = field(default_factory=Event)

    def open(self, path: Path, root: Path | None) -> None:
        self.began.put(path.name)
        assert self.go_on.wait(60)
        raise InvalidArgument("path", "is broken", reason="ADAPTER_BROKEN")


async def test_a_load_keeps_its_place_until_it_ends_though_its_caller_gave_up(tmp_path: Path) -> None:
    """Else a caller who gives up in turns has any number of folders checked at the same time."""
    folders, failures = SlowFolders(), []
    store = AdapterStore(AdapterLimits(max_adapter_checks=2), folders.open)  # type: ignore[arg-type]
    access = AdapterAccess(store, tmp_path, on_change=lambda: None, on_failure=failures.append)
    loads = [asyncio.create_task(access.load(name, "", replace=False)) for name in ("a", "b", "c")]
    first = [await asyncio.to_thread(folders.began.get, timeout=60) for _ in range(2)]
    loads[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await loads[0]
    assert sorted(first) == ["a", "b"]
    # One that waits for its turn is no more once its caller gave up.
    late = asyncio.create_task(access.load("d", "", replace=False))
    await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert folders.began.empty()
    folders.go_on.set()
    for load in loads[1:]:
        with pytest.raises(InvalidArgument):
            await load
    assert (folders.began.get_nowait(), folders.began.empty()) == ("c", True)
    # Nobody waits for the one whose caller gave up.
    await until(lambda: len(failures) == 3)
    assert {error.reason for error in failures} == {"ADAPTER_BROKEN"}
