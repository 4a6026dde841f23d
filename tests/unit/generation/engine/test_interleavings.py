"""Whatever callers and operators do between two steps, a request gets what it gets alone; a runner checks every block.

The same as tests/numerics/engine/test_interleavings.py, without a model: many more of them in the same time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from factories.engine.fake_engine import (
    Answer,
    FakeDrafter,
    FakeRunner,
    collect,
    engine_config,
    make_engine,
    request,
    run,
)
from factories.engine.host_pools import HOSTS, AnyPolicy, host_fields
from penstock.common.errors import DeadlineExceeded, Internal, PenstockError, ResourceExhausted
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.cache_group import CacheGroup
from penstock.generation.core.decoding_mode import EarlyStopping, GuidanceOptions
from penstock.generation.core.request import Request
from penstock.generation.engine.block_commands import BlockCommands
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.fairness.fair_turns import FairTurns

ROOMY = engine_config(num_blocks=600, max_batch_tokens=1000, max_running_sequences=64)
HEADS = ([], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 17, [*range(10, 36)])
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 4},
    {"mode": BeamOptions(3)},
    {"mode": BeamOptions(4, 2, 1.0, length_penalty=0.0), "num_return_sequences": 2},
    {"mode": AssistanceOptions(prompt_lookup_num_tokens=4)},
    {"mode": AssistanceOptions(ngram_memory_num_tokens=5, ngram_memory_match=2), "do_sample": True},
    {"mode": AssistanceOptions(lookahead_window=4, lookahead_ngram_size=3)},
    {"mode": AssistanceOptions(num_assistant_tokens=3, confidence_threshold=0.0), "do_sample": True},
    {"mode": BeamOptions(4), "do_sample": True},
    {"mode": BeamOptions(3, constraints=(((7,),), ((8, 9), (10,))), early_stopping=EarlyStopping.NEVER)},
    {"guidance": GuidanceOptions(2.0, (7, 8, 9, 7))},
    # It shares its beginning with prompts.
    {"guidance": GuidanceOptions(2.0, (1, 2, 3, 4, 5, 6, 7, 8, 9, 1)), "do_sample": True},
    {"guidance": GuidanceOptions(2.0), "do_sample": True, "num_return_sequences": 2},
    {"prompt_logprobs": 0},
)
# Of a model whose layers keep states, which cannot go back.
STATEFUL_MODES = tuple(
    one for one in MODES if not isinstance(one.get("mode"), AssistanceOptions) and one.get("mode") != MODES[4]["mode"]
)
# Kinds of models, and what must have been seen of each.
PLAIN, STATES, WINDOW, GROUPS = "plain", "states", "window", "groups"
WANTED = {
    PLAIN: (
        "swaps", "recomputed", "prefix_hit_tokens", "host_prefix_hit_tokens", "accepted_draft_tokens", "reloaded",
        "aborted_while_swapped", "released_while_swapped", "copied", "claimed", "ended_in_a_pause", "held_in_a_pause",
    ),
    STATES: ("recomputed", "prefix_hit_tokens"),
    WINDOW: ("swaps", "recomputed", "prefix_hit_tokens", "accepted_draft_tokens"),
    GROUPS: (
        "swaps", "recomputed", "prefix_hit_tokens", "host_prefix_hit_tokens", "accepted_draft_tokens", "copied",
        "claimed",
    ),
}  # fmt: skip
Spec = dict[str, Any]


def spec_of(random: Random, modes: tuple[dict[str, Any], ...] = MODES) -> Spec:
    return {
        "prompt": random.choice(HEADS) + [random.randint(0, 2) for _ in range(random.randint(1, 12))],
        "max_new_tokens": random.randint(1, 20),
        "seed": random.randint(0, 3),
        "eos_token_ids": random.choice([(), (3,), (3, 4, 5, 6, 7)]),
        "priority": random.randint(-1, 1),
        "cache_salt": random.choice(["", "tenant"]),
        "fair_share_key": random.choice(["", "a", "b"]),
        **random.choice(modes),
    }


def in_groups(config: EngineConfig, random: Random) -> EngineConfig:
    """Return the configuration of a model with layers of several kinds, in bundles of any sizes."""

    def one_with_span() -> CacheGroup:
        span = random.randint(1, 20)
        where = {"chunk": span} if random.random() < 0.4 else {"window": span, "align": random.choice([1, 1, 5, 8])}
        return CacheGroup(random.randint(1, 3), **where)

    first = CacheGroup(random.randint(1, 3)) if random.random() < 0.8 else one_with_span()
    groups = (first, *(one_with_span() for _ in range(random.randint(1, 2))))
    times = sum(group.num_blocks for group in groups)
    host = config.num_host_blocks * random.choice([1, times])
    return replace(config, groups=groups, num_blocks=config.num_blocks * times, num_host_blocks=host)


def refusal(call: Callable[[], object]) -> str:
    """Return the reason for which a call was refused; empty: it was not."""
    try:
        call()
    except PenstockError as error:
        return error.reason
    return ""


class AnyTurns(FairTurns):
    """Turns in which any tenants rest, all of them, too: who does depends on time, and must change no id."""

    def __init__(self, draw: Random) -> None:
        super().__init__(1.5)
        self._draw = draw

    def choose(self, widths: Mapping[str, int]) -> frozenset[str]:
        return frozenset(tenant for tenant in widths if self._draw.random() < 0.5)


class World:
    """An engine, its callers and its operators."""

    def __init__(self, random: Random, kind: str = PLAIN) -> None:
        self.random = random
        self.now = 0.0
        self.config = EngineConfig(
            num_blocks=random.randint(24, 50),
            block_size=random.randint(1, 6),
            max_context_tokens=200,
            max_running_sequences=random.randint(6, 12),
            max_batch_tokens=random.randint(12, 40),
            prefix_cache=random.random() < 0.8,
            reserve_share=random.choice([0.0, 0.1]),
            max_draft_rows=random.choice([4, 32]),
            **host_fields(*random.choice(HOSTS)),
        )
        self.modes = MODES
        if kind == STATES:
            self.modes = STATEFUL_MODES
            self.config = replace(
                self.config,
                keeps_states=True,
                num_state_snapshots=random.choice([1, 3, 12]),
                state_snapshot_tokens=random.choice([0, 5]),
                **host_fields(*HOSTS[0]),
            )
        elif kind == WINDOW:
            # Some are shorter than a block, most than a prompt.
            self.config = replace(self.config, window=random.randint(1, 20))
        elif kind == GROUPS:
            self.config = in_groups(self.config, random)
        self.engine, self.runner = make_engine(
            self.config, drafter=FakeDrafter(0.6, lengths=(3, 1)), clock=lambda: self.now
        )
        self.engine.policy = AnyPolicy(self.config, random)
        self.engine.turns = AnyTurns(Random(self.config.num_blocks))
        self.answers: dict[str, Answer] = {}
        self.items: dict[str, tuple[Spec, Request]] = {}
        self.aborted: set[str] = set()
        self.marks: dict[tuple[str, int], tuple[int, int]] = {}
        self.seen: Counter[str] = Counter()

    def submit(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 5])):
            spec = spec_of(self.random, self.modes)
            generation = self.random.choice(["", "", "one", "other", "one again"])
            adapter = Adapter(generation[:3], Path(), generation, 8, (), 0, None) if generation else None
            item = request(**spec, adapter=adapter, arrival_time=self.now)
            if self.random.random() < 0.08:
                item.deadline = self.now + self.random.randint(0, 30)
            try:
                self.engine.check(item)
            except ResourceExhausted:
                continue
            self.engine.add(item)
            self.items[item.request_id] = (spec, item)

    def step(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            collect(self.answers, self.engine.step())
            self.now += 1.0
            assert not self.engine._scheduler.copies.listed(), "copies are left of a step"

    def pause(self) -> None:
        """Take no step for a while: requests may have to end all the same."""
        before = self.engine.load()
        self.engine.pause_began()
        for _ in range(self.random.randint(1, 3)):
            if self.random.random() < 0.3:
                self.abort()
            self.now += self.random.choice([0.0, 1.0, 10.0])
            collect(self.answers, self.engine.end_overdue())
            assert self.engine.next_end >= self.now
        self.engine.pause_ended()
        load = self.engine.load()
        assert (load.step, load.kv_blocks_used <= before.kv_blocks_used) == (before.step, True)
        ended = before.waiting_requests + before.running_requests - load.waiting_requests - load.running_requests
        self.seen["ended_in_a_pause"] += ended
        self.seen["held_in_a_pause"] += load.running_requests

    def abort(self) -> None:
        live = self.engine._groups
        if live:
            swapped = [name for name, group in live.items() if group.is_swapped]
            chosen = self.random.choice(swapped or list(live))
            self.engine.abort(chosen, self.random.choice([None, Internal("on purpose", reason="TEST")]))
            self.aborted.add(chosen)
            self.seen["aborted_while_swapped"] += bool(swapped)

    def release_cache(self) -> None:
        live = self.engine._groups
        names = self.random.sample(list(live), min(len(live), self.random.randint(1, 3)))
        self.seen["released_while_swapped"] += any(live[name].is_swapped for name in names)
        self.engine.release_cache(names)
        assert not any(live[name].is_swapped for name in names)

    def clear_cache(self) -> None:
        self.engine.clear_cache()

    def command(self) -> None:
        """Copy blocks in either pool, or from one to the other."""
        commands = BlockCommands(self.engine)
        swaps = []
        for _ in range(self.random.randint(1, 2)):
            kind = self.random.randrange(2)
            pools = (self.engine.host_blocks, self.engine.device_blocks)
            swaps.append((kind, self._block(pools[kind]), self._block(pools[1 - kind])))
        if self.random.random() < 0.5:
            device = self.engine.device_blocks
            pairs = [(self._block(device), self._block(device)) for _ in swaps]
            refused = refusal(lambda: commands.copy(pairs))
        else:
            refused = refusal(lambda: commands.swap(swaps))
        assert refused in ("", "BLOCK_IN_USE", "INVALID_FIELD", "NO_HOST_POOL")
        self.seen["copied"] += not refused

    def _block(self, pool: BlockPool | None) -> int:
        """Return a block, more often one that keeps a prefix."""
        if pool is None:
            return 0
        kept = [block for block in range(pool.num_blocks) if pool.hash_of(block) and not pool.num_holders(block)]
        return (
            self.random.choice(kept) if kept and self.random.random() < 0.7 else self.random.randrange(pool.num_blocks)
        )

    def claim(self) -> None:
        """Claim a block of either pool and put a mark in it, or look at one and give it back."""
        if self.marks and self.random.random() < 0.5:
            self.check_marks()
            side, block = self.random.choice(list(self.marks))
            given = {"host_blocks": [block]} if side == "host" else {"blocks": [block]}
            assert self.engine.caller_blocks.release(**given) == 1
            del self.marks[side, block]
            return
        side = self.random.choice(["device", "host"])
        pool = self.engine.host_blocks if side == "host" else self.engine.device_blocks
        if pool is None or len(self.marks) > 3:
            return
        block = self.random.randrange(pool.num_blocks)
        chosen = {"blocks": (), "host_blocks": [block]} if side == "host" else {"blocks": [block]}
        if not refusal(lambda: self.engine.caller_blocks.claim(**chosen)):
            mark = self.marks[side, block] = (-self.random.randrange(1 << 30), -1)
            self._contents(side)[block] = [mark] * self.config.block_size
            self.seen["claimed"] += 1

    def _contents(self, side: str) -> list[Any]:
        return self.runner.host if side == "host" else self.runner.kv

    def check_marks(self) -> None:
        for (side, block), mark in self.marks.items():
            assert self._contents(side)[block] == [mark] * self.config.block_size, "a claimed block was written"

    def reload(self) -> None:
        """Drain, and go on with a runner that knows nothing."""
        if self.random.random() < 0.7:
            while self.engine.has_work:
                self.step()
            self.engine.caller_blocks.release()
            self.marks.clear()
        is_busy = self.engine.has_work or bool(self.marks)
        fresh = FakeRunner(self.config)
        assert refusal(lambda: self.engine.reinitialise(fresh, lambda: None)) == ("BUSY" if is_busy else "")
        if not is_busy:
            self.runner = fresh
            self.seen["reloaded"] += 1

    def play(self, num_events: int) -> None:
        events = {
            self.submit: 30, self.step: 40, self.abort: 4, self.release_cache: 4, self.clear_cache: 2,
            self.command: 5, self.claim: 6, self.reload: 1, self.pause: 2,
        }  # fmt: skip
        for _ in range(num_events):
            self.random.choices(list(events), list(events.values()))[0]()
            self.engine.check_integrity()
        while self.engine.has_work:
            self.step()
            self.engine.check_integrity()
        self.check_marks()
        self.engine.caller_blocks.release()
        self.engine.clear_cache()
        self.engine.check_integrity()
        load = self.engine.load()
        assert (load.kv_blocks_used, load.host_blocks_used, load.swapped_requests) == (0, 0, 0)
        assert (load.kv_blocks_evictable, load.host_blocks_evictable) == (0, 0)
        assert not self.runner.known, "the runner was not told of sequences that are gone"

    def check_answers(self, alone: Callable[[Spec, Request], Answer]) -> None:
        for name, (spec, item) in self.items.items():
            found, wanted = self.answers[name], alone(spec, item)
            assert found.finished is not None
            assert wanted.finished is not None
            is_cut = name in self.aborted or isinstance(found.finished.error, DeadlineExceeded)
            if not is_cut:
                assert found.finished.error is None, spec
                assert found.ids == wanted.ids, spec
                assert found.finished.sequences == wanted.finished.sequences, spec
                assert found.started is not None
                assert wanted.started is not None
                assert found.started.prompt_logprobs == wanted.started.prompt_logprobs
            elif item.params.mode.streams:
                for index, ids in found.ids.items():
                    assert ids == wanted.ids[index][: len(ids)], spec


class Alone:
    """Answers of engines with one request each."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def __call__(self, spec: Spec, item: Request) -> Answer:
        key = json.dumps([repr(spec), item.adapter and item.adapter.generation])
        if key not in self._answers:
            again = request(**spec, adapter=item.adapter)
            self._answers[key] = run(self._engine(), again)[again.request_id]
        return self._answers[key]

    @staticmethod
    def _engine() -> Engine:
        return make_engine(ROOMY, drafter=FakeDrafter(0.6, lengths=(3, 1)))[0]


