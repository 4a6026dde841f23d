"""Forms of matrices by what rounding costs: more bits where they are worth most, as far as a mean number allows.

A unit is the matrices of a layer with the same input, such as q, k and v: readers join them to one product, which has
one form. Each unit is rounded by itself to each form, and its cost is the energy of the change in the layer's output as
a share of the output's, in the mean over tokens: a token with huge states, as a text's first one has, counts as much as
any other. Then the step to a form with more bits that saves most of the cost for a bit is taken, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.generation.quantise.grid import GridSettings, round_to_nearest
from penstock.generation.quantise.layer_stream import LayerStream

# Tokens of the calibration text that are enough to tell the units apart.
_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that have a form in common."""

    modules: tuple[str, ...]
    weights: int
    # Of rounding to each form.
    costs: tuple[float, ...]


def unit_costs(
    stream: LayerStream,
    units_of: Callable[[int], list[list[str]]],
    forms: Sequence[GridSettings],
    count: Callable[[int], None],
) -> list[Unit]:
    """Return the units of all layers, each with its cost in each of the `forms`. The stream's states stay those before
    its first layer.

    `units_of` takes a layer's index and returns the names in it of each unit's modules. `count` gets the number of
    layers that are done.
    """
    documents = list(stream.states[: max(1, _TOKENS // stream.states.shape[1])])
    found = []
    for index, prefix in enumerate(stream.prefixes):
        layer = stream.load(index)
        exact = list(stream.outputs(index, documents))
        for names in units_of(index):
            modules = [layer.get_submodule(name) for name in names]
            weights = [module.get_parameter("weight") for module in modules]
            costs = []
            for form in forms:
                for module, weight in zip(modules, weights, strict=True):
                    rounded = nn.Parameter(round_to_nearest(weight, form), requires_grad=False)
                    module.register_parameter("weight", rounded)
                changed = zip(stream.outputs(index, documents), exact, strict=True)
                costs.append(float(torch.cat([_change(one, two) for one, two in changed]).mean()))
            for module, weight in zip(modules, weights, strict=True):
                module.register_parameter("weight", weight)
            size = sum(weight.numel() for weight in weights)
            found.append(Unit(tuple(prefix + name for name in names), size, tuple(costs)))
        documents = exact
        stream.unload(index)
        count(index + 1)
    return found


def forms_within(units: list[Unit], bits: Sequence[float], most: float) -> list[int]:
    """Return the place of each unit's form, so that the mean of all weights is at most `most` bits.

    `bits`: of a weight in each form, rising; a form behind the units' costs costs nothing.
    """
    spare = (most - bits[0]) * sum(unit.weights for unit in units)
    costs = [[*unit.costs, *[0.0] * (len(bits) - len(unit.costs))] for unit in units]
    found = [0] * len(units)
    while True:
        steps = []
        for number, unit in enumerate(units):
            now = found[number]
            for form in range(now + 1, len(bits)):
                extra = (bits[form] - bits[now]) * unit.weights
                saved = costs[number][now] - costs[number][form]
                if extra <= spare and saved > 0.0:
                    steps.append((saved / extra, -number, form, extra))
        if not steps:
            return found
        _, negative, form, extra = max(steps)
        found[-negative] = form
        spare -= extra


def _change(found: Tensor, exact: Tensor) -> Tensor:
    """Return the energy of each token's change as a share of its own."""
    energy = exact.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (found - exact).square().sum(-1) / energy
