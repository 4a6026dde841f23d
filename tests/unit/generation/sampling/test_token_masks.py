"""Applying token masks to scores, and computing them beside a forward pass."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from factories.engine.fake_engine import run
from factories.engine.grammars import EOS, compiled, regex, text_tokenizer
from factories.engine.modes import ROOMY, load_service, new_engine, prepare, to_message
from factories.models.run_kernels import new_sampler
from penstock.common.checkpoint import demo_folder
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.grammar.matcher_state import MaskWorkers, MatcherState
from penstock.generation.runner.grammar_masks import GrammarMasks
from penstock.generation.sampling.token_masks import TokenMasks

INF = float("inf")


def sequence(seq_id: int, grammar: MatcherState | None = None, **options: Any) -> Sequence:
    return Sequence(seq_id, 0, SamplingParams(max_new_tokens=4, **options), seq_id, [1, 2], 2, grammar=grammar)


def masks(allowed: dict[int, Seq[int]], vocab_size: int, *, spare_words: int = 0) -> TokenMasks:
    words = np.zeros((len(allowed), -(-vocab_size // 32) + spare_words), dtype=np.uint32)
    for row, ids in enumerate(allowed.values()):
        for token_id in ids:
            words[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMasks(words.view(np.int32), {seq_id: row for row, seq_id in enumerate(allowed)})


@pytest.mark.parametrize("vocab_size", [8, 31, 32, 33, 100])
@pytest.mark.parametrize("spare_words", [0, 1])
def test_only_what_is_allowed_keeps_its_score(vocab_size: int, spare_words: int) -> None:
    scores = torch.randn(3, vocab_size)
    before = scores.clone()
    picked = {7: [0, vocab_size - 1], 9: list(range(0, vocab_size, 3))}
    masks(picked, vocab_size, spare_words=spare_words).apply(scores, [sequence(9), sequence(1), sequence(7)])
    for row, seq_id in enumerate((9, 1, 7)):
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[picked.get(seq_id, list(range(vocab_size)))] = True
        assert torch.equal(scores[row][allowed], before[row][allowed])
        assert (scores[row][~allowed] == -INF).all()


def test_where_nothing_finite_is_left_the_grammar_wins() -> None:
    scores = torch.zeros(2, 40)
    scores[:, 5] = -INF
    masks({0: [5], 1: [5, 6]}, 40).apply(scores, [sequence(0), sequence(1)])
    assert scores[0, 5] == 0.0
    assert scores[0].isneginf().sum() == 39
    assert scores[1, 6] == 0.0
    assert scores[1].isneginf().sum() == 39


def test_a_stuck_beam_ends_unless_every_beam_of_its_search_is_stuck() -> None:
    params = [SamplingParams(max_new_tokens=4, mode=BeamOptions(2)) for _ in range(2)]
    beams = [Sequence(row, 0, params[row // 2], 0, [1, 2], 2) for row in range(4)]
    scores = torch.zeros(4, 40)
    scores[:, 5] = -INF
    masks({0: [5], 1: [5, 6], 2: [5], 3: [5]}, 40).apply(scores, beams)
    assert scores[0].isneginf().all()
    assert [scores[row].argmax().item() for row in (1, 2, 3)] == [6, 5, 5]
    assert [scores[row].isneginf().sum().item() for row in (1, 2, 3)] == [39] * 3


@pytest.mark.parametrize("config", [ROOMY, dataclasses.replace(ROOMY, max_batch_tokens=64, num_blocks=24)])
def test_a_beam_that_obeys_constraint_and_options_comes_before_one_that_does_not(config: EngineConfig) -> None:
    loaded = load_service(demo_folder())
    tokens = text_tokenizer().get_vocab(with_added_tokens=False)
    # Nothing that spells the last letter of the likelier choice.
    barred = [[token_id] for token, token_id in tokens.items() if "x" in token]
    options = {"max_new_tokens": 12, "num_beams": 4, "bad_words_ids": barred}
    message = to_message([5, 6, 7], {**options, "constraint": {"choice": {"values": ["a b c d e f g x", "Zq", "QQ"]}}})
    item = prepare(loaded, message)
    answer = run(new_engine(loaded, config), item)[item.request_id]
    assert "x" not in text_tokenizer().decode(answer.ids[0])


def test_greedy_and_sampled_rows_draw_what_is_allowed_and_others_are_left_alone() -> None:
    sampler = new_sampler()
    rows = [sequence(0), sequence(1, do_sample=True, top_k=5), sequence(2, do_sample=True, temperature=3.0)]
    logits = torch.randn(3, 50)
    free = sampler.sample(logits.clone(), rows)
    masked = sampler.sample(logits.clone(), rows, masks({1: [3], 0: [11, 12]}, 50))
    assert masked[0].token_id == 11 + int(logits[0, 12] > logits[0, 11])
    assert masked[1].token_id == 3
    assert masked[2] == free[2]


def test_processed_scores_show_the_mask() -> None:
    sampler = new_sampler()
    scores = sampler.processed_scores(torch.zeros(1, 20), [sequence(0)], masks({0: [4]}, 20))
    assert scores[0].tolist() == [0.0 if token_id == 4 else -INF for token_id in range(20)]


class Filler:
    """Filler that writes the number of a state, and waits until it is let go."""

    num_words = 3

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self.calls: list[int] = []

    def fill(self, states: Seq[Any], words_RW: np.ndarray[Any, Any]) -> None:
        self.may_finish.wait(60.0)
        self.calls.append(len(states))
        for state, row in zip(states, words_RW, strict=True):
            row[:] = state


def test_masks_are_computed_on_another_thread_and_waited_for() -> None:
    filler = Filler()
    source = GrammarMasks(filler)
    pending = source.start([sequence(number, number) for number in (3, 5)])  # type: ignore[arg-type]
    assert filler.calls == []
    filler.may_finish.set()
    taken = pending.take()
    assert {seq_id: taken.words_RW[row].tolist() for seq_id, row in taken.row_of.items()} == {3: [3] * 3, 5: [5] * 3}


def test_room_for_masks_grows_and_is_used_again() -> None:
    filler = Filler()
    filler.may_finish.set()
    source = GrammarMasks(filler)
    small = source.start([sequence(number, number) for number in range(1, 3)]).take()  # type: ignore[arg-type]
    again = source.start([sequence(number, number) for number in range(1, 9)]).take()  # type: ignore[arg-type]
    large = source.start([sequence(number, number) for number in range(1, 41)]).take()  # type: ignore[arg-type]
    assert np.shares_memory(small.words_RW, again.words_RW)
    assert large.words_RW.shape == (40, 3)
    assert large.words_RW[:, 0].tolist() == list(range(1, 41))


def test_what_the_filler_raises_is_raised_where_the_masks_are_taken() -> None:
    class Broken(Filler):
        def fill(self, states: Seq[Any], words_RW: np.ndarray[Any, Any]) -> None:
            raise ValueError("no masks")

    pending = GrammarMasks(Broken()).start([sequence(0, compiled(regex("a")).start(EOS))])
    with pytest.raises(ValueError, match="no masks"):
        pending.take()


def test_a_grammar_draws_its_only_text_whatever_the_model_says() -> None:
    state = compiled(regex("hello world")).start(EOS)
    one, sampler = sequence(0, state), new_sampler()
    source = GrammarMasks(MaskWorkers(4096, 1))
    while not state.is_done:
        pending = source.start([one])
        logits = torch.randn(1, 4096)
        one.append(sampler.sample(logits, [one], pending.take())[0].token_id)
    assert text_tokenizer().decode(one.output_token_ids) == "hello world"
