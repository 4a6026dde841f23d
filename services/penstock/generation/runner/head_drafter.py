"""Drafter over a trained head (EAGLE-3, multi-token prediction, DFlash): it goes on from the served model's hidden
states."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.common.block_hashes import chain_hash
from penstock.generation.attention.host_kv import copy_blocks
from penstock.generation.attention.to_device import uploaded
from penstock.generation.core.draw import DrawKind
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import BlockCopy, DraftKind, SampledToken, ScheduledSequence
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.block_tables import BlockTables
from penstock.generation.models.draft_head import BlockHead
from penstock.generation.models.fused_head import ChainLimits
from penstock.generation.runner.draft_shadow import new_shadow, take_draft
from penstock.generation.runner.grammar_masks import GrammarMasks, MaskFiller
from penstock.generation.runner.input_batch import InputBatch, ModelInputs
from penstock.generation.sampling.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.step import DraftRequest
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.models.draft_head import DraftHead, Embed
    from penstock.generation.runner.draw_rows import EntryRows
    from penstock.generation.sampling.sampling_kernels import SamplingKernels

# Score of ids that the head does not know: never likely, and a grammar that leaves nothing else still has a token.
_UNLIKELY = -1e9
# Rows of hidden states that wait for a draft before they are computed: drafting may pause for long.
_MOST_WAITING = 64


@dataclass(slots=True)
class _Follower:
    """The head's data of a sequence."""

    # Place of the served model's row that its first row reads: where the hidden states that were taken begin.
    first: int
    # Inputs of its rows: row i reads the token after that of the served model's row `first` + i. At rest all computed
    # rows read the served model's hidden states.
    rows: Sequence
    # Hidden states of rows that are not computed yet, (rows, taps, hidden) each, in order.
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    # Draws the drafts; None: none was asked for yet.
    shadow: Sequence | None = None

    @property
    def end(self) -> int:
        """Place of the first of the served model's rows that it does not know."""
        return self.first + self.rows.num_computed_tokens + self.num_waiting

    def cut(self, place: int) -> None:
        """Forget the served model's rows from `place` on: they were of drafts that were refused."""
        while self.num_waiting and self.end > place:
            last = self.waiting.pop()
            self.num_waiting -= len(last)
            if self.end < place:
                kept = last[: place - self.end]
                self.waiting.append(kept)
                self.num_waiting += len(kept)
        self.rows.num_computed_tokens = min(self.rows.num_computed_tokens, place - self.first)

    def take_waiting(self, count: int) -> Tensor:
        """Return the first `count` rows that wait; they wait no more."""
        whole = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        rest = whole[count:]
        self.waiting, self.num_waiting = ([rest] if len(rest) else []), len(rest)
        return whole[:count]


class _Drawing(NamedTuple):
    """A sequence that draws drafts."""

    follower: _Follower
    shadow: Sequence
    request: DraftRequest


