"""Budget of tokens per step for this machine: `--max-batch-tokens auto`, measured while the process starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.state_pool import new_states
from penstock.generation.engine.config import EngineConfig
from penstock.generation.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.models.language_model import LanguageModel

_PROBE_TOKENS = 32
_REPEATS = 2
_SIZES = tuple(64 << doubling for doubling in range(8))
LARGEST_SIZE = _SIZES[-1]
# Share of the best throughput that a budget must have: prompts lose little, and sequences that decode beside them wait
# for a shorter step.
_GOOD_ENOUGH = 0.97
# When a step of the fixed budget takes less than this share of the allowed time, the sizes differ by noise only.
_NEGLIGIBLE = 0.1


@dataclass(frozen=True, slots=True)
class BatchTuning:
    """The budget, and the (tokens, seconds) by which it was chosen; none for a fixed one."""

    tokens: int
    measured: tuple[tuple[int, float], ...] = ()

    def describe(self) -> str:
        """Return one line for the log and for people."""
        times = ", ".join(f"{size}: {seconds * 1e3:.0f} ms" for size, seconds in self.measured)
        return f"{self.tokens} tokens a step" + (f" (measured: {times})" if times else "")


def smallest_budget(max_running_sequences: int) -> int:
    """Return the least budget: decoding sequences take a token each, and prompts must progress beside all of them."""
    return max_running_sequences + max_running_sequences // 2


def tune_batch_tokens(
    time_prompt: Callable[[int], tuple[float, float]],
    *,
    smallest: int,
    largest: int,
    step_seconds: float,
    spend_seconds: float,
) -> BatchTuning:
    """Return the smallest budget with 97 % of the best prompt throughput and steps of at most `step_seconds`.

    `time_prompt` takes a number of prompt tokens, at most `largest`, and returns the seconds of such a step and the
    seconds that it spent on measuring. After the first 32 tokens a size is tried only if it is expected to end within
    `spend_seconds` altogether. The result is the fixed budget of EngineConfig when steps are too short to matter or
    no time may be spent, and the smallest size when the model is too slow to measure any.
    """
    fixed = max(EngineConfig.max_batch_tokens, smallest)
    sizes = [size for size in _SIZES if smallest <= size <= largest]
    if not sizes or not spend_seconds:
        return BatchTuning(fixed)
    seconds, spent = time_prompt(_PROBE_TOKENS)
    per_token, cost_per_token = seconds / _PROBE_TOKENS, spent / _PROBE_TOKENS
    if per_token * fixed <= _NEGLIGIBLE * step_seconds:
        return BatchTuning(fixed)
    measured: list[tuple[int, float]] = []
    for size in sizes:
        if spent + cost_per_token * size > spend_seconds or (measured and per_token * size > step_seconds):
            break
        seconds, cost = time_prompt(size)
        spent += cost
        # The first run may have made kernels for this size, or been disturbed by another process.
        for _ in range(_REPEATS):
            if spent + cost <= spend_seconds:
                again, cost = time_prompt(size)
                spent += cost
                seconds = min(seconds, again)
        per_token, cost_per_token = seconds / size, cost / size
        measured.append((size, seconds))
    return BatchTuning(_choose(measured, step_seconds) if measured else sizes[0], tuple(measured))


def _choose(measured: list[tuple[int, float]], step_seconds: float) -> int:
    """Choose a measured size. One that is too slow is chosen only when it is the smallest."""
    allowed = [(size, seconds) for size, seconds in measured if seconds <= step_seconds] or measured[:1]
    best = max(size / seconds for size, seconds in allowed)
    return next(size for size, seconds in allowed if size / seconds >= _GOOD_ENOUGH * best)


# Layers that are timed: the last one, which does only a part of its work for rows that nothing is drawn from, and
# before it enough layers that one layer's weights do not stay in the cache for the next run.
_LAYERS = 3


class PromptTimer:
    """Timer of steps with a prompt. It has a small KV pool of its own for as long as it lives.

    A model that cannot be cut runs whole each time.
    """

    def __init__(self, model: LanguageModel, kv: KVCachePool, device: Device, *, most_tokens: int) -> None:
        """`model` and `kv` are those that will serve. `most_tokens`: longest prompt that will be timed."""
        all_layers = model.config.num_layers
        self._is_whole = model.shallow(1) is model
        layers = model.config.num_kv_layers if self._is_whole else min(_LAYERS, all_layers)
        blocks = min(kv.num_blocks, most_tokens // kv.block_size + 1)
        geometry = (layers, blocks, kv.block_size, kv.num_kv_heads, kv.head_dim)
        kinds: dict[str, Any] = {"has_values": kv.has_values, "index": kv.index, "shapes": model.config.kv_shapes}
        small = KVCachePool(*geometry, kv.dtype, kv.device, **kinds)
        # Each runner times one sequence after another.
        small.states = new_states(model.state_layout, 1, kv.device)
        self._device = device
        # Number of layers, without the last, per such layer that is timed.
        self._share = (all_layers - 1) / max(1, layers - 1)
        self._none = ModelRunner(model.shallow(0), small.shallow(0), kernels=device.sampling_kernels())
        self._last = ModelRunner(model.shallow(1), small.shallow(1), kernels=device.sampling_kernels())
        self._some = ModelRunner(model.shallow(layers), small, kernels=device.sampling_kernels())
        self.longest_prompt = self._some.longest_prompt
        # Seconds to draw the first token: one row, however long the prompt is, so one measurement is enough.
        self._drawing: float | None = None

    def __call__(self, num_tokens: int) -> tuple[float, float]:
        """Return the seconds of a step with a prompt of `num_tokens`, and the seconds that this call took."""
        if self._is_whole:
            seconds = self._time(self._some, num_tokens, draws=True)
            return seconds, seconds
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
