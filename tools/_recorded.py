"""A trace of engine steps in memory, and the stand-ins that repeat it: a strategy per request and a runner."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.common.errors import Cancelled
from penstock.generation.core.cache_group import CacheGroup
from penstock.generation.core.decoding_mode import NO_GUIDANCE, GuidanceOptions
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.request import Emission, FinishReason, Logprob, PositionLogprobs
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import CopyKind, RunnerOutput, SampledToken, ScheduledSequence, SchedulerOutput
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.step_trace import FORMAT, row_of

Line = dict[str, Any]
# Names of format 1 -> those of today.
_RENAMED = {"guide": "unconditional", "is_guide": "is_unconditional"}
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
    # Why it ended: "stopped" with its process, "full", "too slow" (the disk was); "cut" when the process ended first or
    # the disk failed.
    end: str
    # request -> what became of it: outcomes and restarts, in order.
    scripts: dict[int, list[Line]]
    # request -> tokens that it was found to have cost.
    spent: dict[int, int]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises TraceError, OSError."""
        with path.open(encoding="ascii") as file:
            head, *lines = _lines(file)
        if head.get("penstock_trace") not in range(1, FORMAT + 1):
            raise TraceError(f"{path} is not a trace of format 1 to {FORMAT}")
        known = {one.name for one in fields(EngineConfig)}
        values = {name: value for name, value in head["config"].items() if name in known}
        values["groups"] = tuple(CacheGroup(**group) for group in values.get("groups", ()))
        config = EngineConfig(**values)
        end = lines.pop()["end"] if lines and "end" in lines[-1] else "cut"
        scripts: dict[int, list[Line]] = {}
        for line in lines:
            set_back = [event["set_back"] for event in line["events"] if "set_back" in event]
            for request, sequences in [*set_back, *line["preempted"]]:
                scripts.setdefault(request, []).append({"restart": sequences})
            for outcome in line["outcomes"]:
                scripts.setdefault(outcome["request"], []).append(outcome)
        spent = dict(one for line in lines for one in line.get("spent", ()))
        return cls(config, head["version"], lines, end, scripts, spent)


def _lines(file: Iterable[str]) -> list[Line]:
    # A process that was killed leaves half a line.
    found = [json.loads(text, object_hook=_with_names_of_today) for text in file if text.endswith("\n")]
    if not found:
        raise TraceError("the file is empty")
    return found


def _with_names_of_today(facts: Line) -> Line:
    return {_RENAMED.get(name, name): value for name, value in facts.items()}


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
        self._params = params_of(facts)
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
        """True: it waits for draws of other sequences."""
        return bool(self._drawn)

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Make the sequences that the trace begins with."""
        sequences = [self._made(one) for one in self._facts["sequences"]]
        for facts, sequence in zip(self._facts["sequences"], sequences, strict=True):
            if "unconditional" in facts:
                sequence.unconditional = self._sequences[facts["unconditional"]]
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
            draw=DrawSpec(DrawKind.UNCONDITIONAL) if "is_unconditional" in facts else DrawSpec(),
            next_token_id=0 if "is_scored" in facts else None,
        )
        self._sequences[sequence.seq_id] = sequence
        self._blocks[sequence.seq_id] = self._tokens.grow(sequence, facts["tokens"], facts["shared"], facts["blocks"])
        return sequence


def _drawn(outcome: Line) -> set[int]:
    return set(outcome["drawn"] if "drawn" in outcome else outcome.get("sequences") or [])


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
    """The outcomes of each sequence and of its unconditional branch; None where sequences depend on each other."""
    owners = {one["unconditional"]: one["sequence"] for one in facts["sequences"] if "unconditional" in one}
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


def params_of(facts: Line) -> SamplingParams:
    """Options that the scheduler and the checks of admission look at."""
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
    """A runner that draws something for every sequence and remembers what it was told to compute."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        self.rows: list[list[Any]] = []
        # Seconds that it says a block takes to the host pool or from it; blocks of the last step.
        self.block_seconds = 0.0
        self.copied = 0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.rows = [row_of(self.requests[entry.sequence.seq_id], entry) for entry in output.scheduled]
        token = SampledToken(0)
        sampled: dict[int, SampledToken] = {}
        prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        for entry in output.scheduled:
            for drawer in (*entry.sample, *(verifier for _, verifier in entry.verifiers)):
                if drawer.draw.kind is not DrawKind.UNCONDITIONAL:
                    sampled[drawer.seq_id] = token
            told = _prompt_rows(entry)
            if told:
                prompt_logprobs[entry.sequence.seq_id] = (PositionLogprobs(Logprob(0, 0.0, 1)),) * told
        kinds = [copy.kind for copy in output.copies]
        num_out, num_in = kinds.count(CopyKind.OUT), kinds.count(CopyKind.IN)
        self.copied = num_out + num_in
        seconds = self.block_seconds
        return RunnerOutput(sampled, prompt_logprobs, out_seconds=num_out * seconds, in_seconds=num_in * seconds)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Keeps nothing."""


def _prompt_rows(entry: ScheduledSequence) -> int:
    """Rows that tell a prompt token's log-probability."""
    sequence = entry.sequence
    if sequence.first_logprob_row is None:
        return 0
    last = sequence.num_prompt_tokens - (sequence.next_token_id is None)
    return max(min(entry.start + entry.num_tokens, last) - max(entry.start, sequence.first_logprob_row), 0)
