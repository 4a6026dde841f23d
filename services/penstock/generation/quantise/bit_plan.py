"""Matrices that get eight bits: those that rounding to four costs most, as far as a mean number of bits allows.

A unit is the matrices of a layer with the same input, such as q, k and v: readers join them to one product, which has
one form. Each unit is rounded by itself, and its cost is the energy of the change in the layer's output as a share of
the output's, in the mean over tokens: a token with huge states, as a text's first one has, counts as much as any other.
Units with the largest cost for a bit come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.generation.quantise.grid import GridSettings, round_to_nearest
from penstock.generation.quantise.layer_stream import LayerStream

# Tokens of the calibration text that are enough to tell the units apart.
_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that have a form in common."""

    modules: tuple[str, ...]
    weights: int
    # Of rounding to few bits.
    cost: float


def unit_costs(
    stream: LayerStream,
    units_of: Callable[[int], list[list[str]]],
    form: GridSettings,
    count: Callable[[int], None],
) -> list[Unit]:
    """Return the units of all layers, each with its cost in `form`. The stream's states stay those before its first
    layer.

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
            for module, weight in zip(modules, weights, strict=True):
                rounded = nn.Parameter(round_to_nearest(weight, form), requires_grad=False)
                module.register_parameter("weight", rounded)
            changed = [_change(one, two) for one, two in zip(stream.outputs(index, documents), exact, strict=True)]
            for module, weight in zip(modules, weights, strict=True):
                module.register_parameter("weight", weight)
            size = sum(weight.numel() for weight in weights)
            found.append(Unit(tuple(prefix + name for name in names), size, float(torch.cat(changed).mean())))
        documents = exact
        stream.unload(index)
        count(index + 1)
    return found


def units_with_more(units: list[Unit], few: float, more: float, most: float) -> list[Unit]:
    """Return the units that get `more` bits a weight, so that the mean of all is at most `most`; others have `few`."""
    spare = (most - few) * sum(unit.weights for unit in units)
    found = []
    for unit in sorted(units, key=lambda unit: unit.cost / unit.weights, reverse=True):
        extra = (more - few) * unit.weights
        if extra <= spare:
            spare -= extra
            found.append(unit)
    return found


def _change(found: Tensor, exact: Tensor) -> Tensor:
    """Return the energy of each token's change as a share of its own."""
    energy = exact.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (found - exact).square().sum(-1) / energy
