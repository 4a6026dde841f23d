"""Scheduler of each step's tokens. No phases: every sequence has tokens, and a number of computed ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.common.idle_only import IDLE_TENANT
from penstock.generation.core.step import Fork
from penstock.generation.engine.block_copies import BlockCopies
from penstock.generation.engine.block_pool import BlockClaims, BlockPool, HeldPrefixes
from penstock.generation.engine.block_tables import BlockTables, FoundPrefix
from penstock.generation.engine.config import RECOMPUTE
from penstock.generation.engine.disk_tier import DiskTier
from penstock.generation.engine.fairness.fair_queue import FairQueue
from penstock.generation.engine.fairness.shares import TenantShares
from penstock.generation.engine.fairness.victims import Victims
from penstock.generation.engine.group import GroupState, SequenceGroup
from penstock.generation.engine.group_queue import GroupQueue
from penstock.generation.engine.host_block import HostBlock
from penstock.generation.engine.host_pool import HostPool
from penstock.generation.engine.prefix_log import PrefixLog
from penstock.generation.engine.prefix_sharing import SharedPrefixes
from penstock.generation.engine.state_snapshots import StateSnapshots
from penstock.generation.engine.step_plan import HeldBack, StepPlan
from penstock.generation.engine.swap_or_recompute import SwapPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.block_store import BlockStore
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import RunnerOutput, SampledToken, SchedulerOutput
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.stats import EngineStats

Progress = tuple[SequenceGroup, "dict[Sequence, SampledToken]"]
# (group, sequence, token up to which the sequence may be computed in this step)
Entries = list[tuple[SequenceGroup, "Sequence", int]]
_IDLE_ONLY = frozenset((IDLE_TENANT,))
# Leaders of a group, each with the blocks of its prompt's prefix; empty for a swapped group.
Starts = list[tuple["Sequence", FoundPrefix]]


class Scheduler:
    """Owner of the queues and of every block table; it decides what each sequence computes. Engine thread only.

    Order within a step: decoding rows (sequences with drafts last), then prompts of running groups, then admission
    from the waiting queue, then the rest of the budget for prompts that got only a share; each in (priority, arrival)
    order, except that admission prefers the tenant that got least (see FairQueue). A sequence waits for blocks that an
    earlier one is computing (see SharedPrefixes). When blocks run out, the last running group in that order is
    preempted; if one tenant holds far more blocks than the others, the last group of that tenant. It releases its
    blocks, keeps its tokens, and waits at its old place. The first group is never preempted, and `Engine.check` accepts
    only requests that fit an empty pool, so some group always progresses.

    With a host pool a preempted group may be swapped instead: its blocks are copied there, and back when it is admitted
    again. In every mode it goes on as if it had only rested.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats, store: BlockStore | None = None) -> None:
        """`store`: behind the host pool, which there must be then."""
        groups = config.block_groups
        self.pool = BlockPool(config.num_blocks, config.block_size, [group.num_blocks for group in groups])
        # Blocks that callers hold themselves (see BlockClaims).
        self.claims = BlockClaims(self.pool)
        self.held_prefixes = HeldPrefixes(self.pool, groups)
        self.copies = BlockCopies()
        self.host = HostPool(config, self.pool, self.copies) if config.num_host_blocks else None
        self.policy = SwapPolicy(config.preemption, config.block_bytes)
        self.tables = BlockTables(
            self.pool,
            prefix_cache=config.prefix_cache,
            host=self.host,
            groups=groups,
            rows=config.max_batch_tokens,
        )
        has_snapshots = config.keeps_states and config.prefix_cache
        self.snapshots = (
            StateSnapshots(config.num_state_snapshots, self.pool, config.state_snapshot_tokens)
            if has_snapshots
            else None
        )
        self.prefixes = SharedPrefixes(self.tables, self.snapshots)
        # None: prefixes go no further than the host pool.
        self.disk: DiskTier | None = None
        if store is not None:
            if self.host is None:
                raise ValueError("a store of blocks needs num_host_blocks")
            self.disk = DiskTier(config, self.host, self.prefixes, store, stats)
        # None: no prefix is kept.
        self.prefix_log: PrefixLog | None = None
        if config.prefix_cache:
            self.prefix_log = PrefixLog([self.pool] if self.host is None else [self.pool, self.host.pool])
        self.waiting = FairQueue(config.tenant_memory_seconds)
        self.running = GroupQueue()
        self._victims = Victims(self.running, self.waiting)
        self.shares = TenantShares(config)
        # Groups that the last `schedule` started for the first time, those that it preempted for recomputation, and
        # those that it swapped out.
        self.admitted: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        # Tenants that rest in the next step, unless there is nothing else to compute (see FairTurns).
        self.resting: frozenset[str] = frozenset()
        # The same before the step was put together: now and then the others have no work for it.
        self.asked_to_rest: frozenset[str] = frozenset()
        self._config = config
        self.stats = stats
        self._forks: list[Fork] = []
        self._released: list[int] = []
        self._parked: list[int] = []
        self._plan = StepPlan(0, 0, self.copies)
        # Prompts that this step computes in part.
        self._cut: Entries = []
        # Groups with an adapter, in any state.
        self._num_adapted = 0

    @property
    def has_work(self) -> bool:
        """True when `schedule` would schedule something."""
        return bool(len(self.waiting) or len(self.running))

    @property
    def plan(self) -> StepPlan:
        """Plan of the step that `schedule` puts together, or did last; number 0: none, or all work is done."""
        return self._plan

    @property
    def num_running_sequences(self) -> int:
        """Number of sequences that running groups hold or will fork."""
        return sum(group.strategy.width for group in self.running)

    def num_sequences_of(self, tenant: str) -> int:
        """Return the number of sequences that a tenant's running groups hold or will fork. O(running groups)."""
        return sum(group.strategy.width for group in self.running if group.request.fair_share_key == tenant)

    def widths(self) -> dict[str, int]:
        """Return the running sequences of each tenant that has a group. O(running groups)."""
        widths = dict.fromkeys(self.waiting.tenants, 0)
        for group in self.running:
            widths[group.request.fair_share_key] += group.strategy.width
        return widths

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group."""
        self.waiting.enter(group)
        self._num_adapted += group.request.adapter is not None

    def remove(self, group: SequenceGroup) -> None:
        """End a group in any state: its blocks are free when this returns."""
        if group.state is GroupState.GONE:
            return
        (self.running if group.state is GroupState.RUNNING else self.waiting).remove(group)
        group.state = GroupState.GONE
        self._num_adapted -= group.request.adapter is not None
        self._give_back(group)
        group.sequences.clear()

    def set_back(self, group: SequenceGroup) -> int:
        """Preempt a group between two steps and uncache its computed blocks, unless another group uses them.

        Return the number of blocks that this frees; a waiting group holds none unless it is swapped.
        """
        if group.state is GroupState.RUNNING:
            blocks = {block for sequence in group.sequences for block in sequence.held_blocks}
            hashes = [self.pool.hash_of(block) for block in blocks]
            self._stop_running(group, swaps=False)
            if self.host is not None:
                self.host.forget_prefixes(hashes)
            return self.pool.forget(blocks)
        if self.host is None or not group.is_swapped:
            return 0
        # The device's pool may have some of its prefixes, too.
        kept, prefixes = self.host.blocks_of(group)
        self.stats.preempted_tokens += _computed_tokens(group)
        self._give_back(group)
        group.restart()
        here = [block for prefix in dict.fromkeys(prefixes) for block in self.pool.holding(prefix)]
        return self.host.pool.forget(kept) + self.pool.forget(here)

    def disown(self, group: SequenceGroup) -> None:
        """Stop sharing the blocks of a group with a failed computation. It is removed next."""
        for sequence in group.sequences:
            self.tables.disown(sequence)
            if self.disk is not None:
                self.disk.forget(sequence.block_hashes)

    def clear_cache(self) -> int:
        """Forget every prefix that no group holds, of both pools, and return the number of its blocks."""
        return self.pool.clear_cache() + (0 if self.host is None else self.host.pool.clear_cache())

    def schedule(self) -> SchedulerOutput:
        """Put the next step together. It is empty only when there is no work, or all of it waits for the store."""
        if self.disk is not None:
            self.disk.take_events()
        self.admitted.clear()
        self.preempted.clear()
        self.swapped.clear()
        self.asked_to_rest = self.resting
        self._put_together()
        if len(self.running) and not self._plan.num_entries:
            # Only resting tenants have work, or sequences in lockstep found all missing blocks in the cache and draw
            # together only now. Groups that the first try preempted stay preempted and are reported.
            self.resting = frozenset()
            self._put_together()
        output = self._plan.output(
            tuple(self._forks), tuple(self._released), tuple(self._parked), has_adapters=self._num_adapted > 0
        )
        if self.pool.bundles is not None:
            output = replace(output, bundles=self.pool.bundles)
        if output.scheduled:
            if self.snapshots is not None:
                output = replace(
                    output, restored=self.snapshots.restores(), saved=self.snapshots.saves(output.scheduled)
                )
            self._forks.clear()
            self._released.clear()
            self._parked.clear()
            self.copies.clear()
        return output

    def _put_together(self) -> None:
        # Among several tenants steps are kept short: a new request waits for the current step.
        waiting, budget = self.waiting, self._config.max_batch_tokens
        if waiting.has_idle_only and IDLE_TENANT not in self.resting:
            budget = self.shares.idle_step_tokens
        elif (not self.resting or self.resting == _IDLE_ONLY) and waiting.is_shared:
            budget = self.shares.step_tokens
        self._plan = StepPlan(budget, self.stats.steps + 1, self.copies)
        self._cut.clear()
        self.prefixes.start_step()
        prompts, drafting = self._schedule_decoding(tuple(self.running))
        if drafting:
            self._schedule_drafts(drafting)
        self._fill(prompts)

    def go_idle(self) -> tuple[int, ...]:
        """Forget the last step's groups, when no step follows.

        Returns seq_ids that have gone since the last step and that no step will carry.
        """
        self._plan = StepPlan(0, 0, self.copies)
        self.admitted.clear()
        self.preempted.clear()
        self.swapped.clear()
        self._cut.clear()
        released = tuple(self._released)
        self._forks.clear()
        self._released.clear()
        self._parked.clear()
        return released

    def update(self, result: RunnerOutput) -> list[Progress]:
        """Count the computed tokens of the planned step, fork sequences that waited for a prompt, and return the draws.

        Sequences that failed are left out: a group with one of them has fewer tokens than drawers.
        """
        progress: dict[SequenceGroup, dict[Sequence, SampledToken]] = {}
        has_spans = bool(self.tables.spans)
        for group, entry in self._plan.entries:
            sequence = entry.sequence
            sequence.num_computed_tokens += entry.num_tokens
            if sequence.seq_id in result.prompt_logprobs:
                group.report.add_prompt_logprobs(result.prompt_logprobs[sequence.seq_id])
            self.tables.computed(sequence, group.block_salt)
            if has_spans:
                self.tables.release_behind(sequence)
            if not group.is_forked:
                for follower in group.fork_followers(sequence):
                    self._fork(sequence, follower, sequence.num_computed_tokens)
            drawers = [verifier for _, verifier in entry.verifiers] if entry.verifiers else entry.sample
            if drawers:
                sampled = progress.setdefault(group, {})
                for drawer in drawers:
                    token = result.sampled.get(drawer.seq_id)
                    if token is not None:
                        sampled[drawer] = token
        if self.snapshots is not None:
            self.snapshots.step_is_done()
        if self.disk is not None:
            self.disk.step_is_done()
        return list(progress.items())

    def apply(self, group: SequenceGroup, decision: Decision) -> None:
        """Carry out a strategy's decision: forks first, then drops. A group without sequences ends."""
        for parent, child in decision.forks:
            # A child without a token of its own computes its last one again: it has no row to draw from.
            self._fork(parent, child, min(parent.num_computed_tokens, child.num_tokens - 1))
            group.sequences.append(child)
        group.sequences += decision.added
        for sequence in decision.dropped:
            self.tables.free(sequence)
            self._released.append(sequence.seq_id)
            group.sequences.remove(sequence)
        if decision.added:
            group.start_over()
        if not group.sequences:
            self.remove(group)

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool's accounting and the block tables disagree. O(blocks), for tests."""
        self.pool.check_integrity()
        held = Counter(
            block
            for queue in (self.running, self.waiting)
            for group in queue
            for sequence in group.sequences
            for block in sequence.held_blocks
        )
        held.update(self.claims.blocks)
        held.update(self.held_prefixes.holders)
        for block in range(self.pool.num_blocks):
            assert held[block] == self.pool.ref_count(block), "reference count differs from the block tables"
        assert not any(group.is_swapped for group in self.running), "a swapped group runs"
        if self.host is not None:
            self.host.check_integrity(self.waiting)

    def _fork(self, parent: Sequence, child: Sequence, computed: int) -> None:
        if self._config.keeps_states and computed != parent.num_computed_tokens:
            # The parent's state is past it.
            computed = 0
        if not self.tables.can_go_back(parent, computed):
            computed = 0
        self.tables.fork(parent, child, computed)
        # A child that shares nothing has no blocks either, and would never be released.
        if computed:
            self._forks.append(Fork(parent.seq_id, child.seq_id, computed))

    def _schedule_decoding(self, groups: Iterable[SequenceGroup]) -> tuple[Entries, Entries]:
        """Place sequences that lack one token. Return those that lack more, and those that lack one and drafts."""
        prompts: Entries = []
        drafting: Entries = []
        for group in groups:
            if self.resting and group.request.fair_share_key in self.resting:
                continue
            all_ready = group.all_ready
            for sequence in group.computable:
                target = group.target(sequence, all_ready=all_ready)
                remaining = target - sequence.num_computed_tokens
                if remaining > 1:
                    entries = drafting if remaining == sequence.num_draft_tokens + 1 else prompts
                    entries.append((group, sequence, target))
                elif remaining == 1 and not self._place(group, sequence, 1):
                    break
        return prompts, drafting

    def _schedule_drafts(self, drafting: Entries) -> None:
        """Place the last token of each sequence, as if it had no drafts, and some of its drafts.

        Each gets an equal share of the rows that `max_draft_rows` and the budget leave. No group is preempted for a
        draft.
        """
        most = self._config.max_draft_rows - self._plan.num_entries
        rows_left = min(most, self._plan.budget) - len(drafting)
        is_bounded_by_budget = self._plan.budget < most
        for position, (group, sequence, _) in enumerate(drafting):
            # It was swapped out meanwhile: it has computed tokens and no blocks.
            if group.state is not GroupState.RUNNING:
                continue
            share = max(rows_left, 0) // (len(drafting) - position)
            num_tokens = 1 + min(sequence.num_draft_tokens, share)
            if is_bounded_by_budget and share < sequence.num_draft_tokens:
                self._plan.is_short = True
            start = sequence.num_computed_tokens
            while num_tokens > 1 and self.tables.blocks_to_write(sequence, start + num_tokens) > self.pool.num_free:
                num_tokens -= 1
            if self._place(group, sequence, num_tokens):
                rows_left -= num_tokens - 1

    def _fill(self, prompts: Entries) -> None:
        """Spend the budget that decoding leaves.

        The rest after admission goes to prompts that got only a share, then to prompts that waited for them.
        """
        while True:
            prompts = self._schedule_prompts(prompts)
            if not self._plan.preempted:
                self._admit()
            if not self._plan.budget or not self._extend_cut():
                break
        if self._cut:
            self._plan.is_short = True

    def _schedule_prompts(self, prompts: Entries) -> Entries:
        """Place prompts of running groups. Return those that wait for blocks that another sequence computes."""
        deferred: Entries = []
        for position, (group, sequence, target) in enumerate(prompts, 1):
            if not self._plan.budget:
                self._plan.is_short = True
                break
            # It was preempted meanwhile and has no computed tokens.
            if group.state is not GroupState.RUNNING:
                continue
            self.prefixes.take_over_blocks(group, sequence)
            computed_blocks = sequence.num_computed_tokens // self._config.block_size
            if self.prefixes.is_being_computed(group, sequence, computed_blocks):
                deferred.append((group, sequence, target))
            else:
                self._place_prompt(group, sequence, target, others=len(self.waiting) > 0 or position < len(prompts))
        return deferred

    def _place_prompt(self, group: SequenceGroup, sequence: Sequence, target: int, *, others: bool) -> None:
        """Schedule as much of a prompt as its share allows now."""
        remaining = target - sequence.num_computed_tokens
        num_tokens = self._chunk(remaining, others=others)
        if self.snapshots is not None:
            start = sequence.num_computed_tokens
            num_tokens = self.snapshots.end_of(sequence, start, start + num_tokens) - start
        if not num_tokens:
            self._plan.is_short = True
            return
        if not self._place(group, sequence, num_tokens):
            return
        if num_tokens < remaining:
            self._cut.append((group, sequence, target))
            self.prefixes.plan(group, sequence, sequence.num_computed_tokens + num_tokens, is_cut=True)

    def _chunk(self, remaining: int, *, others: bool) -> int:
        """Return the number of prompt tokens to compute now. A prompt of several steps leaves others a share."""
        budget = self._plan.budget
        if remaining <= budget or not budget or not others:
            return min(remaining, budget)
        return max(1, int(budget * self._config.long_prompt_share))

    def _extend_cut(self) -> bool:
        """Give the rest of the budget to the prompts that were cut, in order. False: it helps none of them.

        No group is preempted for it.
        """
        cut, self._cut = self._cut, []
        extended = False
        for group, sequence, target in cut:
            end = self._plan.end(sequence)
            # It was preempted meanwhile.
            if end is None:
                continue
            longer = min(target, end + self._plan.budget)
            if self.snapshots is not None:
                longer = self.snapshots.end_of(sequence, sequence.num_computed_tokens, longer)
            if longer > end and self.tables.blocks_to_extend(sequence, longer) <= self.pool.num_free:
                self.tables.extend(sequence, longer)
                self._plan.extend(sequence, longer, group.drawing(sequence, longer))
                self.prefixes.plan(group, sequence, longer, is_cut=longer < target)
                extended = True
                end = longer
            if end < target:
                self._cut.append((group, sequence, target))
        return extended

    def _place(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> bool:
        """Schedule `sequence`, preempting from the end of the order. False: its own group was preempted."""
        if group.state is not GroupState.RUNNING:
            return False
        start = sequence.num_computed_tokens
        end = start + num_tokens
        copies: Seq[tuple[int, int]] = ()
        if not self.tables.is_writable(sequence, end):
            while self.tables.blocks_to_write(sequence, end) > self.pool.num_free:
                victim = self._victims.victim()
                self._preempt(victim)
                if victim is group:
                    return False
            copies = self.tables.make_writable(sequence, end)
        self._plan.add(group, sequence, start, num_tokens, group.drawing(sequence, end), copies)
        # A row of output seldom fills a block that another sequence could use in this very step.
        if num_tokens > 1 or end <= sequence.num_prompt_tokens:
            self.prefixes.plan(group, sequence, end, is_cut=False)
            if sequence.embeds is not None and start < sequence.embeds.num_tokens:
                self._plan.has_embeds = True
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        swaps = self.host is not None and self._is_swapped_out(self.host, group)
        self._plan.remove(group, keep_copies=swaps)
        self.prefixes.forget_group(group)
        self._stop_running(group, swaps=swaps)
        if not swaps:
            self.preempted.append(group)

    def _stop_running(self, group: SequenceGroup, *, swaps: bool) -> None:
        """Take a running group's blocks and put it back at its place in the queue; `swaps`: the host pool has them."""
        self.running.remove(group)
        if swaps:
            for sequence in group.sequences:
                if sequence.block_table:
                    self.tables.give_back(sequence)
                    self._parked.append(sequence.seq_id)
            self.swapped.append(group)
            self.stats.swaps += 1
        else:
            self.stats.preempted_tokens += _computed_tokens(group)
            self._give_back(group)
            group.restart()
        group.state = GroupState.WAITING
        self.waiting.put_back(group)
        self.stats.preemptions += 1

    def _is_swapped_out(self, host: HostPool, group: SequenceGroup) -> bool:
        """Copy the computed blocks of a preempted group to the host pool. False: it must be computed again.

        That is so when the host pool has no room, and when the step that it leaves would have filled blocks of it.
        """
        tokens = _computed_tokens(group)
        if not tokens or self._config.preemption == RECOMPUTE or group in self.prefixes.borrowers:
            return False
        blocks, taken = host.blocks_to_save(group)
        if taken > host.pool.num_free or not self.policy.swaps(group, blocks, tokens):
            return False
        host.swap_out(group)
        return True

    def _admit(self) -> None:
        """Start waiting groups in order. The first that does not fit ends admission, so no group is passed for ever.

        A group that waits for blocks of others, or of the store, is passed over in this step; its sequences count all
        the same. A tenant that has its share of the running sequences is passed over while there are others.
        """
        if not len(self.waiting):
            return
        width = self.num_running_sequences
        held = set(self.resting)
        passed: list[SequenceGroup] = []
        while not self._plan.preempted and (group := self.waiting.first(held)) is not None:
            if self._has_its_share(group):
                held.add(group.request.fair_share_key)
                self._plan.admission_stopped = HeldBack.SEQUENCES
                continue
            width += group.strategy.width
            leaders = group.computable if group.is_swapped else group.leaders
            # Sequences in lockstep start in one step: if they draw in it, they draw together.
            if not self._plan.budget or self._plan.budget < len(leaders):
                self._plan.admission_stopped = HeldBack.BUDGET
                break
            while width > self._config.max_running_sequences and (victim := self._victims.place_for(group)) is not None:
                width -= victim.strategy.width
                self._preempt(victim)
            if width > self._config.max_running_sequences:
                self._plan.admission_stopped = HeldBack.SEQUENCES
                break
            if self.disk is not None and self.disk.keeps_waiting(group):
                self.waiting.remove(group)
                passed.append(group)
                continue
            starts = self._starts(group)
            if any(self.prefixes.is_being_computed(group, leader, len(prefix)) for leader, prefix in starts):
                self.waiting.remove(group)
                passed.append(group)
                continue
            if not self._start(group, starts) and not self._start_in_place_of_crowd(group, starts):
                self._plan.admission_stopped = HeldBack.BLOCKS
                break
            if not starts:
                self._go_on(group)
                continue
            all_ready = group.all_ready
            for leader in leaders:
                others = bool(passed) or len(self.waiting) > 0
                self._place_prompt(group, leader, group.target(leader, all_ready=all_ready), others=others)
        for group in passed:
            self.waiting.put_back(group)

    def _starts(self, group: SequenceGroup) -> Starts:
        """Return the leaders of a waiting group with their cached prefixes; none for a swapped group."""
        if group.is_swapped:
            return []
        return [(leader, self.prefixes.find(group, leader)) for leader in group.leaders]

    def _blocks_to_start(self, group: SequenceGroup, starts: Starts) -> int:
        """Return the number of free blocks that `_start` takes."""
        if self.host is not None and group.is_swapped:
            return self.host.blocks_to_return(group)
        return sum(self.tables.blocks_to_admit(leader, prefix) for leader, prefix in starts)

    def _go_on(self, group: SequenceGroup) -> None:
        """Schedule a group that came back from the host pool: it goes on as if it had only rested."""
        prompts, drafting = self._schedule_decoding((group,))
        if drafting:
            self._schedule_drafts(drafting)
        self._schedule_prompts(prompts)

    def _has_its_share(self, group: SequenceGroup) -> bool:
        """True when the tenant of a waiting group has as many running sequences as it may beside other tenants.

        O(running groups), and O(1) where there are no others. Requests of idle capacity always have a bound.
        """
        tenant = group.request.fair_share_key
        if tenant == IDLE_TENANT:
            most = self.shares.idle_sequences
        elif self.waiting.has_others(tenant):
            most = self.shares.running_sequences
        else:
            return False
        running = self.num_sequences_of(tenant)
        return running > 0 and running + group.strategy.width > most

    def _start(self, group: SequenceGroup, starts: Starts) -> bool:
        """Move a waiting group to the running ones, with its leaders' prefixes, or with all of its computed blocks.

        False: there is no room now.
        """
        left = self.pool.num_free - self._blocks_to_start(group, starts)
        if left < (self._config.reserve_blocks if len(self.running) else 0):
            return False
        self.waiting.remove(group)
        self.waiting.charge(group)
        self.running.add(group)
        group.state = GroupState.RUNNING
        if self.host is not None and group.is_swapped:
            self.host.swap_in(group)
            self.tables.report_brought(group.sequences, group.block_salt)
            return True
        self.tables.start(starts)
        if self.host is not None:
            self.tables.report_brought([one for one, _ in starts], group.block_salt)
        if self.snapshots is not None:
            for sequence, prefix in starts:
                if len(prefix):
                    self.snapshots.restore(sequence)
        # Family 0: an unconditional branch has another prompt.
        leader = next(one for one, _ in starts if one.family == 0)
        leader.first_logprob_row = group.report.next_logprob_row
        self.stats.host_prefix_hit_tokens += self._host_tokens(starts)
        cached = min(leader.num_computed_tokens, leader.num_prompt_tokens)
        if group.report.scheduled(cached):
            self.admitted.append(group)
            self.stats.prefix_lookup_tokens += leader.num_prompt_tokens
            self.stats.prefix_hit_tokens += cached
        return True

    def _start_in_place_of_crowd(self, group: SequenceGroup, starts: Starts) -> bool:
        """Start a waiting group by preempting the last groups of another tenant's crowd. False: it was not possible."""
        needed = self._config.reserve_blocks + self._blocks_to_start(group, starts)
        if needed > self.pool.num_free + self._victims.blocks_for(group):
            return False
        while (victim := self._victims.victim_for(group)) is not None:
            self._preempt(victim)
            # The victim's planned blocks are gone: look for prefixes again.
            if self._start(group, self._starts(group)):
                return True
        return False

    def _host_tokens(self, starts: Starts) -> int:
        if self.host is None:
            return 0
        # Of the first group: a block of tokens counts once.
        found = (block for _, prefix in starts for block in prefix.groups[0])
        return self._config.block_size * sum(isinstance(block, HostBlock) for block in found)

    def _give_back(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            if sequence.block_table or sequence in group.host_tables:
                self.tables.free(sequence)
                self._released.append(sequence.seq_id)
        if self.host is not None and group.is_swapped:
            self.host.forget(group)


def _computed_tokens(group: SequenceGroup) -> int:
    """Return the tokens that a group would compute again: shared tokens of a prompt count once."""
    shared: dict[int, int] = {}
    own = 0
    for sequence in group.sequences:
        prompt = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        shared[sequence.family] = max(shared.get(sequence.family, 0), prompt)
        own += sequence.num_computed_tokens - prompt
    return own + sum(shared.values())
