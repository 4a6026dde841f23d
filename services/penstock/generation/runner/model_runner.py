"""Runner of one step: block copies, forward pass, logits of the rows that need them, tokens."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from penstock.common.heap import trim_heap
from penstock.generation.attention.host_kv import copy_blocks
from penstock.generation.attention.to_device import uploaded
from penstock.generation.core.draw import DrawKind
from penstock.generation.core.request import Logprob, PositionLogprobs
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import BlockTable, Sequence
from penstock.generation.core.step import RunnerOutput, SampledToken, ScheduledSequence, SchedulerOutput
from penstock.generation.models.captured_decode import CapturedLM, can_capture
from penstock.generation.models.hidden_keeper import joint
from penstock.generation.runner.dola import EarlyExits
from penstock.generation.runner.draw_rows import DrawRows
from penstock.generation.runner.fast_path import FastPath, goes_on
from penstock.generation.runner.feature_tap import FeatureTap, TappedStep
from penstock.generation.runner.grammar_masks import GrammarMasks, MaskFiller, PendingMasks
from penstock.generation.runner.grouped_input_batch import GroupedInputBatch
from penstock.generation.runner.hidden_states import HiddenHistories
from penstock.generation.runner.input_batch import AdapterRows, InputBatch, ModelInputs, embed_step
from penstock.generation.runner.output_tensors import StepTensorTaker
from penstock.generation.runner.placed_states import with_states
from penstock.generation.runner.row_outputs import MeanPooling, PromptScorer, apply_guidance
from penstock.generation.runner.steady_decode import SteadyDecode
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import SamplingKernels

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.attention.host_kv import HostKVPool
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.devices.graph_capture import GraphCapture
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.models.hidden_keeper import LayerTaps
    from penstock.generation.models.language_model import LanguageModel
    from penstock.generation.sampling.token_masks import TokenMasks

# No live sequence has a negative id.
_WARM_UP_ID = -1
# Layers that a warm-up runs with many rows, to touch memory and load kernels: all layers are alike.
_WARM_UP_LAYERS = 2
_NOBODY: frozenset[int] = frozenset()
# Draws by seq_id, and the ids of sequences that failed or are exhausted, as in RunnerOutput.
_Drawn: TypeAlias = "tuple[dict[int, SampledToken], frozenset[int], frozenset[int]]"


@dataclass(frozen=True, slots=True)
class WarmUpWork:
    """Work of a warm-up: prompts computed in one step, then decode steps of these sequences."""

    num_sequences: int = 2
    # Of each prompt.
    num_tokens: int = 64
    num_steps: int = 1


class ModelRunner:
    """Runner of the engine over one model and one KV pool. Used by one thread."""

    def __init__(
        self,
        model: LanguageModel,
        kv: KVCachePool,
        *,
        prompt_logprob_rows: int = 64,
        masks: MaskFiller | None = None,
        kernels: SamplingKernels | None = None,
        host: HostKVPool | None = None,
        graphs: GraphCapture | None = None,
        most_captured_rows: int = 256,
        tap: FeatureTap | None = None,
    ) -> None:
        """`prompt_logprob_rows`: most prompt rows with logits at a time; each takes vocabulary x 4 bytes, thrice.

        `masks` None: no sequence may have a grammar. `kernels`: the device's sampling kernels; None: the reference.
        `host` None: no step copies blocks from or to the host. `graphs`: decode steps of up to `most_captured_rows` are
        captured by it where the model can be. `tap` None: no request has drafts of a head.
        """
        self._again = partial(
            ModelRunner,
            kv=kv,
            prompt_logprob_rows=prompt_logprob_rows,
            masks=masks,
            kernels=kernels,
            host=host,
            graphs=graphs,
            most_captured_rows=most_captured_rows,
            tap=tap,
        )
        if graphs is not None and can_capture(model, kv):
            model = CapturedLM(model, kv, graphs, most_captured_rows)
        kernels = kernels or SamplingKernels()
        self._model = model
        self._kv = kv
        self._host = host
        # States of the model's layers; None: they keep none.
        self._states = kv.states
        self._prompt_scorer = PromptScorer(model, prompt_logprob_rows, kernels)
        self._pooling = MeanPooling()
        self._histories = HiddenHistories()
        self._inputs: InputBatch | GroupedInputBatch = (
            InputBatch(kv.block_size, model.device)
            if kv.layout is None
            else GroupedInputBatch(kv.layout, kv.block_size, model.device)
        )
        self._adapters = AdapterRows()
        self._sampler = Sampler(model.device, kernels)
        self._fast_path = FastPath()
        self._tap = tap
        self._masks = None if masks is None else GrammarMasks(masks)
        # State that the next step may go on from.
        self._steady: SteadyDecode | None = None

    def over(self, model: LanguageModel) -> ModelRunner:
        """Return a runner of another model of the same shape over the same pool, without any sequence."""
        return self._again(model)

    def change_weights(self, model: LanguageModel) -> LanguageModel:
        """Go on with another model of the same shape, between two steps; return the old one. Sequences keep all that
        is kept of them."""
        old, fresh = self._model, self._again(model)
        self._model, self._prompt_scorer, self._steady = fresh._model, fresh._prompt_scorer, None
        return old

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step. It changes only the KV pools and the runner's own buffers.

        A sequence with a NaN in its logits is in `failed`: only this sequence ends.
        """
        if not output.copies:
            return self._compute(output)
        self._model.blocks_are_copied(output.copies)
        out_seconds, in_seconds = copy_blocks(self._kv, self._host, output.copies)
        return replace(self._compute(output), out_seconds=out_seconds, in_seconds=in_seconds)

    def _compute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run a step after its copies."""
        steady, self._steady = self._steady, None
        if steady is None or (result := steady.step(output, self._model, self._kv)) is None:
            return self._execute(output)
        self._steady = steady
        return result

    @torch.inference_mode()
    def _execute(self, output: SchedulerOutput) -> RunnerOutput:
        self._sampler.fork(output.forks)
        self._histories.fork(output.forks)
        if self._states is not None:
            self._states.fork(output.forks, output.released)
        self.release(output.released)
        if output.parked:
            self._inputs.release(output.parked)
        if self._states is not None:
            self._states.restore(output.restored)
        if not output.scheduled:
            return RunnerOutput({}, {})
        inputs = self._inputs.build(output.scheduled, output.bundles)
        if self._states is not None:
            inputs = replace(inputs, metadata=with_states(inputs.metadata, self._states, output.scheduled))
        draws = DrawRows.of(output.scheduled, inputs.row_starts)
        exits = EarlyExits(draws, self._model.device) if draws.dola else None
        tensors = self._start_tensors(draws, inputs.row_starts) if draws.tensors else None
        tapped = None if self._tap is None else TappedStep.of(self._tap, output, inputs.row_starts)
        masks = self._start_masks(draws)
        drawn = None
        num_rows = inputs.row_starts[-1]
        # hidden_RI holds the rows that are drawn from, or all rows where others are wanted, too.
        wants_all = draws.wants_all_of(num_rows) or (tapped is not None and tapped.wants_last(self._num_layers))
        rows_R = None if wants_all else self._index(draws.rows)
        num_results = num_rows if rows_R is None else len(draws.rows)
        adapters = None
        if output.adapters is not None:
            adapters = self._adapters.of(self._model, output.adapters, inputs.row_starts)
        embeds_TI = embed_step(self._model, output.scheduled, inputs, adapters) if output.has_embeds else None
        taps = None if tapped is None else tapped.layers
        if self._model.draws_in(inputs.metadata) and self._fast_path.takes(draws, num_results, self._sampler):
            hidden_RI, drawn = self._forward_and_draw(draws, inputs, rows_R, embeds_TI, adapters, taps)
            # The call of a steady decode looks up the ids itself.
            looks_up = adapters is None or not adapters.changes_embedding
            if drawn is not None and looks_up and self._states is None and goes_on(output.scheduled):
                self._steady = SteadyDecode(
                    output.scheduled,
                    inputs.metadata,
                    inputs.tables,
                    self._kv.block_size,
                    adapters,
                    self._kv.layout,
                    tapped,
                )
        else:
            hidden_RI = self._model.forward(
                inputs.input_ids_T,
                inputs.positions_T,
                inputs.metadata,
                self._kv,
                rows_R,
                embeds_TI=embeds_TI,
                keeper=joint(
                    None if exits is None else exits.keeper,
                    None if tensors is None else tensors.keeper,
                    taps,
                ),
                attention=None if tensors is None else tensors.attention,
                adapters=adapters,
            )
        if tapped is not None:
            tapped.hand_over(self._model.embed)
        if self._states is not None:
            self._states.save(output.saved)
        # Those that change the head.
        head = adapters if adapters is not None and adapters.changes_site(self._model.head_site) else None
        sampled, failed, exhausted = drawn or self._sample(draws, hidden_RI, exits, tensors, masks, head)
        if draws.remembered:
            self._compare(draws, hidden_RI, sampled)
        if draws.pooled:
            sampled.update(self._pool(draws, hidden_RI))
        return RunnerOutput(sampled, self._prompt_logprobs(draws, hidden_RI, head), failed, exhausted)

    def release(self, seq_ids: Seq[int]) -> None:
        self._steady = None
        for keeper in (
            self._inputs,
            self._sampler,
            self._fast_path,
            self._pooling,
            self._histories,
            self._adapters,
        ):
            keeper.release(seq_ids)
        if self._states is not None:
            self._states.release(seq_ids)

    @property
    def _num_layers(self) -> int:
        return self._model.config.num_layers

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt such that pool and model have room for it and one more token."""
        return min(self._kv.num_slots, self._model.config.max_position_embeddings) - 1

    def warm_up(self, work: WarmUpWork | None = None) -> None:
        """Prepare memory, threads and kernels for the first request.

        It runs prompts through the first layers and decode steps through all, no more of either than pool and model
        hold. It writes into the first blocks of the pool: call it only before the first request, or while the pool is
        unused.
        """
        if work is not None:
            # It may write many blocks.
            self._kv.leave_small_pages()
        work = work or WarmUpWork()
        num_tokens = max(1, min(work.num_tokens, self.longest_prompt))
        num_steps = max(1, min(work.num_steps, self.longest_prompt + 1 - num_tokens))
        most = self._kv.num_slots // self._kv.block_size // self._blocks_of(num_tokens + num_steps)
        num_sequences = min(work.num_sequences, most)
        params = SamplingParams(num_steps + 1)
        drawn = replace(params, do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
        sequences = [
            self._trial(index, num_tokens, drawn if index % 2 else params, num_steps) for index in range(num_sequences)
        ]
        steps = [(self, num_tokens + step, 1) for step in range(num_steps)]
        for runner, start, count in ((self._shallow(_WARM_UP_LAYERS), 0, num_tokens), *steps):
            step = tuple(ScheduledSequence(sequence, start, count, (sequence,)) for sequence in sequences)
            sampled = runner.execute(SchedulerOutput(step, bundles=self._trial_bundles())).sampled
            for sequence in sequences:
                # None: deeper layers read the old content of the blocks, and damaged weights may have left NaN there.
                token = sampled.get(sequence.seq_id)
                sequence.token_ids.append(0 if token is None else token.token_id)
            # Otherwise the memory of many rows would stay, in addition to the pool's pages.
            trim_heap()
        self.release([sequence.seq_id for sequence in sequences])
        if isinstance(self._model, CapturedLM):
            self._model.capture_all()

    def _shallow(self, num_layers: int) -> ModelRunner:
        """Return this runner, with the same buffers, over the first layers of its model and pool only, or over all
        where the model cannot be cut.

        The warm-up of SmolLM2-135M takes 0.15 s of processor in place of 0.77 with it, and the more layers and width a
        model has, the more it saves of a start. A copy, since the prompt is to touch this runner's own buffers.
        """
        num_layers = min(num_layers, self._model.config.num_layers)
        model = self._model.shallow(num_layers)
        if model is self._model:
            return self
        twin = copy.copy(self)
        twin._model, twin._kv = model, self._kv.shallow(num_layers)
        return twin

    def run_prompt(self, num_tokens: int, *, draws: bool = True) -> None:
        """Compute a prompt of at most `longest_prompt` tokens in one step, and its first token if it `draws`.

        May return before the device is done. Writes into the pool as `warm_up` does.
        """
        sequence = self._trial(0, num_tokens, SamplingParams(1))
        step = ScheduledSequence(sequence, 0, num_tokens, (sequence,) if draws else ())
        self.execute(SchedulerOutput((step,), bundles=self._trial_bundles()))
        self.release([sequence.seq_id])

    def _trial(self, index: int, num_tokens: int, params: SamplingParams, num_new: int = 1) -> Sequence:
        """Return a sequence without a request, on the `index`-th range of blocks with room for all its tokens."""
        each = self._blocks_of(num_tokens + num_new)
        numbers = range(index * each, (index + 1) * each)
        tables = tuple(
            BlockTable([number * self._kv.bundle_blocks + first for number in numbers], width)
            for first, width in self._trial_views()
        )
        return Sequence(
            seq_id=_WARM_UP_ID - index,
            index=0,
            params=params,
            seed=index,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_table=tables[0].blocks,
            tables=tables,
        )

    def _trial_views(self) -> list[tuple[int, int]]:
        """Return each group's first block and number of blocks, among those that trials have for a block of tokens."""
        layout = self._kv.layout
        widths = [1] if layout is None else [group.num_blocks for group in layout.groups]
        return [(sum(widths[:place]), width) for place, width in enumerate(widths)]

    def _trial_bundles(self) -> dict[int, range] | None:
        """Return the bundles of all trials."""
        if self._kv.layout is None:
            return None
        size = self._kv.bundle_blocks
        starts = range(0, self._kv.num_blocks // size * size, size)
        return {
            at + first: range(at + first, at + first + width) for at in starts for first, width in self._trial_views()
        }

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._kv.block_size)

    def _forward_and_draw(
        self,
        draws: DrawRows,
        inputs: ModelInputs,
        rows_R: torch.Tensor | None,
        embeds_TI: torch.Tensor | None,
        adapters: AdapterBatch | None,
        taps: LayerTaps | None,
    ) -> tuple[torch.Tensor, _Drawn | None]:
        """Compute hidden states and greedy draws in one call. The draws are None when some row has no token."""
        hidden_RI, ids_R = self._model.forward_and_draw(
            inputs.input_ids_T, inputs.positions_T, inputs.metadata, self._kv, rows_R, embeds_TI, adapters, taps
        )
        ids = ids_R.tolist()
        if -1 in ids:
            return hidden_RI, None
        sampled = {sequence.seq_id: SampledToken(-1) for sequence in draws.without_logits}
        each = zip(draws.sequences, draws.for_drawers(ids), strict=True)
        sampled.update((sequence.seq_id, SampledToken(id)) for sequence, id in each)
        return hidden_RI, (sampled, _NOBODY, _NOBODY)

    def _start_masks(self, draws: DrawRows) -> PendingMasks | None:
        """Start the masks, which are computed during the forward pass."""
        if not draws.constrained:
            return None
        if self._masks is None:
            raise RuntimeError("a sequence has a grammar, and this runner has no masks")
        return self._masks.start(draws.constrained)

    def _start_tensors(self, draws: DrawRows, row_starts: list[int]) -> StepTensorTaker:
        return StepTensorTaker(draws, row_starts, self._model.attention, self._model.device)

    def _sample(
        self,
        draws: DrawRows,
        hidden_RI: torch.Tensor,
        exits: EarlyExits | None,
        tensors: StepTensorTaker | None,
        pending: PendingMasks | None,
        head: AdapterBatch | None,
    ) -> _Drawn:
        """Draw for all sequences but unconditional branches; siblings draw from copies of one row.

        `hidden_RI` holds all rows, or only those in `draws`; `head` are the adapters of all rows, if some change the
        head.
        """
        results = {sequence.seq_id: SampledToken(-1) for sequence in draws.without_logits}
        if not draws.rows:
            return results, _NOBODY, _NOBODY
        if len(draws.rows) < hidden_RI.shape[0]:
            hidden_RI = hidden_RI[self._index(draws.rows)]
        head = None if head is None else head.select(draws.rows)
        logits_NV = self._logits(hidden_RI, draws, exits, tensors, head)
        masks = None if pending is None else pending.take()
        if tensors is not None:
            tensors.take_scores(logits_NV, self._sampler, masks)
        try:
            drawn = self._draw(logits_NV, draws.sequences, masks)
            failed = exhausted = _NOBODY
        except FloatingPointError:
            logits_NV = self._logits(hidden_RI, draws, exits, None, head)
            drawn, failed, exhausted = self._draw_numbers(logits_NV, draws.sequences, masks)
        results.update((sequence.seq_id, token) for sequence, token in drawn)
        if tensors is not None:
            for sequence, found in tensors.tensors():
                if sequence.seq_id in results:
                    results[sequence.seq_id] = replace(results[sequence.seq_id], tensors=found)
        return results, failed, exhausted

    def _logits(
        self,
        hidden_RI: torch.Tensor,
        draws: DrawRows,
        exits: EarlyExits | None,
        tensors: StepTensorTaker | None,
        head: AdapterBatch | None,
    ) -> torch.Tensor:
        """Return (N, vocabulary) logits: contrasted with earlier layers for DoLa, and guided for guidance.

        `head` are the adapters of the rows of `hidden_RI`.
        """
        logits_NV = self._model.compute_logits(hidden_RI, head)
        if tensors is not None:
            tensors.take_logits(logits_NV)
        if exits is not None:
            exits.contrast(
                logits_NV, lambda hidden, rows: self._model.compute_logits(hidden, head and head.select(rows))
            )
        if len(draws.sequences) > len(draws.rows):
            logits_NV = logits_NV.repeat_interleave(self._index(draws.repeats), dim=0)
        if draws.guided:
            apply_guidance(logits_NV, draws.sequences, draws.guided)
        return logits_NV

    def _draw(
        self, logits_NV: torch.Tensor, sequences: list[Sequence], masks: TokenMasks | None
    ) -> list[tuple[Sequence, SampledToken]]:
        kept = [row for row, sequence in enumerate(sequences) if sequence.draw.kind is not DrawKind.UNCONDITIONAL]
        if len(kept) < len(sequences):
            logits_NV = logits_NV[self._index(kept)]
            sequences = [sequences[row] for row in kept]
        return list(zip(sequences, self._sampler.sample(logits_NV, sequences, masks), strict=True)) if sequences else []

    def _draw_numbers(
        self, logits_NV: torch.Tensor, sequences: list[Sequence], masks: TokenMasks | None
    ) -> tuple[list[tuple[Sequence, SampledToken]], frozenset[int], frozenset[int]]:
        """Draw row by row, so that a row without a token fails alone: by its model (NaN) or by its options.

        Used only after a draw has failed, since it costs one pass per row.
        """
        drawn: list[tuple[Sequence, SampledToken]] = []
        failed: set[int] = set()
        exhausted: set[int] = set()
        is_bad = logits_NV.isnan().any(dim=-1).tolist()
        for row, sequence in enumerate(sequences):
            try:
                drawn += self._draw(logits_NV[row : row + 1], [sequence], masks)
            except FloatingPointError:
                last_resort = sequence.params.mode.last_resort
                if is_bad[row] or last_resort is None or sequence.params.limits_tokens:
                    (failed if is_bad[row] else exhausted).add(sequence.seq_id)
                else:
                    drawn.append((sequence, _impossible(last_resort, sequence.params.top_logprobs)))
        return drawn, frozenset(failed), frozenset(exhausted)

    def _compare(self, draws: DrawRows, hidden_TI: torch.Tensor, sampled: dict[int, SampledToken]) -> None:
        """Keep hidden states, and set the similarity for draws that want it."""
        self._histories.add(draws.remembered, hidden_TI)
        asking = [one for one in draws.sequences if one.draw.similarity and one.seq_id in sampled]
        for seq_id, similarity in self._histories.similarities(asking).items():
            sampled[seq_id] = replace(sampled[seq_id], similarity=similarity)

    def _pool(self, draws: DrawRows, hidden_TI: torch.Tensor) -> dict[int, SampledToken]:
        """Return the embeddings of inputs that are complete, by seq_id."""
        done: dict[int, SampledToken] = {}
        for entry, row in draws.pooled:
            embedding = self._pooling.add(entry, hidden_TI[row : row + entry.num_tokens])
            if embedding is not None:
                done[entry.sequence.seq_id] = SampledToken(-1, embedding=embedding)
        return done

    def _prompt_logprobs(
        self, draws: DrawRows, hidden_TI: torch.Tensor, head: AdapterBatch | None
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        return {
            entry.sequence.seq_id: found
            for entry, row in draws.scored
            if (
                found := self._prompt_scorer.score(
                    entry,
                    hidden_TI[row : row + entry.num_tokens],
                    None if head is None else head.select(range(row, row + entry.num_tokens)),
                )
            )
        }

    def _index(self, values: list[int]) -> torch.Tensor:
        return uploaded(np.array(values, dtype=np.int64), self._model.device)


def _impossible(token_id: int, num_top: int | None) -> SampledToken:
    """Return the draw of a token with probability 0, when all others have 0, too."""
    if num_top is None:
        return SampledToken(token_id)
    return SampledToken(token_id, -math.inf, PositionLogprobs(Logprob(token_id, -math.inf, 1)))
