"""Greedy search and sampling, n >= 1: sequences that share the prompt and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy, Emission
from penstock.generation.engine.request import FinishReason, SequenceFinish
from penstock.generation.engine.sequence import Sequence
from penstock.generation.engine.stopping import Stop
from penstock.generation.sampling.params import derive_seed

if TYPE_CHECKING:
    from penstock.generation.engine.request import Request
    from penstock.generation.engine.step import SampledToken
    from penstock.generation.engine.stopping import StopCriteria, StopState


@dataclass(slots=True)
class _Track:
    """A live sequence and what is known of its output."""

    sequence: Sequence
    stop: StopState
    # None when nobody asked, or when an earlier attempt drew some of the tokens.
    cumulative_logprob: float | None


class ParallelSampling(DecodingStrategy):
    """Every drawn token is final and emitted at once."""

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        self._request = request
        self._criteria = criteria
        self._next_seq_id = next_seq_id
        self._tracks: dict[Sequence, _Track] = {}

    @property
    def width(self) -> int:
        return len(self._tracks)

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Raises InvalidArgument when resumed ids go on after their own end."""
        settled: list[Emission] = []
        for index in range(self._request.params.num_return_sequences):
            track = self._new_track(index)
            resumed = self._request.resumed_token_ids[index] if self._request.resumed_token_ids else []
            stop = self._replay(track, resumed)
            if stop is None:
                self._tracks[track.sequence] = track
            else:
                settled.append(Emission(index, (), (), self._finish(track, stop)))
        return list(self._tracks), settled

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        decision = Decision()
        for sequence, token in sampled.items():
            track = self._tracks[sequence]
            sequence.token_ids.append(token.token_id)
            if track.cumulative_logprob is not None and token.logprob is not None:
                track.cumulative_logprob += token.logprob
            stop = self._criteria.check(sequence, track.stop)
            finish = None
            if stop is not None:
                finish = self._finish(track, stop)
                decision.dropped.append(sequence)
                del self._tracks[sequence]
            logprobs = () if token.logprobs is None else (token.logprobs,)
            decision.emissions.append(Emission(sequence.index, (token.token_id,), logprobs, finish))
        return decision

    def end(self, reason: FinishReason) -> list[Emission]:
        stop = Stop(reason)
        return [Emission(sequence.index, (), (), self._finish(track, stop)) for sequence, track in self._tracks.items()]

    def _new_track(self, index: int) -> _Track:
        request = self._request
        sequence = Sequence(
            seq_id=self._next_seq_id(),
            index=index,
            params=request.params,
            seed=derive_seed(request.params.seed, index),
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        return _Track(sequence, self._criteria.new_state(), None if request.params.top_logprobs is None else 0.0)

    def _replay(self, track: _Track, resumed: list[int]) -> Stop | None:
        """Tokens of an earlier attempt, through the same criteria."""
        stop = None
        for token_id in resumed:
            if stop is not None:
                raise InvalidArgument("resumed_token_ids", "a sequence goes on after its end")
            track.sequence.token_ids.append(token_id)
            track.cumulative_logprob = None
            stop = self._criteria.check(track.sequence, track.stop)
        return stop

    @staticmethod
    def _finish(track: _Track, stop: Stop) -> SequenceFinish:
        return SequenceFinish(
            index=track.sequence.index,
            reason=stop.reason,
            num_tokens=track.sequence.num_output_tokens,
            stop_token_id=stop.token_id,
            stop_string=stop.string,
            cumulative_logprob=track.cumulative_logprob,
        )
