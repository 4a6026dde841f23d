"""Scores, logits, hidden states and attentions of output positions are those of transformers' generate()."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories.engine.fake_engine import Answer, engine_config, request, run
from factories.engine.model_engine import load_tiny, model_engine
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from penstock.generation.core.decoding_mode import GuidanceOptions, TensorOutputs
from penstock.generation.core.request import Request
from penstock.generation.core.tensors import StepTensors, TensorData
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.models.decoder import CausalLM
from penstock.generation.startup.tune_engine import window_of
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Of the four models two have each test in the ordinary run, chosen test by test.
pytestmark = pytest.mark.thinned(2)
TOLERANCE, ATTENTION_TOLERANCE = 1e-4, 1e-5
NEW_TOKENS = 12
EVERYTHING = TensorOutputs(scores=True, logits=True, hidden_states=True, attentions=True)
# Several chunks a prompt, and blocks that no length is a multiple of for long.
TIGHT = engine_config(block_size=4, num_blocks=200, max_batch_tokens=20, max_running_sequences=12)
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-gqa-window": ("qwen2", WINDOW),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "qwen3-mqa": ("qwen3", {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "deepseek-latent": ("deepseek_v3", {"num_hidden_layers": 3}),
}


@dataclass
class Pair:
    """One checkpoint, here and in transformers."""

    ours: CausalLM
    theirs: PreTrainedModel


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, config = MODELS[request.param]
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("model"), family, seed=31, **config)
    return Pair(load_tiny(folder), reference_model(folder))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def array(data: TensorData | None) -> torch.Tensor:
    assert data is not None
    dtype = {"float32": "<f4", "int64": "<i8"}[data.dtype]
    return torch.from_numpy(np.frombuffer(data.data, dtype=dtype).reshape(data.shape).copy())


def steps_of(answer: Answer, index: int = 0) -> list[StepTensors | None]:
    """An entry per token of the sequence, in order."""
    found: list[StepTensors | None] = []
    for delta in answer.deltas:
        if delta.index == index:
            assert len(delta.tensors) in (0, len(delta.token_ids))
            found += delta.tensors or (None,) * len(delta.token_ids)
    return found


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs.float(), atol=tolerance, rtol=0)


def check_row(ours: StepTensors, hidden: Sequence[torch.Tensor], attentions: Sequence[torch.Tensor]) -> None:
    """`hidden`: (hidden) of each layer; `attentions`: (heads, keys) of each layer, keys the newest of the context."""
    close(array(ours.hidden_states), torch.stack(list(hidden)))
    weights = array(ours.attentions)
    assert weights.shape[0] == len(attentions)
    for layer, theirs in zip(weights, attentions, strict=True):
        seen = min(theirs.shape[-1], layer.shape[-1])
        close(layer[:, layer.shape[-1] - seen :], theirs[:, theirs.shape[-1] - seen :], ATTENTION_TOLERANCE)
        assert not layer[:, : layer.shape[-1] - seen].any()
        close(layer.sum(-1), torch.ones(len(layer)))


@torch.inference_mode()
def check_against_generate(pair: Pair, ids: list[int], answer: Answer, **options: Any) -> None:
    theirs: Any = pair.theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
        **options,
    )
    assert answer.ids[0] == theirs.sequences[0, len(ids) :].tolist()
    steps = steps_of(answer)
    assert len(steps) == NEW_TOKENS
    for step, ours in enumerate(steps):
        assert ours is not None
        close(array(ours.scores), theirs.scores[step][0])
        close(array(ours.logits), theirs.logits[step][0])
        hidden = [state[0, -1] for state in theirs.hidden_states[step]]
        check_row(ours, hidden, [weights[0, :, -1] for weights in theirs.attentions[step]])
        assert array(ours.attentions).shape[-1] == len(ids) + step


def test_greedy_tensors_are_those_of_generate_in_chunks_and_a_mixed_batch(pair: Pair) -> None:
    prompts = [prompt(length) for length in (1, 7, 30, 55)]
    asking = [request(ids, max_new_tokens=NEW_TOKENS, tensors=EVERYTHING) for ids in prompts]
    others = [request(prompt(9, seed), max_new_tokens=20, do_sample=seed % 2 > 0, seed=seed) for seed in range(4)]
    answers = run(model_engine(pair.ours, TIGHT), *(one for two in zip(asking, others, strict=True) for one in two))
    for ids, item in zip(prompts, asking, strict=True):
        check_against_generate(pair, ids, answers[item.request_id])
    assert all(not any(steps_of(answers[item.request_id])) for item in others)


def test_processed_scores_show_what_the_processors_did_and_logits_do_not(pair: Pair) -> None:
    ids = prompt(20)
    options: dict[str, Any] = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    item = request(ids, max_new_tokens=NEW_TOKENS, tensors=EVERYTHING, **options)
    check_against_generate(pair, ids, run(model_engine(pair.ours), item)[item.request_id], **options)


@torch.inference_mode()
def check_rows(pair: Pair, ids: list[int], output: list[int], steps: list[StepTensors | None]) -> torch.Tensor:
    """Hidden states and attentions of the rows of given ids; their (steps, vocabulary) logits."""
    theirs: Any = pair.theirs(torch.tensor([ids + output]), output_hidden_states=True, output_attentions=True)
    for step, ours in enumerate(steps):
        assert ours is not None
        row = len(ids) - 1 + step
        weights = [layer[0, :, row, : row + 1] for layer in theirs.attentions]
        check_row(ours, [state[0, row] for state in theirs.hidden_states], weights)
        close(array(ours.logits), theirs.logits[0, row])
    return theirs.logits[0, len(ids) - 1 : -1]


def test_sampled_scores_are_what_the_warpers_leave_for_every_returned_sequence(pair: Pair) -> None:
    ids = prompt(26)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.9)])
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9, "seed": 4}
    item = request(ids, max_new_tokens=NEW_TOKENS, num_return_sequences=3, tensors=EVERYTHING, **options)
    answer = run(model_engine(pair.ours, TIGHT), item)[item.request_id]
    for index, output in answer.ids.items():
        steps = steps_of(answer, index)
        logits = check_rows(pair, ids, output, steps)
        for ours, row, token in zip(steps, logits, output, strict=True):
            assert ours is not None
            scores = array(ours.scores)
            close(scores, warpers(torch.tensor([ids]), row[None])[0])
            assert scores[token] > -torch.inf


def repeating() -> list[int]:
    return prompt(6) * 5


@pytest.mark.parametrize("do_sample", [False, True])
def test_assisted_answers_carry_the_tensors_of_the_unassisted(pair: Pair, do_sample: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "tensors": EVERYTHING, "do_sample": do_sample, "seed": 7}
    plain = request(repeating(), **options)
    assisted = request(
        repeating(), mode=AssistanceOptions(prompt_lookup_num_tokens=3, max_matching_ngram_size=2), **options
    )
    one, other = (run(model_engine(pair.ours), item)[item.request_id] for item in (plain, assisted))
    assert one.ids == other.ids
    for left, right in zip(steps_of(one), steps_of(other), strict=True):
        assert left is not None
        assert right is not None
        for name in ("scores", "logits", "hidden_states", "attentions"):
            close(array(getattr(left, name)), array(getattr(right, name)))


def test_contrastive_answers_carry_the_tensors_of_the_row_the_candidates_came_from(pair: Pair) -> None:
    ids = prompt(15)
    item = request(ids, max_new_tokens=NEW_TOKENS, mode=ContrastiveOptions(0.6, 4), tensors=EVERYTHING)
    item.first_needed_row = 0
    answer = run(model_engine(pair.ours), item)[item.request_id]
    steps = steps_of(answer)
    assert len(steps) == NEW_TOKENS
    check_rows(pair, ids, answer.ids[0], steps)


def test_guided_scores_are_guided_and_logits_are_not(pair: Pair) -> None:
    ids, negative = prompt(18), prompt(5, seed=9)
    item = request(ids, max_new_tokens=NEW_TOKENS, guidance=GuidanceOptions(1.6, tuple(negative)), tensors=EVERYTHING)
    answer = run(model_engine(pair.ours, TIGHT), item)[item.request_id]
    options = {"guidance_scale": 1.6, "negative_prompt_ids": torch.tensor([negative])}
    check_against_generate(pair, ids, answer, **options)


def test_early_exits_and_hidden_states_come_from_one_forward_pass(pair: Pair) -> None:
    ids = prompt(18)
    asked = request(ids, max_new_tokens=NEW_TOKENS, mode=DolaOptions((0, 1)), tensors=EVERYTHING)
    plain = request(ids, max_new_tokens=NEW_TOKENS, mode=DolaOptions((0, 1)))
    answers = run(model_engine(pair.ours), asked, plain)
    answer = answers[asked.request_id]
    assert answer.ids == answers[plain.request_id].ids
    steps = steps_of(answer)
    logits = check_rows(pair, ids, answer.ids[0], steps)
    for ours, row, token in zip(steps, logits, answer.ids[0], strict=True):
        assert ours is not None
        scores = array(ours.scores)
        assert int(scores.argmax()) == token
        # Contrasted: they are not what the last layer says.
        assert not torch.allclose(scores, row, atol=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 30, "num_return_sequences": 3}]
)
def test_logprobs_ranks_and_their_sum_are_those_of_the_scores(pair: Pair, options: dict[str, Any]) -> None:
    item = request(
        prompt(14), max_new_tokens=NEW_TOKENS, top_logprobs=2, repetition_penalty=1.3, tensors=EVERYTHING, **options
    )
    answer = run(model_engine(pair.ours), item)[item.request_id]
    for index, output in answer.ids.items():
        positions = [one for delta in answer.deltas if delta.index == index for one in delta.logprobs]
        total = 0.0
        for position, ours, token in zip(positions, steps_of(answer, index), output, strict=True):
            assert ours is not None
            assert position.chosen is not None
            scores = array(ours.scores)
            assert position.chosen.token_id == token
            assert abs(position.chosen.logprob - float(scores.log_softmax(-1)[token])) < TOLERANCE
            assert position.chosen.rank == int((scores > scores[token]).sum()) + 1
            assert [entry.token_id for entry in position.top] == scores.topk(2).indices.tolist()
            total += position.chosen.logprob
        finish = next(delta.finish for delta in answer.deltas if delta.index == index and delta.finish)
        assert finish.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_top_k_and_chosen_steps_cut_what_travels(pair: Pair) -> None:
    ids = prompt(12)
    few = TensorOutputs(scores=True, logits=True, top_k=5, steps=frozenset({0, 3, 99}))
    some, whole = (request(ids, max_new_tokens=6, tensors=tensors) for tensors in (few, EVERYTHING))
    answers = run(model_engine(pair.ours), some, whole)
    full = steps_of(answers[whole.request_id])
    for step, (ours, all_of_it) in enumerate(zip(steps_of(answers[some.request_id]), full, strict=True)):
        if step not in (0, 3):
            assert ours is None
            continue
        assert ours is not None
        assert all_of_it is not None
        assert ours.hidden_states is ours.attentions is None
        for values, ids_of, everything in (
            (ours.scores, ours.score_ids, all_of_it.scores),
            (ours.logits, ours.logit_ids, all_of_it.logits),
        ):
            top = array(everything).topk(5)
            assert array(ids_of).tolist() == top.indices.tolist()
            close(array(values), top.values)


def test_a_preempted_request_has_its_tensors_once(pair: Pair) -> None:
    """Room for about one of three requests at full length; with a window they only grow until it is full."""
    window = window_of(pair.ours)
    length, blocks, tokens = (3, 7, 8) if window else (20, 22, 30)
    if len(set(pair.ours.sights)) > 1:
        # Layers with a window give back what is behind it.
        blocks = 14
    config = engine_config(
        block_size=4, num_blocks=blocks, max_batch_tokens=tokens, max_running_sequences=4, window=window
    )
    # The kernels read, and so keep, more behind a window.
    config = replace(config, num_blocks=max(blocks, config.blocks_needed(length, 30, 1)))
    items: list[Request] = [request(prompt(length, seed), max_new_tokens=30, tensors=EVERYTHING) for seed in range(3)]
    engine = model_engine(pair.ours, config)
    answers = run(engine, *items)
    assert engine.stats.preemptions
    for seed, item in enumerate(items):
        answer = answers[item.request_id]
        steps = steps_of(answer)
        assert len(steps) == 30
        check_rows(pair, prompt(length, seed), answer.ids[0], steps)


def test_beam_sequences_carry_those_of_their_steps(pair: Pair) -> None:
    item = request(prompt(8), max_new_tokens=4, mode=BeamOptions(num_beams=3), tensors=EVERYTHING)
    answer = run(model_engine(pair.ours), item)[item.request_id]
    assert len(answer.ids[0]) == 4
    assert len(steps_of(answer)) == 4
