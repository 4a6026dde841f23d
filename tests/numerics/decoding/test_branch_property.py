"""The engine's promise for the modes with branches: the same ids alone and together, in whatever pool and budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, request, run
from factories.engine.model_engine import answer_alone, load_tiny, model_engine
from factories.models.checkpoints import tiny_checkpoint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import NO_GUIDANCE, PLAIN, GuidanceOptions
from penstock.generation.core.request import Request, TokenHealingOptions
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.models.decoder import CausalLM

HEALING = TokenHealingOptions(frozenset({3, 14, 15, 92, 65}), str)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=8, num_hidden_layers=3))


@st.composite
def modes(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"mode": ContrastiveOptions(draw(st.sampled_from([0.2, 0.6, 0.95])), draw(st.integers(2, 4)))}
    sampled = {
        "do_sample": True,
        "num_return_sequences": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 9)),
    }
    layers = draw(st.sampled_from([None, (0,), (1, 2), (0, 1, 2)]))
    negative = draw(st.sampled_from([None, (), (5,), (11, 12, 13, 14, 15, 16)]))
    return {
        "mode": PLAIN if layers is None else DolaOptions(layers),
        "guidance": NO_GUIDANCE if negative is None else GuidanceOptions(draw(st.sampled_from([0.5, 2.5])), negative),
        **(sampled if draw(st.booleans()) else {}),
    }


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    head = draw(st.sampled_from([[], [11, 12, 13, 14, 15, 16, 17, 18, 19]]))
    return {
        "prompt": head + draw(st.lists(st.integers(2, 30), min_size=2, max_size=8)),
        "max_new_tokens": draw(st.sampled_from([1, 9, 12])),
        "eos_token_ids": draw(st.sampled_from([(), (), tuple(range(40))])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "healed": draw(st.booleans()),
        **draw(modes()),
    }


def make(spec: dict[str, Any]) -> Request:
    fields = dict(spec)
    healed = fields.pop("healed")
    item = request(**fields)
    return replace(item, token_healing=HEALING) if healed else item


tight = st.builds(
    engine_config,
    num_blocks=st.integers(22, 28),
    block_size=st.integers(2, 4),
    max_running_sequences=st.integers(8, 12),
    max_batch_tokens=st.integers(12, 24),
    prefix_cache=st.booleans(),
    reserve_share=st.just(0.0),
)
seen: Counter[str] = Counter()
# Whatever else is drawn: prompts that begin alike, in a pool that does not hold them all.
_ALIKE: dict[str, Any] = {
    "prompt": [11, 12, 13, 14, 15, 16, 17, 18, 19, 4, 9],
    "max_new_tokens": 12,
    "eos_token_ids": (),
    "repetition_penalty": 1.0,
    "healed": False,
    "guidance": NO_GUIDANCE,
    "do_sample": True,
    "num_return_sequences": 2,
    "seed": 3,
}


@example(
    [{**_ALIKE, "mode": mode} for mode in (PLAIN, PLAIN, DolaOptions((0, 1, 2)), PLAIN, PLAIN)],
    engine_config(
        num_blocks=24, block_size=2, max_running_sequences=10, max_batch_tokens=16, prefix_cache=True, reserve_share=0.0
    ),
    [3, 1, 0, 2, 0, 0],
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(specs(), min_size=4, max_size=6), tight, st.lists(st.integers(0, 3), min_size=6, max_size=6))
def check(model: CausalLM, drawn: list[dict[str, Any]], config: EngineConfig, gaps: list[int]) -> None:
    engine = model_engine(model, config)
    answers: dict[str, Answer] = {}
    submitted = []
    for spec, gap in zip(drawn, gaps, strict=False):
        item = make(spec)
        if (
            MODES.blocks_needed(config, item.params, len(item.prompt_token_ids), item.params.max_new_tokens)
            > config.num_blocks
        ):
            continue
        engine.add(item)
        submitted.append((spec, item))
        for _ in range(gap):
            collect(answers, engine.step())
            engine.check_integrity()
    run(engine, answers=answers)
    for spec, item in submitted:
        assert answers[item.request_id].ids == answer_alone(model, make(spec)).ids
    assert engine.load().kv_blocks_used == 0
    seen["preemptions"] += engine.stats.preemptions
    seen["prefix_hit_tokens"] += engine.stats.prefix_hit_tokens


@pytest.mark.slow
def test_same_ids_alone_and_together_whatever_the_pool_and_the_budget(model: CausalLM) -> None:
    seen.clear()
    check(model)
    assert seen["preemptions"] > 0
    assert seen["prefix_hit_tokens"] > 0
