"""Memory that is given back during and after a flood."""

from __future__ import annotations

import gc
import weakref

from factories.servers.router import until
from penstock.common.heap import HeapTrimmer


class _Connection:
    """Ends as asyncio's do: in a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


async def test_a_flood_frees_what_lived_through_a_collection() -> None:
    trimmer = HeapTrimmer(256, 0.01)
    gc.collect()
    living: list[_Connection] = []
    seen: list[weakref.ref[_Connection]] = []
    try:
        for _ in range(2048):
            living.append(_Connection())
            seen.append(weakref.ref(living[-1]))
            if len(living) > 100:
                # Older than some collections by then.
                living.pop(0)
                trimmer.note()
        # Without Python's own collections, which a flood that frees as much as it makes does not have.
        assert sum(one() is not None for one in seen) < len(living) + 800
        living.clear()
        await until(lambda: not any(one() is not None for one in seen))
    finally:
        gc.collect()


async def test_a_flood_without_an_end_frees_the_oldest_generation() -> None:
    trimmer = HeapTrimmer(256, 3600.0)
    gc.collect()
    living: list[_Connection] = []
    seen: list[weakref.ref[_Connection]] = []
    try:
        for _ in range(3 * 4096):
            living.append(_Connection())
            seen.append(weakref.ref(living[-1]))
            if len(living) > 1000:
                # Older than collections of the middle generation.
                living.pop(0)
                trimmer.note()
        assert sum(one() is not None for one in seen) < len(living) + 4096 + 100
    finally:
        gc.collect()
        await until(lambda: trimmer._timer is not None)
        assert trimmer._timer is not None
        trimmer._timer.cancel()
