"""The strategy seam carries more than sampling: a plain beam search, written here, equals one without an engine.

It forks in every step, drops beams, holds draws back until all beams have theirs, and emits only at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from factories.engine.fake_engine import engine_config, make_engine, ranking, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.request import Emission, FinishReason, Logprob, Request, SequenceFinish
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import SampledToken
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy
from penstock.generation.engine.stopping import StopCriteria

VOCABULARY = 50
Candidate = tuple[float, Sequence, int]


class Beams(DecodingStrategy):
    """`width` beams over the candidates that `top_logprobs` brings; no length penalty, no end-of-sequence."""

    def __init__(self, request: Request, criteria: StopCriteria, next_seq_id: Callable[[], int]) -> None:
        self._request = request
        self._next_seq_id = next_seq_id
        self._scores: dict[Sequence, float] = {}
        self._drawn: dict[Sequence, tuple[Logprob, ...]] = {}

    @property
    def width(self) -> int:
        return 3

    def start(self) -> tuple[list[Sequence], list[Emission]]:
        root = self._sequence(self._request.prompt_token_ids)
        self._scores[root] = 0.0
        return [root], []

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        for sequence, token in sampled.items():
            assert token.logprobs is not None
            self._drawn[sequence] = token.logprobs.top
        if self._drawn.keys() < self._scores.keys():
            return Decision()
        best = self._best()
        self._drawn.clear()
        decision = self._branch(best)
        if next(iter(self._scores)).num_output_tokens == self._request.params.max_new_tokens:
            decision.emissions = self.end(FinishReason.LENGTH)
            # Forks that end in the step that made them are carried out and then dropped.
            decision.dropped += list(self._scores)
        return decision

    def end(self, reason: FinishReason) -> list[Emission]:
        beam, score = max(self._scores.items(), key=lambda entry: entry[1])
        finish = SequenceFinish(0, reason, beam.num_output_tokens, cumulative_logprob=score)
        return [Emission(0, tuple(beam.output_token_ids), (), finish)]

    def _best(self) -> list[Candidate]:
        candidates = [
            (self._scores[sequence] + entry.logprob, sequence, entry.token_id)
            for sequence, top in self._drawn.items()
            for entry in top
        ]
        return sorted(candidates, key=lambda one: (-one[0], one[1].token_ids, one[2]))[: self.width]

    def _branch(self, best: list[Candidate]) -> Decision:
        decision = Decision(dropped=[beam for beam in self._scores if all(beam is not parent for _, parent, _ in best)])
        parents = {parent: list(parent.token_ids) for _, parent, _ in best}
        scores: dict[Sequence, float] = {}
        for score, parent, token_id in best:
            child = parent
            if parent in scores:
                child = self._sequence(parents[parent])
                decision.forks.append((parent, child))
            child.token_ids.append(token_id)
            scores[child] = score
        self._scores = scores
        return decision

    def _sequence(self, token_ids: list[int]) -> Sequence:
        prompt = self._request.prompt_token_ids
        return Sequence(self._next_seq_id(), 0, self._request.params, 0, list(token_ids), len(prompt))


def beam_search(prompt: list[int], steps: int, width: int, top: int) -> list[int]:
    """The same search over the runner's ranking, with no engine."""
    beams = [(0.0, prompt)]
    for _ in range(steps):
        grown = [
            (score + logprob, ids, token)
            for score, ids in beams
            for token, logprob in ranking(0, ids, VOCABULARY)[:top]
        ]
        grown.sort(key=lambda one: (-one[0], one[1], one[2]))
        beams = [(score, [*ids, token]) for score, ids, token in grown[:width]]
    return max(beams, key=lambda beam: beam[0])[1][len(prompt) :]


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
    steps=st.integers(1, 8),
    num_blocks=st.integers(24, 40),
    block_size=st.integers(1, 5),
    max_batch_tokens=st.integers(9, 20),
)
def test_beam_search_over_forks_gives_what_it_gives_without_an_engine(
    prompts: list[list[int]], steps: int, num_blocks: int, block_size: int, max_batch_tokens: int
) -> None:
    config = engine_config(
        num_blocks=3 * num_blocks, block_size=block_size, max_batch_tokens=max_batch_tokens, max_running_sequences=9
    )
    engine, _ = make_engine(config, strategy=Beams)
    items = [request(prompt, max_new_tokens=steps, top_logprobs=6) for prompt in prompts]
    answers = run(engine, *items)
    for item in items:
        answer = answers[item.request_id]
        assert answer.ids[0] == beam_search(item.prompt_token_ids, steps, width=3, top=6)
        assert answer.started is not None
    assert engine.load().kv_blocks_used == 0


def test_preempted_beams_share_their_prompt_again_and_end_the_same() -> None:
    engine, _ = make_engine(engine_config(num_blocks=24, reserve_share=0.0), strategy=Beams)
    items = [request([number] * 9, max_new_tokens=10, top_logprobs=6) for number in range(4)]
    answers = run(engine, *items)
    assert engine.stats.preemptions > 0
    for item in items:
        assert answers[item.request_id].ids[0] == beam_search(item.prompt_token_ids, 10, width=3, top=6)


def test_beams_compute_their_prompt_once_and_hold_its_blocks_once() -> None:
    engine, runner = make_engine(strategy=Beams)
    run(engine, request([1] * 16, max_new_tokens=5, top_logprobs=6))
    assert [step.num_tokens for step in runner.steps] == [16, 3, 3, 3, 3]
    assert engine.stats.computed_tokens == 28
