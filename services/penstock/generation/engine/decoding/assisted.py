"""Assisted generation: drafts from the prompt or from a draft model, of which one forward pass verifies many.

Drafts and draws are coupled. Every position is drawn from the model itself, by the request's own options and with the
uniform of (seed, position), and a draft is accepted iff it equals the drawn token. So the ids are exactly those of the
same request without assistance, greedy or sampled, whatever the drafts. For greedy search this is transformers' rule.
For sampling transformers 5.23 uses speculative sampling (Leviathan et al. 2023), which has the same distribution but
draws other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.core.modes import AssistantSchedule, DecodingMode, GenerationMode
from penstock.generation.core.request import Emission
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftRequest
from penstock.generation.engine.decoding.base import Decision, ModeSpec
from penstock.generation.engine.decoding.parallel_sampling import ParallelSampling, blocks_needed, most_sequences
from penstock.generation.engine.decoding.prompt_lookup import NgramIndex, prompt_lookup
from penstock.generation.engine.drafts import goes_on, until_end

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.request import FinishReason, Request
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.decoding.parallel_sampling import Track
    from penstock.generation.engine.stopping import StopCriteria

# Prompt tokens that are indexed in one step, about 2 ms: look-ups in a longer prompt begin some steps later.
_INDEXED_AT_A_TIME = 4096
_LOOKUP = frozenset({"prompt_lookup_num_tokens", "max_matching_ngram_size"})
_DRAFT_MODEL = frozenset(
    {"assistant_model", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
)


@dataclass(frozen=True, slots=True)
class AssistanceOptions(DecodingMode):
    """Options of assisted generation: prompt lookup when `prompt_lookup_num_tokens` is set, else the draft model."""

    num_assistant_tokens: int = 20
    schedule: AssistantSchedule = AssistantSchedule.CONSTANT
    # Drafting stops at a token to which the draft model gives less than this probability; 0: never.
    confidence_threshold: float = 0.4
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2

    may_be_guided = False

    @property
    def uses_draft_model(self) -> bool:
        """True when drafts come from a model rather than from the prompt."""
        return self.prompt_lookup_num_tokens is None

    @property
    def uses(self) -> frozenset[str]:
        """See DecodingMode."""
        return _DRAFT_MODEL if self.uses_draft_model else _LOOKUP

    @property
    def no_drafts(self) -> str:
        """See DecodingMode."""
        return (
            "it belongs to prompt lookup"
            if self.uses_draft_model
            else "config.prompt_lookup_num_tokens is set and wins"
        )

    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        """See DecodingMode."""
        return GenerationMode.ASSISTED_GENERATION


class AssistedGeneration(ParallelSampling):
    """Greedy search and sampling, n >= 1, with drafts after every draw but the prompt's."""

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(request, criteria, next_seq_id)
        params = request.params
        assert isinstance(params.mode, AssistanceOptions), "the registry chooses by the options"
        self._options = params.mode
        self._end_ids = frozenset() if params.ignore_eos else frozenset(params.eos_token_ids)
        # Sequences that have drawn and have no drafts yet.
        self._ready: list[Sequence] = []
        # Prompt lookup: the index of the prompt, and one of every sequence.
        self._prompt_index: NgramIndex | None = None
        self._indices: dict[Sequence, NgramIndex] = {}
        # Draft model: number of tokens that each sequence asks for.
        self._num_drafts: dict[Sequence, int] = {}

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        decision = Decision()
        drawn: dict[Sequence, list[SampledToken]] = {}
        for drawer, token in sampled.items():
            drawn.setdefault(drawer.origin or drawer, []).append(token)
        self._ready = []
        for sequence, tokens in drawn.items():
            self._verify(self._tracks[sequence], tokens, decision)
        if not self._options.uses_draft_model:
            for sequence in self._ready:
                self._draft(sequence, self._look_up(sequence))
        return decision

    def draft_requests(self) -> list[DraftRequest]:
        if not self._options.uses_draft_model:
            return []
        threshold = self._options.confidence_threshold
        requests = [DraftRequest(one, min(self._wanted(one), self._room(one)), threshold) for one in self._ready]
        return [request for request in requests if request.num_tokens > 0]

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        for sequence, token_ids in drafts.items():
            self._draft(sequence, until_end(token_ids, self._end_ids))

    def restarted(self) -> list[Sequence] | None:
        """Drop the drafts: they are not worth room or computation of a preempted request."""
        self._drop_drafts()
        return None

    def end(self, reason: FinishReason) -> list[Emission]:
        self._drop_drafts()
        return super().end(reason)

    def _verify(self, track: Track, tokens: list[SampledToken], decision: Decision) -> None:
        """Take the draws after the last token and after its drafts, up to the first one that was not drafted.

        There are fewer draws than drafts when the step had no room for all: the other drafts wait for the next step.
        """
        sequence, probes = track.sequence, track.sequence.probes
        drafts = sequence.take_back_drafts()
        accepted = 0
        taken: list[SampledToken] = []
        for token in tokens:
            is_draft = accepted < len(drafts) and drafts[accepted] == token.token_id
            if not is_draft:
                sequence.roll_back(sequence.num_tokens)
            stop = self._append(track, token)
            taken.append(token)
            accepted += is_draft
            if stop is not None or not is_draft:
                break
        decision.accepted_drafts += accepted
        decision.rejected_drafts += min(len(tokens), len(drafts)) - accepted
        self._emit(track, tuple(taken), stop, decision)
        if stop is not None:
            return
        if is_draft and accepted < len(drafts):
            sequence.append_drafts(drafts[accepted:], probes[accepted:])
            return
        self._adapt(sequence, len(drafts), accepted)
        self._ready.append(sequence)

    def _adapt(self, sequence: Sequence, num_drafts: int, accepted: int) -> None:
        """Adapt the number of drafts (transformers' heuristic schedules): 2 more if all were accepted, else 1 less.

        Each sequence of each request begins anew, with either schedule.
        """
        if num_drafts and self._options.schedule is not AssistantSchedule.CONSTANT:
            wanted = self._wanted(sequence)
            self._num_drafts[sequence] = wanted + 2 if accepted == num_drafts else max(1, wanted - 1)

    def _wanted(self, sequence: Sequence) -> int:
        return self._num_drafts.get(sequence, self._options.num_assistant_tokens)

    def _room(self, sequence: Sequence) -> int:
        """Return the number of drafts that the sequence can still use: the row of the last one draws a token, too."""
        return self._criteria.max_output_tokens - sequence.num_output_tokens - 1

    def _look_up(self, sequence: Sequence) -> list[int]:
        options = self._options
        room = min(options.prompt_lookup_num_tokens or 0, self._room(sequence))
        if room <= 0:
            return []
        if self._prompt_index is None:
            self._prompt_index = NgramIndex(options.max_matching_ngram_size)
        prompt = self._request.prompt_token_ids
        if self._prompt_index.num_tokens < len(prompt):
            self._prompt_index.extend(prompt[: self._prompt_index.num_tokens + _INDEXED_AT_A_TIME])
            if self._prompt_index.num_tokens < len(prompt):
                return []
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = self._prompt_index.copy()
        return prompt_lookup(index, sequence.token_ids, room, self._end_ids)

    def _draft(self, sequence: Sequence, drafts: list[int]) -> None:
        """Append drafts for verification, as far as the grammar allows them."""
        drafts = drafts[: max(self._room(sequence), 0)]
        states: list[GrammarState | None] = [None] * (len(drafts) + 1)
        if drafts and sequence.grammar is not None:
            drafts, states = _allowed(sequence.grammar, drafts)
        if not drafts:
            return
        first = sequence.num_tokens
        sequence.append_drafts(drafts, [])
        sequence.probes = [
            (first - 1 + place, self._probe(sequence, first + place, state)) for place, state in enumerate(states)
        ]

    def _probe(self, sequence: Sequence, num_tokens: int, grammar: GrammarState | None) -> Sequence:
        """Return a probe of the first `num_tokens` tokens. It copies them: a step has a few dozen probes only."""
        return Sequence(
            seq_id=self._next_seq_id(),
            index=sequence.index,
            params=sequence.params,
            seed=sequence.seed,
            token_ids=sequence.token_ids[:num_tokens],
            num_prompt_tokens=sequence.num_prompt_tokens,
            draw=sequence.draw,
            grammar=grammar,
            embeds=sequence.embeds,
            origin=sequence,
        )

    def _drop_drafts(self) -> None:
        for sequence in self._tracks:
            if sequence.num_draft_tokens:
                sequence.roll_back(sequence.num_tokens - sequence.num_draft_tokens)


def _allowed(grammar: GrammarState, drafts: list[int]) -> tuple[list[int], list[GrammarState | None]]:
    """Return the drafts that the grammar allows, and the states before, between and after them.

    They end before the first draft that the grammar refuses, or that completes the output and so ends the sequence.
    """
    states = [grammar.copy()]
    for token_id in drafts:
        state = states[-1].copy()
        if not goes_on(state, token_id):
            break
        states.append(state)
    return drafts[: len(states) - 1], list(states)


ASSISTED = ModeSpec(AssistanceOptions, AssistedGeneration, most_sequences, blocks_needed)
