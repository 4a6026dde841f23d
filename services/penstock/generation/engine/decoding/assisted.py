"""Assisted generation: drafts from texts, from guesses or from a draft model. One forward pass verifies many of them.

Drafts and draws are coupled. Every position is drawn from the model itself, by the request's own options and with the
uniform of (seed, position), and a draft is accepted iff it equals the drawn token. So the ids are those of the same
request without assistance, greedy or sampled, whatever the drafts. This is exact where a row's scores do not depend on
the rows beside it: in float32, and in bfloat16 on the C++ kernels. For greedy search this is transformers' rule. For
sampling transformers 5.23 uses speculative sampling (Leviathan et al. 2023), which has the same distribution but
draws other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.generation.core.decoding_mode import AssistantSchedule, DecodingMode, GenerationMode, Scope
from penstock.generation.core.plugins import plugin_failed
from penstock.generation.core.request import Emission
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftKind, DraftRequest
from penstock.generation.engine.decoding.base import Decision, ModeSpec, VerifiedDrafts
from penstock.generation.engine.decoding.lookahead import Lookahead
from penstock.generation.engine.decoding.parallel_sampling import ParallelSampling, blocks_needed, most_sequences
from penstock.generation.engine.decoding.prompt_lookup import NgramIndex, prompt_lookup
from penstock.generation.engine.draft_account import DraftAccount
from penstock.generation.engine.draft_length import DraftLength
from penstock.generation.engine.drafts import DraftThrottle, goes_on, until_end

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.request import FinishReason, Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.decoding.parallel_sampling import Track
    from penstock.generation.engine.stopping import StopCriteria

# Prompt tokens that are indexed in one step, about 2 ms: look-ups in a longer prompt begin some steps later.
_INDEXED_AT_A_TIME = 4096
# Output tokens to remember at a time, and the tokens before them that lead to their beginning.
_REMEMBERED_AT_A_TIME, _REMEMBERED_BEFORE = 256, 8
# Name of a draft model that is the caller's object.
CALLERS_DRAFTS = "the caller's"


@dataclass(frozen=True, slots=True)
class AssistanceOptions(DecodingMode):
    """Options of assisted generation.

    Memory, prompt lookup and lookahead are asked in this order; the first enabled one with drafts gives them: the
    longer a match must be, the more it says. The draft model gives drafts if none of the three is enabled.
    """

    num_assistant_tokens: int = 20
    schedule: AssistantSchedule = AssistantSchedule.CONSTANT
    # Drafting stops at a token with less than this probability in the draft model; 0: never.
    confidence_threshold: float = 0.4
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2
    # Most tokens to draft from past outputs; None: neither drafted nor remembered.
    ngram_memory_num_tokens: int | None = None
    ngram_memory_match: int = 3
    # Tokens to guess ahead; None: none.
    lookahead_window: int | None = None
    lookahead_ngram_size: int = 4
    lookahead_guesses: int = 4
    # (ids so far, most tokens) -> drafts: a function of a caller in this process that replaces the draft model; None:
    # none.
    own_drafts: Callable[[list[int], int], list[int]] | None = None

    may_be_guided = False

    @property
    @override
    def asks_draft_model(self) -> bool:
        return self.uses_draft_model and self.own_drafts is None

    @property
    def uses_draft_model(self) -> bool:
        """True when drafts come from a model, the server's or the caller's, rather than from texts."""
        return self.prompt_lookup_num_tokens is None and not self.recalls_outputs and self.lookahead_window is None

    @property
    @override
    def recalls_outputs(self) -> bool:
        return self.ngram_memory_num_tokens is not None

    @property
    @override
    def uses(self) -> frozenset[Scope]:
        if self.uses_draft_model:
            return frozenset({Scope.DRAFT_MODEL})
        asked = {
            Scope.LOOKUP: self.prompt_lookup_num_tokens is not None,
            Scope.NGRAM_MEMORY: self.recalls_outputs,
            Scope.LOOKAHEAD: self.lookahead_window is not None,
        }
        return frozenset(scope for scope, is_asked in asked.items() if is_asked)

    @override
    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        return GenerationMode.ASSISTED_GENERATION


def with_drafts(params: SamplingParams, drafts: Callable[[list[int], int], list[int]] | None) -> SamplingParams:
    """Return `params` with the caller's own drafts, if the mode drafts with a model."""
    if drafts is None or not isinstance(params.mode, AssistanceOptions):
        return params
    return replace(params, mode=replace(params.mode, own_drafts=drafts))


