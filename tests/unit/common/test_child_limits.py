"""Limits that a child process puts on itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from penstock.common.heap import free_heap_bytes

# Leaves so many megabytes of holes behind, limits itself to 64 more, and prints how many it gets then, in pieces of
# which each would fit into a hole.
CODE = """
import sys
from penstock.common.child_limits import limit_memory
blocks = [bytes(4000) for _ in range(int(sys.argv[1]) * 250)]
kept = blocks[::500]
del blocks
limit_memory(64 << 20)
found = []
try:
    while len(found) < 50_000:
        found.append(bytes(4000))
except MemoryError:
    pass
got = len(found)
del found
print(got // 250)
"""


@pytest.mark.skipif(not free_heap_bytes(), reason="this C library does not tell what is free")
def test_what_a_large_load_left_free_is_no_gift() -> None:
    def granted(megabytes_of_holes: int) -> int:
        command = [sys.executable, "-c", CODE, str(megabytes_of_holes)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    fresh, loaded = granted(0), granted(48)
    assert 40 <= fresh <= 70
    assert abs(loaded - fresh) <= 8
