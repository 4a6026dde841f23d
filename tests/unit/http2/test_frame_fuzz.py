"""Frames that a fuzzer made, at both ends of the transport: no error, no hang, nothing left over."""

from __future__ import annotations

import gc
import os

import psutil
import pytest
from factories.wire.frame_fuzz import Fuzzer, replace_log
from penstock.common.heap import trim_heap
from penstock.http2.client_calls import CallsConnection
from penstock.http2.client_stream import ClientStreamCall
from penstock.http2.server_call import Call
from penstock.http2.server_connection import Connection

FRAMES = int(os.environ.get("PENSTOCK_FUZZ_FRAMES", "5000"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
# What a run may add to the process, however long it is.
_MOST_MEMORY = 40 << 20


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Free what other tests left before the loop runs: clients of HTTP close themselves by a task of any loop."""
    gc.collect()


@pytest.mark.timeout(3600)
async def test_frames_of_any_kind_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    log = replace_log(monkeypatch)
    fuzzer = Fuzzer(SEED)
    await fuzzer.run(FRAMES // 10)
    process = psutil.Process()
    trim_heap()
    before = process.memory_info().rss
    totals = await fuzzer.run(FRAMES)
    assert not log.errors
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) in (Connection, CallsConnection, ClientStreamCall, Call)]
    # The last connection may still be in a frame of the run that has ended.
    assert len(left) < 50
    # What is free in the heap is other tests' as well.
    trim_heap()
    assert process.memory_info().rss - before < _MOST_MEMORY
    print(f"\n{totals}, {(process.memory_info().rss - before) / 2**20:+.1f} MiB")
