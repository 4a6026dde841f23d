"""A decoding mode that is one file and one line of registration, from the fake runner to a real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories.engine.alternate import WITH_ALTERNATE, AlternateOptions
from factories.engine.fake_engine import engine_config, make_engine, ranking, request, run
from factories.engine.model_engine import answer_alone, check_company, load_tiny, model_engine
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import InvalidArgument
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.models.decoder import CausalLM
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.table import OutputOptions
from penstock.generation.options.tensor_options import TensorSizes, resolve_tensors

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
PERIODS = (1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    torch.set_num_threads(1)
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=4))


@pytest.mark.parametrize("period", PERIODS)
def test_with_a_fake_runner_it_takes_what_it_says(period: int) -> None:
    engine, _ = make_engine(vocab_size=50, modes=WITH_ALTERNATE)
    item = request([1, 2, 3], max_new_tokens=7, mode=AlternateOptions(period))
    wanted: list[int] = []
    for position in range(7):
        wanted.append(ranking(0, [1, 2, 3, *wanted], 50)[position % period == period - 1][0])
    assert run(engine, item)[item.request_id].ids[0] == wanted


def test_an_engine_that_does_not_know_it_refuses_it() -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="AlternateOptions"):
        engine.check(request([1], mode=AlternateOptions()))


def reference(model: CausalLM, period: int, length: int) -> list[int]:
    """Token by token, each from a request of its own that lists the two best."""
    ids: list[int] = []
    for position in range(length):
        (delta,) = answer_alone(model, request([*PROMPT, *ids], max_new_tokens=1, top_logprobs=2)).deltas
        ids.append(delta.logprobs[0].top[position % period == period - 1].token_id)
    return ids


@pytest.mark.parametrize("period", PERIODS)
def test_on_a_model_it_takes_what_it_says(model: CausalLM, period: int) -> None:
    item = request(PROMPT, max_new_tokens=9, mode=AlternateOptions(period))
    ids = run(model_engine(model, modes=WITH_ALTERNATE), item)[item.request_id].ids[0]
    assert ids == reference(model, period, 9)


@pytest.mark.parametrize("tight", [pytest.param(False, marks=pytest.mark.slow), True])
def test_beside_every_other_mode_and_preempted_it_gives_what_it_gives_alone(model: CausalLM, tight: bool) -> None:
    def requests() -> list[Request]:
        modes: dict[str, dict[str, Any]] = {
            **{f"alternate {period}": {"mode": AlternateOptions(period)} for period in PERIODS},
            "greedy": {},
            "sampled": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
            "beams": {"mode": BeamOptions(3)},
            "contrastive": {"mode": ContrastiveOptions(0.6, 3)},
            "lookup": {"mode": AssistanceOptions(prompt_lookup_num_tokens=3)},
            "alternate, penalised": {"mode": AlternateOptions(), "repetition_penalty": 1.4},
        }
        return [
            request(PROMPT[number % 4 :], request_id=name, max_new_tokens=14, **options)
            for number, (name, options) in enumerate(modes.items())
        ]

    blocks = {"num_blocks": 26, "reserve_share": 0.0} if tight else {"num_blocks": 300}
    config = engine_config(max_running_sequences=16, max_batch_tokens=40, **blocks)
    engine = check_company(model, requests, config, WITH_ALTERNATE)
    assert (engine.stats.preemptions > 0) == tight


def test_its_facts_are_heeded_where_its_name_is_unknown() -> None:
    item = request(PROMPT, max_new_tokens=4, mode=AlternateOptions())
    sizes = TensorSizes(vocab_size=50, num_layers=2, hidden_size=8, num_heads=2)
    with pytest.raises(InvalidArgument, match="alternating search"):
        resolve_tensors(OutputOptions(output_logits=True), item.params, 9, sizes, RequestLimits())
