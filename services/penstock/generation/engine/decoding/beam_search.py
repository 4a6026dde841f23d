"""Beam search and beam sampling, as transformers 5.24's `_beam_search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.generation.core.request import FinishReason
from penstock.generation.engine.decoding.base import Decision
from penstock.generation.engine.decoding.beams import Beam, BeamStrategy, Extension, draw_spec
from penstock.generation.engine.decoding.hypotheses import Hypotheses, Hypothesis
from penstock.generation.engine.decoding.parallel_sampling import new_unconditional

if TYPE_CHECKING:
    from penstock.generation.core.request import Emission, Request
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.stopping import StopCriteria

_BY_SCORE = attrgetter("score")


class BeamSearch(BeamStrategy):
    """Search over the best extensions of all beams in every step.

    Those of the first `num_beams` extensions that a criterion ends become hypotheses. The best of the others go on.

    Beam sampling draws the extensions instead, without replacement and with probabilities softmax(score): it ranks
    their scores with Gumbel noise (Kool et al. 2019), which is transformers' multinomial. The drawn extensions are then
    taken by their scores, as in 4.41; 5.23 took them as they were drawn.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(request, criteria, next_seq_id)
        self._num_beams = self.options.num_beams
        self._keep = self.candidates_per_beam * self._num_beams
        self._samples = request.params.do_sample
        # Draws by the beam's place.
        slots = [place if self._samples else None for place in range(self._num_beams)]
        self._is_guided = request.params.guidance.is_on
        self._specs = [draw_spec(self._keep, gumbel_slot=slot, is_guided=self._is_guided) for slot in slots]
        # With guidance: the unconditional branch of each place among the beams.
        self._branches: list[Sequence] = []
        self._hypotheses = Hypotheses(self._num_beams, self.options, criteria.max_output_tokens)
        self._beams: list[Beam] = []
        self._drawn: dict[Sequence, SampledToken] = {}

    @property
    def width(self) -> int:
        return self._num_beams * (2 if self._is_guided else 1)

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        sequences, emissions = super().start()
        return [*sequences, *self._branches], emissions

    def first_beam(self) -> Beam:
        self._beams = self._placed([self.root()])
        if self._is_guided:
            self._branches = [new_unconditional(self._request, 0, self._next_seq_id())]
            self._beams[0].sequence.unconditional = self._branches[0]
        return self._beams[0]

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        self._drawn.update(sampled)
        if len(self._drawn) < len(self._beams):
            return Decision()
        running = self._choose(self.ranked(self._beams, self._drawn, self._keep))
        decision = Decision()
        length = self._beams[0].sequence.num_output_tokens + 1
        if running and not self._hypotheses.is_decided(running[0].score, length):
            self._beams = self._placed(self.grow(self._beams, running, self._drawn, decision))
            if self._is_guided:
                self._grow_branches(running, decision)
        else:
            # When the processors leave no beam a token and no beam has ended, the open beams end here.
            reason = None if self._hypotheses else FinishReason.LENGTH
            decision.emissions = self.emissions(self.ranking(reason))
            decision.dropped = [*(beam.sequence for beam in self._beams), *self._branches]
        self._drawn.clear()
        return decision

    def restarted(self) -> None:
        """Forget the draws: all beams draw again."""
        self._drawn.clear()

    def ranking(self, reason: FinishReason | None) -> list[Hypothesis]:
        if reason is not None:
            for beam in self._beams:
                self.close(self._hypotheses, beam, reason)
        return list(self._hypotheses)

    def _choose(self, ranked: list[Extension]) -> list[Extension]:
        """Return the extensions that go on, best first. Ended ones of the first `num_beams` become hypotheses."""
        if self._samples:
            ranked = sorted(ranked, key=_BY_SCORE, reverse=True)
        running: list[Extension] = []
        for place, extension in enumerate(ranked):
            if len(running) == self._num_beams:
                break
            stop = self.stop_of(extension)
            if stop is None:
                running.append(extension)
            elif place < self._num_beams:
                self.conclude(self._hypotheses, extension, stop, self._drawn)
        return running

    def _grow_branches(self, running: list[Extension], decision: Decision) -> None:
        """Let the branch of each place go on with the token of the beam now in that place.

        As in transformers a branch belongs to a place and not to a beam: it keeps its own tokens when beams change
        places, which decides the scores that follow.
        """
        first = self._branches[0]
        decision.dropped += self._branches[len(running) :]
        del self._branches[len(running) :]
        while len(self._branches) < len(running):
            branch = new_unconditional(self._request, 0, self._next_seq_id())
            branch.token_ids[:] = first.token_ids
            decision.forks.append((first, branch))
            self._branches.append(branch)
        for beam, branch, extension in zip(self._beams, self._branches, running, strict=True):
            branch.append(extension.token_id)
            beam.sequence.unconditional = branch

    def _placed(self, beams: list[Beam]) -> list[Beam]:
        for beam, spec in zip(beams, self._specs, strict=False):
            beam.sequence.draw = spec
        return beams
