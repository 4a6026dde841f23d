"""vLLM as a backend, before a scripted server of its protocol: answers, refusals by name, aborts, moves."""

from __future__ import annotations

import asyncio
import io
import zipfile
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.router import backend, chat, collect, generate, running_router, until
from factories.servers.scripted_engine import (
    EOS,
    OTHER_EOS,
    ScriptedEngine,
    Tell,
    from_position,
    prompt_of,
    tokenizer_zip,
)
from factories.servers.scripted_inference import ScriptedInference
from penstock.common.errors import PenstockError, StartupError, from_rpc_error
from penstock.engines import vllm_inference_pb2
from penstock.engines.vllm_engine_pb2 import GenerateComplete, GenerateResponse, GenerateStreamChunk
from penstock.v1 import common_pb2, config_pb2, text_pb2
from structlog.testing import capture_logs

WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)
IDS = [*range(300, 308), EOS]
QUICK_POLLS: dict[str, Any] = {"engine_poll_seconds": 0.01}
Made = type[ScriptedEngine]


@pytest.fixture(params=[ScriptedEngine, ScriptedInference], ids=["VllmEngine", "vllm.Inference"])
def made(request: pytest.FixtureRequest) -> Made:
    """Make an engine of each of vLLM's protocols."""
    protocol: Made = request.param
    return protocol


def vllm_router(*backends: Any, **settings: Any) -> Any:
    """Run a router before them."""
    return running_router(*backends, **{**QUICK_POLLS, **settings})


def config(**fields: Any) -> config_pb2.GenerationConfig:
    return config_pb2.GenerationConfig(**fields)


def sampling_of(request: Any) -> Any:
    """Return the message with a request's seed, of either protocol."""
    return request.sampling if isinstance(request, vllm_inference_pb2.GenerateRequest) else request.sampling_params


def limit_of(request: Any) -> int:
    """Return a request's limit of tokens, of either protocol."""
    is_own = isinstance(request, vllm_inference_pb2.GenerateRequest)
    limit: int = request.stopping.max_new_tokens if is_own else request.sampling_params.max_tokens
    return limit


async def failure(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


async def test_an_answer_comes_as_from_our_own_backend(made: Made) -> None:
    async with made() as engine, vllm_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)))
        assert answer.ids() == IDS
        assert answer.text() == await router.decode(IDS)
        result = answer.finished.sequences[0]
        assert result.finish_reason == common_pb2.FINISH_REASON_STOP_EOS
        assert result.token_count == len(IDS)
        assert answer.finished.usage.prompt_tokens == answer.started.prompt_tokens
        chatted = await collect(router.stub.Chat(chat()))
        assert chatted.text() == await router.decode(IDS)
        assert not engine.aborted


async def test_its_model_is_described_by_its_own_files() -> None:
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        models = await router.stub.ListModels(text_pb2.ListModelsRequest())
        assert [model.name for model in models.models] == [engine.model]
        assert models.models[0].max_context_tokens == engine.max_context
        await collect(router.stub.Generate(generate()))
        # generation_config.json has two ends; vLLM tells that of config.json alone.
        assert set(engine.requests[0].sampling_params.stop_token_ids) == {EOS, OTHER_EOS}
        assert engine.requests[0].sampling_params.ignore_eos


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
        logit_bias={7: 1.5},
    )
    stop = config_pb2.StopConfig(stop_strings=["zzz"], stop_token_ids=[common_pb2.TokenIds(ids=[9])])
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(config=asked, stop=stop)))
        sampling = engine.requests[0].sampling_params
        assert (sampling.top_k, sampling.max_tokens, sampling.min_tokens) == (7, 6, 2)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            assert getattr(sampling, name) == pytest.approx(getattr(asked, name))
        assert dict(sampling.logit_bias) == {7: 1.5}
        assert list(sampling.stop) == ["zzz"]
        assert 9 in sampling.stop_token_ids
        assert sampling.seed == 5
        assert answer.started.seed == asked.seed
        assert answer.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_without_options_it_decodes_as_the_models_file_says() -> None:
    """vLLM itself would sample at temperature 1."""
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        await collect(router.stub.Generate(generate()))
        assert engine.requests[0].sampling_params.temperature == 0
        assert engine.requests[0].sampling_params.HasField("temperature")


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        ({"json_schema": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True}, "json_object", True),
    ],
)
async def test_a_constraint_reaches_it(constraint: dict[str, Any], field: str, value: Any) -> None:
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        await collect(router.stub.Generate(generate(constraint=config_pb2.Constraint(**constraint))))
        assert getattr(engine.requests[0].sampling_params, field) == value


