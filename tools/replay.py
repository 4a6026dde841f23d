"""Replay a trace of engine steps (`penstock serve generation --trace-steps FILE`) through the real scheduler.

    python tools/replay.py TRACE                          does every step schedule the same rows? exit code 1: no
    python tools/replay.py TRACE --set max_batch_tokens=256 --set num_blocks=2000     what would that have been like?

No model and no tokens: a stand-in draws for everybody, and each request's decoding repeats what the trace says became
of its draws. Requests arrive, and are cut off, before the step that the trace has them before. The first difference is
printed with both schedules.

With --set the trace is run twice, as it was configured and as it is told to be, and the figures of both are shown. Time
is simulated then: a step takes a + b * rows seconds, fitted to the trace, and requests arrive and are cut off when they
did. What such a run cannot know: which tokens other drafts would have hit (of drafts that were not verified the rest
follows later), what a mode that begins anew after a preemption (contrastive search) does without one or with another,
what beams do when their draws come in an order that the trace has no outcome for (they are given up and counted), and
of other block sizes which blocks are equal where the recorded ones do not tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.common.errors import Cancelled, PenstockError
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.modes import NO_GUIDANCE, GuidanceOptions
from penstock.generation.core.request import (
    Emission,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Purpose,
    Request,
    RequestOutput,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import RunnerOutput, SampledToken, ScheduledSequence, SchedulerOutput
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy
from penstock.generation.engine.decoding.modes import MODES, ModeRegistry
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.step_trace import FORMAT, row_of
from penstock.generation.engine.stopping import StopCriteria

Line = dict[str, Any]
# Ids of tokens that are in no full block: never those of a block, which are counted from 1.
_FIRST_LOOSE_TOKEN = 1 << 31


class TraceError(Exception):
    """The file is not a trace that this version reads."""


@dataclass(slots=True)
class Trace:
    """A trace in memory: O(its size)."""

    config: EngineConfig
    version: str
    steps: list[Line]
    # Why it ended; "cut" when the process ended first.
    end: str
    # request -> what became of it: outcomes and restarts, in order.
    scripts: dict[int, list[Line]]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises TraceError, OSError."""
        with path.open(encoding="ascii") as file:
            head, *lines = _lines(file)
        if head.get("penstock_trace") != FORMAT:
            raise TraceError(f"{path} is not a trace of format {FORMAT}")
        known = {one.name for one in fields(EngineConfig)}
        config = EngineConfig(**{name: value for name, value in head["config"].items() if name in known})
        end = lines.pop()["end"] if lines and "end" in lines[-1] else "cut"
        scripts: dict[int, list[Line]] = {}
        for line in lines:
            for request, sequences in line["preempted"]:
                scripts.setdefault(request, []).append({"restart": sequences})
            for outcome in line["outcomes"]:
                scripts.setdefault(outcome["request"], []).append(outcome)
        return cls(config, head["version"], lines, end, scripts)


def _lines(file: Iterable[str]) -> list[Line]:
    # A process that was killed leaves half a line.
    found = [json.loads(text) for text in file if text.endswith("\n")]
    if not found:
        raise TraceError("the file is empty")
    return found


