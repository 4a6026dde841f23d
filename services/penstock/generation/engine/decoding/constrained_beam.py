"""Constrained beam search: sequences that must contain given phrases, as in transformers 4.41.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.generation.core.request import FinishReason
from penstock.generation.engine.decoding.base import Decision
from penstock.generation.engine.decoding.beams import Beam, BeamStrategy, Extension, draw_spec
from penstock.generation.engine.decoding.constraints import Constraint, Progress
from penstock.generation.engine.decoding.hypotheses import Hypotheses, Hypothesis
from penstock.generation.engine.stopping import Stop

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.stopping import StopCriteria

_LENGTH = Stop(FinishReason.LENGTH)
# Weight of one bank against scores (transformers).
_BANK_WEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class _Choice:
    """An extension that may go on."""

    extension: Extension
    # Progress with it; the bank that it is ranked in follows from this.
    progress: Progress


class ConstrainedBeamSearch(BeamStrategy):
    """Beam search with constraints.

    Beams are also extended by the tokens that would advance their constraints, and are chosen in turns from the banks
    of equal progress. Only a sequence that meets every constraint becomes a hypothesis.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(request, criteria, next_seq_id)
        self._num_beams = self.options.num_beams
        self._keep = self.candidates_per_beam * self._num_beams
        self._most = criteria.max_output_tokens
        self._hypotheses = Hypotheses(self._num_beams, self.options, self._most)
        self._start = Progress.start(tuple(map(Constraint, self.options.constraints)))
        # transformers checks the whole sequence: constraints that the prompt meets are met.
        for token_id in request.prompt_token_ids:
            if self._start.is_complete:
                break
            self._start = self._start.add(token_id)
        self._beams: list[Beam] = []
        self._progress: dict[Beam, Progress] = {}
        self._drawn: dict[Sequence, SampledToken] = {}

    @property
    def width(self) -> int:
        return self._num_beams

    def first_beam(self) -> Beam:
        beam = self.root()
        self._take([beam], [self._start])
        return beam

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        self._drawn.update(sampled)
        if len(self._drawn) < len(self._beams):
            return Decision()
        ranked = self.ranked(self._beams, self._drawn, self._keep)
        chosen = self._in_turns(self._choose(ranked))
        decision = Decision()
        length = self._beams[0].sequence.num_output_tokens + 1
        if not chosen or self._hypotheses.is_decided(ranked[0].score, length):
            self._conclude(decision, None if self._hypotheses else FinishReason.LENGTH)
        elif length == self._most:
            self._add_open(
                [
                    (
                        self._progress_of(one).is_complete,
                        partial(self.conclude, self._hypotheses, one, _LENGTH, self._drawn),
                    )
                    for one in chosen
                ]
            )
            self._conclude(decision, None)
        else:
            progress = [self._progress_of(one) for one in chosen]
            self._take(self.grow(self._beams, chosen, self._drawn, decision), progress)
        self._drawn.clear()
        return decision

    def restarted(self) -> None:
        """Forget the draws: all beams draw again."""
        self._drawn.clear()

    def ranking(self, reason: FinishReason | None) -> list[Hypothesis]:
        if reason is not None:
            self._add_open(
                [
                    (self._progress[beam].is_complete, partial(self.close, self._hypotheses, beam, reason))
                    for beam in self._beams
                ]
            )
        return list(self._hypotheses)

    def _choose(self, ranked: list[Extension]) -> list[_Choice]:
        """Return the extensions that go on. An ended one of the first that meets everything becomes a hypothesis."""
        running: list[_Choice] = []
        for place, extension in enumerate(ranked):
            stop = self._end_of(extension)
            if stop is None:
                running.append(_Choice(extension, self._progress_of(extension)))
                if len(running) == self._num_beams:
                    break
            elif place < self._num_beams and self._is_met(extension, stop):
                self.conclude(self._hypotheses, extension, stop, self._drawn)
        return running

    def _in_turns(self, choices: list[_Choice]) -> list[Extension]:
        """Return the best of every bank, highest bank first, then the second best of each, up to the number of beams.

        As in transformers, banks are runs of the order by 100 * bank + score: scores hundreds apart split them.
        """
        advances = self._advances({(one.extension.beam, one.extension.token_id) for one in choices})
        if not advances:
            return [one.extension for one in choices]
        every = sorted(choices + advances, key=_weight, reverse=True)
        turns = [(turn, one) for _, run in groupby(every, key=_bank) for turn, one in enumerate(run)]
        turns.sort(key=itemgetter(0))
        return [one.extension for _, one in turns[: self._num_beams]]

    def _advances(self, known: set[tuple[Beam, int]]) -> list[_Choice]:
        """Return every beam with each token that advances it, unless the pair is in `known`."""
        advances: list[_Choice] = []
        for beam in self._beams:
            candidates = self._drawn[beam.sequence].candidates
            assert candidates is not None
            scores = dict(zip(beam.sequence.draw.extra_ids, candidates.extra_scores, strict=True))
            for token_id, reached in self._progress[beam].advances():
                if (beam, token_id) in known or scores[token_id] == -math.inf:
                    continue
                known.add((beam, token_id))
                total = beam.score + scores[token_id]
                extension = Extension(beam, token_id, scores[token_id], total, total)
                stop = self._end_of(extension)
                if stop is not None and self._is_met(extension, stop):
                    self.conclude(self._hypotheses, extension, stop, self._drawn)
                else:
                    advances.append(_Choice(extension, reached))
        return advances

    def _end_of(self, extension: Extension) -> Stop | None:
        """Return the end that the extension causes, apart from its length."""
        stop = self.stop_of(extension)
        return None if stop is not None and stop.reason is FinishReason.LENGTH else stop

    def _is_met(self, extension: Extension, stop: Stop) -> bool:
        """True when every constraint is met where the extension ends. An end-of-sequence id itself meets none."""
        if stop.reason is FinishReason.STOP_EOS:
            return self._progress[extension.beam].is_complete
        return self._progress_of(extension).is_complete

    def _progress_of(self, extension: Extension) -> Progress:
        return self._progress[extension.beam].add(extension.token_id)

    def _add_open(self, ends: list[tuple[bool, Callable[[], None]]]) -> None:
        """Add open sequences that meet every constraint; the others as well, when those are too few."""
        for is_met, add in ends:
            if is_met:
                add()
        if sum(is_met for is_met, _ in ends) < self._request.params.num_return_sequences:
            for is_met, add in ends:
                if not is_met:
                    add()

    def _conclude(self, decision: Decision, reason: FinishReason | None) -> None:
        decision.emissions = self.emissions(self.ranking(reason))
        decision.dropped = [beam.sequence for beam in self._beams]

    def _take(self, beams: list[Beam], progress: list[Progress]) -> None:
        self._beams = beams
        self._progress = dict(zip(beams, progress, strict=True))
        for beam, reached in self._progress.items():
            beam.sequence.draw = draw_spec(self._keep, extra_ids=reached.advancing)


def _bank(choice: _Choice) -> int:
    return choice.progress.bank


def _weight(choice: _Choice) -> float:
    return choice.progress.bank * _BANK_WEIGHT + choice.extension.score
