"""An engine without a model: a runner that checks the KV pool it is told to use, and short ways to make requests."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from penstock.generation.core.draw import Candidates, DrawKind
from penstock.generation.core.prompt_embeds import PromptEmbeds
from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    Logprob,
    PositionLogprobs,
    Request,
    RequestOutput,
    StartedOutput,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import (
    CopyKind,
    DraftKind,
    DraftRequest,
    RunnerOutput,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
)
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import ASSISTED
from penstock.generation.engine.decoding.mode_registry import ModeRegistry
from penstock.generation.engine.decoding.parallel_sampling import PLAIN_SPEC
from penstock.generation.engine.engine import Engine

_ids = itertools.count()


class FakeRunner:
    """Runner whose draws are a pure function of (seed, all tokens before), read back from the KV by the block tables.

    `kv[block][offset]` holds (token, position), with a number in place of an embedding's token, and another one with an
    adapter. A step fails when a
    sequence's context is not what its tokens say, when two sequences write the same slot, when a draw is asked of a row
    that is not the drawer's last, or when a sequence draws without its branch (whose tokens its draw then depends on,
    too).
    """

    def __init__(self, config: EngineConfig, *, vocab_size: int = 50, script: dict[int, int] | None = None) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.script = script or {}
        self.kv: list[list[tuple[int, int] | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.host: list[list[tuple[int, int] | None]] = [[None] * config.block_size] * config.num_host_blocks
        self.steps: list[SchedulerOutput] = []
        self.fail_at_step: int | None = None
        # Of the step's sequences, by seq_id; 0: without an adapter.
        self._marks: dict[int, int] = {}
        # Of a model that keeps states: what the state of a sequence, and of a snapshot, was made of.
        self.states: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        # seq_ids that were computed and not released since.
        self.known: set[int] = set()

    def release(self, seq_ids: Items[int]) -> None:
        self.known.difference_update(seq_ids)
        for seq_id in seq_ids:
            self.states.pop(seq_id, None)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.steps.append(output)
        for parent, child, num_tokens in output.forks if self.config.keeps_states else ():
            assert len(self.states[parent]) == num_tokens, "a fork at another token than its parent's state"
            self.states[child] = self.states[parent]
        self.release(output.released)
        for seq_id, place, num_tokens in output.restored:
            assert seq_id not in self.states, "restored over a state"
            assert len(self.snapshots[place]) == num_tokens, "a snapshot of another token"
            self.states[seq_id] = self.snapshots[place]
        self.known.update(entry.sequence.seq_id for entry in output.scheduled)
        if self.fail_at_step == len(self.steps):
            raise RuntimeError("device lost")
        self._copy(output)
        if not output.scheduled:
            return RunnerOutput({}, {})
        assert 0 < output.num_tokens <= self.config.max_batch_tokens
        adapters = output.adapters or (None,) * len(output.scheduled)
        self._marks = {
            entry.sequence.seq_id: 0 if adapter is None else zlib.crc32(adapter.generation.encode()) << 20
            for entry, adapter in zip(output.scheduled, adapters, strict=True)
        }
        self._write(output)
        if self.config.keeps_states:
            self._keep_states(output)
        sampled: dict[int, SampledToken] = {}
        prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        branches = {
            one.seq_id: one.token_ids for entry in output.scheduled for one in entry.sample if is_unconditional(one)
        }
        for entry in output.scheduled:
            context = self._read(output, entry.sequence, entry.start, entry.start + entry.num_tokens)
            for drawer in entry.sample:
                assert drawer.token_ids == context, "drawn from a row that is not the drawer's last"
                if is_unconditional(drawer):
                    continue
                branch = drawer.unconditional
                assert branch is None or branch.seq_id in branches, "drawn without its branch"
                beside = [] if branch is None else [-1, *branches[branch.seq_id]]
                if mark := self._marks[entry.sequence.seq_id]:
                    beside.append(mark)
                sampled[drawer.seq_id] = self.draw(drawer, [*context, *beside])
            for row, verifier in entry.verifiers:
                before = context[: entry.start + row + 1]
                assert verifier.token_ids == before, "a verifier draws from a row that is not its last"
                assert verifier.origin is entry.sequence
                mark = self._marks[entry.sequence.seq_id]
                sampled[verifier.seq_id] = self.draw(verifier, [*before, mark] if mark else before)
            ids = prompt_targets(entry)
            if ids:
                prompt_logprobs[entry.sequence.seq_id] = tuple(
                    PositionLogprobs(Logprob(token_id, -1.0, 1)) for token_id in ids
                )
        return RunnerOutput(sampled, prompt_logprobs)

    def _copy(self, output: SchedulerOutput) -> None:
        bundles = output.bundles
        held = {block for entry in output.scheduled for block in entry.sequence.held_blocks}
        if bundles is not None:
            held = {block for head in held for block in bundles[head]}
        saved = {copy.source for copy in output.copies if copy.kind is CopyKind.OUT}
        for source, destination, kind in output.copies:
            if kind is CopyKind.IN:
                self.kv[destination] = list(self.host[source])
            elif kind is CopyKind.OUT:
                self.host[destination] = list(self.kv[source])
            else:
                needed = not output.scheduled or destination in held or destination in saved
                assert needed, "a copy that no sequence in this step needs"
                self.kv[destination] = list(self.kv[source])

    def draw(self, sequence: Sequence, context: Items[int]) -> SampledToken:
        if sequence.num_output_tokens in self.script:
            return SampledToken(self.script[sequence.num_output_tokens], logprob=-0.5)
        seed = sequence.seed if sequence.params.do_sample else 0
        if sequence.draw.kind is DrawKind.CANDIDATES:
            return candidates(sequence, seed, context, self.vocab_size)
        ranked = ranking(seed, context, self.vocab_size)
        wants = sequence.params.top_logprobs
        top = tuple(Logprob(token, score, rank) for rank, (token, score) in enumerate(ranked[: wants or 0], 1))
        logprobs = None if wants is None else PositionLogprobs(Logprob(ranked[0][0], ranked[0][1], 1), top)
        return SampledToken(ranked[0][0], logprob=None if wants is None else ranked[0][1], logprobs=logprobs)

    def _write(self, output: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for entry in output.scheduled:
            sequence = entry.sequence
            assert entry.start == sequence.num_computed_tokens
            assert 0 < entry.num_tokens <= sequence.num_tokens - entry.start
            for position in range(entry.start, entry.start + entry.num_tokens):
                index, offset = divmod(position, self.config.block_size)
                for block in self._blocks(output, sequence, index):
                    assert (block, offset) not in written, "two sequences write the same slot"
                    written.add((block, offset))
                    self.kv[block][offset] = (self._content(sequence, position), position)

    @staticmethod
    def _blocks(output: SchedulerOutput, sequence: Sequence, index: int) -> list[int]:
        """Return the blocks with the tokens of block `index` of a sequence, in all groups of layers."""
        heads = [table.blocks[index] for table in sequence.tables]
        return heads if output.bundles is None else [block for head in heads for block in output.bundles[head]]

    def _keep_states(self, output: SchedulerOutput) -> None:
        for entry in output.scheduled:
            sequence, start = entry.sequence, entry.start
            state = self.states.get(sequence.seq_id, []) if start else []
            assert state == [self._content(sequence, at) for at in range(start)], "the state is of something else"
            new = [self._content(sequence, at) for at in range(start, start + entry.num_tokens)]
            self.states[sequence.seq_id] = state + new
        assert len(self.states) <= self.config.max_running_sequences
        for seq_id, place, num_tokens in output.saved:
            assert place < self.config.num_state_snapshots
            self.snapshots[place] = self.states[seq_id]
            assert len(self.snapshots[place]) == num_tokens

    def _read(self, output: SchedulerOutput, sequence: Sequence, start: int, end: int) -> list[int]:
        for group, table in zip(self.config.block_groups, sequence.tables, strict=True):
            first = group.first_read(start)
            assert first // self.config.block_size >= table.num_released, "a block that is read is given back"
            for position in range(first, end):
                index, offset = divmod(position, self.config.block_size)
                block = table.blocks[index]
                for one in (block,) if output.bundles is None else output.bundles[block]:
                    slot = self.kv[one][offset]
                    assert slot == (self._content(sequence, position), position), "the KV pool holds something else"
        return sequence.token_ids[:end]

    def _content(self, sequence: Sequence, position: int) -> int:
        """Return the token, or a negative number that stands for an embedding in its place; with its adapter's mark."""
        embeds, mark = sequence.embeds, self._marks[sequence.seq_id]
        if embeds is None or position >= embeds.num_tokens:
            return sequence.token_ids[position] + mark
        return ~int.from_bytes(embeds.digests[position // self.config.block_size][:4]) - mark


class FakeDrafter:
    """Drafter whose tokens are the runner's draws, each with probability `quality`, else other ones."""

    kind = DraftKind.DRAFT_MODEL

    def __init__(self, quality: float, *, vocab_size: int = 50, lengths: Items[int] = (99,)) -> None:
        """`lengths`: how many tokens the answers have at most, in turns."""
        self.quality = quality
        self.vocab_size = vocab_size
        self.calls: list[list[DraftRequest]] = []
        self.released: list[int] = []
        self._lengths = itertools.cycle(lengths)

    def draft(self, orders: Items[DraftRequest]) -> list[list[int]]:
        self.calls.append(list(orders))
        assert all(order.num_tokens > 0 for order in orders)
        assert all(order.sequence.num_draft_tokens == 0 for order in orders), "drafts upon drafts"
        return [self._answer(order.sequence, min(order.num_tokens, next(self._lengths))) for order in orders]

    def release(self, seq_ids: Items[int]) -> None:
        self.released.extend(seq_ids)

    def _answer(self, sequence: Sequence, count: int) -> list[int]:
        seed = sequence.seed if sequence.params.do_sample else 0
        context = list(sequence.token_ids)
        for _ in range(count):
            token = ranking(seed, context, self.vocab_size)[0][0]
            is_right = hashlib.blake2b(repr(context).encode()).digest()[0] < 256 * self.quality
            context.append(token if is_right else (token + 1) % self.vocab_size)
        return context[sequence.num_tokens :]


def prompt_targets(entry: ScheduledSequence) -> list[int]:
    """Return the prompt tokens whose log-probabilities the entry's rows give."""
    sequence = entry.sequence
    if sequence.first_logprob_row is None:
        return []
    known = sequence.token_ids[: sequence.num_prompt_tokens]
    if sequence.next_token_id is not None:
        known = [*known, sequence.next_token_id]
    first = max(entry.start, sequence.first_logprob_row)
    return known[first + 1 : entry.start + entry.num_tokens + 1]


def is_unconditional(sequence: Sequence) -> bool:
    """True when the sequence is an unconditional branch: only another sequence's draw needs its row."""
    return sequence.draw.kind is DrawKind.UNCONDITIONAL


def ranking(seed: int, context: Items[int], vocab_size: int) -> list[tuple[int, float]]:
    """Return some (token, logprob), best first: a pure function of the context."""
    digest = hashlib.blake2b(repr((seed, list(context))).encode(), digest_size=32).digest()
    tokens = dict.fromkeys(byte % vocab_size for byte in digest)
    return [(token, -0.5 - 0.25 * rank - digest[0] / 1000) for rank, token in enumerate(tokens)]


def candidates(sequence: Sequence, seed: int, context: Items[int], vocab_size: int) -> SampledToken:
    """Return the best of `ranking`, after a penalty of 1 per time that a token is taken. Other tokens score -20."""
    spec, listed = sequence.draw, sequence.params.top_logprobs
    scores = {token: score - spec.taken_ids.count(token) for token, score in ranking(0, context, vocab_size)}
    slot = spec.gumbel_slot
    keys = scores if slot is None else {t: score + _noise((seed, len(context), slot, t)) for t, score in scores.items()}
    best = sorted(keys, key=lambda token: (-keys[token], token))[: spec.num_candidates]
    by_score = sorted(scores, key=lambda token: -scores[token])
    found = Candidates(
        token_ids=tuple(best),
        scores=tuple(scores[token] for token in best),
        keys=tuple(keys[token] for token in best),
        extra_scores=tuple(scores.get(token, -20.0) for token in spec.extra_ids),
        ranks=() if listed is None else tuple(by_score.index(token) + 1 for token in best),
    )
    if listed is None:
        return SampledToken(-1, candidates=found)
    top = tuple(Logprob(token, scores[token], rank) for rank, token in enumerate(by_score[:listed], 1))
    return SampledToken(-1, candidates=found, logprobs=PositionLogprobs(None, top))


def _noise(what: tuple[int, ...]) -> float:
    """Return Gumbel noise: a pure function of its arguments."""
    number = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=6).digest(), "big")
    return -math.log(-math.log((number + 0.5) / 2.0**48))


