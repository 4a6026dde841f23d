"""Which strategy serves a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.generation.core.modes import GenerationMode
from penstock.generation.core.request import Purpose
from penstock.generation.engine.decoding.assisted import AssistedGeneration
from penstock.generation.engine.decoding.beam_search import BeamSearch
from penstock.generation.engine.decoding.constrained_beam import ConstrainedBeamSearch
from penstock.generation.engine.decoding.contrastive import ContrastiveSearch
from penstock.generation.engine.decoding.embedding import Embedding
from penstock.generation.engine.decoding.group_beam import GroupBeamSearch
from penstock.generation.engine.decoding.parallel_sampling import ParallelSampling
from penstock.generation.engine.decoding.scoring import Scoring
from penstock.generation.engine.decoding.token_healing import TokenHealing

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.engine.decoding.base import DecodingStrategy
    from penstock.generation.engine.stopping import StopCriteria

_MODES: dict[GenerationMode, Callable[[Request, StopCriteria, Callable[[], int]], DecodingStrategy]] = {
    GenerationMode.GREEDY_SEARCH: ParallelSampling,
    GenerationMode.SAMPLE: ParallelSampling,
    GenerationMode.BEAM_SEARCH: BeamSearch,
    GenerationMode.BEAM_SAMPLE: BeamSearch,
    GenerationMode.GROUP_BEAM_SEARCH: GroupBeamSearch,
    GenerationMode.CONSTRAINED_BEAM_SEARCH: ConstrainedBeamSearch,
    GenerationMode.DOLA_GENERATION: ParallelSampling,
    GenerationMode.CONTRASTIVE_SEARCH: ContrastiveSearch,
    GenerationMode.ASSISTED_GENERATION: AssistedGeneration,
}


def make_strategy(request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> DecodingStrategy:
    """The strategy of the request's purpose and mode."""
    if request.purpose is not Purpose.GENERATE:
        return (Scoring if request.purpose is Purpose.SCORE else Embedding)(request, criteria, next_seq_id)
    if request.healing is None:
        return _MODES[request.params.mode](request, criteria, next_seq_id)
    mode = _MODES[request.params.mode]
    return TokenHealing(request, request.healing, lambda healed: mode(healed, criteria, next_seq_id), next_seq_id)