def check(kind: str, seed: int, num_events: int, alone: Alone) -> Counter[str]:
    world = World(Random(seed), kind)
    try:
        world.play(num_events)
        world.check_answers(alone)
    except Exception as error:
        error.add_note(f"{kind}, seed {seed}, {num_events} events")
        raise
    stats = world.engine.stats
    return world.seen + Counter(
        swaps=stats.swaps,
        recomputed=stats.preemptions - stats.swaps,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        host_prefix_hit_tokens=stats.host_prefix_hit_tokens,
        accepted_draft_tokens=stats.accepted_draft_tokens,
    )


def play(kind: str, seeds: range, num_events: int) -> None:
    seen, alone = Counter[str](), Alone()
    for seed in seeds:
        seen += check(kind, seed, num_events, alone)
    assert min(seen[what] for what in WANTED[kind]) > 0, seen


@pytest.mark.parametrize(
    ("kind", "seeds"), [(PLAIN, range(19, 24)), (STATES, range(2)), (WINDOW, range(3)), (GROUPS, range(6))]
)
def test_whatever_happens_every_answer_is_the_one_alone(kind: str, seeds: range) -> None:
    play(kind, seeds, 120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, STATES, WINDOW, GROUPS])
@pytest.mark.parametrize("first", range(100, 1700, 100))
def test_whatever_happens_for_long(kind: str, first: int) -> None:
    play(kind, range(first, first + 100 if kind == PLAIN else first + 30), 250)
