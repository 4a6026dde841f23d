"""Beam modes in pools that hardly hold them: the same sequences and scores. What else runs beside them, and how they
are cut, is drawn in test_interleavings.py."""

from __future__ import annotations

from typing import Any

from factories.engine.fake_engine import Answer, engine_config, make_engine, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.decoding_mode import EarlyStopping
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.mode_registry import MODES

ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000)


@st.composite
def beam_options(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a request in one of the beam modes."""
    shared: dict[str, Any] = {
        "early_stopping": draw(st.sampled_from(EarlyStopping)),
        "length_penalty": draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
    }
    mode = draw(st.sampled_from(["beam", "sample", "group", "constrained"]))
    if mode == "group":
        groups, size = draw(st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1)]))
        return {"mode": BeamOptions(groups * size, groups, 1.0, pad_token_id=3, **shared)}
    num_beams = draw(st.integers(2, 4))
    if mode == "constrained":
        phrases = draw(st.sampled_from([(((7, 8, 9),),), (((7,),), ((8, 9), (10,))), (((1, 1),), ((2, 2),))]))
        return {"mode": BeamOptions(num_beams, constraints=phrases, **shared)}
    return {"mode": BeamOptions(num_beams, **shared), "do_sample": mode == "sample", "seed": draw(st.integers(0, 9))}


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a request; mostly beams, whose prompts share heads with others'."""
    head = draw(st.sampled_from([[], [1, 2, 3, 4, 5, 6], [1] * 9]))
    return {
        "prompt": head + draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)),
        "max_new_tokens": draw(st.integers(1, 9)),
        "num_return_sequences": draw(st.integers(1, 2)),
        "eos_token_ids": draw(st.sampled_from([(), (4,), (4, 11, 12, 13, 14, 15)])),
        "stop_token_ids": draw(st.sampled_from([(), ((20, 21), (22,), (30,), (31,), (32,))])),
        "priority": draw(st.integers(0, 1)),
    } | draw(st.one_of(beam_options(), beam_options(), st.just({"do_sample": True, "seed": 3})))


def outcome(answer: Answer) -> list[Any]:
    assert answer.finished is not None
    return [answer.ids, answer.finished.sequences]


def alone(spec: dict[str, Any]) -> list[Any]:
    engine, _ = make_engine(ROOMY)
    item = request(**spec)
    return outcome(run(engine, item)[item.request_id])


@settings(max_examples=20, deadline=None)
@given(specs(), st.integers(1, 4))
def test_a_pool_of_just_the_blocks_that_admission_counts_is_enough(spec: dict[str, Any], block_size: int) -> None:
    config = engine_config(block_size=block_size, reserve_share=0.0, prefix_cache=False)
    item = request(**spec)
    needed = MODES.blocks_needed(config, item.params, len(item.prompt_token_ids), item.params.max_new_tokens)
    engine, _ = make_engine(engine_config(num_blocks=needed, block_size=block_size, reserve_share=0.0))
    assert outcome(run(engine, item)[item.request_id]) == alone(spec)
    assert engine.stats.preemptions == 0
    assert engine.load().kv_blocks_used == 0


def test_a_crowd_of_beams_in_a_small_pool_is_preempted_and_gives_the_same() -> None:
    kinds: list[dict[str, Any]] = [
        {"mode": BeamOptions(4)},
        {"mode": BeamOptions(4), "do_sample": True, "seed": 5},
        {"mode": BeamOptions(4, 2, 1.0)},
        {"mode": BeamOptions(4, constraints=(((7, 8),),))},
    ]
    crowd = [{"prompt": [1, 2, 3, 4, i], "max_new_tokens": 12, **kinds[i % 4]} for i in range(8)]
    engine, _ = make_engine(engine_config(num_blocks=44, block_size=2, reserve_share=0.0))
    items = [request(**spec) for spec in crowd]
    answers = run(engine, *items)
    assert engine.stats.preemptions > 0
    assert engine.stats.copy_on_write_blocks > 0
    assert [outcome(answers[item.request_id]) for item in items] == [alone(spec) for spec in crowd]
    assert engine.load().kv_blocks_used == 0
