"""The demands of a request's options on the sampler: found once per request, shared by all its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.sampling.processors import LATE_PROCESSORS, OTHER_WARPERS, PROCESSORS

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.sampling.processors.base import LogitsProcessor

# (largest top_k, candidates that are looked at for it); the surplus holds ties of the k-th score. Only a row's own
# options decide: the same row takes the same path in every batch.
_CANDIDATES = ((20, 32), (40, 64), (96, 128), (200, 256))
_NUCLEUS_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The treatment of a row with certain options."""

    params: SamplingParams
    # In the order they run.
    processors: tuple[type[LogitsProcessor], ...]
    # Values that the processors prepared from the options.
    prepared: dict[type[LogitsProcessor], object]
    is_greedy: bool
    # Warpers beside temperature, top-k, top-p and min-p.
    has_other_warpers: bool
    # Some of the processors run after the warpers and change which token is drawn.
    changes_warped: bool
    # Number of highest scores that decide a draw; 0 where only the whole vocabulary does.
    num_candidates: int
    # Number of top logprobs; None where no logprobs were asked for.
    num_top: int | None

    @property
    def is_warped_first(self) -> bool:
        """True when the whole vocabulary is warped before anything is drawn."""
        return self.has_other_warpers or self.changes_warped

    @property
    def is_plain(self) -> bool:
        """True when the row has no processor and no warper."""
        return self.is_greedy and not self.processors

    @classmethod
    def of(cls, params: SamplingParams) -> RowPlan:
        """Return the plan for these options."""
        kinds = tuple(kind for kind in (*PROCESSORS, *LATE_PROCESSORS) if kind.wants(params))
        prepared = {kind: kind.prepare(params) for kind in kinds}
        has_other_warpers = any(kind.wants(params) for kind in OTHER_WARPERS)
        changes_warped = any(kind in LATE_PROCESSORS and not kind.is_argmax_invariant for kind in kinds)
        is_short = not has_other_warpers and not changes_warped
        return cls(
            params=params,
            processors=kinds,
            prepared=prepared,
            is_greedy=is_greedy(params),
            has_other_warpers=has_other_warpers,
            changes_warped=changes_warped,
            num_candidates=num_candidates(params) if is_short else 0,
            num_top=params.top_logprobs,
        )


def is_greedy(params: SamplingParams) -> bool:
    """True when do_sample is off or the temperature is 0."""
    return not params.do_sample or params.temperature == 0.0


def num_candidates(params: SamplingParams) -> int:
    """Number of highest scores that decide a draw with these options; 0 where only the whole vocabulary does."""
    if params.top_k > 0:
        return next((count for limit, count in _CANDIDATES if params.top_k <= limit), 0)
    return _NUCLEUS_CANDIDATES if params.top_p < 1.0 else 0
