"""Replay a trace of engine steps (`penstock serve generation --trace-steps FILE`) through the real scheduler.

    python tools/replay.py TRACE                          does every step schedule the same rows? exit code 1: no
    python tools/replay.py TRACE --set max_batch_tokens=256 --set num_blocks=2000     what would that have been like?

No model and no tokens: a stand-in draws for every sequence, and each request's decoding repeats what the trace says
became of its draws. Requests arrive, and are cut off, before the step that the trace has them before. The first
difference is printed with both schedules.

With --set the trace is run twice, as it was configured and as it is told to be, and the figures of both are shown. Time
is simulated then: a step takes a + b * rows seconds, fitted to the trace, and requests arrive and are cut off when they
did. A block that is copied to the host pool or from it takes what such blocks took on average (nothing, where the trace
has none). What such a run cannot know: which tokens other drafts would have hit (of drafts that were not verified the
rest follows later), what a mode that begins anew after a preemption (contrastive search) does without one or with
another, what beams do when their draws come in an order that the trace has no outcome for (they are given up and
counted), and of other block sizes which blocks are equal where the recorded ones do not tell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from typing_extensions import override

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from penstock.common.errors import PenstockError
from penstock.common.pace import Demand, Pace
from penstock.generation.core.request import Purpose, Request, RequestOutput
from penstock.generation.engine.config import AUTO, EngineConfig
from penstock.generation.engine.decoding.base import DecodingStrategy
from penstock.generation.engine.decoding.mode_registry import MODES, ModeRegistry
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.fairness.fair_turns import FairTurns
from penstock.generation.engine.group import SequenceGroup
from penstock.generation.engine.stopping import StopCriteria
from penstock.generation.engine.swap_or_recompute import SwapPolicy

from tools._recorded import Line, RecordedStrategy, StandIn, Tokens, Trace, TraceError, params_of


class _Recorded(ModeRegistry):
    """The modes as they are, but that every request is decoded by what was recorded of it."""

    def __init__(self, strategy: Callable[..., DecodingStrategy]) -> None:
        super().__init__(MODES)
        self._strategy = strategy

    @override
    def make_strategy(
        self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]
    ) -> DecodingStrategy:
        return self._strategy(request, criteria, next_seq_id)


class Replay:
    """One run of a trace through an engine."""

    def __init__(self, trace: Trace, config: EngineConfig, *, exact: bool) -> None:
        self.trace = trace
        self.now = 0.0
        self.refused = 0
        # Requests with outcomes that do not fit the order in which their sequences draw now.
        self.lost = 0
        self.runner = StandIn()
        self._tokens = Tokens(trace.config.block_size)
        self._exact = exact
        self._facts: dict[str, Line] = {}
        modes = _Recorded(self._strategy)
        self.engine = _RecordedCosts(self._facts, trace.spent, config, self.runner, modes, self._clock)
        self._strategies: dict[str, RecordedStrategy] = {}

    def _clock(self) -> float:
        return self.now

    def happen(self, event: Line) -> None:
        """An arrival, a request cut off or set back, the cache cleared, or the blocks that a caller holds."""
        if "clear" in event:
            self.engine.clear_cache()
        elif "overwritten" in event:
            self.engine.forget_prefixes(*event["overwritten"])
        elif "set_back" in event:
            with contextlib.suppress(PenstockError):
                self.engine.release_cache([str(event["set_back"][0])])
        elif "claimed" in event:
            # With other blocks than the trace had, some of them may not be there.
            with contextlib.suppress(PenstockError):
                self.engine.caller_blocks.release()
                self.engine.caller_blocks.claim(event["claimed"], host_blocks=event.get("claimed_host", ()))
        elif "cut" in event:
            self.engine.abort(str(event["cut"]))
        else:
            self._facts[str(event["add"])] = event
            try:
                request = _request(event)
                self.engine.check(request)
                self.engine.add(request)
            except PenstockError:
                self.refused += 1

    def step(self) -> tuple[list[list[Any]], list[RequestOutput]]:
        """One step of the engine: its rows and its outputs."""
        self.runner.rows = []
        outputs = self.engine.step()
        for output in outputs:
            if output.finished is not None:
                self._facts.pop(output.request.request_id, None)
                self._strategies.pop(output.request.request_id, None)
        return self.runner.rows, outputs

    def give_up(self) -> bool:
        """Cut off the first request that waits for draws which do not come; False: there is none."""
        for request_id, strategy in self._strategies.items():
            if strategy.holds_draws:
                self.lost += 1
                return self.engine.abort(request_id)
        return False

    def _strategy(self, request: Request, *_: object) -> DecodingStrategy:
        facts = self._facts[request.request_id]
        script = self.trace.scripts.get(facts["add"], [])
        strategy = self._strategies[request.request_id] = RecordedStrategy(
            facts, script, self._tokens, exact=self._exact
        )
        for number in _numbers(facts, script):
            self.runner.requests[number] = facts["add"]
        return strategy


def _numbers(facts: Line, script: Iterable[Line]) -> Iterable[int]:
    """Numbers of all sequences that a request ever has."""
    made = [*facts["sequences"]]
    for one in script:
        made += [child for _, child in one.get("forks", ())]
        made += one.get("added", [])
        made += [sequence for sequence in one.get("restart", []) if not isinstance(sequence, int)]
    return [one["sequence"] for one in made]


def _request(facts: Line) -> Request:
    return Request(
        request_id=str(facts["add"]),
        prompt_token_ids=[0] * facts["prompt"],
        params=params_of(facts),
        arrival_time=facts["at"],
        priority=facts["priority"],
        fair_share_key=str(facts.get("tenant", "")),
        purpose=Purpose[facts["purpose"]],
        first_needed_row=facts["first_needed_row"],
    )


class _RecordedCosts(Engine):
    """Engine in which requests cost what they did: that depends on the answers before them, which are not replayed."""

    def __init__(
        self,
        facts: Mapping[str, Line],
        spent: Mapping[int, int],
        config: EngineConfig,
        runner: StandIn,
        modes: _Recorded,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(config, runner, None, modes=modes, clock=clock)
        self._facts = facts
        self._recorded = spent

    def _cost(self, request: Request, pace: Pace, demand: Demand) -> int:
        recorded = self._facts[request.request_id].get("cost")
        return super()._cost(request, pace, demand) if recorded is None else int(recorded)

    def _spent(self, group: SequenceGroup, generated: float) -> int:
        return self._recorded.get(int(group.request.request_id), 0) or super()._spent(group, generated)


class _RecordedPolicy(SwapPolicy):
    """Ways of preemptions as they were: they depend on how long steps and copies took."""

    swapped: frozenset[int] = frozenset()

    def swaps(self, group: SequenceGroup, blocks: int, tokens: int) -> bool:
        """True when the request was swapped in the recorded step."""
        return group.key[1] in self.swapped


class _FittedPolicy(SwapPolicy):
    """Judge of preemptions in simulated time, by what rows and copies took in the trace."""

    def __init__(self, way: str, row_seconds: float, block_seconds: float) -> None:
        super().__init__(way, 0)
        self._row_seconds = row_seconds
        self._block_seconds = block_seconds

    @override
    def swaps(self, group: SequenceGroup, blocks: int, tokens: int) -> bool:
        if self._way != AUTO:
            return super().swaps(group, blocks, tokens)
        return 2 * blocks * self._block_seconds <= tokens * self._row_seconds


class _RecordedTurns(FairTurns):
    """Turns of tenants as they were: they depend on how long steps took."""

    resting: frozenset[str] = frozenset()

    def choose(self, widths: Mapping[str, int]) -> frozenset[str]:
        """Return the tenants that rested in the recorded step."""
        return self.resting


def first_difference(trace: Trace) -> str | None:
    """Replay `trace` as it was; what differs first, in lines for people, or None."""
    replay = Replay(trace, trace.config, exact=True)
    turns = replay.engine.turns = _RecordedTurns(0.0)
    policy = replay.engine.policy = _RecordedPolicy(trace.config.preemption, 0)
    for line in trace.steps:
        replay.now = line["at"]
        turns.resting = frozenset(str(tenant) if tenant else "" for tenant in line.get("resting", ()))
        policy.swapped = frozenset(line.get("swapped", ()))
        for event in line["events"]:
            replay.happen(event)
        preemptions = replay.engine.stats.preemptions
        rows, _ = replay.step()
        load = replay.engine.load()
        pool = [load.kv_blocks_used, load.kv_blocks_free + load.kv_blocks_evictable, load.kv_blocks_evictable]
        found = {
            "rows": (line["rows"], rows),
            "preemptions": (
                len(line["preempted"]) + len(line.get("swapped", ())),
                replay.engine.stats.preemptions - preemptions,
            ),
            "blocks copied to the host pool or from it": (sum(line.get("copied", ())[:2]), replay.runner.copied),
            "pool [used, free, evictable]": (line["pool"], pool),
        }
        for name, (recorded, replayed) in found.items():
            if recorded != replayed:
                return f"step {line['step']}: {name}\n  trace:  {recorded}\n  replay: {replayed}"
    return None


@dataclass(slots=True)
class Figures:
    """Figures of a simulated run."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    finished: int = 0
    refused: int = 0
    lost: int = 0
    preemptions: int = 0
    swaps: int = 0
    copied_blocks: int = 0
    prefix_hits: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    total_seconds: list[float] = field(default_factory=list)

    def shown(self) -> dict[str, str]:
        """Name -> figure."""
        return {
            "steps": str(self.steps),
            "rows": str(self.rows),
            "rows a step": f"{self.rows / max(self.steps, 1):.1f}",
            "simulated seconds": f"{self.seconds:.3f}",
            "requests finished": str(self.finished),
            "requests refused": str(self.refused),
            "requests given up": str(self.lost),
            "preemptions": str(self.preemptions),
            "of them swaps": str(self.swaps),
            "blocks to the host, and back": str(self.copied_blocks),
            "prefix hits, tokens": str(self.prefix_hits),
            "queue p50, seconds": _percentile(self.queue_seconds, 0.5),
            "queue p95, seconds": _percentile(self.queue_seconds, 0.95),
            "request p50, seconds": _percentile(self.total_seconds, 0.5),
            "request p95, seconds": _percentile(self.total_seconds, 0.95),
        }


