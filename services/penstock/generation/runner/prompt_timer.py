"""What a prompt's step takes, found out with a few of the model's layers: they are all alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.generation.runner.kv_cache import KVCachePool
from penstock.generation.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.sampling.kernels import SamplingKernels

# Enough that one layer's weights do not stay in the cache for its next turn.
_LAYERS = 2


class PromptTimer:
    """Has a small KV pool of its own, for as long as it is there."""

    def __init__(self, model: CausalLM, kv: KVCachePool, kernels: SamplingKernels, *, most_tokens: int) -> None:
        """`model` and `kv` are those that will serve; `most_tokens`: of a prompt that anybody will ask about."""
        layers = min(_LAYERS, len(model.layers))
        blocks = min(kv.num_blocks, most_tokens // kv.block_size + 1)
        small = KVCachePool(layers, blocks, kv.block_size, kv.num_kv_heads, kv.head_dim, kv.dtype, kv.device)
        self._share = len(model.layers) / layers
        self._none = ModelRunner(model.shallow(0), small, kernels=kernels)
        self._some = ModelRunner(model.shallow(layers), small, kernels=kernels)
        self.longest_prompt = self._some.longest_prompt

    def __call__(self, num_tokens: int) -> tuple[float, float]:
        """Seconds that a step with a prompt of so many tokens takes, and seconds that it took to find out."""
        began = time.perf_counter()
        rest = self._none.time_prompt(num_tokens)
        layers = max(self._some.time_prompt(num_tokens) - rest, 0.0)
        return rest + layers * self._share, time.perf_counter() - began
