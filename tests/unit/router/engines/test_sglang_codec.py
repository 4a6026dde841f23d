"""SGLang's messages: a request as SGLang takes it, and an answer as it tells it."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.engines import sglang_scheduler_pb2 as sglang
from penstock.router.engines.engine_model import EngineModel, read_model
from penstock.router.engines.engine_request import EngineRequest, lacking, resolve_request
from penstock.router.engines.engine_services import EngineFacts
from penstock.router.engines.sglang_codec import SglangCodec
from penstock.router.engines.vllm_codec import VllmCodec
from penstock.v1 import common_pb2, config_pb2, generation_pb2, tokenizer_pb2

CODEC = SglangCodec()


def model() -> EngineModel:
    told = EngineFacts("m", 100, 50, (2,), max_running_requests=8, kv_tokens=1600)
    return read_model(told, None, CODEC.max_top_logprobs, tokenizer_pb2.GetTokenizerResponse())


def resolved(**fields: Any) -> EngineRequest:
    config = config_pb2.GenerationConfig(**fields.pop("config", {}))
    stop = config_pb2.StopConfig(**fields.pop("stop", {}))
    message = generation_pb2.GenerateRequest(
        request_id="r", prompt_token_ids=[5, 6], seed=9, config=config, stop=stop, **fields
    )
    return resolve_request(message, model())


def generate(request: EngineRequest, index: int = 0) -> Any:
    return CODEC.generate(request, index, "r-0")


def test_nothing_is_left_to_its_zeros() -> None:
    """An unset field is 0 there, and 0 is not off."""
    sampling = generate(resolved()).sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.0, 1.0, -1, 1.0)
    assert sampling.max_new_tokens == 98
    assert list(sampling.stop_token_ids) == [2]
    assert sampling.ignore_eos
    assert sampling.no_stop_trim


def test_options_of_sampling_are_those_of_the_request() -> None:
    sampling = generate(
        resolved(config={"do_sample": True, "top_k": 0, "top_p": 0.5, "temperature": 0.7})
    ).sampling_params
    assert (sampling.top_k, sampling.top_p) == (-1, 0.5)
    assert sampling.temperature == pytest.approx(0.7)
    default = generate(resolved(config={"do_sample": True})).sampling_params
    assert default.top_k == 50
    assert generate(resolved(config={"do_sample": True, "top_p": 0.0})).sampling_params.top_k == 1


def test_what_was_sent_before_is_part_of_the_prompt() -> None:
    resumed = [common_pb2.TokenIds(ids=[7, 8])]
    message = generate(resolved(resumed_token_ids=resumed, config={"max_new_tokens": 10, "min_new_tokens": 1}))
    assert list(message.tokenized.input_ids) == [5, 6, 7, 8]
    assert (message.sampling_params.max_new_tokens, message.sampling_params.min_new_tokens) == (8, 0)


def test_strict_tools_that_nothing_holds_there_are_told() -> None:
    calls = generation_pb2.CallGrammar(opens=["<tool_call>"], grammar='start: "a"')
    assert resolved(calls=calls).warnings == resolved().warnings
    calls.is_required = True
    request = resolved(calls=calls)
    assert CODEC.lacks(request) is None
    assert any("strict" in warning for warning in request.warnings)


def test_a_seed_that_was_asked_for_is_refused_and_the_routers_own_is_not() -> None:
    assert CODEC.lacks(resolved(config={"do_sample": True})) is None
    found = CODEC.lacks(resolved(config={"do_sample": True, "seed": 4}))
    assert found is not None
    assert found[0] == "config.seed"


@pytest.mark.parametrize(
    ("constraint", "lacks"),
    [
        ({"json_schema": "{}"}, None),
        ({"regex": "a"}, None),
        ({"grammar": "root"}, None),
        ({"json_object": True}, "constraint.json_object"),
        ({"choice": config_pb2.Choices(values=["a"])}, "constraint.choice"),
    ],
)
def test_its_constraints(constraint: dict[str, Any], lacks: str | None) -> None:
    request = resolved(constraint=config_pb2.Constraint(**constraint))
    found = lacking(request, model(), CODEC.params, CODEC.constraints, resumes=False)
    assert (found and found[0]) == lacks
    if lacks is None:
        assert generate(request).sampling_params.WhichOneof("constraint") is not None


def test_a_chunk_and_an_end_are_read() -> None:
    request = resolved(output=config_pb2.OutputConfig(top_logprobs=1))
    chunk = sglang.GenerateStreamChunk(token_ids=[7], prompt_tokens=2, completion_tokens=1)
    chunk.output_logprobs.token_ids.append(7)
    chunk.output_logprobs.token_logprobs.append(-1.0)
    chunk.output_logprobs.top_logprobs.add(values=[-1.0], token_ids=[7])
    read = CODEC.read(sglang.GenerateResponse(chunk=chunk), request)
    assert list(read.token_ids) == [7]
    assert (read.logprobs[0].chosen.token_id, read.logprobs[0].chosen.rank) == (7, 1)
    end = sglang.GenerateComplete(output_ids=[7], finish_reason="stop", matched_token_id=2)
    told = CODEC.read(sglang.GenerateResponse(complete=end), request)
    assert not told.token_ids
    assert told.end is not None
    assert (told.end.reason, told.end.token_id) == ("stop", 2)


def test_an_abort_is_a_call_for_each_request() -> None:
    assert [one.request_id for one in CODEC.aborts(["a", "b"])] == ["a", "b"]  # type: ignore[attr-defined]
    assert [list(one.request_ids) for one in VllmCodec().aborts(["a", "b"])] == [["a", "b"]]  # type: ignore[attr-defined]
