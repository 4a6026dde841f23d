"""Drafter of assisted generation: a second model that runs ahead of the served one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftKind, ScheduledSequence, SchedulerOutput
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.block_tables import BlockTables
from penstock.generation.runner.draft_shadow import new_shadow, take_draft

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.step import DraftRequest, Runner, SampledToken


@dataclass(slots=True)
class _Shadow:
    """The draft model's copy of a sequence, with blocks of the draft pool."""

    sequence: Sequence
    # Number of its first tokens that are the original's; the last drafts follow them.
    num_common: int = 0


@dataclass(slots=True)
class _Draft:
    """A request in progress."""

    request: DraftRequest
    shadow: Sequence
    # Number of drafts still to draw; 0: it is finished.
    num_left: int

    @property
    def num_missing(self) -> int:
        """Number of tokens to compute before the next one can be drawn."""
        return self.shadow.num_tokens - self.shadow.num_computed_tokens


class ModelDrafter:
    """Drafter of the engine over a runner of its own (model, sampler and pool). Used by the engine's thread.

    Drafts are drawn with the request's own options, penalties and grammar included, and with the same uniforms as the
    served model's draws at these positions: the closer the two distributions, the more often both draws agree. Only
    speed depends on that.

    Between two calls the pool keeps a sequence's computed tokens, so a call computes only its new tokens. Rejected
    drafts are rolled back. When the pool is full, the sequences with the oldest drafts are forgotten. If even that
    leaves no room, a sequence gets no drafts.
    """

    kind = DraftKind.DRAFT_MODEL

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        max_context_tokens: int,
        max_prefill_tokens: int,
        on_grow: Callable[[], None] | None = None,
    ) -> None:
        """`max_context_tokens` is the draft model's. `max_prefill_tokens`: most rows of a call before its first draft.
        `on_grow` is the block pool's.

        A longer prompt takes several calls; only the last one returns drafts.
        """
        self._runner = runner
        self._max_context_tokens = max_context_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._tables = BlockTables(BlockPool(num_blocks, block_size), prefix_cache=False)
        self._tables.pool.on_grow = on_grow
        # seq_id -> shadow, the least recently used first.
        self._shadows: OrderedDict[int, _Shadow] = OrderedDict()
        # Sequences that the runner must forget before its next step.
        self._released: list[int] = []

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks of the draft pool that sequences hold."""
        return self._tables.pool.num_used

    def draft(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """Runs one forward pass over all requests for each token of the longest one."""
        for request in requests:
            self._follow(request)
        busy = {request.sequence.seq_id for request in requests}
        drafts = [self._start(request, busy) for request in requests]
        active = [draft for draft in drafts if draft is not None and draft.num_left > 0]
        active.sort(key=lambda draft: draft.num_missing)
        entries = self._catch_up(active)
        while entries:
            self._run(entries)
            active = [draft for draft in active if draft.num_left > 0 and draft.num_missing == 1]
            entries = [(draft, 1) for draft in active]
        return [[] if draft is None else self._answer(draft.request) for draft in drafts]

    def release(self, seq_ids: Seq[int]) -> None:
        for seq_id in seq_ids:
            self._forget(seq_id)

    def clear(self) -> None:
        """Forget every sequence: their blocks may be overwritten."""
        self.release(tuple(self._shadows))

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool's accounting and the block tables disagree. O(blocks), for tests."""
        self._tables.pool.check_integrity()
        held = sum(len(shadow.sequence.block_table) for shadow in self._shadows.values())
        assert held == self._tables.pool.num_used, "blocks that no sequence holds"

    def _follow(self, request: DraftRequest) -> None:
        """Bring the shadow to the original's tokens. Computed rows of other tokens are void."""
        original = request.sequence
        shadow = self._shadows.get(original.seq_id)
        if shadow is None:
            shadow = self._shadows[original.seq_id] = _Shadow(new_shadow(request))
        self._shadows.move_to_end(original.seq_id)
        own = shadow.sequence
        # The row of the last token is needed for the first draft.
        limit = min(own.num_computed_tokens, original.num_tokens - 1)
        common = min(shadow.num_common, limit)
        while common < limit and own.token_ids[common] == original.token_ids[common]:
            common += 1
        if common < own.num_computed_tokens:
            own.num_computed_tokens = common
            # The sampler's counts for it hold refused tokens.
            self._released.append(original.seq_id)
        own.token_ids[shadow.num_common :] = original.token_ids[shadow.num_common :]
        shadow.num_common = original.num_tokens
        own.grammar = None if original.grammar is None else original.grammar.copy()

    def _start(self, request: DraftRequest, busy: set[int]) -> _Draft | None:
        """Make room for the drafts; None when there is none."""
        own = self._shadows[request.sequence.seq_id].sequence
        # The last draft is never computed.
        num_drafts = min(request.num_tokens, self._max_context_tokens - own.num_tokens + 1)
        end = own.num_tokens + num_drafts - 1
        if num_drafts < 1 or not self._make_room(own, end, busy):
            self._forget(own.seq_id)
            return None
        self._tables.make_writable(own, end)
        return _Draft(request, own, num_drafts)

    def _make_room(self, own: Sequence, end: int, busy: set[int]) -> bool:
        """Forget idle sequences until `own` can be computed up to `end`; False when that is not enough."""
        pool = self._tables.pool
        while self._tables.blocks_to_write(own, end) > pool.num_free:
            idle = next((seq_id for seq_id in self._shadows if seq_id not in busy), None)
            if idle is None:
                return False
            self._forget(idle)
        return True

    def _catch_up(self, active: list[_Draft]) -> list[tuple[_Draft, int]]:
        """Return the tokens of each draft to compute first; drafts with the fewest come first."""
        entries = []
        budget = self._max_prefill_tokens
        for draft in active:
            num_tokens = min(draft.num_missing, budget)
            if num_tokens:
                entries.append((draft, num_tokens))
                budget -= num_tokens
        return entries

    def _run(self, entries: list[tuple[_Draft, int]]) -> None:
        """Run one forward pass. A sequence draws a token once all of its tokens are computed."""
        scheduled = []
        for draft, num_tokens in entries:
            own = draft.shadow
            sample = (own,) if num_tokens == draft.num_missing else ()
            scheduled.append(ScheduledSequence(own, own.num_computed_tokens, num_tokens, sample))
        result = self._runner.execute(SchedulerOutput(tuple(scheduled), released=tuple(self._released)))
        self._released.clear()
        for (draft, num_tokens), entry in zip(entries, scheduled, strict=True):
            draft.shadow.num_computed_tokens += num_tokens
            if entry.sample:
                self._take(draft, result.sampled.get(draft.shadow.seq_id))
            else:
                draft.num_left = 0

    @staticmethod
    def _take(draft: _Draft, drawn: SampledToken | None) -> None:
        """Append a drawn token and decide whether another one follows. None: the model's output is not a number."""
        draft.num_left -= 1
        threshold = draft.request.confidence_threshold
        if drawn is None or not take_draft(draft.shadow, drawn.token_id, drawn.logprob, threshold):
            draft.num_left = 0

    def _answer(self, request: DraftRequest) -> list[int]:
        shadow = self._shadows[request.sequence.seq_id]
        return shadow.sequence.token_ids[shadow.num_common :]

    def _forget(self, seq_id: int) -> None:
        shadow = self._shadows.pop(seq_id, None)
        if shadow is not None:
            self._tables.free(shadow.sequence)
            self._released.append(seq_id)
