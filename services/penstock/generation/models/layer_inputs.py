"""Inputs given to a model's layers in place of what the layers before made, so that each is judged by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

# Argument of a layer that is no positional one.
_HIDDEN = "hidden_states"


def decoder_layers(causal: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """Return the first `num_layers` modules of the first list that has as many; empty: there is none."""
    lists = (module for module in causal.modules() if isinstance(module, nn.ModuleList))
    return next((list(found)[:num_layers] for found in lists if len(found) >= num_layers), ())


@contextmanager
def given_inputs(layers: Sequence[nn.Module], inputs_LTI: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Give layer i the rows `inputs_LTI[i]` (T, hidden) inside the block, whatever it is called with. Yield the list of
    their results, each (T, hidden), in the order of the calls."""
    results: list[Tensor] = []

    def keep(_module: nn.Module, _arguments: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        # Some modules go on in the same memory.
        results.append(hidden[0].clone())

    hooks = []
    for layer, rows_TI in zip(layers, inputs_LTI, strict=True):
        hooks.append(layer.register_forward_pre_hook(partial(_replaced, rows_TI), with_kwargs=True))
        hooks.append(layer.register_forward_hook(keep))
    try:
        yield results
    finally:
        for hook in hooks:
            hook.remove()


def _replaced(
    rows_TI: Tensor, _module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a layer's arguments with other rows."""
    rows_1TI = rows_TI.clone().unsqueeze(0)
    if arguments:
        return (rows_1TI, *arguments[1:]), named
    return arguments, {**named, _HIDDEN: rows_1TI}
