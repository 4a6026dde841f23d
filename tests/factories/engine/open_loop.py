"""An engine under open-loop load in simulated time: arrivals do not wait for answers. Deterministic and fast."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from factories.engine.fake_engine import engine_config, request
from penstock.common.errors import DeadlineExceeded, ResourceExhausted
from penstock.generation.core.step import RunnerOutput, SampledToken, SchedulerOutput
from penstock.generation.engine.engine import Engine

_ids = itertools.count()


@dataclass(frozen=True)
class Flow:
    """Requests of one tenant: so many a second, in [begin, end)."""

    rate: float
    tenant: str = ""
    prompt_tokens: int = 40
    output_tokens: tuple[int, int] = (32, 32)
    deadline_seconds: float | None = None
    begin: float = 0.0
    end: float = 60.0


@dataclass
class Outcome:
    """Ends of one flow's requests, each with its latency in seconds."""

    good: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    refused: int = 0
    # Times from now on that callers were told to wait.
    pushbacks: list[float] = field(default_factory=list)

    @property
    def p99(self) -> float:
        ordered = sorted(self.good)
        return ordered[int(0.99 * (len(ordered) - 1))]


@dataclass(frozen=True)
class Slowdown:
    """Another program on the machine: for the first `busy` seconds of each period steps take `factor` times as long."""

    factor: float = 2.0
    busy: float = 20.0
    period: float = 40.0
    # Time at which its first period begins.
    begin: float = 0.0

    def at(self, now: float) -> float:
        """Factor at a time."""
        return self.factor if now >= self.begin and (now - self.begin) % self.period < self.busy else 1.0


class TimedRunner:
    """Runner whose steps take `fixed` seconds and `per_row` more for each row, and longer in a slowdown."""

    def __init__(self, fixed: float, per_row: float, slowdown: Slowdown | None = None) -> None:
        self.now = 0.0
        self._fixed = fixed
        self._per_row = per_row
        self._slowdown = slowdown

    def release(self, seq_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        factor = 1.0 if self._slowdown is None else self._slowdown.at(self.now)
        self.now += factor * (self._fixed + self._per_row * output.num_tokens)
        return RunnerOutput(
            {drawer.seq_id: SampledToken(1) for entry in output.scheduled for drawer in entry.sample}, {}
        )


def simulate(
    flows: Sequence[Flow],
    *,
    fixed: float = 0.004,
    per_row: float = 0.0002,
    slowdown: Slowdown | None = None,
    seed: int = 0,
    **config: Any,
) -> list[Outcome]:
    """Run the flows to their end, and everything that was accepted. Requests have prompts of their own.

    The queue has a bound where `config` has one.
    """
    runner = TimedRunner(fixed, per_row, slowdown)
    engine = Engine(
        engine_config(
            **{"num_blocks": 4096, "block_size": 16, "max_batch_tokens": 512, "max_running_sequences": 64} | config
        ),
        runner,  # type: ignore[arg-type]
        None,
        clock=lambda: runner.now,
    )
    arrivals = sorted((at, number) for number, flow in enumerate(flows) for at in _times(flow, seed + number))
    draw = random.Random(seed)
    outcomes, owners = [Outcome() for _ in flows], {}
    arrivals.reverse()
    while arrivals or engine.has_work:
        if not engine.has_work and arrivals:
            runner.now = max(runner.now, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= runner.now:
            at, number = arrivals.pop()
            flow = flows[number]
            arrived = request(
                [next(_ids) + 2 for _ in range(flow.prompt_tokens)],
                max_new_tokens=draw.randint(*flow.output_tokens),
                arrival_time=runner.now,
                fair_share_key=flow.tenant,
                deadline=None if flow.deadline_seconds is None else at + flow.deadline_seconds,
            )
            owners[arrived.request_id] = (number, at)
            if engine.num_waiting >= config.get("max_queued_requests", math.inf):
                outcomes[number].refused += 1
                del owners[arrived.request_id]
                continue
            try:
                engine.check_deadline(arrived, engine.load().pace, {})
            except ResourceExhausted as error:
                outcomes[number].refused += 1
                outcomes[number].pushbacks.append(error.retry_after_seconds or 0.0)
            else:
                engine.add(arrived)
        for output in engine.step():
            if output.finished is not None:
                number, at = owners.pop(output.request.request_id)
                assert output.finished.error is None or isinstance(output.finished.error, DeadlineExceeded)
                ends = outcomes[number].good if output.finished.error is None else outcomes[number].late
                ends.append(runner.now - at)
    return outcomes


def _times(flow: Flow, seed: int) -> list[float]:
    draw, at, times = random.Random(seed), flow.begin, []
    while (at := at + draw.expovariate(flow.rate)) < flow.end:
        times.append(at)
    return times
