"""Patterns of modules' names: what peft's regular expressions would match, within bounds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.module_patterns import ModulePatterns

LIMITS = AdapterLimits()
MODULES = [
    *(f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in ("self_attn.q_proj", "mlp.up_proj")),
    "lm_head",
]
# Names, ends of names, dots that mean any character, and expressions.
PLAIN = ["q_proj", "up_proj", "proj", "mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head", "1.mlp.up_proj", "x"]
OTHERS = [
    "self.attn.q.proj",
    "l..head",
    r"layers\.(0|1)\..*",
    r".*\.q_proj",
    r"model\.layers\.\d\..*proj",
    "(a|lm)_head",
]


def expected(keys: list[str], modules: list[str]) -> dict[str, int]:
    """As peft/utils/other.py:get_pattern_key finds them."""
    found = {}
    for module in modules:
        numbers = [number for number, key in enumerate(keys) if re.match(rf"(.*\.)?({key})$", module)]
        if numbers:
            found[module] = numbers[0]
    return found


@given(st.lists(st.sampled_from(PLAIN), unique=True))
def test_names_are_found_as_the_expressions_that_they_are(keys: list[str]) -> None:
    assert ModulePatterns("rank_pattern", keys, LIMITS).first_matches(MODULES) == expected(keys, MODULES)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([*PLAIN, *OTHERS]), unique=True))
def test_the_first_that_matches_counts(keys: list[str]) -> None:
    assert ModulePatterns("rank_pattern", keys, LIMITS).first_matches(MODULES) == expected(keys, MODULES)


def refusal(keys: list[str], limits: AdapterLimits = LIMITS) -> tuple[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        ModulePatterns("alpha_pattern", keys, limits).first_matches(MODULES)
    assert "alpha_pattern" in caught.value.message
    return caught.value.reason, caught.value.message


def test_slow_expressions_end_by_the_processor_time_that_they_take() -> None:
    """In this process they would hold its lock: 4000 of these take minutes."""
    keys = [f"[a-z._0-9]*[a-z._0-9]*[a-z._0-9]*[a-z._0-9]*x{number}" for number in range(4000)]
    reason, message = refusal(keys, AdapterLimits(adapter_pattern_seconds=0.1))
    assert reason == "ADAPTER_UNSUPPORTED"
    assert "--adapter-pattern-seconds 0.1" in message


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["q_proj"] * 5000, "ADAPTER_UNSUPPORTED"),
        (["x" * 300], "ADAPTER_UNSUPPORTED"),
        (["(a+)+x"], "ADAPTER_UNSUPPORTED"),
        ([".*.*.*.*.*x"], "ADAPTER_UNSUPPORTED"),
        (["\ud800"], "ADAPTER_UNSUPPORTED"),
        (["["], "ADAPTER_BROKEN"),
        (["(" * 200], "ADAPTER_BROKEN"),
        (["((((((((a{9999}b{9999}c{9999}d{9999}"], "ADAPTER_BROKEN"),
    ],
    ids=range(8),
)
def test_what_is_no_pattern_is_refused(keys: list[str], reason: str) -> None:
    assert refusal(keys)[0] == reason
