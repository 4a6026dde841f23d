"""Classifier-free guidance against transformers' generate, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import request, run
from factories.engine.model_engine import answer_alone, check_any_company, in_any_company, model_engine
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel

PROMPT = [17, 203, 44, 9, 118, 60, 7]
NEGATIVE = [5, 31, 31, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=11)


def guided(prompt: list[int], scale: float = 1.7, negative: list[int] = NEGATIVE, **fields: Any) -> Request:
    return request(prompt, guidance=GuidanceOptions(scale, tuple(negative)), **fields)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("negative", [None, NEGATIVE, PROMPT * 3])
@pytest.mark.parametrize("scale", [0.0, 0.6, 1.5, 4.0])
def test_greedy_ids_are_those_of_generate(
    model: CausalLM, reference: PreTrainedModel, scale: float, negative: list[int] | None
) -> None:
    expected = reference.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=24,
        do_sample=False,
        guidance_scale=scale,
        negative_prompt_ids=None if negative is None else torch.tensor([negative]),
        repetition_penalty=1.2,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    item = guided(PROMPT, scale, negative or [], max_new_tokens=24, repetition_penalty=1.2)
    assert answer_alone(model, item).ids == {0: expected}


def test_sampled_logprobs_are_those_of_the_guided_distribution(model: CausalLM, reference: PreTrainedModel) -> None:
    item = guided(PROMPT, 2.5, max_new_tokens=12, do_sample=True, seed=5, num_return_sequences=3, top_logprobs=0)
    answer = answer_alone(model, item)
    for index, ids in answer.ids.items():
        with torch.no_grad():
            scores, free = (
                reference(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1].log_softmax(-1)
                for start in (PROMPT, NEGATIVE)
            )
        logprobs = (2.5 * (scores - free) + free).log_softmax(-1)
        expected = [float(row[token_id]) for row, token_id in zip(logprobs, ids, strict=True)]
        drawn = [
            entry.chosen.logprob
            for delta in answer.deltas
            if delta.index == index
            for entry in delta.logprobs
            if entry.chosen
        ]
        assert drawn == pytest.approx(expected, abs=1e-4)


def requests() -> list[Request]:
    common: dict[str, Any] = {"max_new_tokens": 14, "eos_token_ids": (1,)}
    return [
        guided(PROMPT, request_id="greedy", **common),
        guided(PROMPT, 3.0, [8], request_id="shared prompt", do_sample=True, num_return_sequences=3, **common),
        guided(PROMPT[2:], 0.5, PROMPT * 2, request_id="long negative prompt", do_sample=True, seed=9, **common),
        guided([3], 2.0, [], request_id="one token", **common),
        request(PROMPT * 2, request_id="plain", **common),
    ]


@in_any_company
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    assert check_any_company(model, requests, config).stats.prefix_hit_tokens > 0


def test_resumed_ids_go_on_where_they_were(model: CausalLM) -> None:
    item = guided(PROMPT, max_new_tokens=10, do_sample=True, seed=4, num_return_sequences=2)
    ids = answer_alone(model, item).ids
    rest = guided(
        PROMPT,
        max_new_tokens=10,
        do_sample=True,
        seed=4,
        num_return_sequences=2,
        resumed_token_ids=[ids[0][:3], ids[1][:7]],
    )
    assert answer_alone(model, rest).ids == {0: ids[0][3:], 1: ids[1][7:]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_numbers_in_an_unconditional_row_end_the_guided_request_alone(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    whole = model.compute_logits

    def broken(hidden_NI: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        logits_NV = whole(hidden_NI, adapters)
        # Rows in order of admission: plain, guided, unconditional branch.
        if len(logits_NV) == 3:
            logits_NV[2, 7] = value
        return logits_NV

    monkeypatch.setattr(model, "compute_logits", broken)
    plain, item = request(PROMPT), guided(PROMPT)
    answers = run(model_engine(model), plain, item)
    finished, error = answers[plain.request_id].finished, answers[item.request_id].finished
    assert finished is not None
    assert finished.error is None
    assert error is not None
    assert error.error is not None
    assert error.error.reason == "MODEL_OUTPUT_NAN"
