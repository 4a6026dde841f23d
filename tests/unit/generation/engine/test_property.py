"""The engine's promise: a request's ids do not depend on what else runs, nor on how its tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from factories.engine.fake_engine import Answer, collect, engine_config, make_engine, request, run
from factories.engine.host_pools import AnyPolicy, configs_with_hosts
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.engine.fairness.fair_turns import FairTurns

ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a request; prompts come from few tokens and common heads, so that prefixes are shared."""
    head = draw(st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 17, [1] * 17, [*range(10, 36)]]))
    tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    return {
        "prompt": head + tail,
        "max_new_tokens": draw(st.integers(1, 14)),
        "num_return_sequences": draw(st.sampled_from([1, 1, 1, 2, 4])),
        "do_sample": True,
        "seed": draw(st.integers(0, 3)),
        "eos_token_ids": draw(st.sampled_from([(), (3,), (3, 4, 5, 6, 7)])),
        "priority": draw(st.integers(0, 2)),
        "cache_salt": draw(st.sampled_from(["", "tenant"])),
        "fair_share_key": draw(st.sampled_from(["", "a", "b"])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
    }


configs = configs_with_hosts(
    num_blocks=st.integers(28, 60),
    block_size=st.integers(1, 6),
    max_running_sequences=st.integers(4, 9),
    max_batch_tokens=st.integers(9, 40),
    prefix_cache=st.booleans(),
    reserve_share=st.sampled_from([0.0, 0.1]),
)


class AnyTurns(FairTurns):
    """Turns in which any tenants rest, all of them, too: who does depends on time, and must change no id."""

    def __init__(self, draw: Random) -> None:
        super().__init__(1.5)
        self._draw = draw

    def choose(self, widths: Mapping[str, int]) -> frozenset[str]:
        return frozenset(tenant for tenant in widths if self._draw.random() < 0.5)


def alone(spec: dict[str, Any]) -> Answer:
    item = request(**spec)
    return run(make_engine(ROOMY)[0], item)[item.request_id]


def fits(config: Any, item: Request) -> bool:
    needed = config.blocks_needed(
        len(item.prompt_token_ids), item.params.max_new_tokens, item.params.num_return_sequences
    )
    return bool(needed <= config.num_blocks)


@settings(max_examples=30, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=8), configs, st.data())
def test_same_ids_alone_and_together_whatever_the_pool_and_the_budget(
    drawn: list[dict[str, Any]], config: Any, data: st.DataObject
) -> None:
    engine, _ = make_engine(config)
    random = data.draw(st.randoms(use_true_random=False))
    engine.turns = AnyTurns(random)
    engine.policy = AnyPolicy(config, random)
    answers: dict[str, Answer] = {}
    submitted = []
    for spec in drawn:
        item = request(**spec)
        if fits(config, item):
            engine.add(item)
            submitted.append((spec, item))
        for _ in range(data.draw(st.integers(0, 4))):
            collect(answers, engine.step())
            engine.check_integrity()
    while engine.has_work:
        collect(answers, engine.step())
        engine.check_integrity()
    for spec, item in submitted:
        answer, expected = answers[item.request_id], alone(spec)
        assert answer.ids == expected.ids
        assert answer.finished is not None
        assert expected.finished is not None
        assert answer.finished.sequences == expected.finished.sequences
        assert answer.started is not None
        assert expected.started is not None
        assert answer.started.prompt_logprobs == expected.started.prompt_logprobs
    assert engine.load().kv_blocks_used == 0


@settings(max_examples=25, deadline=None)
@given(specs(), st.data())
def test_a_resumed_request_goes_on_with_the_same_ids(spec: dict[str, Any], data: st.DataObject) -> None:
    whole = alone(spec)
    cuts = [data.draw(st.integers(0, len(ids))) for _, ids in sorted(whole.ids.items())]
    resumed = [ids[:cut] for cut, (_, ids) in zip(cuts, sorted(whole.ids.items()), strict=True)]
    item = request(**spec, resumed_token_ids=resumed)
    rest = run(make_engine(engine_config(num_blocks=60, max_batch_tokens=16))[0], item)[item.request_id]
    for index, ids in whole.ids.items():
        assert resumed[index] + rest.ids.get(index, []) == ids
    assert rest.finished is not None
    assert whole.finished is not None
    assert rest.finished.sequences == whole.finished.sequences
    assert rest.finished.completion_tokens == whole.finished.completion_tokens


@settings(max_examples=25, deadline=None)
@given(specs())
def test_several_returned_sequences_equal_as_many_requests_with_derived_seeds(spec: dict[str, Any]) -> None:
    together = alone(spec | {"num_return_sequences": 4})
    for index in range(4):
        single = alone(spec | {"num_return_sequences": 1, "seed": derive_seed(spec["seed"], index)})
        assert single.ids[0] == together.ids[index]


@settings(max_examples=30, deadline=None)
@given(st.lists(specs(), min_size=2, max_size=8), configs, st.data())
def test_cancelling_at_any_moment_frees_the_blocks_and_disturbs_nobody(
    drawn: list[dict[str, Any]], config: Any, data: st.DataObject
) -> None:
    engine, _ = make_engine(config)
    items = [(spec, request(**spec)) for spec in drawn]
    items = [(spec, item) for spec, item in items if fits(config, item)]
    moments = {item.request_id: data.draw(st.one_of(st.none(), st.integers(0, 20))) for _, item in items}
    answers: dict[str, Answer] = {}
    for _, item in items:
        engine.add(item)
    for step in range(10_000):
        if not engine.has_work:
            break
        for request_id in [request_id for request_id, moment in moments.items() if moment == step]:
            engine.abort(request_id)
            engine.check_integrity()
        collect(answers, engine.step())
        engine.check_integrity()
    for spec, item in items:
        answer, expected = answers[item.request_id], alone(spec)
        assert answer.finished is not None
        for index, ids in answer.ids.items():
            assert ids == expected.ids[index][: len(ids)]
        if moments[item.request_id] is None:
            assert answer.ids == expected.ids
    assert engine.load().kv_blocks_used == 0