@dataclass(slots=True)
class _Drafting:
    """State of one sequence's drafts."""

    # Origin of the drafts being verified.
    kind: DraftKind = DraftKind.DRAFT_MODEL
    # Prompt lookup.
    index: NgramIndex | None = None
    # None: drafts cost nothing that is known.
    lookup_account: DraftAccount | None = None
    # Number of its first tokens that are remembered, or were before its output.
    num_remembered: int = 0
    memory_throttle: DraftThrottle = field(default_factory=DraftThrottle)
    lookahead: Lookahead | None = None
    lookahead_throttle: DraftThrottle = field(default_factory=DraftThrottle)
    # Draft model: number of tokens to ask for; None: the options' number.
    num_drafts: int | None = None
    # Draft head; None: drafts cost nothing that is known.
    length: DraftLength | None = None

    @property
    def throttle(self) -> DraftThrottle | None:
        """Throttle of the drafts being verified; None: their kind has none."""
        if self.kind is DraftKind.NGRAM_MEMORY:
            return self.memory_throttle
        return self.lookahead_throttle if self.kind is DraftKind.LOOKAHEAD else None


class AssistedGeneration(ParallelSampling):
    """Greedy search and sampling, n >= 1, with drafts after a draw, the prompt's included."""

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        super().__init__(request, criteria, next_seq_id)
        params = request.params
        assert isinstance(params.mode, AssistanceOptions), "the registry chooses by the options"
        self._options = params.mode
        self._end_ids = frozenset(params.ending_ids)
        # Sequences that have drawn and have no drafts yet.
        self._ready: list[Sequence] = []
        # Prompt lookup: the index of the prompt.
        self._prompt_index: NgramIndex | None = None
        self._drafting: dict[Sequence, _Drafting] = {}

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        started = super().start()
        self._drafting = {sequence: self._new_drafting(sequence) for sequence in self._tracks}
        if self._options.asks_draft_model and self._request.has_draft_head:
            for sequence, drafting in self._drafting.items():
                sequence.is_tapped = drafting.length is None or not drafting.length.rests
        return started

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        decision = Decision()
        drawn: dict[Sequence, list[SampledToken]] = {}
        for drawer, token in sampled.items():
            sequence = drawer.origin or drawer
            tokens = drawn.setdefault(sequence, [])
            # Past a wrong draft a row may have given no token.
            if drawer.num_tokens == sequence.num_tokens - sequence.num_draft_tokens + len(tokens):
                tokens.append(token)
        self._ready = []
        for sequence, tokens in drawn.items():
            self._verify(self._tracks[sequence], tokens, decision)
        if not self._options.asks_draft_model:
            for sequence in self._ready:
                self._draft_from_texts(sequence)
        return decision

    def draft_requests(self) -> list[DraftRequest]:
        if not self._options.asks_draft_model:
            return []
        threshold = self._options.confidence_threshold
        requests = [DraftRequest(one, self._number(one), threshold) for one in self._ready]
        return [request for request in requests if request.num_tokens > 0]

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        for sequence, token_ids in drafts.items():
            kind = DraftKind.DRAFT_HEAD if self._request.has_draft_head else DraftKind.DRAFT_MODEL
            self._append_drafts(sequence, until_end(token_ids, self._end_ids), kind)

    def restarted(self) -> list[Sequence] | None:
        """Drop the drafts: a preempted request spends no room or computation on them."""
        self._drop_drafts()
        return None

    def end(self, reason: FinishReason) -> list[Emission]:
        self._drop_drafts()
        for sequence in self._tracks:
            self._remember(sequence)
        return super().end(reason)

    def _verify(self, track: Track, tokens: list[SampledToken], decision: Decision) -> None:
        """Take the draws after the last token and after its drafts, up to the first one that was not drafted.

        There are fewer draws than drafts when the step had no room for all: the other drafts wait for the next step.
        """
        sequence, verifiers = track.sequence, track.sequence.verifiers
        drafting = self._drafting[sequence]
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
        if drafts:
            decision.note_drafts(VerifiedDrafts(drafting.kind, accepted, min(len(tokens), len(drafts)) - accepted))
        self._emit(track, tuple(taken), stop, decision)
        if stop is not None:
            self._remember(sequence)
            del self._drafting[sequence]
            return
        if drafting.lookahead is not None:
            drafting.lookahead.learn(sequence.token_ids, len(taken), drafts, [token.token_id for token in tokens])
        if sequence.num_tokens >= drafting.num_remembered + _REMEMBERED_AT_A_TIME:
            self._remember(sequence)
        if is_draft and accepted < len(drafts):
            sequence.append_drafts(drafts[accepted:], verifiers[accepted:])
            return
        self._adapt(drafting, len(drafts), accepted)
        self._ready.append(sequence)

    def _adapt(self, drafting: _Drafting, num_drafts: int, accepted: int) -> None:
        """Adapt the number of drafts (transformers' heuristic schedules): 2 more if all were accepted, else 1 less.

        With either schedule each sequence of each request begins anew. Drafts of memory and lookahead have no schedule:
        they pause while none is accepted. Those of prompt lookup pause while they do not pay. A head drafts as many as
        pay.
        """
        if not num_drafts:
            return
        if drafting.kind is DraftKind.PROMPT_LOOKUP:
            if drafting.lookup_account is not None:
                drafting.lookup_account.note(num_drafts, accepted)
            return
        if drafting.kind is DraftKind.DRAFT_HEAD:
            if drafting.length is not None:
                drafting.length.note(num_drafts, accepted)
            return
        throttle = drafting.throttle
        if throttle is not None:
            throttle.note(accepted)
        elif self._options.schedule is not AssistantSchedule.CONSTANT:
            wanted = self._wanted(drafting)
            drafting.num_drafts = wanted + 2 if accepted == num_drafts else max(1, wanted - 1)

    def _wanted(self, drafting: _Drafting) -> int:
        return self._options.num_assistant_tokens if drafting.num_drafts is None else drafting.num_drafts

    def _number(self, sequence: Sequence) -> int:
        """Return the number of drafts to ask the draft model, or the draft head, for."""
        drafting = self._drafting[sequence]
        most = min(self._wanted(drafting), self._room(sequence))
        if drafting.length is None or most <= 0:
            return most
        number = drafting.length.affordable(most)
        sequence.is_tapped = not drafting.length.rests
        return number

    def _room(self, sequence: Sequence) -> int:
        """Return the number of drafts that the sequence can still use: the row of the last one draws a token, too."""
        return self._criteria.max_output_tokens - sequence.num_output_tokens - 1

    def _new_drafting(self, sequence: Sequence) -> _Drafting:
        drafting = _Drafting(num_remembered=sequence.num_prompt_tokens)
        options, costs = self._options, self._request.draft_costs
        if options.prompt_lookup_num_tokens is not None and costs is not None:
            costs.measure()
            drafting.lookup_account = DraftAccount(costs)
        if options.asks_draft_model and self._request.has_draft_head and costs is not None:
            costs.measure()
            drafting.length = DraftLength(costs, options.num_assistant_tokens)
        if options.lookahead_window is not None:
            # A prompt may have no ids; then any id will do, and an id that the prompt has not is as good as another.
            fillers = self._request.known_prompt_ids or [0]
            size, guesses = options.lookahead_ngram_size, options.lookahead_guesses
            drafting.lookahead = Lookahead(options.lookahead_window, size, guesses, fillers)
        return drafting

    def _draft_from_texts(self, sequence: Sequence) -> None:
        """Draft by the first enabled kind that has drafts."""
        options, drafting, room = self._options, self._drafting[sequence], self._room(sequence)
        if room <= 0:
            return
        if options.own_drafts is not None and options.uses_draft_model:
            try:
                own = options.own_drafts(list(sequence.token_ids), min(self._wanted(drafting), room))
            except Exception as error:
                raise plugin_failed("assistant_model", type(options.own_drafts).__name__, error) from error
            self._append_drafts(sequence, until_end(own, self._end_ids), DraftKind.DRAFT_MODEL)
            return
        drafts: list[int] = []
        past = self._request.past_outputs
        if past is not None and options.ngram_memory_num_tokens is not None:
            most = min(options.ngram_memory_num_tokens, room)
            drafts = past.continuation(sequence.token_ids, fewest=options.ngram_memory_match, max_tokens=most)
            drafts = until_end(drafts, self._end_ids)
            kind = DraftKind.NGRAM_MEMORY
            if drafts and not drafting.memory_throttle.allows():
                drafts = []
        if not drafts and options.prompt_lookup_num_tokens is not None:
            most = min(options.prompt_lookup_num_tokens, room)
            if drafting.lookup_account is not None:
                most = drafting.lookup_account.affordable(most, sequence.num_output_tokens)
            drafts = self._look_up(sequence, most) if most else []
            kind = DraftKind.PROMPT_LOOKUP
        if not drafts and drafting.lookahead is not None and drafting.lookahead_throttle.allows():
            drafts = until_end(drafting.lookahead.guess(sequence.token_ids[-1], room), self._end_ids)
            kind = DraftKind.LOOKAHEAD
        if drafts:
            self._append_drafts(sequence, drafts, kind)

    def _look_up(self, sequence: Sequence, most: int) -> list[int]:
        if self._prompt_index is None:
            self._prompt_index = NgramIndex(self._options.max_matching_ngram_size)
        prompt = self._request.prompt_token_ids
        if self._prompt_index.num_tokens < len(prompt):
            self._prompt_index.extend(prompt[: self._prompt_index.num_tokens + _INDEXED_AT_A_TIME])
            if self._prompt_index.num_tokens < len(prompt):
                return []
        drafting = self._drafting[sequence]
        if drafting.index is None:
            drafting.index = self._prompt_index.copy()
        return prompt_lookup(drafting.index, sequence.token_ids, most, self._end_ids)

    def _remember(self, sequence: Sequence) -> None:
        """Add the output that is not remembered yet to the tenant's past outputs."""
        past, drafting = self._request.past_outputs, self._drafting[sequence]
        if past is None or sequence.num_tokens == drafting.num_remembered:
            return
        first = max(drafting.num_remembered - _REMEMBERED_BEFORE, sequence.num_placeholders)
        past.add(sequence.token_ids[first:])
        drafting.num_remembered = sequence.num_tokens

    def _append_drafts(self, sequence: Sequence, drafts: list[int], kind: DraftKind) -> None:
        """Append drafts for verification, as far as the grammar allows them."""
        drafts = drafts[: max(self._room(sequence), 0)]
        states: list[GrammarState | None] = [None] * (len(drafts) + 1)
        if drafts and sequence.grammar is not None:
            drafts, states = _allowed(sequence.grammar, drafts)
        if not drafts:
            return
        self._drafting[sequence].kind = kind
        first = sequence.num_tokens
        sequence.append_drafts(drafts, [])
        sequence.verifiers = [
            (first - 1 + place, self._verifier(sequence, first + place, state)) for place, state in enumerate(states)
        ]

    def _verifier(self, sequence: Sequence, num_tokens: int, grammar: GrammarState | None) -> Sequence:
        """Return a verifier of the first `num_tokens` tokens. It copies them: a step has a few dozen verifiers only."""
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
