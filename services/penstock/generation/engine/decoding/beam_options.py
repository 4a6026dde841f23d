"""Options and facts of the beam modes, and their largest share of batch and pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.generation.core.decoding_mode import DecodingMode, EarlyStopping, GenerationMode, Rescue, Scope

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class BeamOptions(DecodingMode):
    """Options of beam search, beam sampling, group beam search and constrained beam search."""

    num_beams: int
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE
    # Group beam search: token that a finished group counts as in the diversity penalty of the others. None: the first
    # end-of-sequence id, as in transformers.
    pad_token_id: int | None = None
    # Constrained beam search: one alternative of every constraint must occur; a phrase has one alternative.
    constraints: tuple[tuple[tuple[int, ...], ...], ...] = ()

    streams = Scope.BEAMS.streams
    shares_constraint = True
    keeps_more_than_ends = True
    uses = frozenset({Scope.BEAMS})
    no_drafts = "drafts need greedy search or sampling"

    @property
    @override
    def may_be_guided(self) -> bool:  # type: ignore[override]
        """Groups draw at different positions, and constraints have the releases of groups."""
        return self.num_beam_groups == 1 and not self.constraints

    @property
    @override
    def rescue(self) -> Rescue:
        """Groups follow transformers 4.41.1, which never allows a token against the other options."""
        return Rescue.TOGETHER if self.num_beam_groups == 1 else Rescue.GRAMMAR_ONLY

    @property
    @override
    def sizes(self) -> Mapping[str, float]:
        return {"num_beams": self.num_beams, "num_beam_groups": self.num_beam_groups}

    @override
    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        if self.constraints:
            return GenerationMode.CONSTRAINED_BEAM_SEARCH
        if self.num_beam_groups > 1:
            return GenerationMode.GROUP_BEAM_SEARCH
        return GenerationMode.BEAM_SAMPLE if do_sample else GenerationMode.BEAM_SEARCH


def beam_options(params: SamplingParams) -> BeamOptions:
    """Return the options of a request in a beam mode. Raises ValueError for another mode."""
    if not isinstance(params.mode, BeamOptions):
        raise ValueError("not a beam mode")
    return params.mode


def beam_width(params: SamplingParams) -> int:
    """With guidance each place among the beams has an unconditional branch."""
    return beam_options(params).num_beams * (2 if params.guidance.is_on else 1)


def beams_blocks_needed(config: EngineConfig, params: SamplingParams, prompt_tokens: int, output_tokens: int) -> int:
    """Each later group computes the prompt's last token again, into a block of its own."""
    options = beam_options(params)
    needed = config.blocks_needed(prompt_tokens, output_tokens, options.num_beams)
    if params.guidance.is_on:
        negative = max(len(params.guidance.negative_prompt_ids), 1)
        needed += config.blocks_needed(negative, output_tokens, options.num_beams)
    again = options.num_beam_groups - 1 if prompt_tokens % config.block_size == 0 else 0
    return needed + config.bundle_blocks * again
