"""The sequences that draw in a step, with their options as tensors over the rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.attention.to_device import uploaded
from penstock.generation.core.draw import DrawKind
from penstock.generation.sampling.draw_context import DrawContext, RowStreams
from penstock.generation.sampling.ops.counted_draws import Stream
from penstock.generation.sampling.processors import PROCESSORS
from penstock.generation.sampling.processors.base import Stage
from penstock.generation.sampling.processors.min_p import MinP
from penstock.generation.sampling.processors.temperature import Temperature
from penstock.generation.sampling.processors.top_k import TopK
from penstock.generation.sampling.processors.top_p import TopP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.draw_context import RowKernels
    from penstock.generation.sampling.processors.base import Processor
    from penstock.generation.sampling.state import SamplingState

    Wanting = dict[type[Processor], list[int]]


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of the R rows that draw a token, as the native kernels take them; neutral where a row is warped first."""

    rows_R: torch.Tensor
    temperatures_R: torch.Tensor
    # A value of 0 turns it off.
    top_ks_R: torch.Tensor
    # Infinity turns it off.
    top_ps_R: torch.Tensor
    min_ps_R: torch.Tensor


# Stands where (number of candidates, has top-k) would: the row is drawn from the whole vocabulary, as the warpers and
# the processors after them left it.
WARPED = (-1, False)


