"""Base of every beam mode: beams that grow, fork and end, on sequences that share blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from penstock.common.errors import InvalidArgument
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.grammar import GrammarError
from penstock.generation.core.request import (
    Emission,
    FinishReason,
    Logprob,
    PositionLogprobs,
    SequenceFinish,
    at_most_0,
)
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy
from penstock.generation.engine.decoding.beam_options import beam_options
from penstock.generation.engine.stopping import Stop

if TYPE_CHECKING:
    from penstock.generation.core.draw import Candidates
    from penstock.generation.core.request import Request
    from penstock.generation.core.step import SampledToken
    from penstock.generation.core.tensors import StepTensors
    from penstock.generation.engine.decoding.hypotheses import Hypotheses, Hypothesis
    from penstock.generation.engine.stopping import StopCriteria, StopState


class BeamLogprobs(NamedTuple):
    """Logprobs of a beam's last token, and of those before it, shared with the beams that it forked from."""

    before: BeamLogprobs | None
    last: PositionLogprobs

    @classmethod
    def of(cls, before: BeamLogprobs | None, drawn: SampledToken, token_id: int, score: float) -> BeamLogprobs:
        """Append the logprobs of `token_id`; `score` is its processed score."""
        candidates = drawn.candidates
        assert candidates is not None
        top = drawn.logprobs.top if drawn.logprobs is not None else ()
        chosen = Logprob(token_id, at_most_0(score - candidates.log_total), _rank(token_id, candidates, top))
        return cls(before, PositionLogprobs(chosen, top))

    def unrolled(self) -> tuple[PositionLogprobs, ...]:
        """Return one entry per token, in order."""
        entries = []
        node: BeamLogprobs | None = self
        while node is not None:
            entries.append(node.last)
            node = node.before
        return tuple(reversed(entries))


class BeamTensors(NamedTuple):
    """Tensors of a beam's last token, and of those before it, shared with the beams that it forked from."""

    before: BeamTensors | None
    last: StepTensors | None

    def unrolled(self) -> tuple[StepTensors | None, ...]:
        """Return one entry per token, in order."""
        entries = []
        node: BeamTensors | None = self
        while node is not None:
            entries.append(node.last)
            node = node.before
        return tuple(reversed(entries))


@dataclass(slots=True, eq=False)
class Beam:
    """An open sequence of a search."""

    sequence: Sequence
    # Sum of the processed scores of its output tokens.
    score: float
    stop: StopState
    # Logprobs of its tokens; None: none yet, or not asked for.
    logprobs: BeamLogprobs | None = None
    # Tensors of its tokens; None: none yet, or not asked for.
    tensors: BeamTensors | None = None
    # Its row among the beams of all groups, as transformers' beam_indices count them.
    place: int = 0

    @property
    def output(self) -> tuple[int, ...]:
        """Output tokens so far."""
        return tuple(self.sequence.output_token_ids)


def draw_spec(
    num_candidates: int,
    *,
    gumbel_slot: int | None = None,
    extra_ids: tuple[int, ...] = (),
    taken_ids: tuple[int, ...] = (),
    is_guided: bool = False,
) -> DrawSpec:
    """Return the draw that beams want from the sampler. Guided scores are made from log-probabilities, but are not
    log-probabilities themselves: transformers takes them unchanged."""
    return DrawSpec(
        kind=DrawKind.CANDIDATES,
        num_candidates=num_candidates,
        log_softmax=not is_guided,
        extra_ids=extra_ids,
        gumbel_slot=gumbel_slot,
        taken_ids=taken_ids,
    )


class Extension(NamedTuple):
    """A beam and a token that may come next."""

    beam: Beam
    token_id: int
    # The token's processed score.
    token_score: float
    # Score of the beam with the token: the sum of both.
    score: float
    # Ranking key: the score, or the score with noise.
    key: float


_BY_KEY = attrgetter("key")


