"""Random HTTP at a real gateway: no fault, nothing left behind, nothing told to the log.

PENSTOCK_FUZZ_HTTP: how many requests; PENSTOCK_FUZZ_SEED: where to begin.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
from factories.servers.gateway_tree import TOKEN, GatewayTree, gateway_tree
from factories.wire.good_bodies import ROUTES
from factories.wire.http_fuzz import HttpFuzzer
from factories.wire.random_messages import CANARY
from penstock.gateway import app

COUNT = int(os.environ.get("PENSTOCK_FUZZ_HTTP", "300"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
LOOKS = 20
# A run of so many may add so many MiB to the gateway after its first quarter.
LONG, MOST_MEMORY = 20_000, 64
MOST_LOG_BYTES = 1_000_000
# Of the backend: answers that nothing may end are this long.
MAX_CONTEXT = 4096
# Answers are kept for callers who build on them: few, so that what else grows is seen.
FLAGS = ("--max-responses", "100")
# A run of hours: a line of each kind as often as in one minute.
LONG_FLAGS = ("--log-seconds", "86400") if COUNT > LONG else ()


def test_every_route_that_takes_a_body_is_asked() -> None:
    assert {route.path for route in ROUTES} == app._POST.keys()


def test_a_connection_is_known_by_seed_and_number() -> None:
    one, other = (HttpFuzzer("127.0.0.1:80", 7, TOKEN) for _ in range(2))
    for number in (0, 5, 1, 5):
        assert one.connection(number) == other.connection(number)
    assert one.connection(0) != HttpFuzzer("127.0.0.1:80", 8, TOKEN).connection(0)


def check(tree: GatewayTree) -> None:
    """It runs, and its log tells neither a caller's words nor a fault."""
    assert tree.is_running
    said = tree.gateway.output()
    assert CANARY not in said, said[max(0, said.index(CANARY) - 500) :][:1000]
    # A log line of a fault has the exception; what Python or a library prints has a traceback.
    for fault in ('"exception"', "Traceback"):
        assert fault not in said, said[max(0, said.index(fault) - 500) :][:5000]
    assert tree.log_bytes < MOST_LOG_BYTES
    assert tree.health() == 200


@pytest.mark.timeout(0)  # as long as PENSTOCK_FUZZ_HTTP takes
@pytest.mark.parametrize("way", ["http", "tls"])
async def test_random_http(way: str) -> None:
    is_tls = way == "tls"
    # TLS changes little of what is read: a tenth over it.
    count = max(100, COUNT // 10) if is_tls else COUNT
    memory: list[int] = []
    with gateway_tree(*FLAGS, *LONG_FLAGS, is_tls=is_tls, tokens=8, step_seconds=0.0, max_context=MAX_CONTEXT) as tree:
        fuzzer = HttpFuzzer(tree.address, SEED, TOKEN, tree.tls)
        begin = time.process_time()

        def look() -> None:
            memory.append(tree.rss_bytes >> 20)
            if COUNT > 1000:
                sys.stdout.write(f"{fuzzer.totals.requests} requests, {memory[-1]} MiB, log {tree.log_bytes} bytes\n")

        totals = await fuzzer.run(count, every=max(1, count // LOOKS), look=look)
        if COUNT > 1000:
            sys.stdout.write(f"\n{totals}\nown CPU {time.process_time() - begin:.0f} s, MiB: {memory}\n")
        assert not totals.problems, totals.problems[:20]
        check(tree)
        # Most have an answer: what is malformed may end its connection without one.
        assert totals.answers > totals.requests / 2
        assert {"200", "400", "401", "404"} <= totals.statuses.keys()
        assert count < LONG or memory[-1] - memory[LOOKS // 4] < MOST_MEMORY, memory