async def test_choices_reach_it() -> None:
    constraint = config_pb2.Constraint(choice=config_pb2.Choices(values=["yes", "no"]))
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        await collect(router.stub.Generate(generate(constraint=constraint)))
        assert list(engine.requests[0].sampling_params.choice.choices) == ["yes", "no"]


async def test_each_sequence_is_a_call_with_a_seed_of_its_own(made: Made) -> None:
    async with made() as engine, vllm_router(engine) as router:
        asked = config(do_sample=True, num_return_sequences=3, seed=5)
        answer = await collect(router.stub.Generate(generate(config=asked, output=WANT_IDS)))
        assert [answer.ids(index) for index in range(3)] == [IDS] * 3
        assert len({sampling_of(request).seed for request in engine.requests}) == 3
        assert answer.finished.usage.completion_tokens == 3 * len(IDS)


async def test_log_probabilities_come_with_their_alternatives(made: Made) -> None:
    output = config_pb2.OutputConfig(return_token_ids=True, top_logprobs=2, prompt_logprobs=1)
    async with made() as engine, vllm_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(output=output)))
        positions = [position for delta in answer.deltas for position in delta.logprobs]
        assert [position.chosen.token_id for position in positions] == IDS
        assert all(position.chosen.logprob == pytest.approx(-0.5) for position in positions)
        # The most likely ones, in order: vLLM lists the token itself first.
        assert [one.rank for one in positions[0].top] == [1, 2]
        assert all(position.top[0].logprob >= position.top[1].logprob for position in positions)
        assert len(answer.started.prompt_logprobs) == answer.started.prompt_tokens
        assert not answer.started.prompt_logprobs[0].HasField("chosen")


async def test_a_stop_string_ends_the_answer_and_is_named(made: Made) -> None:
    async with made(script=from_position(4, end=None)) as engine, vllm_router(engine) as router:
        text = await router.decode([303])
        engine.stop_string = text
        stop = config_pb2.StopConfig(stop_strings=[text])
        answer = await collect(router.stub.Generate(generate(stop=stop)))
        assert answer.finished.sequences[0].stop_string == text
        assert text not in answer.text()


async def test_max_time_ends_it_although_it_knows_none(made: Made) -> None:
    async with made(allowance=2) as engine, vllm_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(config=config(max_time=0.5), output=WANT_IDS)))
        assert answer.finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_MAX_TIME
        # A busy machine may not get to the second token in this time.
        assert answer.ids() in (IDS[:2], IDS[:1], [])
        await engine.until(lambda: bool(engine.aborted) and not engine.live)


# Refusals by name.


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"config": config(num_beams=4)}, "config.num_beams"),
        ({"config": config(dola_layers=config_pb2.DolaLayers(preset="low"))}, "config.dola_layers"),
        ({"config": config(penalty_alpha=0.6, top_k=4)}, "config.penalty_alpha"),
        ({"config": config(guidance_scale=2.0)}, "config.guidance_scale"),
        ({"config": config(do_sample=True, typical_p=0.5)}, "config.typical_p"),
        ({"config": config(no_repeat_ngram_size=2)}, "config.no_repeat_ngram_size"),
        ({"config": config(allowed_token_ids=[5, 6])}, "config.allowed_token_ids"),
        ({"config": config(logit_bias={7: 101.0})}, "config.logit_bias"),
        ({"config": config(watermarking_config=config_pb2.WatermarkingConfig())}, "config.watermarking_config"),
        ({"output": config_pb2.OutputConfig(output_scores=True)}, "output.output_scores"),
        (
            {"stop": config_pb2.StopConfig(stop_token_ids=[common_pb2.TokenIds(ids=[5, 6])])},
            "stop.stop_token_ids",
        ),
    ],
)
async def test_what_it_lacks_is_refused_by_the_fields_and_the_backends_names(
    fields: dict[str, Any], field: str
) -> None:
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        error = await failure(router.stub.Generate(generate(**fields)))
        assert (error.code, error.reason, error.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "NOT_ON_BACKEND",
            field,
        )
        assert engine.address in error.message
        assert not engine.requests


async def test_drafts_are_the_engines_own_affair(made: Made) -> None:
    async with made() as engine, vllm_router(engine) as router:
        answer = await collect(router.stub.Generate(generate(config=config(prompt_lookup_num_tokens=4))))
        assert any("drafts" in warning for warning in answer.started.warnings)
        assert len(engine.requests) == 1


