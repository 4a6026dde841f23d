"""Runs one step of the scheduler: copies, forward pass, logits of the rows that need them, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.engine.sequence import Sequence
from penstock.generation.engine.step import RunnerOutput, SampledToken, ScheduledSequence, SchedulerOutput
from penstock.generation.runner.input_batch import InputBatch
from penstock.generation.sampling.logprobs import position_logprobs
from penstock.generation.sampling.params import SamplingParams
from penstock.generation.sampling.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.engine.request import PositionLogprobs
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.runner.kv_cache import KVCachePool

# No live sequence has a negative id.
_WARM_UP_ID = -1


class ModelRunner:
    """The engine's Runner over one model and one KV pool. Used by one thread."""

    def __init__(self, model: CausalLM, kv: KVCachePool, *, prompt_logprob_rows: int = 64) -> None:
        """`prompt_logprob_rows`: prompt rows whose logits exist at a time; a row takes vocabulary x 4 bytes, thrice."""
        self._model = model
        self._kv = kv
        self._prompt_logprob_rows = prompt_logprob_rows
        self._inputs = InputBatch(kv.block_size, model.device)
        self._sampler = Sampler(model.device)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step. Mutates only the KV pool and the runner's own buffers.

        Sequences whose logits hold a NaN are in `failed`: they end alone.
        """
        self._inputs.release(output.released)
        self._sampler.release(output.released)
        self._kv.copy_blocks(output.copies)
        if not output.scheduled:
            return RunnerOutput({}, {})
        inputs = self._inputs.build(output.scheduled)
        hidden_TI = self._model.forward(inputs.input_ids_T, inputs.positions_T, inputs.metadata, self._kv)
        sampled, failed = self._sample(output.scheduled, hidden_TI, inputs.row_starts)
        prompt_logprobs = self._prompt_logprobs(output.scheduled, hidden_TI, inputs.row_starts)
        return RunnerOutput(sampled, prompt_logprobs, failed)

    def warm_up(self, *, num_sequences: int = 4, num_tokens: int = 64) -> None:
        """Run a prompt and a decode step, so that the first request finds memory, threads and kernels ready.

        Writes into the first blocks of the pool: only before the first request, or while the pool is unused.
        """
        longest = min(self._kv.num_slots, self._model.config.max_position_embeddings) - 1
        num_tokens = max(1, min(num_tokens, longest))
        blocks_each = -(-(num_tokens + 1) // self._kv.block_size)
        num_sequences = min(num_sequences, self._kv.num_blocks // blocks_each)
        for do_sample in (False, True):
            params = SamplingParams(2, do_sample=do_sample, temperature=0.7, top_k=20, top_p=0.8)
            sequences = [
                Sequence(
                    seq_id=_WARM_UP_ID - index,
                    index=0,
                    params=params,
                    seed=index,
                    token_ids=[0] * num_tokens,
                    num_prompt_tokens=num_tokens,
                    block_table=list(range(index * blocks_each, (index + 1) * blocks_each)),
                )
                for index in range(num_sequences)
            ]
            for start, count in ((0, num_tokens), (num_tokens, 1)):
                step = tuple(ScheduledSequence(sequence, start, count, (sequence,)) for sequence in sequences)
                sampled = self.execute(SchedulerOutput(step)).sampled
                for sequence in sequences:
                    sequence.token_ids.append(sampled[sequence.seq_id].token_id)
            self.execute(SchedulerOutput((), released=tuple(sequence.seq_id for sequence in sequences)))

    def _sample(
        self, scheduled: Seq[ScheduledSequence], hidden_TI: torch.Tensor, row_starts: list[int]
    ) -> tuple[dict[int, SampledToken], frozenset[int]]:
        """Tokens of every sequence in some `sample`, and who has none; siblings draw from copies of one row."""
        rows: list[int] = []
        repeats: list[int] = []
        sequences: list[Sequence] = []
        for entry, end in zip(scheduled, row_starts[1:], strict=True):
            if entry.sample:
                rows.append(end - 1)
                repeats.append(len(entry.sample))
                sequences.extend(entry.sample)
        if not rows:
            return {}, frozenset()
        if len(rows) < hidden_TI.shape[0]:
            hidden_TI = hidden_TI[self._index(rows)]
        if len(sequences) == len(rows):
            repeats = []
        try:
            tokens = self._sampler.sample(self._logits(hidden_TI, repeats), sequences)
        except FloatingPointError:
            return self._sample_numbers(self._logits(hidden_TI, repeats), sequences)
        return {sequence.seq_id: token for sequence, token in zip(sequences, tokens, strict=True)}, frozenset()

    def _logits(self, hidden_NI: torch.Tensor, repeats: list[int]) -> torch.Tensor:
        """Logits of the rows, each as often as `repeats` says; once when it is empty."""
        logits_NV = self._model.compute_logits(hidden_NI)
        return logits_NV.repeat_interleave(self._index(repeats), dim=0) if repeats else logits_NV

    def _sample_numbers(
        self, logits_NV: torch.Tensor, sequences: list[Sequence]
    ) -> tuple[dict[int, SampledToken], frozenset[int]]:
        """As `_sample`, leaving out the rows with a NaN: looked for only here, since it costs a pass over them all."""
        is_bad = logits_NV.isnan().any(dim=-1).tolist()
        good = [row for row, bad in enumerate(is_bad) if not bad]
        kept = [sequences[row] for row in good]
        tokens = self._sampler.sample(logits_NV[self._index(good)], kept) if kept else []
        failed = frozenset(sequence.seq_id for sequence, bad in zip(sequences, is_bad, strict=True) if bad)
        return {sequence.seq_id: token for sequence, token in zip(kept, tokens, strict=True)}, failed

    def _prompt_logprobs(
        self, scheduled: Seq[ScheduledSequence], hidden_TI: torch.Tensor, row_starts: list[int]
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        results: dict[int, tuple[PositionLogprobs, ...]] = {}
        for entry, first_row in zip(scheduled, row_starts, strict=False):
            sequence, num_top = entry.sequence, entry.sequence.params.prompt_logprobs
            if num_top is None:
                continue
            end = min(entry.start + entry.num_tokens, sequence.num_prompt_tokens - 1)
            if end <= entry.start:
                continue
            # Row of token i predicts token i + 1.
            targets = sequence.token_ids[entry.start + 1 : end + 1]
            hidden_PI = hidden_TI[first_row : first_row + len(targets)]
            results[sequence.seq_id] = tuple(self._score(hidden_PI, targets, num_top))
        return results

    def _score(self, hidden_PI: torch.Tensor, targets: list[int], num_top: int) -> list[PositionLogprobs]:
        """Logprobs of `targets` by the model's own distribution, a bounded number of rows at a time."""
        entries: list[PositionLogprobs] = []
        for first in range(0, len(targets), self._prompt_logprob_rows):
            chunk = slice(first, first + self._prompt_logprob_rows)
            chosen = self._index(targets[chunk])
            entries += position_logprobs(self._model.compute_logits(hidden_PI[chunk]), chosen, [num_top] * len(chosen))
        return entries

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)
