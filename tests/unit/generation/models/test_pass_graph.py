"""A pass runs by its graph where that gives the modules' bits for other numbers, rows and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from penstock.generation.models.pass_graph import PassGraph
from torch import Tensor

Compute = Callable[..., Tensor]


class Passes:
    """Passes of one computation, and how often Python ran it."""

    def __init__(self, compute: Compute, *, key: str = "") -> None:
        self.graph, self.key, self.calls = PassGraph(), key, 0
        self._compute = compute

    def __call__(self, *inputs: Tensor) -> Tensor:
        def counted(*tensors: Tensor) -> Tensor:
            self.calls += 1
            return self._compute(*tensors)

        with torch.inference_mode():
            (result,) = self.graph(self.key, inputs, lambda: (counted(*inputs),), lambda *tensors: (counted(*tensors),))
            return result

    def repeats(self, *inputs: Tensor) -> bool:
        """True when a pass runs without Python, after enough of them."""
        for _ in range(20):
            self(*inputs)
        before = self.calls
        self(*inputs)
        return self.calls == before


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def test_later_passes_run_without_python_and_give_the_same() -> None:
    weight = rows(4, 9)
    passes = Passes(lambda x: (x @ weight).view(x.shape[0], 2, 2).tanh())
    assert passes.repeats(rows(3))
    for count in (1, 2, 3, 17):
        for seed in range(3):
            x = rows(count, seed)
            assert torch.equal(passes(x), (x @ weight).view(count, 2, 2).tanh())
        assert passes.repeats(rows(count))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1 if x[0, 0] > 0 else x - 1,
        lambda x: x * x[0, 0].item(),
        lambda x: x * x[0].tolist()[0],
        lambda x: x * float(x.numpy()[0, 0]),
        lambda x: x[x > 0],
        lambda x: x[(x > 0).nonzero()[:, 0]],
        lambda x: x + 1 if torch.equal(x, x.abs()) else x,
        lambda x: torch.nn.functional.one_hot((x.abs() * 9).long()[:, 0]),
        lambda x: x[torch.where(x > 0)[0]],
    ],
    ids=["if", "item", "tolist", "numpy", "mask", "nonzero", "equal", "one hot", "where"],
)
def test_a_pass_that_python_reads_numbers_of_stays_with_python(compute: Compute) -> None:
    passes = Passes(compute)
    assert not passes.repeats(rows(3).abs())
    for seed in range(6):
        assert torch.equal(passes(rows(3, seed)), compute(rows(3, seed)))


def test_a_pass_that_depends_on_the_number_of_rows_in_python_stays_with_python() -> None:
    passes = Passes(lambda x: x * 2 if len(x.unbind(0)) > 2 else x * 3)
    assert passes.repeats(rows(3))
    for count in (2, 1, 3, 2):
        assert torch.equal(passes(rows(count)), rows(count) * (2 if count > 2 else 3))
    assert not passes.repeats(rows(3))


def test_a_number_of_rows_that_is_a_constant_is_found_where_the_bits_are_the_same() -> None:
    """As of a scale that queries get from some position on: constants of one row are right for all others below it."""

    def scale(positions_T: Tensor) -> Tensor:
        seen_T = positions_T - torch.arange(len(positions_T))
        return ((torch.arange(positions_T.shape[0]) + seen_T) // 64).float()

    passes = Passes(scale)
    assert passes.repeats(torch.tensor([5]))
    for first in (3, 4, 61, 62):
        positions_T = torch.arange(first, first + 3)
        assert torch.equal(passes(positions_T), scale(positions_T))
    assert not passes.repeats(torch.tensor([5]))


def test_operators_that_one_row_does_without_are_no_reason_for_python() -> None:
    passes = Passes(lambda x: (x[:, :] if x.shape[0] > 1 else x) * 2)
    assert passes.repeats(rows(1))
    for count in (3, 1, 4, 1, 17):
        assert torch.equal(passes(rows(count)), rows(count) * 2)
        assert passes.repeats(rows(count))


def test_a_torch_without_the_functions_of_graphs_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "optimized_execution")
    passes = Passes(lambda x: x * 2)
    assert not passes.repeats(rows(3))
    assert torch.equal(passes(rows(3)), rows(3) * 2)


def test_a_computation_that_changes_with_each_call_stays_with_python() -> None:
    calls: list[int] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    assert not Passes(compute).repeats(rows(2))


def test_many_rows_run_by_the_modules() -> None:
    assert not Passes(lambda x: x + 1).repeats(rows(65))
    assert Passes(lambda x: x + 1).repeats(rows(64))


def test_memory_is_that_of_the_call_and_equal_tensors_are_two() -> None:
    def compute(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        first.index_copy_(0, torch.arange(x.shape[0]), x)
        return second.clone()

    passes = Passes(compute)
    assert passes.repeats(rows(3), torch.zeros(5, 4), torch.zeros(5, 4))
    first, second = torch.zeros(5, 4), torch.zeros(5, 4)
    assert not passes(rows(3), first, second).any()
    assert torch.equal(first[:3], rows(3))
    # A pool of another size.
    first = torch.zeros(9, 4)
    assert torch.equal(passes(rows(3), first, torch.ones(9, 4)), torch.ones(9, 4))
    assert torch.equal(first[:3], rows(3))


def test_rows_that_are_not_numbers_end_no_graph() -> None:
    passes = Passes(lambda x: x * 2)
    assert passes.repeats(rows(2))
    assert passes(torch.full((3, 4), torch.nan)).isnan().all()
    assert passes.repeats(rows(3))


def test_a_graph_for_another_key_is_made_anew_and_not_for_ever() -> None:
    passes = Passes(lambda x: x + 1)
    for key in "abcd":
        passes.key = key
        assert passes.repeats(rows(2))
    passes.key = "e"
    assert not passes.repeats(rows(2))


def test_weights_are_freed_with_the_graph() -> None:
    weights = [rows(4)]
    passes = Passes(lambda x: x @ weights[0])
    assert passes.repeats(rows(3))
    known = weakref.ref(weights[0])
    weights.clear()
    gc.collect()
    # The graph has it.
    assert known() is not None
    del passes
    gc.collect()
    assert known() is None


def test_inputs_that_change_in_place_change_once_a_pass() -> None:
    graph, state = PassGraph(), torch.zeros(2, 3)
    calls = 0

    def compute(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        state.mul_(2.0).add_(x)
        # As a module that puts a new tensor in the place of its state.
        return state.sum(1), state + 0.0

    wanted = torch.zeros(2, 3)
    with torch.inference_mode():
        for number in range(20):
            x = torch.full((2, 3), float(number % 3))
            found, state = graph("", (x,), lambda x=x, state=state: compute(x, state), compute, (state,))
            wanted = wanted * 2.0 + x
            assert torch.equal(state, wanted)
            assert torch.equal(found, wanted.sum(1))
    assert calls < 15