def engine_config(**changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_context_tokens": 200,
        "max_batch_tokens": 64,
        "max_running_sequences": 16,
        # Prompts of tests are short.
        "state_snapshot_tokens": 0,
    }
    return EngineConfig(**(defaults | changes))


def request(prompt: Iterable[int], *, max_new_tokens: int = 8, **fields: Any) -> Request:
    """Make a request from now (time 0). `fields` go to Request where it has them, else to SamplingParams."""
    names = {"request_id", "arrival_time", "resumed_token_ids", "cache_salt", "priority", "deadline", "fair_share_key"}
    names |= {"embeds", "adapter"}
    own = {name: fields.pop(name) for name in list(fields) if name in names}
    params = SamplingParams(max_new_tokens=max_new_tokens, **fields)
    defaults: dict[str, Any] = {"request_id": f"r{next(_ids)}", "arrival_time": 0.0}
    return Request(**(defaults | own), prompt_token_ids=list(prompt), params=params)


def prompt_embeds(kinds: Items[int], block_size: int, *, num_placeholders: int | None = None) -> PromptEmbeds:
    """Make embeddings of a number of kinds, without data; blocks of the same kinds are equal. No token has an id."""
    blocks = [kinds[first : first + block_size] for first in range(0, len(kinds), block_size)]
    digests = tuple(hashlib.sha256(bytes(block)).digest() for block in blocks)
    return PromptEmbeds(bytearray(), len(kinds), len(kinds) if num_placeholders is None else num_placeholders, digests)


