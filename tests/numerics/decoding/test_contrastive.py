"""Contrastive search against transformers 4.41.1, by golden files; and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import answer_alone, check_company, golden_cases, load_tiny, model_engine
from factories.models.checkpoints import tiny_checkpoint
from factories.models.golden_models import EOS, golden_checkpoint
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import FinishReason, Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel

CASES = golden_cases(
    "contrastive", {"penalty_alpha", "top_k", "max_new_tokens", "repetition_penalty", "suppress_tokens"}
)
PROMPT = [17, 203, 44, 9, 118, 60, 7]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CausalLM]:
    root = tmp_path_factory.mktemp("golden")
    return {name: load_tiny(golden_checkpoint(root / name, name)) for name in {case["model"] for case in CASES}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=21)


def contrastive(prompt: list[int], alpha: float = 0.6, top_k: int = 4, **fields: Any) -> Request:
    return request(prompt, mode=ContrastiveOptions(alpha, top_k), **fields)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_ids_are_those_of_the_release(golden: Mapping[str, CausalLM], case: Mapping[str, Any]) -> None:
    kwargs = dict(case["kwargs"])
    if "suppress_tokens" in kwargs:
        kwargs["suppress_tokens"] = tuple(kwargs["suppress_tokens"])
    item = contrastive(case["prompt"], kwargs.pop("penalty_alpha"), kwargs.pop("top_k"), eos_token_ids=(EOS,), **kwargs)
    assert answer_alone(golden[case["model"]], item).ids == dict(enumerate(case["ids"]))


def test_there_are_golden_cases_of_many_alphas_and_widths() -> None:
    assert len({(case["kwargs"]["penalty_alpha"], case["kwargs"]["top_k"]) for case in CASES}) >= 4


def searched(reference: PreTrainedModel, prompt: list[int], alpha: float, top_k: int, steps: int) -> list[int]:
    """The search from the paper's definition, every candidate by a forward pass of its own over the whole text."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            probabilities = reference(torch.tensor([ids])).logits[0, -1].softmax(-1)
            best: list[tuple[float, int]] = []
            for token_id in probabilities.topk(top_k).indices.tolist():
                hidden = reference.model(torch.tensor([[*ids, token_id]])).last_hidden_state[0]
                alike = torch.cosine_similarity(hidden[:-1], hidden[-1:]).max()
                best.append((float((1 - alpha) * probabilities[token_id] - alpha * alike), token_id))
        ids.append(max(best, key=lambda one: one[0])[1])
    return ids[len(prompt) :]


@pytest.mark.parametrize(("alpha", "top_k"), [(0.6, 4), (0.2, 2), (0.95, 8)])
def test_ids_are_those_of_the_definition(model: CausalLM, reference: PreTrainedModel, alpha: float, top_k: int) -> None:
    item = contrastive(PROMPT, alpha, top_k, max_new_tokens=16)
    assert answer_alone(model, item).ids[0] == searched(reference, PROMPT, alpha, top_k, 16)


def test_a_long_text_goes_over_many_pieces_of_history(model: CausalLM, reference: PreTrainedModel) -> None:
    prompt = [(37 * number) % 300 + 4 for number in range(300)]
    config = engine_config(num_blocks=60, block_size=16, max_context_tokens=400, max_batch_tokens=77)
    item = contrastive(prompt, 0.7, 3, max_new_tokens=6)
    answer = run(model_engine(model, config), item)[item.request_id]
    assert answer.ids[0] == searched(reference, prompt, 0.7, 3, 6)


def requests() -> list[Request]:
    return [
        contrastive(PROMPT, request_id="usual", max_new_tokens=12),
        contrastive(PROMPT, 0.9, 3, request_id="same prompt", max_new_tokens=9, repetition_penalty=1.3),
        contrastive(PROMPT * 4, 0.3, 2, request_id="long", max_new_tokens=14, stop_token_ids=((5,),)),
        contrastive([3], 0.6, 5, request_id="one token", max_new_tokens=11, eos_token_ids=(1,)),
        request(PROMPT * 3, request_id="greedy", max_new_tokens=14),
        request(PROMPT, request_id="sampled", max_new_tokens=14, do_sample=True, num_return_sequences=3),
    ]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(engine_config(), marks=pytest.mark.slow),
        pytest.param(
            engine_config(max_batch_tokens=14, max_running_sequences=14, num_blocks=80), marks=pytest.mark.slow
        ),
        engine_config(num_blocks=26, block_size=3, max_running_sequences=16, max_batch_tokens=16, reserve_share=0.0),
    ],
    ids=["roomy", "chunked", "preempted"],
)
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    engine = check_company(model, requests, config)
    assert (engine.stats.preemptions > 0) == (config.num_blocks == 26)


