"""The draws of one step by the C++ kernels: one call for every sampled row with any options, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from penstock.generation.sampling.drawing import Drawing
from penstock.generation.sampling.ops.candidates import top_candidates
from penstock.generation.sampling.ops.logprobs import LISTED, listed_logprobs
from penstock.generation.sampling.processors.base import min_tokens_to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.request import PositionLogprobs

# torch.ops.penstock.draw_rows returns this id for a row with a NaN or with nothing finite.
_NOTHING = -1


class Kept(NamedTuple):
    """The scores that R rows are drawn from: those above `lowest_R`, and the equal ones up to the id `last_R`, each
    over the temperature; `totals_R` (fp64) are log(sum(exp)) of them."""

    temperatures_R: torch.Tensor
    lowest_R: torch.Tensor
    last_R: torch.Tensor
    totals_R: torch.Tensor

    @classmethod
    def all(cls, scores_NV: torch.Tensor, rows_R: torch.Tensor) -> Kept:
        """Keep the whole vocabulary of every row."""
        ones_R = torch.ones(len(rows_R))
        totals_R = torch.ops.penstock.log_totals(scores_NV, rows_R)
        return cls(ones_R, torch.full_like(ones_R, -torch.inf), torch.zeros_like(rows_R), totals_R)

    def picked(self, places_R: torch.Tensor) -> Kept:
        """Return the part that belongs to some of the rows."""
        return Kept(*(values_R[places_R] for values_R in self))


class NativeDrawing(Drawing):
    """A Drawing by C++ kernels. A row's result, the order of its sums included, depends on its own scores and options
    only."""

    @override
    def warp(self, picked_R: torch.Tensor) -> None:
        """Rows with other warpers than the usual ones go through torch's operators."""
        batch = self._batch
        plans = [batch.states[batch.sampled_rows[place]].plan for place in picked_R.tolist()]
        is_usual = [not plan.has_other_warpers for plan in plans]
        if not all(is_usual):
            super().warp(picked_R[torch.tensor([not one for one in is_usual])])
        if any(is_usual):
            options = batch.options_of(picked_R[torch.tensor(is_usual)])
            keeps = [min_tokens_to_keep(plan.params) for plan, one in zip(plans, is_usual, strict=True) if one]
            torch.ops.penstock.warp_rows(
                self._scores_NV,
                options.rows_R,
                options.temperatures_R,
                options.top_ks_R,
                options.top_ps_R,
                options.min_ps_R,
                torch.tensor(keeps),
            )

    def _add_greedy_logprobs(self, asking_R: torch.Tensor) -> None:
        self._list(asking_R, Kept.all(self._scores_NV, asking_R))

    @override
    def sampled(self, uniforms_M: torch.Tensor) -> None:
        options = self._batch.draw_options
        rows_R = options.rows_R
        if not len(rows_R):
            return
        ids_R, *kept = torch.ops.penstock.draw_rows(
            self._scores_NV,
            rows_R,
            options.temperatures_R,
            options.top_ks_R,
            options.top_ps_R,
            options.min_ps_R,
            uniforms_M[: len(rows_R)],
        )
        if _NOTHING in ids_R.tolist():
            raise FloatingPointError("the model produced logits that are not numbers")
        self.token_ids_N[rows_R] = ids_R
        num_top = self._batch.num_top
        asking = [place for place, row in enumerate(rows_R.tolist()) if row in num_top] if num_top else []
        if asking:
            places_R = self._batch.index(asking)
            self._list(rows_R[places_R], Kept(options.temperatures_R, *kept).picked(places_R))

    def _list(self, rows_R: torch.Tensor, kept: Kept) -> None:
        """Make the logprobs of these rows, which asked for them."""
        rows = rows_R.tolist()
        num_top = [self._batch.num_top[row] for row in rows]
        found = native_logprobs(self._scores_NV, rows_R, self.token_ids_N[rows_R], num_top, kept)
        self.logprobs.update(zip(rows, found, strict=True))


def native_logprobs(
    scores_NV: torch.Tensor, rows_R: torch.Tensor, chosen_R: torch.Tensor, num_top: Seq[int], kept: Kept
) -> list[PositionLogprobs]:
    """Return position_logprobs (see ops/logprobs.py) over the remaining scores of the rows `rows_R`; `chosen_R` are
    ids."""
    # A token more likely than the chosen one always remains.
    given_NV, pairs = scores_NV.numpy(), zip(rows_R.tolist(), chosen_R.tolist(), strict=True)
    ranks = [1 + int(np.count_nonzero(given_NV[row] > given_NV[row, chosen])) for row, chosen in pairs]
    count, all_R = max(LISTED, *num_top), torch.arange(len(rows_R))
    # The kernel reads every row that it gets: if few rows want logprobs, these are copied.
    few = 2 * len(rows_R) < len(scores_NV)
    top = top_candidates(scores_NV[rows_R], all_R, count) if few else top_candidates(scores_NV, rows_R, count)
    ids_RC = top.ids_RC
    scores_RC = torch.cat([scores_NV[rows_R, chosen_R][:, None], top.scores_RC], dim=1)
    logprobs_RC = (scores_RC.double() / kept.temperatures_R[:, None] - kept.totals_R[:, None]).float()
    chosen = list(zip(chosen_R.tolist(), logprobs_RC[:, 0].tolist(), ranks, strict=True))
    scores_RC, logprobs_RC = scores_RC[:, 1:], logprobs_RC[:, 1:]
    lowest_R1, last_R1 = kept.lowest_R[:, None], kept.last_R[:, None]
    is_kept_RC = (scores_RC > lowest_R1) | ((scores_RC == lowest_R1) & (ids_RC <= last_R1))
    scores_RC = scores_RC.masked_fill(~is_kept_RC, -torch.inf)
    return listed_logprobs(chosen, (scores_RC.tolist(), ids_RC.tolist(), logprobs_RC.tolist()), num_top)
