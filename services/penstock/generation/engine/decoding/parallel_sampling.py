"""Greedy search, sampling and DoLa, n >= 1: sequences that share the prompt and nothing else.

With classifier-free guidance each has an unconditional branch, which gets the same output and lives as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import NO_GUIDANCE, PLAIN, DecodingMode, GenerationMode, Scope
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.grammar import GrammarError
from penstock.generation.core.request import Emission, FinishReason, SequenceFinish
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy, ModeSpec
from penstock.generation.engine.stopping import Stop

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.stopping import StopCriteria, StopState

# Unconditional branches of one request begin with the same negative prompt, and so are a family of their own.
_UNCONDITIONAL_FAMILY = 1


@dataclass(frozen=True, slots=True)
class DolaOptions(DecodingMode):
    """Options of DoLa (Chuang et al. 2023): the layers with early exits to contrast with the last one, by number."""

    early_exits: tuple[int, ...] = ()
    # The contrast leaves few tokens, and ordinary options often forbid all of them: transformers' argmax gives id 0.
    last_resort = 0
    uses = frozenset({Scope.DOLA})

    @override
    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        return GenerationMode.DOLA_GENERATION


@dataclass(slots=True)
class Track:
    """A live sequence and the state of its output."""

    sequence: Sequence
    stop: StopState
    # None: not asked for, or an earlier attempt drew some of the tokens.
    cumulative_logprob: float | None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequence, and its unconditional branch if it has one."""
        branch = self.sequence.unconditional
        return (self.sequence,) if branch is None else (self.sequence, branch)

    def append(self, token_id: int) -> None:
        """Append an output token."""
        self.sequence.append(token_id)
        if self.sequence.unconditional is not None:
            self.sequence.unconditional.append(token_id)


class ParallelSampling(DecodingStrategy):
    """Strategy in which every drawn token is final and emitted at once."""

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        self._request = request
        self._criteria = criteria
        self._next_seq_id = next_seq_id
        self._tracks: dict[Sequence, Track] = {}
        self._branches = _branches(request.params)

    @property
    def width(self) -> int:
        return len(self._tracks) * self._branches

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Raises InvalidArgument when resumed ids go on after their own end."""
        preset_events: list[Emission] = []
        for index in range(self._request.params.num_return_sequences):
            track = self._new_track(index)
            resumed = self._request.resumed_token_ids[index] if self._request.resumed_token_ids else []
            stop = self._replay(track, resumed)
            if stop is None:
                self._tracks[track.sequence] = track
            else:
                preset_events.append(Emission(index, (), (), self._finish(track, stop)))
        return [one for track in self._tracks.values() for one in track.sequences], preset_events

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        decision = Decision()
        for sequence, token in sampled.items():
            track = self._tracks[sequence]
            stop = self._append(track, token)
            self._emit(track, (token,), stop, decision)
        return decision

    def end(self, reason: FinishReason) -> list[Emission]:
        stop = Stop(reason)
        return [Emission(sequence.index, (), (), self._finish(track, stop)) for sequence, track in self._tracks.items()]

    def _append(self, track: Track, token: SampledToken) -> Stop | None:
        """Append a drawn token. Return the end that it causes, if any."""
        track.append(token.token_id)
        if track.cumulative_logprob is not None and token.logprob is not None:
            track.cumulative_logprob += token.logprob
        return self._criteria.check(track.sequence, track.stop)

    def _emit(self, track: Track, tokens: tuple[SampledToken, ...], stop: Stop | None, decision: Decision) -> None:
        """Emit the tokens that were appended; `stop`: the sequence ended with the last one."""
        finish = None
        if stop is not None:
            finish = self._finish(track, stop)
            decision.dropped.extend(track.sequences)
            del self._tracks[track.sequence]
        decision.emissions.append(_emission(track.sequence.index, tokens, finish))

    def _new_track(self, index: int) -> Track:
        request = self._request
        sequence = Sequence(
            seq_id=self._next_seq_id(),
            index=index,
            params=request.params,
            seed=derive_seed(request.params.seed, index),
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            grammar=None
            if request.grammar is None
            else request.grammar.start(request.params.eos_token_ids, self._criteria.max_output_tokens),
            embeds=request.embeds,
            unconditional=new_unconditional(request, index, self._next_seq_id())
            if request.params.guidance.is_on
            else None,
        )
        return Track(sequence, self._criteria.new_state(), None if request.params.top_logprobs is None else 0.0)

    def _replay(self, track: Track, resumed: list[int]) -> Stop | None:
        """Append tokens of an earlier attempt, through the same criteria. Return the end that they cause, if any."""
        stop = None
        for token_id in resumed:
            if stop is not None:
                raise InvalidArgument("resumed_token_ids", "a sequence goes on after its end")
            try:
                track.append(token_id)
            except GrammarError:
                raise InvalidArgument("resumed_token_ids", "do not obey the constraint") from None
            track.cumulative_logprob = None
            stop = self._criteria.check(track.sequence, track.stop)
        return stop

    @staticmethod
    def _finish(track: Track, stop: Stop) -> SequenceFinish:
        return SequenceFinish(
            index=track.sequence.index,
            reason=stop.reason,
            num_tokens=track.sequence.num_output_tokens,
            stop_token_id=stop.token_id,
            stop_string=stop.string,
            cumulative_logprob=track.cumulative_logprob,
        )


def _emission(index: int, tokens: tuple[SampledToken, ...], finish: SequenceFinish | None) -> Emission:
    if len(tokens) == 1:
        # Nearly every emission is of one token: written out, it takes a third of the time.
        (token,) = tokens
        logprobs = () if token.logprobs is None else (token.logprobs,)
        return Emission(index, (token.token_id,), logprobs, finish, () if token.tensors is None else (token.tensors,))
    token_ids = tuple(token.token_id for token in tokens)
    found = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    has_tensors = any(token.tensors is not None for token in tokens)
    return Emission(index, token_ids, found, finish, tuple(token.tensors for token in tokens) if has_tensors else ())


def _branches(params: SamplingParams) -> int:
    """Return the number of sequences per returned one: itself, and with guidance its unconditional branch."""
    return 2 if params.guidance.is_on else 1


def new_unconditional(request: Request, index: int, seq_id: int) -> Sequence:
    """Return the unconditional branch of returned sequence `index`, before any output.

    Without a negative prompt it starts from the last prompt token, as in transformers.
    """
    prompt = list(request.params.guidance.negative_prompt_ids) or request.prompt_token_ids[-1:]
    return Sequence(
        seq_id=seq_id,
        index=index,
        # Nothing is drawn from it and its rows are not returned: it is the plain model over its tokens.
        params=replace(
            request.params, mode=PLAIN, guidance=NO_GUIDANCE, tensors=None, top_logprobs=None, prompt_logprobs=None
        ),
        seed=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        draw=DrawSpec(DrawKind.UNCONDITIONAL),
        family=_UNCONDITIONAL_FAMILY,
    )


def most_sequences(params: SamplingParams) -> int:
    return params.num_return_sequences * _branches(params)


def blocks_needed(config: EngineConfig, params: SamplingParams, prompt_tokens: int, output_tokens: int) -> int:
    count = params.num_return_sequences
    needed = config.blocks_needed(prompt_tokens, output_tokens, count)
    if params.guidance.is_on:
        needed += config.blocks_needed(max(len(params.guidance.negative_prompt_ids), 1), output_tokens, count)
    return needed


PLAIN_SPEC = ModeSpec(DecodingMode, ParallelSampling, most_sequences, blocks_needed)
DOLA = ModeSpec(DolaOptions, ParallelSampling, most_sequences, blocks_needed)
