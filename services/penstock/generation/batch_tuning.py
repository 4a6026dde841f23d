"""How many tokens a step should have on this machine: `--max-batch-tokens auto`, measured while the process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.generation.engine.config import EngineConfig

_PROBE_TOKENS = 32
_SIZES = tuple(64 << doubling for doubling in range(8))
# A budget is good that has so much of the best throughput: prompts lose little, and sequences that decode beside them
# wait for a shorter step.
_GOOD_ENOUGH = 0.97
# Where a step of the fixed budget takes less than this share of what it may, the sizes differ by noise only.
_NEGLIGIBLE = 0.1


@dataclass(frozen=True, slots=True)
class BatchTuning:
    """The budget, and the (tokens, seconds) that it was chosen by: none when it is a fixed one."""

    tokens: int
    measured: tuple[tuple[int, float], ...] = ()

    def describe(self) -> str:
        """For the log and people."""
        times = ", ".join(f"{size}: {seconds * 1e3:.0f} ms" for size, seconds in self.measured)
        return f"{self.tokens} tokens a step" + (f" (measured: {times})" if times else "")


def smallest_budget(max_running_sequences: int) -> int:
    """Decoding sequences take a token each; prompts must get on beside as many as may run."""
    return max_running_sequences + max_running_sequences // 2


def tune_batch_tokens(
    time_prompt: Callable[[int], float], *, smallest: int, largest: int, step_seconds: float, spend_seconds: float
) -> BatchTuning:
    """The smallest budget with 97 % of the best prompt throughput among those whose steps take at most `step_seconds`.

    `time_prompt` computes a prompt of so many tokens, at most `largest`, and returns its seconds. Apart from the first
    32 tokens nothing is tried that is not expected to end within `spend_seconds` altogether. The fixed budget of
    EngineConfig where steps are too short to matter or nothing may be measured, the smallest size where the model is so
    slow that nothing can be.
    """
    fixed = max(EngineConfig.max_batch_tokens, smallest)
    sizes = [size for size in _SIZES if smallest <= size <= largest]
    if not sizes or not spend_seconds:
        return BatchTuning(fixed)
    spent = time_prompt(_PROBE_TOKENS)
    per_token = spent / _PROBE_TOKENS
    if per_token * fixed <= _NEGLIGIBLE * step_seconds:
        return BatchTuning(fixed)
    measured: list[tuple[int, float]] = []
    for size in sizes:
        expected = per_token * size
        if spent + expected > spend_seconds or (measured and expected > step_seconds):
            break
        seconds = time_prompt(size)
        spent += seconds
        # The first time may have made kernels for this size.
        if spent + seconds <= spend_seconds:
            again = time_prompt(size)
            spent += again
            seconds = min(seconds, again)
        per_token = seconds / size
        measured.append((size, seconds))
    return BatchTuning(_choose(measured, step_seconds) if measured else sizes[0], tuple(measured))


def _choose(measured: list[tuple[int, float]], step_seconds: float) -> int:
    """One that is too slow is taken only when it is the smallest."""
    allowed = [(size, seconds) for size, seconds in measured if seconds <= step_seconds] or measured[:1]
    best = max(size / seconds for size, seconds in allowed)
    return next(size for size, seconds in allowed if size / seconds >= _GOOD_ENOUGH * best)
