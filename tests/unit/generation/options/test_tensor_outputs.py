"""Sizes of tensors, and the cutting of deltas that have them."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import TensorOutputs
from penstock.generation.core.request import Emission, FinishReason, SequenceFinish
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.tensors import StepTensors, TensorData
from penstock.generation.delivery.delta_sizes import MAX_DELTA_BYTES, split, with_tensors
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.table import OutputOptions
from penstock.generation.options.tensor_options import TensorSizes, resolve_tensors

SIZES = TensorSizes(vocab_size=1000, num_layers=4, hidden_size=64, num_heads=8)
ALL = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


def resolve(
    names: tuple[str, ...] = ALL, *, new: int = 10, prompt: int = 20, limits: RequestLimits | None = None, **fields: Any
) -> TensorOutputs | None:
    params = SamplingParams(max_new_tokens=new, **fields.pop("params", {}))
    return resolve_tensors(
        OutputOptions(**dict.fromkeys(names, True), **fields), params, prompt, SIZES, limits or RequestLimits()
    )


def test_nothing_asked_is_nothing() -> None:
    assert resolve(()) is None


def test_flags_and_options_arrive() -> None:
    found = resolve(("output_logits",), scores_top_k=5, tensor_steps=(1, 3))
    assert found == TensorOutputs(logits=True, top_k=5, steps=frozenset({1, 3}))
    assert found.wants(3)
    assert not found.wants(2)


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    found = resolve(("output_scores",), scores_top_k=5000)
    assert found is not None
    assert found.top_k == 1000


# Prompt 20, 10 new tokens: the contexts are 20 … 29 tokens.
@pytest.mark.parametrize(
    ("names", "fields", "total"),
    [
        (("output_scores",), {}, 10 * 4000),
        (("output_scores",), {"scores_top_k": 7}, 10 * 7 * 12),
        (("output_hidden_states",), {}, 10 * 5 * 64 * 4),
        (("output_attentions",), {}, sum(4 * 8 * 4 * context for context in range(20, 30))),
        (("output_attentions",), {"tensor_steps": (0, 9, 12)}, 4 * 8 * 4 * (20 + 29)),
        (("output_logits",), {"params": {"num_return_sequences": 3, "do_sample": True}}, 3 * 10 * 4000),
    ],
)
def test_the_bytes_of_an_answer_are_counted_exactly(names: tuple[str, ...], fields: dict[str, Any], total: int) -> None:
    assert resolve(names, limits=RequestLimits(max_tensor_bytes=total), **dict(fields)) is not None
    with pytest.raises(InvalidArgument) as caught:
        resolve(names, limits=RequestLimits(max_tensor_bytes=total - 1), **dict(fields))
    assert caught.value.field == f"output.{names[0]}"
    assert str(total) in caught.value.description


def test_the_largest_of_several_is_named() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(limits=RequestLimits(max_tensor_bytes=10))
    assert caught.value.field == "output.output_scores"


def test_a_token_must_fit_a_message() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(("output_attentions",), prompt=5000, limits=RequestLimits(max_token_tensor_bytes=600_000))
    assert caught.value.field == "output.output_attentions"


@pytest.mark.parametrize("name", ALL)
def test_beams_count_all_that_may_be_returned(name: str) -> None:
    assert resolve((name,), params={"mode": BeamOptions(num_beams=2)})
    with pytest.raises(InvalidArgument) as caught:
        resolve((name,), params={"mode": BeamOptions(num_beams=10**6)})
    assert caught.value.field == f"output.{name}"


def tensors(num_bytes: int) -> StepTensors:
    return StepTensors(scores=TensorData("float32", (num_bytes // 4,), bytes(num_bytes)))


def test_a_delta_that_is_too_large_is_cut_between_tokens_and_ends_with_its_last_part() -> None:
    third = MAX_DELTA_BYTES // 3 - 8
    finish = SequenceFinish(0, FinishReason.LENGTH, 5)
    sizes = (third, third, third, MAX_DELTA_BYTES, 4)
    delta = Emission(0, (1, 2, 3, 4, 5), (), finish, tuple(map(tensors, sizes)))
    parts = list(split(delta))
    assert [part.token_ids for part in parts] == [(1, 2, 3), (4,), (5,)]
    assert [part.finish for part in parts] == [None, None, finish]
    assert [entry for part in parts for entry in part.tensors] == list(delta.tensors)


def test_positions_without_tensors_have_empty_entries() -> None:
    delta = with_tensors(Emission(0, (1, 2)))
    assert delta.tensors == (None, None)
    assert list(split(delta)) == [delta]


def test_an_end_without_tokens_stays_one_delta() -> None:
    delta = Emission(0, (), (), SequenceFinish(0, FinishReason.ABORTED, 2), seq=3)
    assert list(split(with_tensors(delta))) == [delta]
