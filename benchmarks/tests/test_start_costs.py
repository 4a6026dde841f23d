"""Memory of a start, as /proc has it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from benchmarks.start_costs import Cost, median, pool_memory, private_memory, row

MAPPINGS = """\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                 512 kB
Private_Clean:         4 kB
Private_Dirty:       508 kB
7f0000200000-7f0040201000 rw-p 00000000 00:00 0
Size:            1048580 kB
Rss:                6144 kB
Private_Clean:         0 kB
Private_Dirty:      6144 kB
7f0040201000-7f0040301000 r-xp 00000000 08:01 77   /usr/lib/libtorch_cpu.so
Size:               1024 kB
Rss:                1024 kB
Shared_Clean:       1024 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
"""


def test_private_memory_leaves_out_what_is_shared() -> None:
    assert private_memory(MAPPINGS) == (4 + 508 + 6144) / 1024


def test_a_pools_pages_are_those_of_its_mapping() -> None:
    assert pool_memory(MAPPINGS, 1 << 30) == 6.0
    assert pool_memory(MAPPINGS, 5 << 30) == 0.0


def test_this_process_has_the_pages_that_it_writes() -> None:
    # None is larger. Linux counts it against no limit (MAP_NORESERVE, which Python names since 3.13).
    size, unreserved = 64 << 30, 0x4000
    before = private_memory(Path("/proc/self/smaps").read_text())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved) as memory:
        memory[: 8 << 20] = bytes(8 << 20)
        smaps = Path("/proc/self/smaps").read_text()
    # This process may have grown by a few MiB more meanwhile.
    assert 7.9 < private_memory(smaps) - before < 24.0
    assert pool_memory(smaps, size) == pytest.approx(8, abs=2)


def test_a_row_tells_what_is_beyond_the_bare_process() -> None:
    bare = Cost(1.0, 1.0, 1.5, 1.5, private=100.0)
    cost = median([Cost(2.0, 2.2, 2.5, 2.8, 250.0, 90.0, 40.0, 300.0), Cost(private=250.0), Cost(private=250.0)])
    assert (cost.ready, cost.private) == (0.0, 250.0)
    cost = Cost(2.0, 2.2, 2.5, 2.8, 250.0, 90.0, 40.0, 300.0)
    assert row("a", cost, bare)[5:] == ["250", "150", "90", "40", "20", "300"]
