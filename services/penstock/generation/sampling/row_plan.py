"""The demands of a request's options on the sampler: found once per request, shared by all its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.sampling.processors import PROCESSORS
from penstock.generation.sampling.processors.base import Stage

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import Processor

# (largest top_k, number of candidates for it); the surplus holds ties of the k-th score. Only a row's own options
# decide: the same row takes the same path in every batch.
_CANDIDATES = ((20, 32), (40, 64), (96, 128), (200, 256))
_NUCLEUS_CANDIDATES = 256


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """The treatment of a row with certain options. Plans are compared by identity."""

    params: SamplingParams
    # Those that the row wants and the draw does not do itself, in running order.
    processors: tuple[type[Processor], ...]
    # Values that the processors prepared from the options.
    prepared: dict[type[Processor], object]
    is_greedy: bool
    # True: some of them are of stage WARP; temperature, top-k, top-p and min-p are in the draw.
    has_other_warpers: bool
    # True: some of them run after the warpers and change the drawn token.
    changes_warped: bool
    # Number of highest scores that a draw needs; 0: it needs the whole vocabulary.
    num_candidates: int
    # Number of top logprobs; None: no logprobs were requested.
    num_top: int | None

    @property
    def is_warped_first(self) -> bool:
        """True when the whole vocabulary is warped before the draw."""
        return self.has_other_warpers or self.changes_warped

    @property
    def is_plain(self) -> bool:
        """True when nothing processes or warps the row."""
        return self.is_greedy and not self.processors

    @classmethod
    def of(cls, params: SamplingParams) -> RowPlan:
        """Return the plan for these options."""
        chooses = is_greedy(params)
        kinds = tuple(
            kind
            for kind in PROCESSORS
            if not kind.is_in_draw and not (chooses and kind.stage is Stage.WARP) and kind.wants(params)
        )
        prepared = {kind: kind.prepare(params) for kind in kinds}
        has_other_warpers = any(kind.stage is Stage.WARP for kind in kinds)
        changes_warped = any(kind.stage is Stage.LATE and not kind.keeps_odds for kind in kinds)
        is_short = not has_other_warpers and not changes_warped
        return cls(
            params=params,
            processors=kinds,
            prepared=prepared,
            is_greedy=chooses,
            has_other_warpers=has_other_warpers,
            changes_warped=changes_warped,
            num_candidates=num_candidates(params) if is_short else 0,
            num_top=params.top_logprobs,
        )


def is_greedy(params: SamplingParams) -> bool:
    """True when do_sample is off or the temperature is 0."""
    return not params.do_sample or params.temperature == 0.0


def num_candidates(params: SamplingParams) -> int:
    """Number of highest scores that a draw with these options needs; 0: it needs the whole vocabulary."""
    if params.top_k > 0:
        return next((count for limit, count in _CANDIDATES if params.top_k <= limit), 0)
    return _NUCLEUS_CANDIDATES if params.top_p < 1.0 else 0
