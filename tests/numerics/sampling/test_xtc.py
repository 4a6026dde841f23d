"""XTC on a model: its chance is counted, so a sequence's ids are the same alone, in company, preempted, drafted and
moved."""

from __future__ import annotations

from typing import Any

import pytest
from factories.engine.fake_engine import request
from factories.engine.model_engine import answer_alone, check_any_company, in_any_company, load_tiny
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.decoder import CausalLM

PROMPT = [17, 203, 44, 9, 118, 60, 7]
XTC: dict[str, Any] = {"do_sample": True, "temperature": 0.3, "xtc_probability": 0.5, "xtc_threshold": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=11))


def requests() -> list[Request]:
    common: dict[str, Any] = {"max_new_tokens": 14, "eos_token_ids": (1,)}
    return [
        request(PROMPT, request_id="one", seed=3, **XTC, **common),
        request(PROMPT, request_id="three", seed=4, num_return_sequences=3, **XTC, **common),
        request(PROMPT[2:] * 2, request_id="always", seed=5, **{**XTC, "xtc_probability": 1.0}, **common),
        request(PROMPT * 2, request_id="typical", seed=6, do_sample=True, typical_p=0.8, **common),
        request(PROMPT * 2, request_id="plain", **common),
    ]


@in_any_company
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    check_any_company(model, requests, config)


def test_drafts_change_nothing_and_the_option_does(model: CausalLM) -> None:
    plain = answer_alone(model, request(PROMPT * 3, max_new_tokens=20, seed=3, **XTC)).ids
    drafts = AssistanceOptions(prompt_lookup_num_tokens=4)
    assert answer_alone(model, request(PROMPT * 3, max_new_tokens=20, seed=3, mode=drafts, **XTC)).ids == plain
    without = {**XTC, "xtc_probability": 0.0}
    assert answer_alone(model, request(PROMPT * 3, max_new_tokens=20, seed=3, **without)).ids != plain


def test_resumed_ids_go_on_where_they_were(model: CausalLM) -> None:
    whole = answer_alone(model, request(PROMPT, max_new_tokens=16, seed=3, **XTC)).ids[0]
    rest = request(PROMPT, max_new_tokens=16, seed=3, resumed_token_ids=[whole[:6]], **XTC)
    assert answer_alone(model, rest).ids == {0: whole[6:]}
