"""Group (diverse) beam search (Vijayakumar et al. 2016), as transformers 4.41.1's `_group_beam_search`.

Groups search in parallel. At every position a group is penalised for the tokens that earlier groups chose there. So
group g draws a position one step after group g - 1: the groups run staggered, all of them in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.generation.core.request import FinishReason
from penstock.generation.engine.decoding.base import Decision
from penstock.generation.engine.decoding.beams import Beam, BeamStrategy, Extension, draw_spec
from penstock.generation.engine.decoding.hypotheses import Hypotheses, Hypothesis
from penstock.generation.engine.stopping import Stop

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.stopping import StopCriteria

_BY_SCORE = attrgetter("score")
_LENGTH = Stop(FinishReason.LENGTH)


@dataclass(slots=True)
class _BeamGroup:
    """One search. Before its first draw it has no beams, or one without output."""

    hypotheses: Hypotheses
    beams: list[Beam] = field(default_factory=list)
    drawn: dict[Sequence, SampledToken] = field(default_factory=dict)
    # Tokens that its beams chose at each position.
    chosen: list[tuple[int, ...]] = field(default_factory=list)
    is_over: bool = False

    @property
    def is_ready(self) -> bool:
        """True when every beam has drawn."""
        return bool(self.beams) and len(self.drawn) == len(self.beams)


class GroupBeamSearch(BeamStrategy):
    """Strategy of `num_beam_groups` searches of equal width.

    A group advances when its beams have drawn and the groups before it have chosen at the next position, so that its
    beams can draw again at once.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(request, criteria, next_seq_id)
        self._size = self.options.num_beams // self.options.num_beam_groups
        self._keep = self.candidates_per_beam * self._size
        self._most = criteria.max_output_tokens
        self._groups = [
            _BeamGroup(Hypotheses(self._size, self.options, self._most)) for _ in range(self.options.num_beam_groups)
        ]
        eos = request.params.eos_token_ids
        pad = self.options.pad_token_id
        # Stands for a finished group. Without an end id and a pad id such a group counts as no token.
        self._padding = (pad if pad is not None else eos[0],) * self._size if eos or pad is not None else ()
        self._group_of: dict[Sequence, _BeamGroup] = {}

    @property
    def width(self) -> int:
        return self._size * sum(not group.is_over for group in self._groups)

    def first_beam(self) -> Beam:
        return self._begin(0)

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        for sequence, token in sampled.items():
            self._group_of[sequence].drawn[sequence] = token
        decision = Decision()
        for index, group in enumerate(self._groups):
            if group.is_ready and self._may_move(index):
                self._move(index, decision)
        if all(group.is_over for group in self._groups):
            decision.emissions = self.emissions(self.ranking(None))
        return decision

    def restarted(self) -> None:
        """Forget the draws: all beams draw again."""
        for group in self._groups:
            group.drawn.clear()

    def ranking(self, reason: FinishReason | None) -> list[Hypothesis]:
        found: list[Hypothesis] = []
        for group in self._groups:
            if reason is not None:
                self._close_all(group, reason)
            found += group.hypotheses
        # Of equal scores the last one comes first, as in transformers.
        return sorted(found, key=_BY_SCORE)[::-1]

    def _may_move(self, index: int) -> bool:
        """True when earlier groups have chosen at the position after the one that it has drawn."""
        following = len(self._groups[index].chosen) + 1
        return all(before.is_over or len(before.chosen) > following for before in self._groups[:index])

    def _move(self, index: int, decision: Decision) -> None:
        group = self._groups[index]
        ranked = self.ranked(group.beams, group.drawn, self._keep)
        running = self._choose(group, ranked)
        group.chosen.append(tuple(extension.token_id for extension in running))
        length = len(group.chosen)
        # The next group starts when this one has its first position; its beam shares the prompt of this group's beam.
        if length == 1 and index + 1 < len(self._groups):
            decision.forks.append((group.beams[0].sequence, self._begin(index + 1).sequence))
        if not running or group.hypotheses.is_decided(ranked[0].score, length):
            if not group.hypotheses:
                # The processors leave no beam any token.
                self._close_all(group, FinishReason.LENGTH)
            self._finish(group, decision)
        elif length == self._most:
            for extension in running:
                self.conclude(group.hypotheses, extension, _LENGTH, group.drawn)
            self._finish(group, decision)
        else:
            self._go_on(index, running, decision)

    def _go_on(self, index: int, running: list[Extension], decision: Decision) -> None:
        group = self._groups[index]
        for beam in group.beams:
            del self._group_of[beam.sequence]
        group.beams = self.grow(group.beams, running, group.drawn, decision, index * self._size)
        group.drawn.clear()
        spec = draw_spec(self._keep, taken_ids=self._taken(index, len(group.chosen)))
        for beam in group.beams:
            beam.sequence.draw = spec
            self._group_of[beam.sequence] = group

    def _choose(self, group: _BeamGroup, ranked: list[Extension]) -> list[Extension]:
        """Return the extensions that go on, best first. Ended ones of the first become hypotheses."""
        running: list[Extension] = []
        for place, extension in enumerate(ranked):
            stop = self.stop_of(extension)
            if stop is None or stop.reason is FinishReason.LENGTH:
                running.append(extension)
                if len(running) == self._size:
                    break
            elif place < self._size:
                self.conclude(group.hypotheses, extension, stop, group.drawn)
        return running

    def _begin(self, index: int) -> Beam:
        beam = self.root()
        beam.place = index * self._size
        beam.sequence.draw = draw_spec(self._keep, taken_ids=self._taken(index, 0))
        self._groups[index].beams = [beam]
        self._group_of[beam.sequence] = self._groups[index]
        return beam

    def _taken(self, index: int, position: int) -> tuple[int, ...]:
        """Return the tokens that earlier groups chose at `position`; a finished one counts as padding."""
        taken: tuple[int, ...] = ()
        for before in self._groups[:index]:
            taken += before.chosen[position] if position < len(before.chosen) else self._padding
        return taken

    def _close_all(self, group: _BeamGroup, reason: FinishReason) -> None:
        for beam in group.beams:
            self.close(group.hypotheses, beam, reason)

    def _finish(self, group: _BeamGroup, decision: Decision) -> None:
        group.is_over = True
        decision.dropped += [beam.sequence for beam in group.beams]
        for beam in group.beams:
            del self._group_of[beam.sequence]
        group.beams = []
        group.drawn.clear()