class Tokens:
    """Token ids that are equal where the trace has equal blocks, and differ everywhere else."""

    def __init__(self, block_size: int) -> None:
        """`block_size` is the trace's."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}
        self._loose = _FIRST_LOOSE_TOKEN

    def grow(self, sequence: Sequence, num_tokens: int, first_block: int, hashes: Iterable[int]) -> int:
        """Bring `sequence` to `num_tokens` tokens, with `hashes` for its full blocks from `first_block` on; how many
        full blocks are known now."""
        token_ids = sequence.token_ids
        for _ in range(len(token_ids), num_tokens):
            self._loose += 1
            token_ids.append(self._loose)
        for block_hash in hashes:
            number = self._numbers.setdefault(block_hash, len(self._numbers) + 1)
            begin = first_block * self._block_size
            token_ids[begin : begin + self._block_size] = [number] * self._block_size
            first_block += 1
        return first_block


class RecordedStrategy(DecodingStrategy):
    """Does with its draws what the trace says was done with them."""

    def __init__(self, facts: Line, script: list[Line], tokens: Tokens, *, exact: bool) -> None:
        """`exact`: the schedule is that of the trace, so the next outcome is always due."""
        self._facts = facts
        self._tokens = tokens
        self._width: int = facts["width"]
        self._params = _params(facts)
        # By number, and how many of their full blocks are known.
        self._sequences: dict[int, Sequence] = {}
        self._blocks: dict[int, int] = {}
        self._exact = exact
        self._script = deque(script if exact else _merged(script))
        # Without forks and restarts every sequence goes its own way: number -> its outcomes.
        self._own = None if exact else _by_sequence(facts, self._script)
        self._drawn: set[int] = set()
        self._next_probe = -1 - (facts["add"] << 20)

    @property
    def width(self) -> int:
        return self._width

    @property
    def holds_draws(self) -> bool:
        """Whether it waits for draws of other sequences."""
        return bool(self._drawn)

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """As many sequences as the trace has."""
        sequences = [self._made(one) for one in self._facts["sequences"]]
        for facts, sequence in zip(self._facts["sequences"], sequences, strict=True):
            if "guide" in facts:
                sequence.guide = self._sequences[facts["guide"]]
        return sequences, []

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Raises Cancelled where the trace has the request cut off, or ends."""
        decision = Decision()
        draws: dict[int, int] = {}
        for drawer in sampled:
            owner = (drawer.origin or drawer).seq_id
            draws[owner] = draws.get(owner, 0) + 1
        if self._exact:
            if not self._script:
                raise Cancelled("the trace says no more of it", reason="ABORTED")
            self._apply(self._script.popleft(), decision)
        elif self._own is not None:
            for number, count in draws.items():
                self._go_on(number, count, decision)
        else:
            self._drawn.update(draws)
            while self._script and self._script[0]["drawn_all"] <= self._drawn:
                outcome = self._script.popleft()
                self._drawn -= outcome["drawn_all"]
                self._apply(outcome, decision)
            if not self._script and not decision.dropped:
                raise Cancelled("the trace says no more of it", reason="ABORTED")
        return decision

    def restarted(self) -> list[Sequence] | None:
        for sequence in self._sequences.values():
            if sequence.num_draft_tokens:
                sequence.roll_back(sequence.num_tokens - sequence.num_draft_tokens)
        self._drawn.clear()
        if not self._exact:
            return None
        told = self._script.popleft()["restart"]
        return [self._sequences[one] if isinstance(one, int) else self._made(one) for one in told]

    def end(self, reason: FinishReason) -> list[Emission]:
        return []

    def _go_on(self, number: int, count: int, decision: Decision) -> None:
        """One sequence's next outcome, cut to the rows that were there to draw from."""
        assert self._own is not None
        script = self._own.get(number)
        if not script:
            raise Cancelled("the trace says no more of it", reason="ABORTED")
        sequence, outcome = self._sequences[number], script[0]
        settled = sequence.num_tokens - sequence.num_draft_tokens
        wanted = next((change[1] for change in outcome["sequences"] if change[0] == number), settled)
        if wanted - settled <= count:
            script.popleft()
            self._apply(outcome, decision)
        else:
            drafts = [[number, wanted - settled - count - 1]]
            self._apply({"sequences": [[number, settled + count, -1]], "drafts": drafts}, decision)

    def _apply(self, outcome: Line, decision: Decision) -> None:
        if "cut" in outcome:
            raise Cancelled("cut off", reason="ABORTED")
        changed = outcome.get("sequences", ())
        drafts = outcome.get("drafts", ())
        for number in (*(one if isinstance(one, int) else one[0] for one in changed), *(one[0] for one in drafts)):
            if self._sequences[number].num_draft_tokens:
                self._sequences[number].take_back_drafts()
        for change in changed:
            number, tokens, computed, *hashes = change if isinstance(change, list) else [change, None, -1]
            sequence = self._sequences[number]
            if tokens is None:
                tokens = sequence.num_tokens + 1
            if not self._exact and computed < 0:
                computed = sequence.num_computed_tokens
            if computed >= 0:
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, computed)
            self._blocks[number] = self._tokens.grow(sequence, tokens, self._blocks[number], hashes)
            if not self._exact:
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
        for parent, facts in outcome.get("forks", ()):
            decision.forks.append((self._sequences[parent], self._made(facts, self._sequences[parent])))
        if "restart" in outcome:
            # The preemption that made it begin anew is not there; what it went on with afterwards is.
            decision.dropped.extend(self._sequences.values())
            self._sequences = {}
            decision.added.extend(self._made(one) for one in outcome["restart"] if not isinstance(one, int))
        decision.added.extend(self._made(facts) for facts in outcome.get("added", ()))
        for number in outcome.get("dropped", ()):
            decision.dropped.append(self._sequences.pop(number))
        self._width = outcome.get("width", self._width)
        for number, count in drafts:
            self._draft(self._sequences[number], count)

    def _draft(self, sequence: Sequence, count: int) -> None:
        """`count` drafts, and probes for the rows of the last token and of each of them."""
        if count < 1:
            return
        first = sequence.num_tokens
        sequence.append_drafts([0] * count, [(first - 1 + place, self._probe(sequence)) for place in range(count + 1)])

    def _probe(self, origin: Sequence) -> Sequence:
        self._next_probe -= 1
        return Sequence(self._next_probe, 0, self._params, 0, [], 0, origin=origin)

    def _made(self, facts: Line, parent: Sequence | None = None) -> Sequence:
        size = self._tokens._block_size
        shared = facts["shared"] * size
        sequence = Sequence(
            seq_id=facts["sequence"],
            index=0,
            params=self._params,
            seed=0,
            token_ids=[] if parent is None else parent.token_ids[:shared],
            num_prompt_tokens=facts["prompt"],
            family=facts["family"],
            draw=DrawSpec(DrawKind.GUIDE) if "is_guide" in facts else DrawSpec(),
            next_token_id=0 if "is_scored" in facts else None,
        )
        self._sequences[sequence.seq_id] = sequence
        self._blocks[sequence.seq_id] = self._tokens.grow(sequence, facts["tokens"], facts["shared"], facts["blocks"])
        return sequence


