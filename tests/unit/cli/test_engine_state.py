"""`penstock debug state` can be read at 80 columns, whatever the state holds."""

from __future__ import annotations

from typing import Any

from penstock.cli.engine_state import WIDTH, state_text

BIG = 4_294_967_295
SEQUENCE = {
    "number": BIG,
    "family": BIG,
    "tokens": 131_072,
    "computed_tokens": 131_071,
    "blocks": 8_192,
    "draft_tokens": 5,
    "waits_for": "admission",
    "host_blocks": 8_192,
}
GROUP = {
    "request": "0123456789ab",
    "state": "running",
    "decoding": "ConstrainedBeamSearch",
    "priority": -100,
    "age_seconds": 12345.678,
    "running_seconds": 12000.5,
    "prompt_tokens": 131_072,
    "max_new_tokens": 131_072,
    "width": 32,
    "sequences": [SEQUENCE],
    "more_sequences": 24,
}
POOL = {"used": BIG, "total": BIG, "free": BIG, "evictable": BIG, "references": BIG, "reserve": BIG}
ROWS = {"request": "0123456789ab", "sequences": 32, "prompt_rows": BIG, "decode_rows": BIG, "draft_rows": BIG}
STEP = {
    "number": BIG,
    "rows": 512,
    "rows_left": 511,
    "ended_by": "sequences",
    "admitted": 12,
    "preempted": 3,
    "groups": [ROWS],
    "more_groups": 7,
}
FULL: dict[str, Any] = {
    "stack": ["loop.py:12 wait"],
    "pool": POOL,
    "last_step": STEP,
    "running": [GROUP],
    "more_running": 9,
    "waiting": [GROUP],
    "more_waiting": 0,
    "host_pool": {**POOL, "swapped_requests": BIG, "preemption": "recompute"},
    "counters": {"prefix_lookup_tokens": 2**40},
    "config": {"queue_full_retry_seconds": 0.25, "max_batch_tokens": 16_777_217.0},
}
IDLE = {
    **FULL,
    "stack": [],
    "running": [],
    "waiting": [],
    "more_running": 0,
    "last_step": {**STEP, "number": 0},
}


def test_no_line_is_wider_than_a_terminal() -> None:
    lines = state_text(FULL).splitlines()
    assert max(map(len, lines)) <= WIDTH


def test_every_fact_is_there() -> None:
    told = " ".join(state_text(FULL).split())
    for fact in (
        "it is at loop.py:12 wait",
        f"pool: {BIG} of {BIG} blocks used, {BIG} free, {BIG} evictable, {BIG} references",
        f"host pool: {BIG} of {BIG} blocks used by {BIG} swapped requests",
        "512 rows, 511 left, held back by sequences, 12 admitted, 3 preempted",
        f"0123456789ab: 32 sequences, {BIG} prompt rows, {BIG} decode rows, {BIG} draft rows and 7 more",
        "running: 10 0123456789ab: running, ConstrainedBeamSearch, priority -100, age 12345.678s, running 12000.500s",
        "prompt 131072, most new 131072, width 32",
        f"sequence {BIG}: family {BIG}, 131072 tokens, 131071 computed, 8192 blocks, 8192 host blocks, 5 drafts",
        "waits for admission and 24 more and 9 more",
        f"counters: prefix_lookup_tokens {2**40}",
        "config: queue_full_retry_seconds 0.25 max_batch_tokens 16777217",
    ):
        assert fact in told, fact


def test_an_idle_engine_says_so() -> None:
    told = state_text(IDLE)
    assert "last step: none" in told
    assert "running: none\n" in told
    assert "waiting: none\n" in told


def test_a_service_without_a_host_pool_is_shown() -> None:
    assert "host pool" not in state_text({name: value for name, value in IDLE.items() if name != "host_pool"})