def test_a_step_brings_a_token_and_computes_a_row_per_candidate(model: CausalLM) -> None:
    engine = model_engine(model)
    item = contrastive(PROMPT, 0.6, 4, max_new_tokens=5)
    answer = run(engine, item)[item.request_id]
    assert [len(delta.token_ids) for delta in answer.deltas] == [1] * 5
    assert engine.stats.steps == 1 + 5
    assert engine.stats.computed_tokens == len(PROMPT) + 5 * 4


def test_the_pool_that_is_promised_is_enough_and_no_block_of_it_is_copied_in_vain(model: CausalLM) -> None:
    item = contrastive(PROMPT, 0.6, 4, max_new_tokens=20)
    needed = MODES.blocks_needed(engine_config(), item.params, len(PROMPT), 20)
    engine = model_engine(model, engine_config(num_blocks=needed, reserve_share=0.0))
    answer = run(engine, item)[item.request_id]
    assert answer.ids == answer_alone(model, contrastive(PROMPT, 0.6, 4, max_new_tokens=20)).ids
    assert engine.stats.preemptions == 0


def test_resumed_ids_go_on_where_they_were(model: CausalLM) -> None:
    ids = answer_alone(model, contrastive(PROMPT, max_new_tokens=12)).ids[0]
    for cut in (0, 1, 7, 11):
        rest = contrastive(PROMPT, max_new_tokens=12, resumed_token_ids=[ids[:cut]])
        assert answer_alone(model, rest).ids == {0: ids[cut:]}


def test_resumed_ids_that_had_ended_only_end(model: CausalLM) -> None:
    item = contrastive(PROMPT, max_new_tokens=3, resumed_token_ids=[[4, 5, 6]])
    finished = answer_alone(model, item).finished
    assert finished is not None
    assert [(one.reason, one.num_tokens) for one in finished.sequences] == [(FinishReason.LENGTH, 3)]


def test_logprobs_are_those_of_the_chosen_candidate(model: CausalLM, reference: PreTrainedModel) -> None:
    answer = answer_alone(model, contrastive(PROMPT, 0.9, 4, max_new_tokens=10, top_logprobs=6))
    ids = answer.ids[0]
    with torch.no_grad():
        rows = reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert len(entries) == 10
    for entry, row, token_id in zip(entries, rows, ids, strict=True):
        assert entry.chosen is not None
        assert (entry.chosen.token_id, entry.chosen.rank) == (token_id, 1 + int((row > row[token_id]).sum()))
        assert entry.chosen.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [one.token_id for one in entry.top] == row.topk(6).indices.tolist()
    assert any(entry.chosen.rank > 1 for entry in entries if entry.chosen)
    assert answer.finished is not None
    total = sum(entry.chosen.logprob for entry in entries if entry.chosen)
    assert answer.finished.sequences[0].cumulative_logprob == pytest.approx(total)


def test_a_cached_prefix_is_not_taken_since_its_hidden_states_are_gone(model: CausalLM) -> None:
    engine = model_engine(model)
    run(engine, request(PROMPT * 3, max_new_tokens=2))
    item = contrastive(PROMPT * 3, max_new_tokens=6)
    answer = run(engine, item)[item.request_id]
    assert answer.started is not None
    assert answer.started.cached_tokens == 0
    assert answer.ids == answer_alone(model, contrastive(PROMPT * 3, max_new_tokens=6)).ids


def test_nothing_is_remembered_once_the_request_is_over(model: CausalLM) -> None:
    engine = model_engine(model)
    run(engine, contrastive(PROMPT, max_new_tokens=4))
    assert not engine._runner._histories._histories  # type: ignore[attr-defined]


def test_numbers_that_are_none_end_the_request_alone(model: CausalLM) -> None:
    engine = model_engine(model)
    item = contrastive(PROMPT, max_new_tokens=8)
    engine.add(item)
    engine.step()
    kv: KVCachePool = engine._runner._kv  # type: ignore[attr-defined]
    kv.value(0).fill_(float("nan"))
    other = request([8, 9], max_new_tokens=3)
    answers = run(engine, other)
    assert answers[other.request_id].finished is not None
    assert answers[other.request_id].finished.error is None
    finished = answers[item.request_id].finished
    assert finished is not None
    assert finished.error is not None
    assert finished.error.reason == "MODEL_OUTPUT_NAN"


def test_options_that_leave_no_candidate_end_the_request_as_its_own_fault(model: CausalLM) -> None:
    item = contrastive([5, 6, 7], allowed_token_trie=((9,),), suppress_tokens=(9,), begin_suppress_tokens=(1,))
    finished = answer_alone(model, item).finished
    assert finished is not None
    assert finished.error is not None
    assert (finished.error.code.name, finished.error.reason) == ("INVALID_ARGUMENT", "NO_TOKEN_LEFT")