def _drawn(outcome: Line) -> set[int]:
    changed = outcome.get("sequences", ())
    return set(outcome.get("drawn", changed))


def _merged(script: list[Line]) -> list[Line]:
    """The outcomes that had an effect, each with all that had drawn by then as `drawn_all`. Of preemptions only those
    that replaced sequences."""
    merged: list[Line] = []
    waiting: set[int] = set()
    for one in script:
        if "restart" in one:
            waiting = set()
            if any(not isinstance(sequence, int) for sequence in one["restart"]):
                merged.append({**one, "drawn_all": set()})
            continue
        waiting |= set() if "cut" in one else _drawn(one)
        if one.keys() - {"request", "drawn"}:
            merged.append({**one, "drawn_all": waiting})
            waiting = set()
    return merged


def _by_sequence(facts: Line, script: Iterable[Line]) -> dict[int, deque[Line]] | None:
    """The outcomes of each sequence, with those of its guide; None where sequences depend on each other."""
    owners = {one["guide"]: one["sequence"] for one in facts["sequences"] if "guide" in one}
    own: dict[int, deque[Line]] = {one["sequence"]: deque() for one in facts["sequences"]}
    tokens = {one["sequence"]: one["tokens"] for one in facts["sequences"]}
    for outcome in script:
        if outcome.keys() & {"forks", "added", "restart", "cut"}:
            return None
        drawn = outcome["drawn_all"]
        parts: dict[int, Line] = {number: {"sequences": [], "dropped": [], "drafts": []} for number in drawn}
        for change in outcome.get("sequences", ()):
            change = change if isinstance(change, list) else [change, tokens[change] + 1, -1]
            tokens[change[0]] = change[1]
            owner = owners.get(change[0], change[0])
            if owner not in parts:
                return None
            # What was computed is this run's affair.
            parts[owner]["sequences"].append([change[0], change[1], -1, *change[3:]])
        for name, number, entry in [
            *(("dropped", number, number) for number in outcome.get("dropped", ())),
            *(("drafts", draft[0], draft) for draft in outcome.get("drafts", ())),
        ]:
            owner = owners.get(number, number)
            if owner in parts:
                parts[owner][name].append(entry)
            elif name == "dropped":
                return None
        for number, part in parts.items():
            if "width" in outcome:
                part["width"] = outcome["width"]
            own[number].append(part)
    return own


def _params(facts: Line) -> SamplingParams:
    """What the scheduler and the checks of admission look at."""
    guidance = GuidanceOptions(2.0, (0,) * facts["guidance"]) if "guidance" in facts else NO_GUIDANCE
    mode = MODES.named(*facts["mode"])
    return SamplingParams(
        max_new_tokens=facts["max_new_tokens"],
        num_return_sequences=facts["n"],
        prompt_logprobs=0 if facts["prompt_logprobs"] else None,
        mode=mode,
        guidance=guidance,
        # Beams that decide together what they may draw.
        allowed_token_ids=frozenset([0]) if mode.shares_constraint and facts["lockstep"] else None,
    )


class StandIn:
    """A runner that draws something for everybody and remembers what it was told to compute."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        self.rows: list[list[Any]] = []

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.rows = [row_of(self.requests[entry.sequence.seq_id], entry) for entry in output.scheduled]
        token = SampledToken(0)
        sampled: dict[int, SampledToken] = {}
        prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        for entry in output.scheduled:
            for drawer in (*entry.sample, *(probe for _, probe in entry.probes)):
                if drawer.draw.kind is not DrawKind.GUIDE:
                    sampled[drawer.seq_id] = token
            told = _prompt_rows(entry)
            if told:
                prompt_logprobs[entry.sequence.seq_id] = (PositionLogprobs(Logprob(0, 0.0, 1)),) * told
        return RunnerOutput(sampled, prompt_logprobs)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Keeps nothing."""


