"""Beam search against transformers' generate(): the same sequences in the same order with the same scores."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, engine_config, request, run
from factories.engine.model_engine import answer_alone, check_company, model_engine
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.core.decoding_mode import EarlyStopping
from penstock.generation.core.request import FinishReason, Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel

PROMPT = [17, 203, 44, 9, 118, 60, 7]
# Not an end in any of these tests.
PAD = 319
_TIGHT = engine_config(num_blocks=44, block_size=3, max_batch_tokens=16, reserve_share=0.0)
EARLY = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module", params=["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=11)


def generate(reference: PreTrainedModel, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """Results of transformers: padded sequences without their prompts, and their scores."""
    found = reference.generate(
        torch.tensor([prompt]),
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()


def check(answer: Answer, expected: tuple[list[list[int]], list[float]]) -> None:
    assert answer.finished is not None
    for ids, score, finish in zip(*expected, answer.finished.sequences, strict=True):
        ours = answer.ids[finish.index]
        assert ours + [PAD] * (len(ids) - len(ours)) == ids
        assert finish.num_tokens == len(ours)
        assert finish.cumulative_logprob == pytest.approx(score, rel=1e-6, abs=1e-4)


@cache
def met_ids(reference: PreTrainedModel) -> list[int]:
    ids = generate(reference, PROMPT, num_beams=4, num_return_sequences=4, max_new_tokens=12, eos_token_id=None)[0]
    return list(dict.fromkeys(itertools.chain.from_iterable(zip(*ids, strict=True))))


def usual_ids(reference: PreTrainedModel, count: int) -> list[int]:
    """Ids that a search meets: from its own answer without ends."""
    return met_ids(reference)[2 : 2 + 3 * count : 3]


SIZES = ((2, 1, 12), (4, 3, 20), (5, 5, 9), (4, 4, 1), (3, 2, 40), (6, 6, 16), (2, 2, 30))
SETTINGS = list(itertools.product([0, 1, 3], EARLY, [-1.0, 0.0, 1.0, 2.0]))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("turn", range(len(SETTINGS)))
def test_sequences_and_scores_are_those_of_generate(model: CausalLM, reference: PreTrainedModel, turn: int) -> None:
    num_eos, early, penalty = SETTINGS[turn]
    eos = usual_ids(reference, num_eos)
    for num_beams, count, max_new_tokens in (SIZES[turn % len(SIZES)], SIZES[(turn + 3) % len(SIZES)]):
        expected = generate(
            reference,
            PROMPT,
            num_beams=num_beams,
            num_return_sequences=count,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos or None,
            early_stopping=EARLY[early],
            length_penalty=penalty,
            repetition_penalty=1.2,
        )
        item = request(
            PROMPT,
            max_new_tokens=max_new_tokens,
            num_return_sequences=count,
            eos_token_ids=tuple(eos),
            repetition_penalty=1.2,
            mode=BeamOptions(num_beams, early_stopping=early, length_penalty=penalty),
        )
        check(answer_alone(model, item), expected)


def test_more_end_ids_than_beams_leave_enough_to_go_on(model: CausalLM, reference: PreTrainedModel) -> None:
    eos = [*usual_ids(reference, 6), *range(300, 310)]
    expected = generate(reference, PROMPT, num_beams=3, num_return_sequences=3, max_new_tokens=15, eos_token_id=eos)
    item = request(
        PROMPT, max_new_tokens=15, num_return_sequences=3, eos_token_ids=tuple(eos), mode=BeamOptions(num_beams=3)
    )
    answer = answer_alone(model, item)
    check(answer, expected)
    assert answer.finished is not None
    assert {one.reason for one in answer.finished.sequences} == {FinishReason.STOP_EOS}


def test_min_new_tokens_keeps_beams_from_ending(model: CausalLM, reference: PreTrainedModel) -> None:
    eos = usual_ids(reference, 4)
    expected = generate(
        reference, PROMPT, num_beams=4, num_return_sequences=4, max_new_tokens=15, min_new_tokens=9, eos_token_id=eos
    )
    item = request(
        PROMPT,
        max_new_tokens=15,
        min_new_tokens=9,
        num_return_sequences=4,
        eos_token_ids=tuple(eos),
        mode=BeamOptions(num_beams=4),
    )
    check(answer_alone(model, item), expected)


def test_beam_sampling_draws_what_generate_draws(model: CausalLM, reference: PreTrainedModel) -> None:
    """Their draws are not ours: the best sequences of many runs are compared as distributions."""
    options: dict[str, Any] = {"max_new_tokens": 2, "num_return_sequences": 2, "temperature": 2.0, "top_k": 6}
    runs = 400
    engine = model_engine(model)
    items = [request(PROMPT, do_sample=True, seed=seed, mode=BeamOptions(2), **options) for seed in range(runs)]
    ours = Counter(tuple(map(tuple, answer.ids.values())) for answer in run(engine, *items).values())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        # One row per run: transformers draws for each alone.
        found = reference.generate(
            torch.tensor([PROMPT] * runs), do_sample=True, num_beams=2, pad_token_id=PAD, eos_token_id=None, **options
        )
    pairs = found[:, len(PROMPT) :].view(runs, 2, 2).tolist()
    theirs = Counter(tuple(map(tuple, pair)) for pair in pairs)
    assert chi_square_p(ours, theirs) > 0.001


def chi_square_p(one: Counter[Any], other: Counter[Any]) -> float:
    """p-value of both being drawn from one distribution; what is seen fewer than 10 times is taken together."""
    rare = [key for key in one | other if one[key] + other[key] < 10]
    usual = [key for key in one | other if key not in rare]
    rows = [(one[key], other[key]) for key in usual]
    rows.append((sum(one[key] for key in rare), sum(other[key] for key in rare)))
    rows = [row for row in rows if sum(row)]
    assert len(rows) > 5
    statistic = sum((a - b) ** 2 / (a + b) for a, b in rows)
    # Equal totals: the statistic has one degree of freedom less than there are rows.
    return float(1.0 - torch.special.gammainc(torch.tensor((len(rows) - 1) / 2.0), torch.tensor(statistic / 2.0)))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(engine_config(num_blocks=200, max_batch_tokens=64), id="roomy", marks=pytest.mark.slow),
        pytest.param(_TIGHT, id="preempted"),
    ],
)
def test_every_beam_mode_gives_the_same_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    def crowd() -> list[Request]:
        phrases = (((40, 41),), ((50,), (51, 52)))
        modes: list[dict[str, Any]] = [
            {"mode": BeamOptions(4)},
            {"mode": BeamOptions(3), "do_sample": True, "temperature": 1.5, "top_k": 20},
            {"mode": BeamOptions(4, 2, 0.7)},
            {"mode": BeamOptions(4, constraints=phrases)},
            {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9},
        ]
        penalties: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}]
        return [
            request([*PROMPT, number], request_id=f"{number}", max_new_tokens=14, seed=number, eos_token_ids=(1, 2, 3),
                    **modes[number % 5], **penalties[number % 2])
            for number in range(10)
        ]  # fmt: skip

    assert (check_company(model, crowd, config).stats.preemptions > 0) == (config is _TIGHT)


def test_whether_any_beam_can_go_on_is_decided_by_all_of_them_even_after_a_preemption(model: CausalLM) -> None:
    """A beam that ends with 10 is dead while another lives: what is allowed must not come in spite of that."""

    def item() -> Request:
        return request(
            PROMPT,
            max_new_tokens=8,
            allowed_token_ids=frozenset({10, 11, 12}),
            bad_words_ids=((10, 10), (10, 11), (10, 12)),
            sequence_bias={(10,): 4.0},
            mode=BeamOptions(6),
            num_return_sequences=3,
        )

    alone = answer_alone(model, item()).ids
    assert not any(10 in ids[:-1] for ids in alone.values())
    # Few tokens a step: beams that are computed again do not all get there at once.
    config = engine_config(num_blocks=20, max_batch_tokens=9, max_running_sequences=8, prefix_cache=False)
    preemptions = 0
    for length in range(20, 48, 3):
        engine = model_engine(model, config)
        first, second = request([3] * length, max_new_tokens=30), item()
        assert run(engine, first, second)[second.request_id].ids == alone
        preemptions += engine.stats.preemptions
    assert preemptions


# Beams that have used up the only tokens that may be drawn, each once.
_FEW = (40, 41, 42)
_USED_UP: dict[str, Any] = {
    "suppress_tokens": tuple(set(range(320)) - set(_FEW)),
    "no_repeat_ngram_size": 1,
    "max_new_tokens": 10,
}


@pytest.mark.parametrize(
    "mode",
    [
        BeamOptions(2),
        BeamOptions(4, num_beam_groups=2, diversity_penalty=0.5),
        BeamOptions(2, constraints=(((40,),),)),
        BeamOptions(2, constraints=(((50, 51),),)),
    ],
    ids=["beams", "groups", "word that came", "word that never came"],
)
def test_beams_without_a_token_left_ran_out_of_room(model: CausalLM, mode: BeamOptions) -> None:
    answer = answer_alone(model, request(PROMPT, mode=mode, **_USED_UP))
    assert sorted(answer.ids[0]) == list(_FEW)
    assert answer.finished is not None
    assert {finish.reason for finish in answer.finished.sequences} == {FinishReason.LENGTH}


def test_beams_at_the_end_of_their_trie_are_done(model: CausalLM) -> None:
    trie = ((40, 41), (40, 41, 42))
    answer = answer_alone(model, request(PROMPT, mode=BeamOptions(2), allowed_token_trie=trie, max_new_tokens=10))
    assert answer.ids[0] == [40, 41, 42]
    assert answer.finished is not None
    assert {finish.reason for finish in answer.finished.sequences} == {FinishReason.CONSTRAINT_DONE}