async def test_what_it_lacks_goes_to_a_backend_that_has_it(made: Made) -> None:
    async with made() as engine, backend() as own, vllm_router(engine, own) as router:
        for _ in range(4):
            await collect(router.stub.Generate(generate(config=config(num_beams=4))))
        assert len(own.submitted) == 4
        assert not engine.requests


async def test_a_backend_that_has_it_and_is_away_is_not_a_refusal(made: Made) -> None:
    async with made() as engine, backend() as own, vllm_router(engine, own) as router:
        await own.stop()
        await router.until("backend_up", 0.0, backend=own.address)
        error = await failure(router.stub.Generate(generate(config=config(num_beams=4))))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_BACKEND")
        assert "config.num_beams" in error.message


async def test_its_own_refusal_keeps_its_words_to_itself(made: Made) -> None:
    async with made(refuse=grpc.StatusCode.INVALID_ARGUMENT) as engine, vllm_router(engine) as router:
        error = await failure(router.stub.Generate(generate()))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_ON_BACKEND")
        assert "own words" not in error.message


# Aborts.


async def test_a_caller_who_leaves_aborts_it(made: Made) -> None:
    async with made(allowance=2) as engine, vllm_router(engine) as router:
        call = router.stub.Generate(generate())
        await engine.until(lambda: bool(engine.live))
        call.cancel()
        await engine.until(lambda: bool(engine.aborted) and not engine.live)
        assert engine.aborted == [engine.requests[0].request_id]


async def test_a_deadline_aborts_it(made: Made) -> None:
    async with made(allowance=2) as engine, vllm_router(engine) as router:
        error = await failure(router.stub.Generate(generate(), timeout=1.0))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await engine.until(lambda: bool(engine.aborted) and not engine.live)


async def test_a_router_that_ends_aborts_what_it_has_there(made: Made) -> None:
    async with made(allowance=2) as engine:
        async with vllm_router(engine, drain_grace_seconds=0.1) as router:
            call = router.stub.Generate(generate())
            await engine.until(lambda: bool(engine.live))
        await engine.until(lambda: bool(engine.aborted))
        call.cancel()


# Losses and moves.


async def test_a_stream_moves_from_it_to_our_own_and_back(made: Made) -> None:
    script = count_up(8, first=300)
    # Full from its first report on, so that the first attempt is the engine's.
    full: dict[str, Any] = {"max_queued": 1, "extra_load": 5}
    async with (
        made(script=from_position(8, end=None), allowance=3) as engine,
        EmittingBackend(script=script, fingerprint=backend().fingerprint, allowance=0, **full) as own,
        vllm_router(engine, own) as router,
    ):
        answer = asyncio.ensure_future(
            collect(router.stub.Generate(generate(output=WANT_IDS, config=config(max_new_tokens=8))))
        )
        await engine.until(lambda: bool(engine.requests) and engine.allowance == 0)
        own.extra_load = 0
        await own.allow(2)
        await engine.stop()
        await own.until(lambda: own.allowance == 0 and own.running > 0)
        assert [list(one.ids) for one in own.submitted[-1].resumed_token_ids] == [IDS[:3]]
        await engine.start()
        await engine.allow(None)
        await router.until("backend_up", 1.0, backend=engine.address)
        await own.stop()
        result = await answer
        assert result.ids() == IDS[:8]
        assert result.finished.attempts == 3
        resumed = engine.requests[-1]
        assert prompt_of(resumed)[-5:] == IDS[:5]
        assert limit_of(resumed) == 3


async def test_a_constraint_does_not_move_to_it(made: Made) -> None:
    async with (
        made() as engine,
        EmittingBackend(script=count_up(8), fingerprint=backend().fingerprint, allowance=2) as own,
        vllm_router(engine, own, failover_wait_seconds=0.2) as router,
    ):
        engine.healthy = False
        await router.until("backend_up", 0.0, backend=engine.address)
        constraint = config_pb2.Constraint(json_schema="{}")
        call = router.stub.Generate(generate(constraint=constraint))
        answer = asyncio.ensure_future(collect(call))
        await own.until(lambda: own.allowance == 0 and own.running > 0)
        engine.healthy = True
        await router.until("backend_up", 1.0, backend=engine.address)
        await own.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert not engine.requests


