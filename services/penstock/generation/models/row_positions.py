"""Positions of a step for modules of transformers that take them from a cache's length: rows of several sequences have
no common one. These are attention that scales by the position, and embeddings of positions that count by themselves."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from penstock.generation.attention.transformers_interface import positions_of_step

# Attribute of attention that scales its queries by the position: Llama 4's layers without rotary embeddings.
_SCALES = "attn_temperature_tuning"
# A cache's name in `forward`, by release.
_CACHES = ("cache", "past_key_values")
# Parameters of embeddings of positions: without the first they count from the second on.
_GIVEN, _COUNTED = "position_ids", "cache_length"


class _Positions:
    """A cache in name only: its count of "seen" tokens before each row turns the row's number into its position."""

    def __init__(self, positions_T: Tensor) -> None:
        # By the shape, which a graph of a pass takes from each pass: a length would be a constant of it.
        self._seen_T = positions_T - torch.arange(positions_T.shape[0], device=positions_T.device)

    def get_seq_length(self, *_: Any, **__: Any) -> Tensor:
        return self._seen_T

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return both unchanged: the attention function writes them into the pool."""
        return key, value


def give_positions(causal: nn.Module) -> None:
    """Give the modules of a model that scale by position, or count positions, the rows' own ones within a step. Outside
    of a step, as with transformers' own cache, nothing changes."""
    for module in causal.modules():
        if isinstance(module, nn.Embedding) and _counts(module):
            module.register_forward_pre_hook(_count, with_kwargs=True)
        if getattr(module, _SCALES, False) and hasattr(module, "layer_idx"):
            known = inspect.signature(module.forward).parameters
            module.register_forward_pre_hook(_Giver([name for name in _CACHES if name in known]), with_kwargs=True)


def _counts(module: nn.Module) -> bool:
    return {_GIVEN, _COUNTED} <= inspect.signature(module.forward).parameters.keys()


def _count(
    _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positions_T, given = positions_of_step(), named.get(_GIVEN)
    # Those of the model's caller have a batch; a range that it counted has none.
    if positions_T is None or (given is not None and given.dim() > 1):
        return None
    return arguments, {**named, _GIVEN: positions_T}


class _Giver:
    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions_T = positions_of_step()
        if positions_T is None:
            return None
        return arguments, {**named, **dict.fromkeys(self._names[:1], _Positions(positions_T))}
