"""Targets of the benchmark of the tiers: each of its checks can fail."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kv_disk import COMPUTED, DAMAGED, FILE, HOST, POOL, missed

TOKENS = 4096


def rows(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows as measured with real weights, and changes of some, by place."""
    measured = {
        COMPUTED: (3.79, 0, 0, 0, 0),
        POOL: (0.05, 4080, 0, 0, 0),
        HOST: (0.27, 16, 4064, 0, 0),
        FILE: (0.35, 0, 0, 4080, 0),
        DAMAGED: (3.67, 0, 0, 256, 1),
    }
    names = ("wall_s", "from_pool_tokens", "from_host_tokens", "from_file_tokens", "refused")
    return [
        {"from": place, **dict(zip(names, figures, strict=True)), **changes.get(place, {})}
        for place, figures in measured.items()
    ]


def test_what_was_measured_misses_nothing() -> None:
    assert missed(rows(), ids_equal=True, prompt_tokens=TOKENS) == []


def test_other_ids_are_told() -> None:
    assert missed(rows(), ids_equal=False, prompt_tokens=TOKENS) == ["ids differ"]


@pytest.mark.parametrize(
    ("place", "figures"),
    [
        (COMPUTED, {"from_pool_tokens": 16}),
        (POOL, {"from_pool_tokens": 2000}),
        (HOST, {"from_pool_tokens": 4080, "from_host_tokens": 0}),
        (FILE, {"from_pool_tokens": 4080, "from_file_tokens": 0}),
        (FILE, {"from_file_tokens": 96}),
        (FILE, {"wall_s": 2.0}),
        (DAMAGED, {"refused": 0}),
    ],
)
def test_a_place_that_does_not_do_its_part_is_named(place: str, figures: dict[str, Any]) -> None:
    faults = missed(rows(**{place: figures}), ids_equal=True, prompt_tokens=TOKENS)
    assert faults
    assert all(fault.startswith(f"{place}: ") for fault in faults)