class SamplingBatch:
    """Options of N rows, M of them sampled; built when the composition of the batch changes, then reused.

    Attributes ending in `_M` are over the sampled rows, in the order of `sampled_rows`: first those that draw a token,
    then those that draw candidates after the warpers.
    """

    def __init__(
        self,
        states: Seq[SamplingState],
        device: torch.device,
        kernels: RowKernels,
        *,
        is_reference: bool = False,
    ) -> None:
        """Build the batch; `is_reference`: it returns the processed scores themselves, not draws from them."""
        self.states = states
        self.device = device
        self._kernels = kernels
        self._kinds = [state.sequence.draw.kind for state in states]
        rows = range(len(states))
        plans = [state.plan for state in states]
        self.candidate_rows = [row for row in rows if self._kinds[row] is DrawKind.CANDIDATES]
        candidates = set(self.candidate_rows)
        self.greedy_rows = [row for row in rows if plans[row].is_greedy and row not in candidates]
        token_rows = [row for row in rows if not plans[row].is_greedy and row not in candidates]
        warped_candidates = [row for row in self.candidate_rows if not plans[row].is_greedy]
        self.sampled_rows = [*token_rows, *warped_candidates]
        wanting = _wanting(states)
        if not is_reference:
            # A late processor that changes neither the choice nor its probability is left out when a token is drawn.
            wanting = {kind: self._changed(kind, rows) for kind, rows in wanting.items()}
        # Rows with processors that follow the tokens.
        self.following = [state for state in states if state.trackers]
        # Row -> number of top logprobs, of the rows that asked for logprobs.
        self.num_top = {row: plan.num_top for row, plan in enumerate(plans) if plan.num_top is not None}

        sampled = [states[row] for row in self.sampled_rows]
        self.temperature = Temperature(self.sampled_rows, sampled, device)
        self.top_k = TopK(self.sampled_rows, sampled, device)
        self.top_p = TopP(self.sampled_rows, sampled, device)
        self.min_p = MinP(self.sampled_rows, sampled, device)
        made = {Temperature: self.temperature, TopK: self.top_k, TopP: self.top_p, MinP: self.min_p}
        # The processors of each stage, in running order.
        stages = _build(wanting, made, states, device)
        self.processors, self.warpers, self.late_processors = (
            stages[stage] for stage in (Stage.SCORES, Stage.WARP, Stage.LATE)
        )
        self._rows_M = np.array(self.sampled_rows, dtype=np.int64)
        self.sampled_index_M = self.index(self.sampled_rows)
        # Number of candidates and whether there is a top-k, of every row that draws a token.
        keys = [(plans[row].num_candidates, plans[row].params.top_k > 0) for m, row in enumerate(token_rows)]
        keys = [WARPED if plans[row].is_warped_first else key for row, key in zip(token_rows, keys, strict=True)]
        # Such a pair -> places among the sampled rows; these are drawn together.
        self.groups = {key: self.index([m for m, k in enumerate(keys) if k == key]) for key in sorted(set(keys))}
        self._keys = keys
        # Places, among the sampled rows, of those to warp before a draw.
        warped = [m for m, key in enumerate(keys) if key == WARPED]
        self.warped_first = self.index([*warped, *range(len(token_rows), len(self.sampled_rows))])

    def is_of(self, sequences: Seq[Sequence]) -> bool:
        """True when the rows are these sequences, in this order, and each draws what it drew when the batch was
        built."""
        states = self.states
        return (
            len(states) == len(sequences)
            and all(map(is_, [state.sequence for state in states], sequences))
            and self._kinds == [sequence.draw.kind for sequence in sequences]
        )

    @cached_property
    def greedy_index_R(self) -> torch.Tensor:
        """`greedy_rows` as an index on the device."""
        return self.index(self.greedy_rows)

    @cached_property
    def draw_options(self) -> DrawOptions:
        """Options of the sampled rows that draw a token, in their order."""
        count = len(self._keys)
        options = self.options_of(torch.arange(count))
        is_warped_R = torch.tensor([key == WARPED for key in self._keys], dtype=torch.bool)
        return DrawOptions(
            self.sampled_index_M[:count],
            options.temperatures_R.masked_fill(is_warped_R, 1.0),
            options.top_ks_R.masked_fill(is_warped_R, 0),
            options.top_ps_R.masked_fill(is_warped_R, torch.inf),
            options.min_ps_R.masked_fill(is_warped_R, 0.0),
        )

    def options_of(self, places_R: torch.Tensor) -> DrawOptions:
        """Return the options of some of the sampled rows."""
        return DrawOptions(
            self.sampled_index_M[places_R],
            self.temperature.values_M1[places_R, 0],
            self.top_k.last_places_M1[places_R, 0] + 1,
            self.top_p.values_M1[places_R, 0],
            self.min_p.values_M1[places_R, 0],
        )

    def _changed(self, kind: type[Processor], rows: list[int]) -> list[int]:
        """Return those of `rows` that a processor of this kind changes."""
        if kind.stage is not Stage.LATE or not kind.keeps_odds:
            return rows
        return [row for row in rows if self._kinds[row] is DrawKind.CANDIDATES]

    def index(self, rows: list[int]) -> torch.Tensor:
        """Return row numbers as an index on the device."""
        return uploaded(np.array(rows, dtype=np.int64), self.device)

    @cached_property
    def _streams(self) -> RowStreams:
        return RowStreams(np.array([state.key for state in self.states], dtype=np.uint64))

    def context(self) -> DrawContext:
        """Return the facts about the beginning step that the rows' processors may use."""
        positions = [state.sequence.num_output_tokens for state in self.states]
        return DrawContext(np.array(positions, dtype=np.uint64), self._streams, self._kernels)

    def uniforms(self, context: DrawContext) -> torch.Tensor:
        """Return the uniform numbers that the sampled rows draw with (M, fp64)."""
        return uploaded(context.uniforms(Stream.TOKEN, self._rows_M), self.device)


def _wanting(states: Seq[SamplingState]) -> Wanting:
    wanting: Wanting = {}
    for row, state in enumerate(states):
        for kind in state.plan.processors:
            wanting.setdefault(kind, []).append(row)
    return wanting


def _build(
    wanting: Wanting, made: Mapping[type[Processor], Processor], states: Seq[SamplingState], device: torch.device
) -> dict[Stage, list[Processor]]:
    """Return the processors that some row wants, and those in `made`, by stage, in running order."""
    built: dict[Stage, list[Processor]] = {stage: [] for stage in Stage}
    for kind in PROCESSORS:
        if kind in made:
            built[kind.stage].append(made[kind])
        elif rows := wanting.get(kind):
            built[kind.stage].append(kind(rows, [states[row] for row in rows], device))
    return built
