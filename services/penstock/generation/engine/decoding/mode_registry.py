"""Registry of the decoding modes.

A mode is a file here: its options and facts (a DecodingMode), its strategy, and a ModeSpec that MODES lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.generation.core.request import Purpose
from penstock.generation.engine.decoding.assisted import ASSISTED
from penstock.generation.engine.decoding.base import ModeSpec
from penstock.generation.engine.decoding.beam_options import BeamOptions, beam_options, beam_width, beams_blocks_needed
from penstock.generation.engine.decoding.beam_search import BeamSearch
from penstock.generation.engine.decoding.constrained_beam import ConstrainedBeamSearch
from penstock.generation.engine.decoding.contrastive import CONTRASTIVE
from penstock.generation.engine.decoding.group_beam import GroupBeamSearch
from penstock.generation.engine.decoding.parallel_sampling import DOLA, PLAIN_SPEC
from penstock.generation.engine.decoding.single_pass import Embedding, Scoring
from penstock.generation.engine.decoding.token_healing import TokenHealing

if TYPE_CHECKING:
    from penstock.generation.core.decoding_mode import DecodingMode
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.base import DecodingStrategy
    from penstock.generation.engine.stopping import StopCriteria


class ModeRegistry:
    """Specs of decoding modes by the type of their options. An engine has one registry, which never changes."""

    def __init__(self, specs: Iterable[ModeSpec]) -> None:
        """Take `specs`; a later spec replaces an earlier one for the same options."""
        self._specs: dict[type[DecodingMode], ModeSpec] = {spec.options: spec for spec in specs}

    def __iter__(self) -> Iterator[ModeSpec]:
        return iter(self._specs.values())

    def with_spec(self, spec: ModeSpec) -> ModeRegistry:
        """Return a registry with `spec` added."""
        return ModeRegistry((*self._specs.values(), spec))

    def named(self, name: str, sizes: Mapping[str, float]) -> DecodingMode:
        """Return the mode with options of the type `name`, with these `sizes`. Raises ValueError: unknown name."""
        for options in self._specs:
            if options.__name__ == name:
                return options(**sizes)
        raise ValueError(f"no decoding mode has options of type {name}")

    def of(self, params: SamplingParams) -> ModeSpec:
        """Return the spec of the mode of `params`. Raises ValueError for a mode that is not registered."""
        spec = self._specs.get(type(params.mode))
        if spec is None:
            raise ValueError(f"no decoding mode has options of type {type(params.mode).__name__}")
        return spec

    def make_strategy(
        self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]
    ) -> DecodingStrategy:
        """Return the request's strategy: its mode's, unless its prompt is scored, embedded, or healed first."""
        if request.purpose is not Purpose.GENERATE:
            return (Scoring if request.purpose is Purpose.SCORE else Embedding)(request, criteria, next_seq_id)
        strategy = self.of(request.params).strategy
        if request.token_healing is None:
            return strategy(request, criteria, next_seq_id)
        return TokenHealing(
            request, request.token_healing, lambda healed: strategy(healed, criteria, next_seq_id), next_seq_id
        )

    def most_sequences(self, params: SamplingParams) -> int:
        """Return the most sequences of a request alive at once."""
        return self.of(params).most_sequences(params)

    def blocks_needed(
        self, config: EngineConfig, params: SamplingParams, prompt_tokens: int, output_tokens: int
    ) -> int:
        """Return the most KV blocks that a request can ever hold."""
        return self.of(params).blocks_needed(config, params, prompt_tokens, output_tokens)


def _beam_strategy(request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> DecodingStrategy:
    """Return the search that the beam options choose."""
    options = beam_options(request.params)
    if options.constraints:
        return ConstrainedBeamSearch(request, criteria, next_seq_id)
    return (GroupBeamSearch if options.num_beam_groups > 1 else BeamSearch)(request, criteria, next_seq_id)


# The beam modes have one set of options, and so one spec.
BEAMS = ModeSpec(BeamOptions, _beam_strategy, beam_width, beams_blocks_needed, "num_beams")
MODES = ModeRegistry((PLAIN_SPEC, DOLA, ASSISTED, BEAMS, CONTRASTIVE))