async def test_one_that_its_operator_aborts_moves(made: Made) -> None:
    async with (
        made(script=from_position(8, end=None), allowance=2) as one,
        made(script=from_position(8, end=None), allowance=2) as other,
        vllm_router(one, other) as router,
    ):
        answer = asyncio.ensure_future(
            collect(router.stub.Generate(generate(output=WANT_IDS, config=config(max_new_tokens=8))))
        )
        await until(lambda: bool(one.live or other.live))
        first = one if one.live else other
        await first.until(lambda: first.allowance == 0)
        first.aborted.append(first.requests[0].request_id)
        for engine in (one, other):
            await engine.allow(None)
        result = await answer
        assert result.ids() == IDS[:8]
        assert result.finished.attempts == 2


async def test_sixteen_streams_outlive_one_of_two(made: Made) -> None:
    async with (
        made(script=from_position(40, end=None), allowance=100) as one,
        made(script=from_position(40, end=None), allowance=100) as other,
        vllm_router(one, other) as router,
    ):
        asked = config(max_new_tokens=40)
        answers = [
            asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS, config=asked))))
            for _ in range(16)
        ]
        await one.until(lambda: bool(one.live))
        await other.until(lambda: bool(other.live))
        await one.stop()
        await other.allow(None)
        assert [answer.ids() for answer in await asyncio.gather(*answers)] == [list(range(300, 340))] * 16


@pytest.mark.parametrize("knob", ["healthy", "serving"])
async def test_one_that_is_unhealthy_gets_nothing_new(made: Made, knob: str) -> None:
    """By vLLM's own call it is healthy while it warms up: the standard health service tells of that."""
    async with (
        made(serving=True) as one,
        made(serving=True) as other,
        vllm_router(one, other) as router,
    ):
        setattr(one, knob, False)
        await router.until("backend_up", 0.0, backend=one.address)
        for _ in range(3):
            await collect(router.stub.Generate(generate()))
        assert not one.requests
        assert len(other.requests) == 3
        setattr(one, knob, True)
        await router.until("backend_up", 1.0, backend=one.address)


async def test_an_engine_that_answers_and_makes_no_token_is_lost_at_last(made: Made) -> None:
    async with (
        made(allowance=0) as stuck,
        backend(script=count_up(3), max_queued=1, extra_load=5) as own,
        vllm_router(stuck, own, engine_silence_seconds=0.2, stall_timeout_seconds=0.5) as router,
    ):
        answer = asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS))))
        await stuck.until(lambda: bool(stuck.live))
        own.extra_load = 0
        await own.notify()
        assert (await answer).ids() == list(range(300, 303))


async def test_one_that_is_slow_and_healthy_is_not_lost(made: Made) -> None:
    async with (
        made(allowance=0) as slow,
        vllm_router(slow, stall_timeout_seconds=0.3, engine_silence_seconds=600.0) as router,
    ):
        answer = asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS))))
        await slow.until(lambda: bool(slow.live))
        seen = slow.health_checks
        # More checks than fit into the stall timeout.
        await slow.until(lambda: slow.health_checks > seen + 60)
        await slow.allow(None)
        result = await answer
        assert result.ids() == IDS
        assert result.finished.attempts == 1


# Start.