def _percentile(values: list[float], share: float) -> str:
    return f"{sorted(values)[min(int(len(values) * share), len(values) - 1)]:.4f}" if values else "-"


def step_cost(trace: Trace) -> tuple[float, float]:
    """(a, b) of a step's seconds, a + b * rows, by least squares; neither is below 0."""
    rows = [float(sum(row[4] for row in line["rows"])) for line in trace.steps]
    seconds = [line["seconds"] - line["copied"][2] if "copied" in line else line["seconds"] for line in trace.steps]
    if len(set(rows)) < 2:
        return (statistics.fmean(seconds) if seconds else 0.0), 0.0
    slope, base = statistics.linear_regression(rows, seconds)
    if slope < 0:
        return statistics.fmean(seconds), 0.0
    return (base, slope) if base >= 0 else (0.0, sum(seconds) / sum(rows))


def block_seconds(trace: Trace) -> float:
    """Seconds that a copied block took; 0: none was copied."""
    copied = [line["copied"] for line in trace.steps if "copied" in line]
    blocks = sum(num_out + num_in for num_out, num_in, _ in copied)
    return sum(seconds for _, _, seconds in copied) / blocks if blocks else 0.0


def simulate(trace: Trace, config: EngineConfig, show: Callable[[str], None] | None = None) -> Figures:
    """Run the trace's requests under `config`; `show` gets a line a step."""
    replay, figures = Replay(trace, config, exact=False), Figures()
    base, per_row = step_cost(trace)
    replay.runner.block_seconds = per_block = block_seconds(trace)
    replay.engine.policy = _FittedPolicy(config.preemption, per_row, per_block)
    events = deque((event.get("at", line["at"]), event) for line in trace.steps for event in line["events"])
    while events or replay.engine.has_work:
        if not replay.engine.has_work:
            replay.now = max(replay.now, events[0][0])
        while events and events[0][0] <= replay.now:
            replay.happen(events.popleft()[1])
        if not replay.engine.has_work:
            continue
        started, preemptions = replay.now, replay.engine.stats.preemptions
        rows, outputs = replay.step()
        count = sum(row[4] for row in rows)
        if rows:
            replay.now = started + base + per_row * count + per_block * replay.runner.copied
            figures.steps += 1
            figures.rows += count
        elif not outputs and not replay.give_up():
            raise TraceError("nothing can be scheduled: the trace does not say what its requests do under this")
        for output in outputs:
            if output.finished is not None:
                figures.finished += 1
                if output.finished.timings.queue is not None:
                    figures.queue_seconds.append(output.finished.timings.queue)
                figures.total_seconds.append(replay.now - output.request.arrival_time)
        if show is not None and rows:
            load = replay.engine.load()
            show(
                f"step {figures.steps} at {started:.4f}: {count} rows of {len({row[0] for row in rows})} requests, "
                f"{load.waiting_requests} queued, {load.kv_blocks_used} of {load.kv_blocks_total} blocks, "
                f"{replay.engine.stats.preemptions - preemptions} preempted"
            )
    stats = replay.engine.stats
    figures.seconds, figures.refused, figures.preemptions = replay.now, replay.refused, stats.preemptions
    figures.lost = replay.lost
    figures.swaps, figures.copied_blocks = stats.swaps, stats.host_out_blocks + stats.host_in_blocks
    figures.prefix_hits = stats.prefix_hit_tokens
    return figures


