"""Token healing in the engine: a first phase whose blocks the request goes on from, in any mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, make_engine, ranking, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import NO_GUIDANCE, GuidanceOptions
from penstock.generation.core.request import FinishReason, Request, TokenHealingOptions
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.mode_registry import MODES

VOCABULARY = 50
# The fake runner's draws know no bounds.
ANY = TokenHealingOptions(frozenset(range(VOCABULARY)), lambda token_id: f"+{token_id}")


def healing(prompt: list[int], **fields: Any) -> Request:
    return replace(request(prompt, **fields), token_healing=ANY)


def healed(prompt: list[int]) -> list[int]:
    """The prompt that the request begins with."""
    return [*prompt[:-1], ranking(0, prompt[:-1], VOCABULARY)[0][0]]


def answer_to(item: Request, config: EngineConfig | None = None) -> Answer:
    return run(make_engine(config)[0], item)[item.request_id]


def test_a_healed_request_is_the_request_on_the_healed_prompt() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    answer = answer_to(healing(prompt, max_new_tokens=6))
    assert answer.ids == answer_to(request(healed(prompt), max_new_tokens=6)).ids
    assert answer.started is not None
    assert answer.started.healed == (healed(prompt)[-1], f"+{healed(prompt)[-1]}")


def test_only_the_last_token_is_computed_after_the_healing() -> None:
    engine, runner = make_engine()
    run(engine, healing(list(range(21)), max_new_tokens=3))
    assert [step.num_tokens for step in runner.steps] == [20, 1, 1, 1]


def test_returned_sequences_and_unconditional_branches_share_what_is_left_of_their_prompts() -> None:
    engine, runner = make_engine()
    prompt = list(range(13))
    spec: dict[str, Any] = {
        "max_new_tokens": 3, "num_return_sequences": 3, "do_sample": True, "guidance": GuidanceOptions(2.0, (7, 8, 9)),
    }  # fmt: skip
    item = healing(prompt, **spec)
    assert run(engine, item)[item.request_id].ids == answer_to(request(healed(prompt), **spec)).ids
    assert [step.num_tokens for step in runner.steps] == [12, 2, 1 + 1, 6, 6]


def test_an_unset_negative_prompt_is_the_healed_token() -> None:
    spec: dict[str, Any] = {"max_new_tokens": 4, "guidance": GuidanceOptions(2.0, ())}
    prompt = [1, 2, 3, 4]
    assert answer_to(healing(prompt, **spec)).ids == answer_to(request(healed(prompt), **spec)).ids


@pytest.mark.parametrize("counts", [(2, 5), (0, 3), (4, 0)])
def test_resumed_sequences_are_healed_alike_and_go_on(counts: tuple[int, int]) -> None:
    spec: dict[str, Any] = {
        "max_new_tokens": 6, "num_return_sequences": 2, "do_sample": True, "guidance": GuidanceOptions(2.0, (7,)),
    }  # fmt: skip
    prompt = [1, 2, 3, 4, 5, 6]
    ids = answer_to(request(healed(prompt), **spec)).ids
    resumed = [ids[index][:count] for index, count in enumerate(counts)]
    answer = answer_to(healing(prompt, resumed_token_ids=resumed, **spec))
    assert answer.ids == {index: ids[index][count:] for index, count in enumerate(counts)}


def test_resumed_sequences_that_had_all_ended_need_no_healing() -> None:
    engine, runner = make_engine()
    item = healing([1, 2, 3], max_new_tokens=2, resumed_token_ids=[[4, 5]])
    finished = run(engine, item)[item.request_id].finished
    assert finished is not None
    assert [one.reason for one in finished.sequences] == [FinishReason.LENGTH]
    assert not runner.steps


def test_resumed_ids_beyond_the_end_are_refused_before_anything_runs() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidArgument, match="resumed_token_ids"):
        engine.add(healing([1, 2], max_new_tokens=5, resumed_token_ids=[[3, 4]], eos_token_ids=(3,)))


def test_aborted_before_it_is_healed_every_sequence_has_its_end() -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=16))
    item = healing(list(range(40)), num_return_sequences=2, do_sample=True)
    engine.add(item)
    engine.step()
    engine.abort(item.request_id)
    finished = run(engine)[item.request_id].finished
    assert finished is not None
    assert [(one.index, one.reason) for one in finished.sequences] == [
        (0, FinishReason.ABORTED),
        (1, FinishReason.ABORTED),
    ]
    assert engine.load().kv_blocks_used == 0


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    head = draw(st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8, 9]]))
    return {
        "prompt": head + draw(st.lists(st.integers(0, 2), min_size=2, max_size=10)),
        "max_new_tokens": draw(st.integers(1, 10)),
        "num_return_sequences": draw(st.sampled_from([1, 1, 3])),
        "do_sample": True,
        "seed": draw(st.integers(0, 3)),
        "eos_token_ids": draw(st.sampled_from([(), (3, 4, 5, 6, 7)])),
        "guidance": draw(st.sampled_from([NO_GUIDANCE, NO_GUIDANCE, GuidanceOptions(2.0, (1, 2, 3, 4, 5))])),
        "priority": draw(st.integers(0, 2)),
    }


configs = st.builds(
    engine_config,
    num_blocks=st.integers(28, 60),
    block_size=st.integers(1, 6),
    max_running_sequences=st.integers(6, 9),
    max_batch_tokens=st.integers(9, 40),
    prefix_cache=st.booleans(),
    reserve_share=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=6), configs, st.data())
def test_same_ids_alone_and_together_whatever_the_pool_and_the_budget(
    drawn: list[dict[str, Any]], config: EngineConfig, data: st.DataObject
) -> None:
    engine, _ = make_engine(config)
    answers: dict[str, Answer] = {}
    submitted = []
    for spec in drawn:
        item = healing(**spec)
        params = item.params
        if MODES.blocks_needed(config, params, len(item.prompt_token_ids), params.max_new_tokens) <= config.num_blocks:
            engine.add(item)
            submitted.append((spec, item))
        for _ in range(data.draw(st.integers(0, 4))):
            collect(answers, engine.step())
            engine.check_integrity()
    run(engine, answers=answers)
    roomy = engine_config(num_blocks=400, max_batch_tokens=1000)
    for spec, item in submitted:
        expected = answer_to(request(**(spec | {"prompt": healed(spec["prompt"])})), roomy)
        assert answers[item.request_id].ids == expected.ids
    assert engine.load().kv_blocks_used == 0