class Answer:
    """All outputs of one request. Adding one checks the numbering and that nothing follows the last word."""

    def __init__(self) -> None:
        self.started: StartedOutput | None = None
        self.deltas: list[Emission] = []
        self.finished: FinishedOutput | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finished is None, "something after Finished"
        if output.started is not None:
            assert self.started is None
            assert not self.deltas
            self.started = output.started
        for delta in output.deltas:
            assert self.started is not None
            assert delta.seq == len(self.deltas), "a gap in seq"
            self.deltas.append(delta)
        self.finished = output.finished

    @property
    def ids(self) -> dict[int, list[int]]:
        """New ids by returned sequence."""
        ids: dict[int, list[int]] = {}
        for delta in self.deltas:
            ids.setdefault(delta.index, []).extend(delta.token_ids)
        return ids


def collect(answers: dict[str, Answer], outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        answers.setdefault(output.request.request_id, Answer()).add(output)


def run(engine: Engine, *requests: Request, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Add the requests, step until there is no work, check the pool after every step. Answers by request id.

    `answers` are those of earlier steps, when the engine has been stepped before.
    """
    answers = {} if answers is None else answers
    for item in requests:
        engine.add(item)
    for _ in range(10_000):
        if not engine.has_work:
            if isinstance(engine._runner, FakeRunner):
                assert not engine._runner.known, "the idle runner did not release sequences that are gone"
            return answers
        collect(answers, engine.step())
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def make_engine(config: EngineConfig | None = None, **kwargs: Any) -> tuple[Engine, FakeRunner]:
    config = config or engine_config()
    runner = FakeRunner(config, **{key: kwargs.pop(key) for key in ("vocab_size", "script") if key in kwargs})
    if "strategy" in kwargs:
        # In the place of those of greedy search, sampling and assisted generation.
        strategy = kwargs.pop("strategy")
        kwargs["modes"] = ModeRegistry(dataclasses.replace(spec, strategy=strategy) for spec in (PLAIN_SPEC, ASSISTED))
    return Engine(config, runner, kwargs.pop("stop_text", None), **kwargs), runner