def changed(config: EngineConfig, settings: Iterable[str]) -> EngineConfig:
    """`config` with NAME=VALUE settings. Raises TraceError for a name or value that it does not have."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in values or name == "groups":
            raise TraceError(f"--set {name}: one of {', '.join(one for one in values if one != 'groups')}")
        try:
            kind = type(values[name])
            values[name] = text.lower() in ("1", "true", "on") if kind is bool else kind(text)
        except ValueError:
            raise TraceError(f"--set {setting}: not a number") from None
    try:
        return EngineConfig(**values)
    except ValueError as error:
        raise TraceError(f"--set: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    """0: the same schedule; 1: another; 2: no trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of EngineConfig")
    parser.add_argument("--steps", action="store_true", help="with --set: a line for each step of that run")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except (TraceError, OSError, json.JSONDecodeError, KeyError) as error:
        print(f"replay: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    trace = Trace.read(given.trace)
    print(f"{len(trace.steps)} steps of Penstock {trace.version}, trace ended: {trace.end}")
    if given.set:
        config = changed(trace.config, given.set)
        before = simulate(trace, trace.config).shown()
        after = simulate(trace, config, print if given.steps else None).shown()
        print(f"{'':<24}{'recorded':>14}{' '.join(given.set):>30}")
        for name, figure in before.items():
            print(f"{name:<24}{figure:>14}{after[name]:>30}")
        return 0
    started = time.perf_counter()
    difference = first_difference(trace)
    seconds = time.perf_counter() - started
    print(difference or f"the same rows in every step; {len(trace.steps) / max(seconds, 1e-9):.0f} steps a second")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