class BeamStrategy(DecodingStrategy):
    """Base of the beam strategies. Scores are cumulative logprobs.

    It emits only at its end, best sequence first, since no token is final before. The beams of a search advance
    together: draws are held until all beams have drawn. A beam's first child goes on in its sequence, the others fork.
    A search begins with one beam; transformers begins with `num_beams` equal ones and bars all but the first, with the
    same result.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        """Raises ValueError when the request has no beams."""
        self.options = beam_options(request.params)
        self.criteria = criteria
        self._request = request
        self._next_seq_id = next_seq_id
        # Extensions per beam that a step considers: enough to go on, whichever of them end their beam.
        self.candidates_per_beam = max(2, 1 + criteria.num_eos)

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Raises InvalidArgument when resumed ids are not what an earlier attempt returned."""
        if any(self._request.resumed_token_ids):
            return [], [self._delivered(index, ids) for index, ids in enumerate(self._request.resumed_token_ids)]
        return [self.first_beam().sequence], []

    @abstractmethod
    def first_beam(self) -> Beam:
        """Return the beam that the search begins with."""

    @abstractmethod
    def ranking(self, reason: FinishReason | None) -> list[Hypothesis]:
        """Return the hypotheses, best first. Open beams end by `reason`; None: they do not count."""

    @override
    def end(self, reason: FinishReason) -> list[Emission]:
        """An end by max_time returns the best so far; a request that is cut off has emitted nothing."""
        if reason is FinishReason.MAX_TIME:
            return self.emissions(self.ranking(reason))
        return [Emission(index, (), (), SequenceFinish(index, reason, 0)) for index in self._returned]

    def emissions(self, ranking: list[Hypothesis]) -> list[Emission]:
        """Return the final emissions. If fewer sequences were found than requested, the best are returned again."""
        found = [ranking[index % len(ranking)] for index in self._returned]
        return [
            Emission(
                index, one.token_ids, one.logprobs, _finish(index, one.token_ids, one.stop, one.score), one.tensors
            )
            for index, one in enumerate(found)
        ]

    def root(self) -> Beam:
        """Return a beam with no output yet."""
        request = self._request
        sequence = self._sequence(list(request.prompt_token_ids))
        if request.grammar is not None:
            sequence.grammar = request.grammar.start(request.params.eos_token_ids, self.criteria.max_output_tokens)
        return Beam(sequence, 0.0, self.criteria.new_state())

    def ranked(self, beams: list[Beam], drawn: Mapping[Sequence, SampledToken], count: int) -> list[Extension]:
        """Return the `count` best extensions of all beams; of equal ones the better beam's, then the lower id."""
        by_beam = [_extensions(beam, drawn[beam.sequence]) for beam in beams]
        return list(islice(merge(*by_beam, key=_BY_KEY, reverse=True), count))

    def stop_of(self, extension: Extension) -> Stop | None:
        """Return the end that the extension would cause for its beam, if any."""
        beam = extension.beam
        return self.criteria.check_candidate(beam.sequence, extension.token_id, beam.stop)

    def grow(
        self,
        beams: list[Beam],
        chosen: list[Extension],
        drawn: Mapping[Sequence, SampledToken],
        decision: Decision,
        first_place: int = 0,
    ) -> list[Beam]:
        """Return the beams that replace `beams`, in the order of `chosen`, placed from `first_place` on. `decision`
        gets forks and drops."""
        grown: list[Beam] = []
        going: set[Beam] = set()
        for place, extension in enumerate(chosen, first_place):
            parent = extension.beam
            known, tensors = self.logprobs(extension, drawn), self.tensors(extension, drawn)
            if parent in going:
                child = self._fork(parent.sequence)
                decision.forks.append((parent.sequence, child))
                grown.append(Beam(child, extension.score, parent.stop.copy(), known, tensors, place))
            else:
                # It takes over the stop state as well: that is advanced only below, after all copies.
                going.add(parent)
                grown.append(Beam(parent.sequence, extension.score, parent.stop, known, tensors, place))
        decision.dropped += [beam.sequence for beam in beams if beam not in going]
        for beam, extension in zip(grown, chosen, strict=True):
            beam.sequence.append(extension.token_id)
            self.criteria.check(beam.sequence, beam.stop)
        return grown

    def close(self, hypotheses: Hypotheses, beam: Beam, reason: FinishReason) -> None:
        """Add an open beam as ended with its last token.

        LENGTH is for a beam without a possible token; with a whole path of the request's trie it is CONSTRAINT_DONE.
        """
        if reason is FinishReason.LENGTH and beam.output in (self._request.params.allowed_token_trie or ()):
            reason = FinishReason.CONSTRAINT_DONE
        logprobs = beam.logprobs.unrolled() if beam.logprobs is not None else ()
        tensors = beam.tensors.unrolled() if beam.tensors is not None else ()
        hypotheses.add(beam.output, beam.score, Stop(reason), logprobs, tensors)

    def conclude(
        self, hypotheses: Hypotheses, extension: Extension, stop: Stop, drawn: Mapping[Sequence, SampledToken]
    ) -> None:
        """Add an extension that ends its beam."""
        known, kept = self.logprobs(extension, drawn), self.tensors(extension, drawn)
        logprobs = known.unrolled() if known is not None else ()
        tensors = kept.unrolled() if kept is not None else ()
        hypotheses.add((*extension.beam.output, extension.token_id), extension.score, stop, logprobs, tensors)

    def logprobs(self, extension: Extension, drawn: Mapping[Sequence, SampledToken]) -> BeamLogprobs | None:
        """Return logprobs of the extended sequence when the request wants them, else None."""
        if self._request.params.top_logprobs is None:
            return None
        beam = extension.beam
        return BeamLogprobs.of(beam.logprobs, drawn[beam.sequence], extension.token_id, extension.token_score)

    def tensors(self, extension: Extension, drawn: Mapping[Sequence, SampledToken]) -> BeamTensors | None:
        """Return tensors of the extended sequence when the request wants them, else None: each token's are those of
        the beam that it was drawn from."""
        if self._request.params.tensors is None:
            return None
        beam = extension.beam
        found = drawn[beam.sequence].tensors
        return BeamTensors(beam.tensors, None if found is None else replace(found, beam_index=beam.place))

    @property
    def _returned(self) -> Iterable[int]:
        return range(self._request.params.num_return_sequences)

    def _fork(self, parent: Sequence) -> Sequence:
        child = self._sequence(list(parent.token_ids))
        if parent.grammar is not None:
            child.grammar = parent.grammar.copy()
        return child

    def _sequence(self, token_ids: list[int]) -> Sequence:
        """Return a new sequence. All beams have the request's seed: DrawSpec.gumbel_slot makes their draws differ."""
        params = self._request.params
        num_prompt_tokens = len(self._request.prompt_token_ids)
        embeds = self._request.embeds
        return Sequence(self._next_seq_id(), 0, params, params.seed, token_ids, num_prompt_tokens, embeds=embeds)

    def _delivered(self, index: int, resumed: list[int]) -> Emission:
        """Return the emission of a sequence that an earlier attempt returned, as a whole and with all others."""
        beam, stop = self.root(), None
        for token_id in resumed:
            if stop is not None:
                raise InvalidArgument("resumed_token_ids", "a sequence goes on after its end")
            try:
                beam.sequence.append(token_id)
            except GrammarError:
                raise InvalidArgument("resumed_token_ids", "do not obey the constraint") from None
            stop = self.criteria.check(beam.sequence, beam.stop)
        if stop is None:
            raise InvalidArgument("resumed_token_ids", "beam modes return whole sequences only: nothing can go on")
        return Emission(index, (), (), _finish(index, beam.output, stop, None))


def _extensions(beam: Beam, drawn: SampledToken) -> Iterator[Extension]:
    """Yield the extensions of one beam, best first. Few of them are ever asked for."""
    candidates = drawn.candidates
    assert candidates is not None
    base = beam.score
    for token_id, score, key in zip(candidates.token_ids, candidates.scores, candidates.keys, strict=True):
        yield Extension(beam, token_id, score, base + score, base + key)


def _finish(index: int, token_ids: tuple[int, ...], stop: Stop, score: float | None) -> SequenceFinish:
    return SequenceFinish(index, stop.reason, len(token_ids), stop.token_id, stop.string, score)


def _rank(token_id: int, candidates: Candidates, top: tuple[Logprob, ...]) -> int:
    """Return the token's rank; 0, not known, when a constraint added it and it is neither a candidate nor listed."""
    if token_id in candidates.token_ids:
        return candidates.ranks[candidates.token_ids.index(token_id)]
    return next((entry.rank for entry in top if entry.token_id == token_id), 0)
