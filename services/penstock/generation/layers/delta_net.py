"""A layer with a gated delta rule in place of attention: its products, a short convolution, the rule, the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.generation.attention.state_pool import StateTensor
from penstock.generation.layers.delta_rule import DeltaRows
from penstock.generation.layers.lora import OUTPUT
from penstock.generation.layers.step_states import states_of_step

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.delta_heads import DeltaHeads
    from penstock.generation.layers.decoder_layer import Step
    from penstock.generation.layers.delta_rule import DeltaRule, DeltaWeights
    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.layers.step_states import EarlierRows


class DeltaNet:
    """Products, convolution, delta rule, gates, output projection; a state of each sequence in the pool."""

    def __init__(
        self,
        number: int,
        heads: DeltaHeads,
        rule: DeltaRule,
        weights: DeltaWeights,
        rows: Linear,
        numbers: Linear,
        output: Linear,
    ) -> None:
        """Take the layer's parts. `number` is the layer's among all of the model. `rows` gives queries, keys, values
        and gates, and `numbers` what fades and corrects a state."""
        self.rows, self.numbers, self.output = rows, numbers, output
        self.heads, self.weights = heads, weights
        # Among the layers that keep a state.
        self.place = heads.place(number)
        self._number, self._rule = number, rule

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Products that --quantization changes."""
        return self.rows, self.output

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); leave in the pool each sequence's state after its rows."""
        states = step.kv.states
        assert states is not None, "its pool has states"
        conv, matrices = states.in_place()
        where, place = states_of_step(step.metadata), self.place
        mixed_TE, numbers_TE = self.rows(x_TI), self.numbers(x_TI)
        rows = DeltaRows(mixed_TE, numbers_TE, where)
        if where.again is not None:
            rows = _with_earlier(rows, where.again, [states.later(slot, place) for slot, _ in where.again.slots])
        out_TE = self._rule(rows, self.weights, self.heads, conv[:, place], matrices[:, place])
        if where.again is not None:
            out_TE = out_TE[where.again.own]
        for slot, own in where.later:
            states.keep_later(slot, place, (mixed_TE[own].clone(), numbers_TE[own].clone()))
        return step.addend(self.output, out_TE, self._number, OUTPUT)


def _with_earlier(rows: DeltaRows, again: EarlierRows, kept: Sequence[tuple[Tensor, ...]]) -> DeltaRows:
    """Return the rows with those of an earlier step before each sequence's own. `kept` are those of each slot."""
    earlier = [(mixed[:count], numbers[:count]) for (mixed, numbers), (_, count) in zip(kept, again.slots, strict=True)]
    mixed_TE = torch.cat((*(mixed for mixed, _ in earlier), rows.mixed))[again.order]
    numbers_TE = torch.cat((*(numbers for _, numbers in earlier), rows.numbers))[again.order]
    return DeltaRows(mixed_TE, numbers_TE, rows.states)


def state_layout(heads: DeltaHeads | None, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Return the tensors of a sequence's state in all layers of the kind: the rows that the next convolution reads, in
    the model's `dtype`, and the heads' matrices. None: there are none."""
    if heads is None:
        return ()
    matrices = (heads.num_layers, heads.value_heads, heads.key_dim, heads.value_dim)
    return (
        StateTensor(0, "conv_states", 0, (heads.num_layers, heads.kernel - 1, heads.channels), dtype),
        StateTensor(0, "recurrent_states", 0, matrices, torch.float32),
    )


def note_lengths(metadata: AttentionMetadata, kv: KVCachePool) -> None:
    """Note in the pool that all layers are after the step's rows, and their states after those that are kept. Raises
    RuntimeError without states."""
    if kv.states is None or metadata.state_slots is None:
        raise RuntimeError("a model with states needs their pool")
    later, kept = None, metadata.state_kept
    if kept is not None:
        later = [count - own for count, own in zip(metadata.query_lens, kept, strict=True)]
    kv.states.advance(metadata.state_slots, metadata.kv_lens, later)
