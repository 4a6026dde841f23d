"""Contrastive search (Su et al. 2022), as in transformers 4.41.1, the last release that Penstock follows for it.

The k most likely tokens are computed, one row each, in forks of the sequence. The candidate with the best
(1 - alpha) * probability - alpha * (largest cosine similarity of its hidden state with those before it) is the next
token, and its own most likely tokens are the next candidates. So every engine step brings a token, except the step
that computes the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import DecodingMode, GenerationMode, Scope
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
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy, ModeSpec, no_token_left
from penstock.generation.engine.stopping import Stop

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.step import SampledToken
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.stopping import StopCriteria


@dataclass(frozen=True, slots=True)
class ContrastiveOptions(DecodingMode):
    """Options of contrastive search (Su et al. 2022; transformers 4.41): `top_k` candidates a step."""

    penalty_alpha: float
    top_k: int

    # Candidates are compared with the hidden state of every token.
    first_needed_row = 0
    keeps_hidden_states = True
    may_be_guided = False
    uses = frozenset({Scope.CONTRASTIVE})
    no_drafts = "drafts need greedy search or sampling"

    @property
    @override
    def sizes(self) -> Mapping[str, float]:
        return {"penalty_alpha": self.penalty_alpha, "top_k": self.top_k}

    @override
    def generation_mode(self, *, do_sample: bool) -> GenerationMode:
        return GenerationMode.CONTRASTIVE_SEARCH


class ContrastiveSearch(DecodingStrategy):
    """Strategy that alternates between one sequence, which draws candidates, and the candidates; one of them goes on.

    Preemption goes back to the one sequence, which draws the same candidates again.
    """

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        options = _options(request.params)
        self._request = request
        self._criteria = criteria
        self._next_seq_id = next_seq_id
        self._alpha = options.penalty_alpha
        self._top_k = options.top_k
        self._text = criteria.new_state()
        self._cumulative_logprob = None if request.params.top_logprobs is None else 0.0
        # Holds the final tokens; it is not in the engine while its candidates are computed.
        self._parent = Sequence(
            seq_id=next_seq_id(),
            index=0,
            params=request.params,
            seed=request.params.seed,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            draw=self._spec(similarity=False),
            grammar=None
            if request.grammar is None
            else request.grammar.start(request.params.eos_token_ids, criteria.max_output_tokens),
            embeds=request.embeds,
        )
        # Draw of the parent: the candidates' probabilities, logprobs and tensors.
        self._drawn: SampledToken | None = None
        # The candidates, best first, and their draws.
        self._candidates: list[Sequence] = []
        self._answers: dict[Sequence, SampledToken] = {}
        self._ended = False

    @property
    def width(self) -> int:
        return 0 if self._ended else self._top_k

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Raises InvalidArgument when resumed ids go on after their own end."""
        stop = None
        for token_id in self._request.resumed_token_ids[0] if self._request.resumed_token_ids else ():
            if stop is not None:
                raise InvalidArgument("resumed_token_ids", "a sequence goes on after its end")
            try:
                self._parent.append(token_id)
            except GrammarError:
                raise InvalidArgument("resumed_token_ids", "do not obey the constraint") from None
            self._cumulative_logprob = None
            stop = self._criteria.check(self._parent, self._text)
        if stop is None:
            return [self._parent], []
        self._ended = True
        return [], [Emission(0, (), (), self._finish(stop))]

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        if not self._candidates:
            decision = Decision(dropped=[self._parent])
            self._branch(sampled[self._parent], decision)
            return decision
        self._answers.update(sampled)
        if len(self._answers) < len(self._candidates):
            return Decision()
        return self._choose()

    def restarted(self) -> list[Sequence]:
        self._candidates = []
        self._answers = {}
        self._parent.draw = self._spec(similarity=False)
        return [self._parent]

    def end(self, reason: FinishReason) -> list[Emission]:
        return [Emission(0, (), (), self._finish(Stop(reason)))]

    def _choose(self) -> Decision:
        """Make one candidate the next token."""
        assert self._drawn is not None, "candidates were drawn"
        decision = Decision(dropped=self._candidates)
        best = self._best()
        self._parent, answer = self._candidates[best], self._answers[self._candidates[best]]
        logprobs = self._logprobs(self._drawn, best)
        tensors = () if self._drawn.tensors is None else (self._drawn.tensors,)
        stop = self._criteria.check(self._parent, self._text)
        token_ids = (self._parent.token_ids[-1],)
        finish = None if stop is None else self._finish(stop)
        decision.emissions.append(Emission(0, token_ids, logprobs, finish, tensors))
        if stop is None:
            self._branch(answer, decision)
        else:
            self._ended = True
        return decision

    def _branch(self, drawn: SampledToken, decision: Decision) -> None:
        """Fork a sequence per candidate from the parent. Raises InvalidArgument when no token is possible."""
        assert drawn.candidates is not None, "the draw is one of candidates"
        ids = drawn.candidates.token_ids[: self._top_k]
        if not ids:
            raise no_token_left()
        parent = self._parent
        self._drawn = drawn
        self._answers = {}
        self._candidates = [self._candidate(token_id) for token_id in ids]
        decision.forks += [(parent, candidate) for candidate in self._candidates]

    def _candidate(self, token_id: int) -> Sequence:
        parent = self._parent
        candidate = Sequence(
            seq_id=self._next_seq_id(),
            index=0,
            params=parent.params,
            seed=parent.seed,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            draw=self._spec(similarity=True),
            grammar=None if parent.grammar is None else parent.grammar.copy(),
            embeds=parent.embeds,
        )
        candidate.append(token_id)
        return candidate

    def _spec(self, *, similarity: bool) -> DrawSpec:
        return DrawSpec(DrawKind.CANDIDATES, num_candidates=self._top_k, similarity=similarity)

    def _best(self) -> int:
        """Return the place of the candidate with the highest score, the first of equals."""
        drawn = self._drawn.candidates if self._drawn is not None else None
        assert drawn is not None, "candidates were drawn"
        scores = []
        for candidate, score in zip(self._candidates, drawn.scores, strict=False):
            similarity = self._answers[candidate].similarity
            assert similarity is not None, "asked for by the draw"
            probability = math.exp(score - drawn.log_total)
            scores.append((1.0 - self._alpha) * probability - self._alpha * similarity)
        return scores.index(max(scores))

    def _logprobs(self, drawn: SampledToken, place: int) -> tuple[PositionLogprobs, ...]:
        """Return the logprobs of the chosen candidate when the request wants them, else none."""
        candidates = drawn.candidates
        if self._request.params.top_logprobs is None or candidates is None:
            return ()
        logprob = at_most_0(candidates.scores[place] - candidates.log_total)
        if self._cumulative_logprob is not None:
            self._cumulative_logprob += logprob
        chosen = Logprob(candidates.token_ids[place], logprob, candidates.ranks[place])
        return (PositionLogprobs(chosen, () if drawn.logprobs is None else drawn.logprobs.top),)

    def _finish(self, stop: Stop) -> SequenceFinish:
        return SequenceFinish(
            index=0,
            reason=stop.reason,
            num_tokens=self._parent.num_output_tokens,
            stop_token_id=stop.token_id,
            stop_string=stop.string,
            cumulative_logprob=self._cumulative_logprob,
        )


def _options(params: SamplingParams) -> ContrastiveOptions:
    assert isinstance(params.mode, ContrastiveOptions), "the registry chooses by the options"
    return params.mode


def _blocks_needed(config: EngineConfig, params: SamplingParams, prompt_tokens: int, output_tokens: int) -> int:
    """Candidates share all but the block of their one token; the last token is computed, too."""
    candidates = _options(params).top_k - 1
    return config.blocks_needed(prompt_tokens, output_tokens + 1, 1) + config.bundle_blocks * candidates


CONTRASTIVE = ModeSpec(
    ContrastiveOptions, ContrastiveSearch, lambda params: _options(params).top_k, _blocks_needed, "top_k"
)
