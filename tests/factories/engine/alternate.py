"""Decoding mode that Penstock does not have: all that a further one takes, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.generation.core.decoding_mode import DecodingMode
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import SampledToken
from penstock.generation.engine.decoding.base import Decision, ModeSpec
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.decoding.parallel_sampling import (
    ParallelSampling,
    Track,
    blocks_needed,
    most_sequences,
)


@dataclass(frozen=True, slots=True)
class AlternateOptions(DecodingMode):
    """Greedy search that takes the second best token at every `period`-th position."""

    period: int = 2

    no_tensors = "is not available with alternating search"

    def is_second(self, position: int) -> bool:
        """True when output position `position`, from 0, takes the second best token."""
        return position % self.period == self.period - 1


class AlternatingSearch(ParallelSampling):
    """Strategy that asks the sampler for the two best tokens and chooses itself."""

    def _new_track(self, index: int) -> Track:
        track = super()._new_track(index)
        track.sequence.draw = DrawSpec(DrawKind.CANDIDATES, num_candidates=2)
        return track

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        options = self._request.params.mode
        assert isinstance(options, AlternateOptions)
        chosen = {}
        for sequence, token in sampled.items():
            assert token.candidates is not None
            place = int(options.is_second(sequence.num_output_tokens))
            chosen[sequence] = replace(token, token_id=token.candidates.token_ids[place])
        return super().advance(chosen)


WITH_ALTERNATE = MODES.with_spec(ModeSpec(AlternateOptions, AlternatingSearch, most_sequences, blocks_needed))