def _prompt_rows(entry: ScheduledSequence) -> int:
    """Rows that tell a prompt token's log-probability."""
    sequence = entry.sequence
    if sequence.first_logprob_row is None:
        return 0
    last = sequence.num_prompt_tokens - (sequence.next_token_id is None)
    return max(min(entry.start + entry.num_tokens, last) - max(entry.start, sequence.first_logprob_row), 0)


class _Recorded(ModeRegistry):
    """The modes as they are, but that every request is decoded by what was recorded of it."""

    def __init__(self, strategy: Callable[..., DecodingStrategy]) -> None:
        super().__init__(MODES)
        self._strategy = strategy

    def make_strategy(
        self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]
    ) -> DecodingStrategy:
        """See ModeRegistry."""
        return self._strategy(request, criteria, next_seq_id)


class Replay:
    """One run of a trace through an engine."""

    def __init__(self, trace: Trace, config: EngineConfig, *, exact: bool) -> None:
        self.trace = trace
        self.now = 0.0
        self.refused = 0
        # Requests whose outcomes do not fit the order in which their sequences draw now.
        self.lost = 0
        self.runner = StandIn()
        self._tokens = Tokens(trace.config.block_size)
        self._exact = exact
        self.engine = Engine(config, self.runner, None, modes=_Recorded(self._strategy), clock=lambda: self.now)
        self._facts: dict[str, Line] = {}
        self._strategies: dict[str, RecordedStrategy] = {}

    def happen(self, event: Line) -> None:
        """An arrival, a request cut off, or the cache cleared."""
        if "clear" in event:
            self.engine.clear_cache()
        elif "cut" in event:
            self.engine.abort(str(event["cut"]))
        else:
            self._facts[str(event["add"])] = event
            try:
                self.engine.add(_request(event))
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
        self.runner.requests.update(dict.fromkeys(_numbers(facts, script), facts["add"]))
        return strategy


def _numbers(facts: Line, script: Iterable[Line]) -> Iterable[int]:
    """Of all sequences that a request ever has."""
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
        params=_params(facts),
        arrival_time=facts["at"],
        priority=facts["priority"],
        purpose=Purpose[facts["purpose"]],
        first_needed_row=facts["first_needed_row"],
    )


def first_difference(trace: Trace) -> str | None:
    """Replay `trace` as it was; what differs first, in lines for people, or None."""
    replay = Replay(trace, trace.config, exact=True)
    for line in trace.steps:
        replay.now = line["at"]
        for event in line["events"]:
            replay.happen(event)
        preemptions = replay.engine.stats.preemptions
        rows, _ = replay.step()
        load = replay.engine.load()
        pool = [load.kv_blocks_used, load.kv_blocks_free + load.kv_blocks_evictable, load.kv_blocks_evictable]
        found = {
            "rows": (line["rows"], rows),
            "preemptions": (len(line["preempted"]), replay.engine.stats.preemptions - preemptions),
            "pool [used, free, evictable]": (line["pool"], pool),
        }
        for name, (recorded, replayed) in found.items():
            if recorded != replayed:
                return f"step {line['step']}: {name}\n  trace:  {recorded}\n  replay: {replayed}"
    return None


@dataclass(slots=True)
class Figures:
    """What a simulated run was like."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    finished: int = 0
    refused: int = 0
    lost: int = 0
    preemptions: int = 0
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
    seconds = [line["seconds"] for line in trace.steps]
    if len(set(rows)) < 2:
        return (statistics.fmean(seconds) if seconds else 0.0), 0.0
    slope, base = statistics.linear_regression(rows, seconds)
    if slope < 0:
        return statistics.fmean(seconds), 0.0
    return (base, slope) if base >= 0 else (0.0, sum(seconds) / sum(rows))


def simulate(trace: Trace, config: EngineConfig, show: Callable[[str], None] | None = None) -> Figures:
    """Run the trace's requests under `config`; `show` gets a line a step."""
    replay, figures = Replay(trace, config, exact=False), Figures()
    base, per_row = step_cost(trace)
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
            replay.now = started + base + per_row * count
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
    figures.prefix_hits = stats.prefix_hit_tokens
    return figures


def changed(config: EngineConfig, settings: Iterable[str]) -> EngineConfig:
    """`config` with NAME=VALUE settings. Raises TraceError for a name or value that it does not have."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in values:
            raise TraceError(f"--set {name}: one of {', '.join(values)}")
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
