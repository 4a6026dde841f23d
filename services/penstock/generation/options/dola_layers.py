"""Which layers DoLa contrasts with the last one: the names of transformers' `dola_layers`, as numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.common.errors import InvalidArgument

# Deeper models take their candidates from the first or the last this many layers only.
_DEEP, _DEEP_SPAN = 40, 20


def candidate_layers(layers: str | Sequence[int], num_layers: int, *, tied: bool) -> tuple[int, ...]:
    """The candidate layers of a model with `num_layers` decoder layers, as transformers 4.55.4's _dola_decoding.

    `layers` is "low", "high" or numbers, 0 being the embedding and i the output of layer i - 1; numbers that are not
    below `num_layers` are left out. `tied`: the embedding is the output head as well, so that an exit from it would
    only repeat the input token, and "low" begins later. Raises InvalidArgument naming config.dola_layers when no
    layer is left.
    """
    if isinstance(layers, str):
        chosen = _preset(layers, num_layers, _first_useful(num_layers) if tied else 0)
    else:
        if any(layer < 0 for layer in layers):
            raise InvalidArgument("config.dola_layers", "must hold no negative layer")
        chosen = [layer for layer in dict.fromkeys(layers) if layer < num_layers]
    if not chosen:
        raise InvalidArgument("config.dola_layers", f"names no layer below the last of the model's {num_layers}")
    return tuple(chosen)


def _first_useful(num_layers: int) -> int:
    """Where "low" begins when the embedding is tied."""
    if num_layers > 2:
        return 2
    return 1 if num_layers == 2 else 0


def _preset(name: str, num_layers: int, first: int) -> list[int]:
    half = num_layers // 2
    deep = num_layers > _DEEP
    if name == "low":
        return [first] if first == half else list(range(first, _DEEP_SPAN if deep else half, 2))
    if name == "high":
        return list(range(num_layers - _DEEP_SPAN if deep else half, num_layers, 2))
    raise InvalidArgument("config.dola_layers", 'must be "low", "high" or layer numbers')
