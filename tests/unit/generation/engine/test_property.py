"""The engine's promise for one request: it goes on where it was cut, and several sequences are several requests.

test_interleavings.py has the promise for many: ids do not depend on what else runs, nor on how tokens are cut into
steps.
"""

from __future__ import annotations

from typing import Any

from factories.engine.fake_engine import Answer, engine_config, make_engine, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.sampling_params import derive_seed

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


def alone(spec: dict[str, Any]) -> Answer:
    item = request(**spec)
    return run(make_engine(ROOMY)[0], item)[item.request_id]


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