def another_tokenizer() -> bytes:
    """Make a zip with a tokenizer.json of one byte more."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(tokenizer_zip())) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) + b" " * (entry.filename == "tokenizer.json"))
    return made.getvalue()


async def test_another_tokenizer_is_turned_away() -> None:
    async with ScriptedEngine(bundle=another_tokenizer()) as engine:
        with pytest.raises(StartupError, match="do not belong together"):
            async with vllm_router(engine):
                pass


@pytest.mark.parametrize(
    "knobs",
    [
        {"bundle": b"no zip"},
        {"bundle_digest": "0" * 64},
        {"vocab_size": 0},
        {"max_context": 0},
        {"bundle": None, "default_sampling_params_json": "[1]"},
        {"bundle": None, "default_sampling_params_json": '{"top_p": 7}'},
    ],
)
async def test_one_with_facts_that_cannot_be_read_is_not_used(knobs: dict[str, Any]) -> None:
    async with ScriptedEngine(**knobs) as engine:
        with pytest.raises(StartupError, match="no generation backend is ready"):
            async with vllm_router(engine, start_timeout_seconds=2.0):
                pass
        assert not engine.requests


async def test_one_that_sends_no_tokenizer_is_served_by_what_it_tells() -> None:
    told = '{"temperature":0.6,"top_p":0.95}'
    async with (
        ScriptedEngine(bundle=None, default_sampling_params_json=told) as engine,
        vllm_router(engine) as router,
    ):
        await collect(router.stub.Generate(generate()))
        sampling = engine.requests[0].sampling_params
        assert sampling.temperature == pytest.approx(0.6)
        assert sampling.top_p == pytest.approx(0.95)


async def test_a_warning_says_that_it_does_not_keep_tenants_apart() -> None:
    with capture_logs() as lines:
        async with ScriptedEngine() as engine, vllm_router(engine):
            pass
    told = [line for line in lines if "cache_salt" in line["event"]]
    assert [(line["log_level"], line["backend"], line["engine"]) for line in told] == [
        ("warning", engine.address, "vLLM")
    ]


# Score and Embed.


async def test_it_scores_by_the_log_probabilities_of_a_prompt(made: Made) -> None:
    async with made() as engine, vllm_router(engine) as router:
        item = text_pb2.ScoreTextItem(prompt="Hello", continuation=" world")
        answer = await router.stub.Score(text_pb2.ScoreTextRequest(items=[item]))
        scored = answer.results[0]
        assert scored.logprob == pytest.approx(-0.5 * len(scored.logprobs))
        assert limit_of(engine.requests[0]) == 1


async def test_it_embeds_if_it_was_started_for_that() -> None:
    async with ScriptedEngine() as engine, vllm_router(engine) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.Embed(text_pb2.EmbedTextRequest(texts=["Hello"]))
        assert from_rpc_error(caught.value).reason == "NOT_ON_BACKEND"
    async with ScriptedEngine(generates=False) as engine, vllm_router(engine) as router:
        answer = await router.stub.Embed(text_pb2.EmbedTextRequest(texts=["Hello"], normalize=True))
        assert list(answer.embeddings[0].values) == pytest.approx([0.6, 0.8])
        error = await failure(router.stub.Generate(generate()))
        assert error.field == "model"


# Lies.


def _change(at: int, **fields: Any) -> Tell:
    """Change the chunk of that number."""

    def edit(message: GenerateResponse, number: int) -> list[GenerateResponse]:
        if number == at and message.HasField("chunk"):
            for name, value in fields.items():
                if isinstance(value, list):
                    getattr(message.chunk, name)[:] = value
                else:
                    setattr(message.chunk, name, value)
        return [message]

    return edit


def _end(**fields: Any) -> Tell:
    """Change the end."""

    def edit(message: GenerateResponse, _: int) -> list[GenerateResponse]:
        if message.HasField("complete"):
            for name, value in fields.items():
                setattr(message.complete, name, value)
        return [message]

    return edit


def _cut(at: int, **end: Any) -> Tell:
    """End before the chunk of that number."""

    def edit(message: GenerateResponse, number: int) -> list[GenerateResponse]:
        if number == at:
            return [GenerateResponse(complete=GenerateComplete(**end))]
        return [message] if number < at else []

    return edit


LIES: dict[str, Tell] = {
    "a token outside the vocabulary": _change(3, token_ids=[1 << 20]),
    "a token after the model's end": lambda message, number: [
        message,
        *([GenerateResponse(chunk=GenerateStreamChunk(token_ids=[7]))] if number == 8 else []),
    ],
    "another prompt's length": _change(0, prompt_tokens=7777),
    "more tokens cached than there are": _change(0, cached_tokens=7777),
    "more tokens than asked for": _change(4, token_ids=list(range(20, 60))),
    "an end of a reason that there is not": _end(finish_reason="tired"),
    "an error that ends well": _end(finish_reason="error"),
    "a length that was not reached": _cut(3, finish_reason="length"),
    "a stop without a stop": _cut(3, finish_reason="stop"),
    "a stop string that nobody named": _cut(3, finish_reason="stop", matched_stop_str="zzz"),
    "no end": lambda message, _: [message] if message.HasField("chunk") else [],
    "more drafts accepted than tokens": _end(spec_accepted_tokens=7777),
    "no message of any kind": lambda _, __: [GenerateResponse()],
}


@pytest.mark.parametrize("lie", LIES)
async def test_one_that_lies_is_left_for_one_that_does_not(lie: str) -> None:
    async with (
        ScriptedEngine(tell=LIES[lie], allowance=0) as liar,
        ScriptedEngine() as honest,
        vllm_router(liar, honest, eject_consecutive_failures=0, eject_failure_share=0.0) as router,
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
