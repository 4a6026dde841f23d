"""States that modules of transformers keep in themselves, moved to the cache of each part of a step.

RecurrentGemma's recurrent layers do so: their modules have room for one batch, and a step has several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.generation.models.transformers_states import is_states_only

_TYPE = "recurrent_gemma"


def move_states(causal: Any) -> None:
    """Let recurrent modules take their states from the cache that they are given, and leave them there, where it is
    one of this package. Models of other types stay as they are."""
    if causal.config.model_type != _TYPE:
        return
    for number, layer in enumerate(causal.model.layers):
        block = layer.temporal_block
        if hasattr(block, "rg_lru"):
            block.forward = _moved(block, number, block.forward)


def first_cache(causal: Any) -> Any:
    """Return the cache that transformers' own pass begins with; None: the model makes one and returns it."""
    from transformers import DynamicCache

    return DynamicCache(config=causal.config) if causal.config.model_type == _TYPE else None


def _moved(block: Any, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
    recurrent: nn.Module = block.rg_lru

    def forward(*arguments: Any, cache: Any = None, **named: Any) -> Any:
        if not is_states_only(cache):
            return own(*arguments, cache=cache, **named)
        states = cache.layers[number]
        block.conv1d_state, recurrent.recurrent_states = states.conv_states[0], states.recurrent_states[0]
        found = own(*arguments, cache=cache, **named)
        states.conv_states[0], states.recurrent_states[0] = block.conv1d_state, recurrent.recurrent_states
        nothing: Any = None
        block.conv1d_state = recurrent.recurrent_states = nothing
        return found

    return forward
