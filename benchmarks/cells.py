"""The six workloads: what is asked, and what a round of one comes to."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Requests = tuple[list[list[int]], list[int]]


@dataclass(frozen=True)
class Workload:
    """Requests that all come at once. `lengths` of prompt and output; the first `common` prompt tokens are shared."""

    name: str
    title: str
    lengths: tuple[tuple[int, int], ...]
    common: int = 0

    @property
    def outputs(self) -> list[int]:
        """Output tokens of each request."""
        return [output for _, output in self.lengths]

    def requests(self, vocab_size: int, seed: int) -> Requests:
        """Prompts of random ids and their output lengths. Another seed shares no prefix: no cache helps from before."""
        rng = random.Random(f"{self.name} {seed}")
        common = [rng.randrange(vocab_size) for _ in range(self.common)]
        prompts = [
            common + [rng.randrange(vocab_size) for _ in range(prompt - self.common)] for prompt, _ in self.lengths
        ]
        return prompts, self.outputs


def _mixed(num_requests: int, seed: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(seed)
    return tuple((rng.randint(32, 512), rng.randint(16, 128)) for _ in range(num_requests))


WORKLOADS = {
    one.name: one
    for one in (
        Workload("W1", "1 × (128 → 128)", ((128, 128),)),
        Workload("W2", "8 × (128 → 128)", ((128, 128),) * 8),
        Workload("W3", "32 × (128 → 64)", ((128, 64),) * 32),
        Workload("W4", "1 × (2048 → 16)", ((2048, 16),)),
        Workload("W5", "64 mixed (32–512 → 16–128)", _mixed(64, seed=5)),
        Workload("W6", "32 × (512 common + 32 → 32)", ((544, 32),) * 32, common=512),
    )
}


def tokens_needed(workloads: list[Workload]) -> int:
    """KV tokens that hold any of the workloads at once, shared prefixes counted every time."""
    return max(sum(prompt + output for prompt, output in one.lengths) for one in workloads)


def figures(workload: Workload, times: list[list[float]]) -> dict[str, float]:
    """One round's figures from the time of every token (seconds from the start).

    ttft_s is the median over requests; decode_tok_s the median of every request's tokens after the first over the time
    they took; prefill_tok_s all prompt tokens over the time to the last first token.
    """
    wall = max(one[-1] for one in times)
    firsts = [one[0] for one in times]
    rates = [(len(one) - 1) / (one[-1] - one[0]) for one in times if one[-1] > one[0]]
    gaps = [after - before for one in times for before, after in pairwise(one)]
    return {
        "wall_s": wall,
        "output_tok_s": sum(map(len, times)) / wall,
        "ttft_s": statistics.median(firsts),
        "last_ttft_s": max(firsts),
        "decode_tok_s": statistics.median(rates) if rates else 0.0,
        "itl_s": statistics.median(gaps) if gaps else 0.0,
        "prefill_tok_s": sum(prompt for prompt, _ in workload.lengths) / max(firsts),
    }


@dataclass(frozen=True)
class Headline:
    """The figure that a workload is judged by."""

    title: str
    workload: str
    figure: str
    roofline: str
    show: Callable[[float], str]
    smaller_is_better: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1: ours is better."""
        return theirs / ours if self.smaller_is_better else ours / theirs


def _speed(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f}"


HEADLINES = (
    Headline("W1 decode tok/s", "W1", "decode_tok_s", "decode", _speed),
    Headline("W1 TTFT ms", "W1", "ttft_s", "prefill", _milliseconds, smaller_is_better=True),
    Headline("W2 tok/s", "W2", "output_tok_s", "total", _speed),
    Headline("W3 tok/s", "W3", "output_tok_s", "total", _speed),
    Headline("W4 prefill tok/s", "W4", "prefill_tok_s", "prefill", _speed),
    Headline("W5 tok/s", "W5", "output_tok_s", "total", _speed),
    Headline("W6 tok/s", "W6", "output_tok_s", "total", _speed),
)

# Of all threads of an engine, those that spin while they wait, too.
PROCESSOR_TIMES = tuple(
    Headline(f"{name} processor s", name, "processor_s", "total", _speed, smaller_is_better=True) for name in WORKLOADS
)


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """The median of every figure over rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]} if rounds else {}