class HeadDrafter:
    """Drafter of the engine over a head with a pool of its own, and the FeatureTap of the runner's steps. Used by the
    engine's thread.

    Drafts are drawn as those of a draft model: with the request's own options, and with the same uniforms as the served
    model's draws at these positions. A greedy draft needs no scores but the head's own.

    The head's keys and values begin where the served model computed a row of the sequence, or at its beginning where
    rows of the same prefix are in the head's pool: behind a prefix from elsewhere, or after a swap, there are none
    before. When its pool is full, the sequences with the oldest drafts are forgotten.
    """

    kind = DraftKind.DRAFT_HEAD

    def __init__(
        self, head: DraftHead, kv: KVCachePool, vocab_size: int, *, kernels: SamplingKernels, masks: MaskFiller | None
    ) -> None:
        """`vocab_size` is the served model's. `masks` None: no sequence has a grammar."""
        self.head, self.kv = head, kv
        self._vocab_size = vocab_size
        self._tables = BlockTables(BlockPool(kv.num_blocks, kv.block_size), prefix_cache=False)
        self._tables.pool.on_grow = kv.leave_small_pages
        self._inputs = InputBatch(kv.block_size, head.device)
        self._sampler = Sampler(head.device, kernels)
        self._masks = None if masks is None else GrammarMasks(masks)
        # Of the model that computed the last step.
        self._embed: Embed | None = None
        # seq_id -> follower, the least recently used first.
        self._followers: OrderedDict[int, _Follower] = OrderedDict()

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks of the head's pool that sequences hold."""
        return self._tables.pool.num_used

    def take(self, entries: Seq[EntryRows], rows_TKI: Tensor, embed: Embed) -> None:
        """Rows of prompts that go on are computed now, others when drafts are asked for."""
        self._embed = embed
        due: list[tuple[_Follower, Sequence]] = []
        for entry, first_row in entries:
            own = entry.sequence
            follower = self._following(own, entry.start)
            own_TKI = rows_TKI[first_row : first_row + entry.num_tokens]
            # A copy of some: the step's other rows would stay as long.
            follower.waiting.append(own_TKI if len(own_TKI) == len(rows_TKI) else own_TKI.clone())
            follower.num_waiting += entry.num_tokens
            for sibling in entry.sample:
                if sibling is not own:
                    self._fork(follower, sibling)
            if not (entry.sample or entry.verifiers) or follower.num_waiting > _MOST_WAITING:
                due.append((follower, own))
        if due:
            busy = {one.seq_id for entry, _ in entries for one in (entry.sequence, *entry.sample)}
            self._compute(due, busy)

    @torch.inference_mode()
    def draft(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """Run the head once over all rows that wait, and once more for each further draft or for a whole block."""
        busy = {request.sequence.seq_id for request in requests}
        found = [self._start(request, busy) for request in requests]
        drawing = [one for one in found if one is not None]
        ends = [one.follower.rows.num_computed_tokens + one.follower.num_waiting for one in drawing]
        if drawing and isinstance(self.head, BlockHead):
            self._draw_blocks(drawing, self.head)
        elif drawing and self.head.can_chain and all(map(self._is_chained, drawing)):
            self._chain(drawing)
        elif drawing:
            self._draw_in_turn(drawing)
        for one, end in zip(drawing, ends, strict=True):
            one.follower.rows.num_computed_tokens = end
            self._keep_prefix(one.follower, one.request.sequence)
        return [[] if one is None else one.shadow.token_ids[one.request.sequence.num_tokens :] for one in found]

    def _draw_in_turn(self, active: list[_Drawing]) -> None:
        """Draw the drafts of all sequences, one pass after the other."""
        hidden_NI, scores_NV = self._step(*self._due_rows([(one.follower, one.follower.num_waiting) for one in active]))
        while places := self._draw(active, scores_NV):
            active = [active[place] for place in places]
            hidden_NI, scores_NV = self._step(self._further(active), hidden_NI[self._index(places)])

    def _draw_blocks(self, drawing: list[_Drawing], head: BlockHead) -> None:
        """Draw the drafts of all sequences from one block of each."""
        scheduled, features_TI = self._due_rows([(one.follower, one.follower.num_waiting) for one in drawing])
        inputs, embeds_TI = self._embedded(scheduled)
        head.forward(embeds_TI, features_TI, inputs.positions_T, inputs.metadata, self.kv)
        blocks = []
        for one in drawing:
            rows, count = one.follower.rows, one.request.num_tokens
            first = rows.num_computed_tokens
            rows.token_ids[first:] = [one.shadow.token_ids[-1], *[head.mask_id] * count]
            blocks.append(ScheduledSequence(rows, first, count + 1))
        inputs, embeds_TI = self._embedded(blocks)
        hidden_TI = head.block(embeds_TI, inputs.positions_T, inputs.metadata, self.kv)
        active = list(range(len(drawing)))
        # The block's rows know nothing of each other's drafts: each is scored when it is drawn from.
        for place in range(1, head.num_drafts + 1):
            scores_NV = head.scores(hidden_TI[self._index([inputs.row_starts[one] + place for one in active])])
            active = [active[again] for again in self._draw([drawing[one] for one in active], scores_NV)]
            if not active:
                return

    def _is_chained(self, one: _Drawing) -> bool:
        """True when a chain needs nothing but the highest scores."""
        return one.shadow.grammar is None and self._is_plain(one.shadow)

    def _chain(self, drawing: list[_Drawing]) -> None:
        """Draw the drafts of all sequences in one call."""
        scheduled, features_TI = self._due_rows([(one.follower, one.follower.num_waiting) for one in drawing])
        inputs, embeds_TI = self._embedded(scheduled)
        tables_SB = self._inputs.whole_tables([one.follower.rows for one in drawing])
        limits = [
            ChainLimits(
                one.request.num_tokens,
                one.request.confidence_threshold,
                one.shadow.params.ending_ids,
            )
            for one in drawing
        ]
        drafts = self.head.chain(
            embeds_TI, features_TI, inputs.positions_T, inputs.metadata, tables_SB, self.kv, limits
        )
        for one, ids in zip(drawing, drafts, strict=True):
            one.shadow.token_ids += ids

    def release(self, seq_ids: Seq[int]) -> None:
        if self._followers:
            for seq_id in seq_ids:
                self._forget(seq_id)

    def follow(self, model: CausalLM, head: DraftHead) -> None:
        """Draft for `model` from now on, the served one with other weights, by `head`: the same, or one of its shape.
        Sequences keep all that is kept of them, and nothing keeps the old ones."""
        self.head = head
        head.share(model)
        self._tables.pool.clear_cache()
        if self._embed is not None:
            self._embed = model.embed

    def clear(self) -> None:
        """Forget every sequence and prefix: their blocks may be overwritten."""
        self.release(tuple(self._followers))
        self._tables.pool.clear_cache()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the head once, over the first blocks of its pool, and forget every sequence."""
        self.clear()
        hidden, size = self.head.config.hidden_size, min(self.kv.block_size, 4)
        rows = Sequence(-1, 0, SamplingParams(1), 0, [0] * size, size, block_table=[0])
        inputs = self._inputs.build((ScheduledSequence(rows, 0, size),))
        self._inputs.release((-1,))
        states = torch.zeros(size, hidden, dtype=self.head.dtype, device=self.head.device)
        self.head.step(states, states, inputs.positions_T, inputs.metadata, self.kv)

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool's accounting and the block tables disagree. O(blocks), for tests."""
        self._tables.pool.check_integrity()
        held = {block for follower in self._followers.values() for block in follower.rows.block_table}
        assert len(held) == self._tables.pool.num_used, "blocks that no sequence holds"

    def _following(self, sequence: Sequence, place: int) -> _Follower:
        """Return the follower of a sequence, ready for the served model's row at `place`."""
        follower = self._followers.get(sequence.seq_id)
        if follower is not None and not follower.first < place <= follower.end:
            # Rows in between came from the prefix cache or the host pool, or all are computed again.
            self._forget(sequence.seq_id)
            follower = None
        if follower is None:
            follower = self._followers[sequence.seq_id] = self._new_follower(sequence, place)
        follower.cut(place)
        return follower

    def _new_follower(self, sequence: Sequence, place: int) -> _Follower:
        """Return a follower for a sequence that begins at `place`: with the rows before it where others have left them,
        else from there on."""
        rows = Sequence(sequence.seq_id, 0, sequence.params, 0, [], 0)
        blocks = self._cached(sequence, place)
        if not blocks:
            return _Follower(place, rows)
        self._tables.open(rows)
        for block in blocks:
            self._tables.pool.acquire(block)
        rows.block_table += blocks
        rows.token_ids = sequence.token_ids[1 : place + 1]
        rows.num_computed_tokens, rows.num_cached_blocks = place, len(blocks)
        return _Follower(0, rows)

    def _cached(self, sequence: Sequence, place: int) -> list[int]:
        """Return the blocks of the rows before `place`; none where one of them is not there."""
        count, offset = divmod(place, self.kv.block_size)
        if offset or len(sequence.block_hashes) < count:
            return []
        found = [self._tables.pool.lookup(self._key(sequence, number)) for number in range(count)]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == count else []

    def _keep_prefix(self, follower: _Follower, sequence: Sequence) -> None:
        """Let others find the full blocks of rows from the sequence's beginning on, all of the model's own states."""
        rows, size = follower.rows, self.kv.block_size
        last = min(rows.num_computed_tokens // size, len(sequence.block_hashes))
        if follower.first or rows.num_cached_blocks >= last:
            return
        for number in range(rows.num_cached_blocks, last):
            self._tables.pool.register(rows.block_table[number], self._key(sequence, number))
        rows.num_cached_blocks = last

    def _key(self, sequence: Sequence, number: int) -> bytes:
        """Return the name of a block of rows: the last one reads the token behind the model's own block."""
        behind = sequence.token_ids[(number + 1) * self.kv.block_size]
        return chain_hash(sequence.block_hashes[number], behind.to_bytes(8, "little", signed=True))

    def _fork(self, parent: _Follower, sibling: Sequence) -> None:
        """Let a sibling begin with what is known of the prompt."""
        self._forget(sibling.seq_id)
        rows = Sequence(sibling.seq_id, 0, sibling.params, 0, list(parent.rows.token_ids), 0)
        self._tables.fork(parent.rows, rows, parent.rows.num_computed_tokens)
        self._followers[sibling.seq_id] = _Follower(parent.first, rows, list(parent.waiting), parent.num_waiting)

    @torch.inference_mode()
    def _compute(self, due: list[tuple[_Follower, Sequence]], busy: set[int]) -> None:
        """Compute rows with a next token that is known, of sequences that draw no drafts now. None of the step's
        sequences, `busy`, is forgotten for them."""
        entries: list[tuple[_Follower, int]] = []
        ready: list[tuple[_Follower, Sequence]] = []
        for follower, sequence in due:
            # The last token has no next one yet; behind a draft comes another one, perhaps.
            known = sequence.num_tokens - sequence.num_draft_tokens - 1 - follower.first
            count = min(follower.num_waiting, known - follower.rows.num_computed_tokens)
            if count > 0 and self._make_ready(follower, sequence, count, busy):
                entries.append((follower, count))
                ready.append((follower, sequence))
        if entries:
            scheduled, features_TI = self._due_rows(entries)
            inputs, embeds_TI = self._embedded(scheduled)
            self.head.forward(embeds_TI, features_TI, inputs.positions_T, inputs.metadata, self.kv)
        for follower, sequence in ready:
            self._keep_prefix(follower, sequence)

    def _start(self, request: DraftRequest, busy: set[int]) -> _Drawing | None:
        """Prepare a sequence for drafts; None: it gets none now."""
        sequence, num_further = request.sequence, request.num_tokens - 1
        if isinstance(self.head, BlockHead):
            request = replace(request, num_tokens=min(request.num_tokens, self.head.num_drafts))
            # Rows of the last token and of each draft.
            num_further = request.num_tokens + 1
        follower = self._followers.get(sequence.seq_id)
        if follower is None:
            return None
        self._followers.move_to_end(sequence.seq_id)
        follower.cut(sequence.num_tokens - 1)
        count = follower.num_waiting
        is_known = count > 0 and follower.end == sequence.num_tokens - 1
        if not is_known or not self._make_ready(follower, sequence, count, busy, num_further):
            return None
        return _Drawing(follower, self._follow(follower, request), request)

    def _follow(self, follower: _Follower, request: DraftRequest) -> Sequence:
        """Bring the shadow to the original's tokens."""
        original, own = request.sequence, follower.shadow
        if own is None:
            own = follower.shadow = new_shadow(request)
        if own.token_ids != original.token_ids[: own.num_tokens]:
            # The sampler's counts for it hold refused tokens.
            self._sampler.release((own.seq_id,))
        own.token_ids = list(original.token_ids)
        own.grammar = None if original.grammar is None else original.grammar.copy()
        return own

    def _make_ready(
        self, follower: _Follower, sequence: Sequence, count: int, busy: set[int], num_further: int = 0
    ) -> bool:
        """Give the next `count` rows their tokens, and them and `num_further` rows room. False: there is no room, and
        the sequence is forgotten."""
        rows = follower.rows
        first = rows.num_computed_tokens
        end = first + count + num_further
        pool = self._tables.pool
        while self._tables.blocks_to_write(rows, end) > pool.num_free:
            idle = next((seq_id for seq_id in self._followers if seq_id not in busy), None)
            if idle is None:
                self._forget(sequence.seq_id)
                return False
            self._forget(idle)
        copies = self._tables.make_writable(rows, end)
        if copies:
            copy_blocks(self.kv, None, [BlockCopy(source, own) for source, own in copies])
        place = follower.first + first + 1
        rows.token_ids[first:] = sequence.token_ids[place : place + count]
        return True

    def _due_rows(self, entries: list[tuple[_Follower, int]]) -> tuple[list[ScheduledSequence], Tensor]:
        """Return rows that wait, which are computed next, and their features (T, hidden)."""
        scheduled = [
            ScheduledSequence(follower.rows, follower.rows.num_computed_tokens, count) for follower, count in entries
        ]
        tapped = [follower.take_waiting(count) for follower, count in entries]
        for follower, count in entries:
            follower.rows.num_computed_tokens += count
        return scheduled, self.head.features(tapped[0] if len(tapped) == 1 else torch.cat(tapped))

    def _further(self, active: list[_Drawing]) -> list[ScheduledSequence]:
        """Return one more row of each sequence, of its last draft: computed next, from the result of the row before."""
        scheduled = []
        for one in active:
            rows = one.follower.rows
            rows.token_ids.append(one.shadow.token_ids[-1])
            scheduled.append(ScheduledSequence(rows, rows.num_computed_tokens, 1))
            rows.num_computed_tokens += 1
        return scheduled

    def _step(self, scheduled: list[ScheduledSequence], features_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows. Return the result of each entry's last row (N, hidden), and its scores."""
        inputs, embeds_TI = self._embedded(scheduled)
        return self.head.step(embeds_TI, features_TI, inputs.positions_T, inputs.metadata, self.kv)

    def _embedded(self, scheduled: list[ScheduledSequence]) -> tuple[ModelInputs, Tensor]:
        """Return inputs of rows of the head, and their embeddings (T, hidden)."""
        assert self._embed is not None, "hidden states were taken with an embedding"
        inputs = self._inputs.build(scheduled)
        return inputs, self.head.embedded(inputs.input_ids_T, self._embed)

    def _draw(self, active: list[_Drawing], scores_NV: Tensor) -> list[int]:
        """Draw a draft of each sequence. Return the places of those that draw another one."""
        plain = [place for place, one in enumerate(active) if self._is_plain(one.shadow)]
        drawn: dict[int, tuple[int, float | None]] = {}
        if plain:
            some_NV = scores_NV if len(plain) == len(active) else scores_NV[self._index(plain)]
            drawn.update(zip(plain, self._highest(some_NV, [active[place] for place in plain]), strict=True))
        others = [place for place in range(len(active)) if place not in drawn]
        if others:
            some_NV = scores_NV if len(others) == len(active) else scores_NV[self._index(others)]
            found = self._sampled(some_NV, [active[place].shadow for place in others])
            drawn.update((place, token) for place, token in zip(others, found, strict=True) if token is not None)
        going_on = []
        for place, one in enumerate(active):
            if place not in drawn:
                continue
            token_id, logprob = drawn[place]
            goes_on = take_draft(one.shadow, token_id, logprob, one.request.confidence_threshold)
            if goes_on and one.shadow.num_tokens < one.request.sequence.num_tokens + one.request.num_tokens:
                going_on.append(place)
        return going_on

    def _is_plain(self, shadow: Sequence) -> bool:
        """True when the highest score is the draft."""
        plan = self._sampler.plan_of(shadow)
        return plan.is_plain and shadow.draw.kind is DrawKind.TOKEN and not shadow.is_constrained

    def _highest(self, scores_NV: Tensor, active: list[_Drawing]) -> list[tuple[int, float | None]]:
        """Return the id of each row's highest score, and its log-probability if some request has a threshold."""
        top = scores_NV.max(dim=-1)
        ids_N = top.indices if self.head.served_ids is None else self.head.served_ids[top.indices]
        logprobs: list[float] | list[None] = [None] * len(active)
        if any(one.request.confidence_threshold > 0.0 for one in active):
            logprobs = (top.values - scores_NV.logsumexp(dim=-1)).tolist()
        pairs = zip(ids_N.tolist(), logprobs, strict=True)
        # A NaN is no score: whatever the draft is, it is refused.
        return [(token_id, None if logprob is None or math.isnan(logprob) else logprob) for token_id, logprob in pairs]

    def _sampled(self, scores_NV: Tensor, shadows: list[Sequence]) -> list[tuple[int, float | None] | None]:
        """Draw by the requests' options: an id and its log-probability where a request has a threshold. None: the
        head's scores are no numbers."""
        served, ids = self.head.served_ids, None
        if served is not None and any(map(self._knows_ids, shadows)):
            # They know the served model's ids.
            logits_NV = scores_NV.new_full((len(shadows), self._vocab_size), _UNLIKELY)
            logits_NV[:, served] = scores_NV
            tokens = self._drawn(logits_NV, shadows)
        else:
            # For what is part of the draw itself the head's own vocabulary is enough: other ids are never likely.
            tokens = self._drawn(scores_NV, shadows)
            if served is not None:
                places = [0 if token is None else token.token_id for token in tokens]
                ids = served[self._index(places)].tolist()
        return [
            None if token is None else (token.token_id if ids is None else ids[place], token.logprob)
            for place, token in enumerate(tokens)
        ]

    def _knows_ids(self, shadow: Sequence) -> bool:
        """True when options of the draw may read ids."""
        return shadow.is_constrained or bool(self._sampler.plan_of(shadow).processors)

    def _drawn(self, logits_NV: Tensor, shadows: list[Sequence]) -> list[SampledToken | None]:
        """Draw from scores, of the ids of a vocabulary or of their places in it. None: they are no numbers."""
        constrained = [one for one in shadows if one.is_constrained]
        masks = None
        if constrained:
            if self._masks is None:
                raise RuntimeError("a sequence has a grammar, and this drafter has no masks")
            masks = self._masks.start(constrained).take()
        try:
            # The draw changes what it reads.
            return list(self._sampler.sample(logits_NV.clone(), shadows, masks))
        except FloatingPointError:
            tokens: list[SampledToken | None] = []
            for place, shadow in enumerate(shadows):
                try:
                    tokens += self._sampler.sample(logits_NV[place : place + 1].clone(), [shadow], masks)
                except FloatingPointError:
                    tokens.append(None)
            return tokens

    def _forget(self, seq_id: int) -> None:
        follower = self._followers.pop(seq_id, None)
        if follower is not None:
            self._tables.free(follower.rows)
            self._inputs.release((seq_id,))
            self._sampler.release((seq_id,))

    def _index(self, values: list[int]) -> Tensor:
        return uploaded(np.array(values, dtype=np.int64), self.head.device)
