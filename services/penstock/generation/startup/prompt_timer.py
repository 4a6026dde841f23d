"""What a prompt's step takes, found out with a few of the model's layers: they are all alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.models.decoder import CausalLM

# The last, which does only a part of its work for rows that nobody draws from, and before it enough that one layer's
# weights do not stay in the cache for its next turn.
_LAYERS = 3


class PromptTimer:
    """Has a small KV pool of its own, for as long as it is there."""

    def __init__(self, model: CausalLM, kv: KVCachePool, device: Device, *, most_tokens: int) -> None:
        """`model` and `kv` are those that will serve; `most_tokens`: of a prompt that anybody will ask about."""
        layers = min(_LAYERS, len(model.layers))
        blocks = min(kv.num_blocks, most_tokens // kv.block_size + 1)
        small = KVCachePool(layers, blocks, kv.block_size, kv.num_kv_heads, kv.head_dim, kv.dtype, kv.device)
        self._device = device
        # Of all layers but the last, for each that is timed.
        self._share = (len(model.layers) - 1) / max(1, layers - 1)
        self._none = ModelRunner(model.shallow(0), small, kernels=device.sampling_kernels())
        self._last = ModelRunner(model.shallow(1), small.shallow(1), kernels=device.sampling_kernels())
        self._some = ModelRunner(model.shallow(layers), small, kernels=device.sampling_kernels())
        self.longest_prompt = self._some.longest_prompt
        # The first token: one row, however long the prompt is. Of a vocabulary's size, so once is enough.
        self._drawing: float | None = None

    def __call__(self, num_tokens: int) -> tuple[float, float]:
        """Seconds that a step with a prompt of so many tokens takes, and seconds that it took to find out."""
        began = time.perf_counter()
        if self._drawing is None:
            self._drawing = min(self._time(self._none, 1, draws=True) for _ in range(2))
        rest = self._time(self._last, num_tokens, draws=False)
        layers = max(self._time(self._some, num_tokens, draws=False) - rest, 0.0)
        return self._drawing + rest + layers * self._share, time.perf_counter() - began

    def _time(self, runner: ModelRunner, num_tokens: int, *, draws: bool) -> float:
        began = time.perf_counter()
        runner.run_prompt(num_tokens, draws=draws)
        self._device.synchronize()
        return time.perf_counter() - began
