"""vLLM's own services as a backend: what they are asked, what the router takes from elsewhere, lies.

What both of vLLM's protocols have in common is in test_engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from factories.servers.router import chat, collect, generate, running_router
from factories.servers.scripted_engine import EOS, OTHER_EOS, ScriptedEngine, Tell
from factories.servers.scripted_inference import ScriptedInference
from penstock.common.errors import PenstockError, StartupError, from_rpc_error
from penstock.engines.vllm_inference_pb2 import FinishInfo, GenerateResponse, SequenceOutput
from penstock.v1 import common_pb2, config_pb2, generation_pb2_grpc, text_pb2
from structlog.testing import capture_logs

WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)
IDS = [*range(300, 308), EOS]


def inference_router(*backends: Any, **settings: Any) -> Any:
    """Run a router before them."""
    return running_router(*backends, **{"engine_poll_seconds": 0.01, **settings})


def config(**fields: Any) -> config_pb2.GenerationConfig:
    return config_pb2.GenerationConfig(**fields)


async def failure(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


async def test_its_model_is_described_by_itself_and_by_our_tokenizer() -> None:
    async with ScriptedInference() as engine, inference_router(engine) as router:
        models = await router.stub.ListModels(text_pb2.ListModelsRequest())
        assert [(model.name, model.max_context_tokens) for model in models.models] == [(engine.model, 4096)]
        answer = await collect(router.stub.Chat(chat()))
        assert answer.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_STOP_EOS
        stopping = engine.requests[0].stopping
        # The tokenizer's ends, in place of those that the engine has and does not tell.
        assert set(stopping.stop_token_ids) == {EOS, OTHER_EOS}
        assert stopping.ignore_eos
        assert not engine.requests[0].response.output_text


async def test_options_reach_it() -> None:
    asked = config(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.25,
        presence_penalty=0.75,
        max_new_tokens=6,
        min_new_tokens=2,
        seed=(1 << 40) + 5,
        logit_bias={7: 101.5},
        allowed_token_ids=[*range(300, 320), 7],
    )
    stop = config_pb2.StopConfig(stop_strings=["zzz"], stop_token_ids=[common_pb2.TokenIds(ids=[9])])
    async with ScriptedInference() as engine, inference_router(engine) as router:
        await collect(router.stub.Generate(generate(config=asked, stop=stop)))
        told = engine.requests[0]
        assert told.temperature == pytest.approx(0.5)
        assert (told.sampling.top_k, told.sampling.seed) == (7, 5)
        assert (told.sampling.top_p, told.sampling.min_p) == (pytest.approx(0.9), pytest.approx(0.05))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            assert getattr(told.decoding, name) == pytest.approx(getattr(asked, name))
        assert dict(told.decoding.logit_bias) == {7: 101.5}
        assert list(told.decoding.allowed_token_ids) == [7, *range(300, 320)]
        assert (told.stopping.max_new_tokens, told.stopping.min_new_tokens) == (6, 2)
        assert list(told.stopping.stop_strings) == ["zzz"]
        assert 9 in told.stopping.stop_token_ids


async def test_what_is_off_is_not_left_to_the_models_own_defaults() -> None:
    """A 0 would be the engine's default, from the model's file."""
    async with ScriptedInference() as engine, inference_router(engine) as router:
        await collect(router.stub.Generate(generate(config=config(do_sample=True, top_k=0, top_p=1.0))))
        told = engine.requests[0]
        assert told.sampling.top_k > 1 << 24
        assert told.sampling.top_p == 1.0
        assert 0 < told.sampling.min_p < 1e-20
        assert told.decoding.repetition_penalty == 1.0


async def test_without_options_it_is_greedy_and_the_log_says_so() -> None:
    with capture_logs() as lines:
        async with ScriptedInference() as engine, inference_router(engine) as router:
            await collect(router.stub.Generate(generate()))
            assert engine.requests[0].HasField("temperature")
            assert engine.requests[0].temperature == 0
    told = [line for line in lines if "greedy" in line["event"]]
    assert [(line["log_level"], line["protocol"]) for line in told] == [("warning", "vllm.Inference")]


async def test_requests_of_different_salts_share_no_blocks_there() -> None:
    with capture_logs() as lines:
        async with ScriptedInference() as engine, inference_router(engine) as router:
            for salt in ("one", "other"):
                await collect(router.stub.Generate(generate(cache_salt=salt)))
            assert len({request.kv.cache_salt for request in engine.requests} - {""}) == 2
    assert not [line for line in lines if "shared by all tenants" in line["event"]]


@pytest.mark.parametrize(
    ("constraint", "field", "read"),
    [
        ({"json_schema": '{"type":"object"}'}, "json", lambda told: told.json == '{"type":"object"}'),
        ({"regex": "[a-z]+"}, "regex", lambda told: told.regex == "[a-z]+"),
        ({"grammar": 'start: "a"'}, "grammar", lambda told: told.grammar == 'start: "a"'),
        ({"json_object": True}, "json_object", lambda told: told.json_object),
        (
            {"choice": config_pb2.Choices(values=["yes", "no"])},
            "choice",
            lambda told: list(told.choice.choices) == ["yes", "no"],
        ),
    ],
)
async def test_a_constraint_reaches_it(constraint: dict[str, Any], field: str, read: Callable[[Any], bool]) -> None:
    async with ScriptedInference() as engine, inference_router(engine) as router:
        await collect(router.stub.Generate(generate(constraint=config_pb2.Constraint(**constraint))))
        told = engine.requests[0].decoding
        assert told.WhichOneof("structured_output") == field
        assert read(told)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"config": config(num_beams=4)}, "config.num_beams"),
        ({"config": config(guidance_scale=2.0)}, "config.guidance_scale"),
        ({"config": config(do_sample=True, typical_p=0.5)}, "config.typical_p"),
        ({"config": config(do_sample=True, temperature=2.5)}, "config.temperature"),
        ({"config": config(no_repeat_ngram_size=2)}, "config.no_repeat_ngram_size"),
        ({"output": config_pb2.OutputConfig(output_scores=True)}, "output.output_scores"),
        ({"stop": config_pb2.StopConfig(stop_token_ids=[common_pb2.TokenIds(ids=[5, 6])])}, "stop.stop_token_ids"),
    ],
)
async def test_what_it_lacks_is_refused_by_the_fields_and_the_backends_names(
    fields: dict[str, Any], field: str
) -> None:
    async with ScriptedInference() as engine, inference_router(engine) as router:
        error = await failure(router.stub.Generate(generate(**fields)))
        assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_ON_BACKEND", field)
        assert engine.address in error.message
        assert not engine.requests


async def test_it_has_no_embeddings() -> None:
    async with ScriptedInference() as engine, inference_router(engine) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.Embed(text_pb2.EmbedTextRequest(texts=["Hello"]))
        assert from_rpc_error(caught.value).reason == "NOT_ON_BACKEND"


async def test_an_unlikely_token_has_the_rank_that_the_engine_tells() -> None:
    output = config_pb2.OutputConfig(top_logprobs=1)
    async with ScriptedInference() as engine, inference_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(output=output)))
        first = next(position for delta in answer.deltas for position in delta.logprobs)
        assert (first.chosen.rank, [one.rank for one in first.top]) == (2, [1])
        assert first.top[0].token_id != first.chosen.token_id


# Health and start.


async def test_one_without_the_health_service_is_asked_for_its_facts() -> None:
    class Old(ScriptedInference):
        has_health = False

    async with Old() as engine, inference_router(engine) as router:
        assert (await collect(router.stub.Generate(generate(output=WANT_IDS)))).ids() == IDS


async def test_one_that_takes_its_health_away_gets_nothing_new() -> None:
    """An engine that shuts down does so, while it finishes what it has."""
    leaving, other = ScriptedInference(), ScriptedInference()
    async with leaving, other, inference_router(leaving, other) as router:
        leaving.is_withdrawn = True
        await router.until("backend_up", 0.0, backend=leaving.address)
        await collect(router.stub.Generate(generate()))
        assert (len(leaving.requests), len(other.requests)) == (0, 1)


async def test_one_that_is_restarted_with_the_other_protocol_is_spoken_to_by_it() -> None:
    engine: ScriptedEngine = ScriptedInference()
    async with engine, inference_router(engine) as router:
        await collect(router.stub.Generate(generate()))
        await engine.stop()
        await router.until("backend_up", 0.0, backend=engine.address)
        async with ScriptedEngine(port=engine.port) as restarted:
            await router.until("backend_up", 1.0, backend=engine.address)
            await collect(router.stub.Generate(generate()))
            assert (len(engine.requests), len(restarted.requests)) == (1, 1)


async def test_one_with_neither_protocol_is_told_by_their_names() -> None:
    class Neither(ScriptedEngine):
        def add_services(self, server: Any) -> None:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(
                generation_pb2_grpc.GenerationServiceServicer(), server
            )

    with capture_logs() as lines:
        async with Neither() as engine:
            with pytest.raises(StartupError, match="no generation backend is ready"):
                async with inference_router(engine, start_timeout_seconds=2.0):
                    pass
    causes = {line["cause"] for line in lines if line["event"] == "backend lost"}
    assert causes == {f"the backend {engine.address} has no vllm.grpc.engine.VllmEngine and no vllm.Inference"}


@pytest.mark.parametrize("knobs", [{"max_context": 0}])
async def test_one_with_facts_that_cannot_be_read_is_not_used(knobs: dict[str, Any]) -> None:
    async with ScriptedInference(**knobs) as engine:
        with pytest.raises(StartupError, match="no generation backend is ready"):
            async with inference_router(engine, start_timeout_seconds=2.0):
                pass
        assert not engine.requests


# Lies. Message 0 has the prompt's facts, message n the n-th token.


def _change(at: int, **fields: Any) -> Tell:
    """Change the tokens of that message."""

    def edit(message: GenerateResponse, number: int) -> list[GenerateResponse]:
        if number == at:
            for name, value in fields.items():
                if isinstance(value, list):
                    getattr(message.outputs, name)[:] = value
                else:
                    setattr(message.outputs, name, value)
        return [message]

    return edit


def _prompt(**fields: Any) -> Tell:
    def edit(message: GenerateResponse, number: int) -> list[GenerateResponse]:
        for name, value in fields.items() if number == 0 else ():
            setattr(message.prompt_info, name, value)
        return [message]

    return edit


def _cut(at: int, **end: Any) -> Tell:
    """End in place of the message of that number."""

    def edit(message: GenerateResponse, number: int) -> list[GenerateResponse]:
        if number == at:
            return [GenerateResponse(outputs=SequenceOutput(finish_info=FinishInfo(**end)))]
        return [message] if number < at else []

    return edit


def _endless(message: GenerateResponse, _: int) -> list[GenerateResponse]:
    message.outputs.ClearField("finish_info")
    return [message]


LIES: dict[str, Tell] = {
    "a token outside the vocabulary": _change(4, token_ids=[1 << 20]),
    "a token after the model's end": lambda message, number: [
        *(_endless(message, number) if number == 9 else [message]),
        *([GenerateResponse(outputs=SequenceOutput(num_tokens=1, token_ids=[7]))] if number == 9 else []),
    ],
    "another prompt's length": _prompt(num_prompt_tokens=7777),
    "no facts of the prompt": lambda message, number: [message] if number else [],
    "more tokens than asked for": _change(5, token_ids=list(range(20, 60)), num_tokens=40),
    "another number of tokens than there are": _change(3, num_tokens=2),
    "tokens without their ids": _change(3, token_ids=[]),
    "a sequence that nobody asked for": _change(3, index=1),
    "an end that is none": _cut(4, finish_reason=FinishInfo.NOT_FINISHED),
    "a length that was not reached": _cut(4, finish_reason=FinishInfo.LENGTH),
    "a stop without a stop": _cut(4, finish_reason=FinishInfo.STOP),
    "a stop string that nobody named": _cut(4, finish_reason=FinishInfo.STOP, stop_string="zzz"),
    "no end": _endless,
    "no message of any kind": lambda _, __: [GenerateResponse()],
}


@pytest.mark.parametrize("lie", LIES)
async def test_one_that_lies_is_left_for_one_that_does_not(lie: str) -> None:
    async with (
        ScriptedInference(tell=LIES[lie], allowance=0) as liar,
        ScriptedInference() as honest,
        inference_router(liar, honest, eject_consecutive_failures=0, eject_failure_share=0.0) as router,
    ):
        honest.healthy = False
        await router.until("backend_up", 0.0, backend=honest.address)
        asked = config(max_new_tokens=20)
        answer = asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS, config=asked))))
        await liar.until(lambda: bool(liar.requests))
        honest.healthy = True
        await router.until("backend_up", 1.0, backend=honest.address)
        await liar.allow(None)
        result = await answer
        assert result.ids() == IDS
        assert result.finished.attempts == 2
