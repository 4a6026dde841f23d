"""Fast path: steps in which the model itself finds the token of every row's highest logit, and no row wants more.

Nearly all steps of plain requests are of that kind. FEATURES lists, once, the wishes of a row that keep its step off
it. `takes` and `goes_on` also exclude rows without a draw, and changes between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.core.draw import DrawKind

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.runner.draw_rows import DrawRows
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.row_plan import RowPlan
    from penstock.generation.sampling.sampler import Sampler


class Feature(NamedTuple):
    """Feature that a row may want beyond the token of its highest logit. One of the two last fields detects it."""

    name: str
    # Field of DrawRows that holds the rows wanting it in this step.
    rows: str = ""
    # (sequence, plan) of a row -> True when the row wants it. The answer holds until the batch's composition changes.
    is_wanted: Callable[[Sequence, RowPlan], bool] | None = None


FEATURES = (
    Feature("early exits", rows="dola"),
    Feature("grammar", rows="constrained"),
    Feature("guidance", rows="guided"),
    Feature("hidden states", rows="remembered"),
    Feature("tensors", rows="tensors"),
    Feature("candidates", is_wanted=lambda sequence, plan: sequence.draw.kind is not DrawKind.TOKEN),
    Feature("logprobs", is_wanted=lambda sequence, plan: plan.num_top is not None),
    Feature("processors", is_wanted=lambda sequence, plan: bool(plan.processors)),
    Feature("sampling", is_wanted=lambda sequence, plan: not plan.is_greedy),
)
_WANTED_IN_STEP = attrgetter(*(feature.rows for feature in FEATURES if feature.rows))
_WANTED_BY_ROW = tuple(feature.is_wanted for feature in FEATURES if feature.is_wanted is not None)


class FastPath:
    """Test of whether a step is on the fast path. The rows are examined once for a composition of the batch."""

    def __init__(self) -> None:
        # The last batch, and whether its rows want their highest logits only.
        self._batch: SamplingBatch | None = None
        self._is_plain = False

    def takes(self, draws: DrawRows, num_results: int, sampler: Sampler) -> bool:
        """True when all `num_results` rows computed to the end draw a token, and no row wants a feature.

        It leaves the sampler's state unchanged.
        """
        if not 0 < len(draws.rows) == num_results or any(_WANTED_IN_STEP(draws)):
            return False
        sequences = draws.sequences
        if any(sequence.origin is not None for sequence in sequences):
            # A batch with verifiers would be built for this one step only.
            return _are_plain((sequence, sampler.plan_of(sequence)) for sequence in sequences)
        batch = sampler.batch_of(sequences)
        if batch is not self._batch:
            self._batch = batch
            self._is_plain = _are_plain((state.sequence, state.plan) for state in batch.states)
        return self._is_plain

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget the last batch, which holds sequences, when some of them are gone."""
        # The runner releases in every step, mostly no sequence.
        if seq_ids:
            self._batch = None


def _are_plain(rows: Iterable[tuple[Sequence, RowPlan]]) -> bool:
    return not any(is_wanted(sequence, plan) for sequence, plan in rows for is_wanted in _WANTED_BY_ROW)


def goes_on(scheduled: Seq[ScheduledSequence]) -> bool:
    """True when a step of these entries, on the fast path, may be followed by one that goes on from it.

    Then each entry is one row, only its own sequence draws from it, and its later steps are on the fast path, too.
    """
    return all(
        entry.num_tokens == 1
        and not entry.verifiers
        and len(entry.sample) == 1
        and entry.sample[0] is entry.sequence
        and entry.sequence.draw.kind is DrawKind.TOKEN
        # Tensors may be wanted for later steps only.
        and entry.sequence.params.tensors is None
        for entry in scheduled
    )
