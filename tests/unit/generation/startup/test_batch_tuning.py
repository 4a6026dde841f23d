"""Choice of the token budget, on made-up machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import StartupError
from penstock.common.options import load
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.startup.batch_tuning import BatchTuning, smallest_budget, tune_batch_tokens


class Machine:
    """A step takes `fixed` seconds and `per_token` for each; the first of a size a little more. To find that out takes
    `share` of it."""

    def __init__(self, fixed: float, per_token: float, share: float = 1.0) -> None:
        self.fixed, self.per_token, self.share = fixed, per_token, share
        self.calls: list[int] = []
        self.spent = 0.0

    def time_prompt(self, num_tokens: int) -> tuple[float, float]:
        seconds = (self.fixed + self.per_token * num_tokens) * (1.0 if num_tokens in self.calls else 1.02)
        self.calls.append(num_tokens)
        self.spent += seconds * self.share
        return seconds, seconds * self.share


def tune(
    machine: Machine, *, smallest: int = 96, largest: int = 4096, step: float = 0.5, spend: float = 1.5
) -> BatchTuning:
    return tune_batch_tokens(
        machine.time_prompt, smallest=smallest, largest=largest, step_seconds=step, spend_seconds=spend
    )


def test_the_smallest_size_with_nearly_the_best_throughput() -> None:
    machine = Machine(0.01, 0.0018)
    found = tune(machine)
    assert found.tokens == 128
    assert [size for size, _ in found.measured] == [128, 256]
    assert machine.spent <= 1.5
    assert "128: 240 ms" in found.describe()


def test_what_is_cheap_to_find_out_is_tried_again() -> None:
    machine = Machine(0.01, 0.0018, share=0.1)
    assert tune(machine).tokens == 128
    assert machine.calls == [32, 128, 128, 128, 256, 256, 256]
    assert machine.spent <= 1.5


def test_larger_steps_where_they_pay_and_are_short_enough() -> None:
    assert tune(Machine(0.06, 0.0003), step=1.0, spend=5.0).tokens == 2048
    assert tune(Machine(0.06, 0.0003), step=0.3, spend=5.0).tokens == 512


def test_a_fast_model_keeps_the_fixed_budget_whatever_the_noise() -> None:
    machine = Machine(0.001, 0.00001)
    assert tune(machine) == BatchTuning(512)
    assert machine.calls == [32]


def test_a_slow_model_takes_the_smallest_and_is_not_measured_further() -> None:
    machine = Machine(0.2, 0.05)
    assert tune(machine) == BatchTuning(128)
    assert machine.calls == [32]


def test_no_time_or_no_room_to_measure() -> None:
    machine = Machine(0.01, 0.0018)
    assert tune(machine, spend=0.0) == BatchTuning(512)
    assert tune(machine, largest=100) == BatchTuning(512)
    assert tune(machine, smallest=5000, largest=6000) == BatchTuning(5000)
    assert tune(machine, smallest=20_000) == BatchTuning(20_000)
    assert machine.calls == []


@given(st.floats(0.0, 1.0), st.floats(1e-6, 0.1), st.integers(2, 2000), st.integers(1, 9000), st.floats(0.01, 5.0))
def test_never_below_what_runs_nor_above_the_time_that_was_given(
    fixed: float, per_token: float, running: int, largest: int, spend: float
) -> None:
    machine = Machine(fixed, per_token)
    found = tune(machine, smallest=smallest_budget(running), largest=largest, spend=spend)
    assert found.tokens >= running
    # The probe, and what was expected to fit: 2 % of it is more than expected here.
    assert machine.spent <= (fixed + per_token * 32) * 1.02 + spend * 1.02
    assert all(size <= largest for size in machine.calls if size > 32)


@pytest.mark.parametrize(
    ("flag", "given_values"),
    [
        ("--max-batch-tokens", {"max_batch_tokens": "some"}),
        ("--max-batch-tokens", {"max_batch_tokens": "0"}),
        ("--max-batch-tokens", {"max_batch_tokens": "8"}),
        ("--target-step-seconds", {"target_step_seconds": "0"}),
        ("--tune-seconds", {"tune_seconds": "-1"}),
    ],
)
def test_nonsense_is_refused_by_its_flag(flag: str, given_values: dict[str, object]) -> None:
    with pytest.raises(StartupError) as refused:
        load(GenerationServiceConfig, given_values, {}).validate()
    assert refused.value.flag == flag


def test_auto_and_numbers_are_read() -> None:
    assert load(GenerationServiceConfig, {}, {}).max_batch_tokens is None
    assert load(GenerationServiceConfig, {"max_batch_tokens": "auto"}, {}).max_batch_tokens is None
    assert load(GenerationServiceConfig, {}, {"PENSTOCK_MAX_BATCH_TOKENS": "300"}).max_batch_tokens == 300
