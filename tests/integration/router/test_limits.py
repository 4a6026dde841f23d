"""Bad requests, full queues and slow readers: the status and field of each, at once, with nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.only_route import only_route
from factories.servers.router import (
    PATIENCE_SECONDS,
    Router,
    backend,
    chat,
    collect,
    generate,
    running_router,
    tokenizer_address,
    until,
)
from factories.wire.tcp_proxy import TcpProxy
from google.protobuf import struct_pb2
from penstock.common.config import ServerConfig
from penstock.common.errors import InvalidArgument, ResourceExhausted, from_rpc_error
from penstock.v1 import admin_pb2, common_pb2, config_pb2, text_pb2, text_pb2_grpc

CONFIG, OUTPUT = config_pb2.GenerationConfig, config_pb2.OutputConfig
WATERMARKING = config_pb2.WatermarkingConfig


async def failure(call: Any) -> tuple[grpc.StatusCode, Any]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (text_pb2.GenerateTextRequest(), "prompt"),
        (generate(""), "prompt"),
        (text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds()), "prompt"),
        (text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=[300] * 5000)), "prompt"),
        (generate(config=CONFIG(seed=2**63)), "config.seed"),
        (generate(config=CONFIG(num_return_sequences=1000)), "config.num_return_sequences"),
        (generate(request_id="x" * 200), "request_id"),
        (generate(session_id="x" * 2000), "session_id"),
        (text_pb2.ChatRequest(), "messages"),
        (chat("word " * 5000), "messages"),
        (chat(output=OUTPUT(echo=True)), "output.echo"),
        (
            chat(continue_final_message=True, add_generation_prompt=True),
            "continue_final_message",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_field_is_named(request_message: Any, field: str) -> None:
    async with backend(max_context=4096) as one, running_router(one) as router:
        method = router.stub.Chat if isinstance(request_message, text_pb2.ChatRequest) else router.stub.Generate
        code, error = await failure(method(request_message))
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert not one.submitted


def of_the_most_fields() -> text_pb2.GenerateTextRequest:
    """A request with as many fields as a message may have: its text, its config, and empty entries."""
    entries = ServerConfig.max_message_fields - 2
    return text_pb2.GenerateTextRequest(text="a", config=CONFIG(bad_words_ids=[common_pb2.TokenIds()] * entries))


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_what_is_made_of_the_largest_request_ends_no_session(transport: Any) -> None:
    async with backend(transport=transport) as one, running_router(one, transport=transport) as router:
        for message in (of_the_most_fields(), generate("b")):
            assert (await collect(router.stub.Generate(message, timeout=PATIENCE_SECONDS))).finished
        assert len(one.submitted) == 2
        message = of_the_most_fields()
        message.config.bad_words_ids.add()
        code, error = await failure(router.stub.Generate(message))
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "config.bad_words_ids")


# A field of number 999, of a release to come.
UNKNOWN = b"\xba\x3e\x01x"


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (generate(config=CONFIG.FromString(UNKNOWN)), "config"),
        (generate(config=CONFIG(watermarking_config=WATERMARKING.FromString(UNKNOWN))), "config.watermarking_config"),
        (chat(output=OUTPUT.FromString(UNKNOWN)), "output"),
        (generate(stop=config_pb2.StopConfig.FromString(UNKNOWN)), "stop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_option_of_another_release_is_refused_not_ignored(request_message: Any, field: str) -> None:
    async with backend() as one, running_router(one) as router:
        method = router.stub.Chat if isinstance(request_message, text_pb2.ChatRequest) else router.stub.Generate
        code, error = await failure(method(request_message))
        assert (code, error.field, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, field, "UNKNOWN_FIELD")
        assert "999" in error.message
        # Beside the options it is not: releases understand one another.
        known = text_pb2.GenerateTextRequest.FromString(generate().SerializeToString() + UNKNOWN)
        call = asyncio.create_task(collect(router.stub.Generate(known)))
        await until(lambda: bool(one.submitted))
        call.cancel()


async def test_backends_complaint_names_the_field_that_the_client_set() -> None:
    async with backend() as one, running_router(one) as router:
        one.refuse = InvalidArgument("config.negative_prompt_ids", "is not available")
        _, error = await failure(router.stub.Generate(generate(config=CONFIG(negative_prompt_text="no"))))
        assert (error.field, error.reason) == ("config.negative_prompt_text", "INVALID_FIELD")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"constraint": config_pb2.Constraint(choice=config_pb2.Choices(values=[""] * 40_000))}, "constraint"),
        ({"stop": config_pb2.StopConfig(stop_strings=[""] * 40_000)}, "stop"),
        ({"config": CONFIG(bad_words_ids=[common_pb2.TokenIds()] * 40_000)}, "config"),
        ({"output": OUTPUT(tensor_steps=range(40_000))}, "output"),
    ],
)
async def test_options_beyond_their_bound_are_refused_before_they_are_copied(options: Any, field: str) -> None:
    """Millions of tiny entries fit a message, and each costs every stream of the router its time."""
    async with backend() as one, running_router(one, max_options_bytes=64 << 10) as router:
        for message in (generate(**options), chat(**options)):
            method = router.stub.Chat if isinstance(message, text_pb2.ChatRequest) else router.stub.Generate
            code, error = await failure(method(message))
            assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert "--max-options-bytes" in error.message
        assert not one.submitted


async def test_a_negative_prompt_is_no_option_to_be_bounded() -> None:
    long = CONFIG(negative_prompt_ids=common_pb2.TokenIds(ids=[300] * 2000))
    async with backend() as one, running_router(one, max_options_bytes=1024) as router:
        assert (await collect(router.stub.Generate(generate(config=long)))).finished
        text = CONFIG(negative_prompt_text="word " * 1000)
        assert (await collect(router.stub.Generate(generate(config=text)))).finished


async def test_unknown_model_is_not_found() -> None:
    async with backend() as one, running_router(one) as router:
        code, error = await failure(router.stub.Generate(generate(model="other")))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert (await collect(router.stub.Generate(generate(model="penstock-demo")))).finished


@pytest.mark.parametrize("make", [generate, chat])
async def test_metadata_that_nothing_reads_is_warned_about(make: Any) -> None:
    metadata = struct_pb2.Struct()
    metadata.update({"user": "me"})
    async with backend() as one, running_router(one) as router:
        for fields, warnings in (({"metadata": metadata}, 1), ({}, 0)):
            message = make(**fields)
            method = router.stub.Chat if isinstance(message, text_pb2.ChatRequest) else router.stub.Generate
            answer = await collect(method(message))
            assert ["metadata" in warning for warning in answer.started.warnings] == [True] * warnings


async def test_live_request_id_cannot_be_used_twice() -> None:
    async with backend(script=count_up(10), allowance=1) as one, running_router(one) as router:
        first = asyncio.ensure_future(collect(router.stub.Generate(generate(request_id="mine"))))
        await one.until(lambda: one.running == 1)
        code, error = await failure(router.stub.Generate(generate(request_id="mine")))
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
        await one.allow(None)
        answer = await first
        assert answer.started.request_id == "mine"
        assert (await collect(router.stub.Generate(generate(request_id="mine")))).finished


@pytest.mark.parametrize("method", ["Embed", "Score", "DetectWatermark"])
async def test_methods_that_a_backend_does_not_have_are_unimplemented(method: str) -> None:
    async with backend() as one, running_router(one) as router:
        items = [text_pb2.ScoreTextItem(prompt="Hello", continuation=" world")]
        messages = {
            "Embed": text_pb2.EmbedTextRequest(texts=["Hello"]),
            "Score": text_pb2.ScoreTextRequest(items=items),
            "DetectWatermark": text_pb2.DetectWatermarkTextRequest(text="Hello"),
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(router.stub, method)(messages[method])
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert from_rpc_error(caught.value).reason == "UNIMPLEMENTED"


async def test_full_queue_is_refused_at_once_with_pushback() -> None:
    settings = {"max_live_requests": 1, "max_waiting_requests": 1}
    async with backend(script=count_up(10), allowance=1) as one, running_router(one, **settings) as router:
        live = asyncio.ensure_future(collect(router.stub.Generate(generate())))
        await one.until(lambda: one.running == 1)
        waiting = asyncio.ensure_future(collect(router.stub.Generate(generate())))
        await router.until("num_requests_waiting", 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(generate()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in dict(caught.value.trailing_metadata() or ())
        await one.allow(None)
        await asyncio.gather(live, waiting)


async def test_backends_full_is_resource_exhausted_before_any_work() -> None:
    async with backend(max_queued=1, extra_load=1) as one, running_router(one) as router:
        code, error = await failure(router.stub.Generate(generate()))
        assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert not one.submitted


async def room_for(router: Router, requests: int) -> None:
    """Wait until the router knows that the backend's queue has room."""
    service: Any = router.server.service
    await until(lambda: only_route(service).pool.ready("")[0].load.room >= requests)


async def test_running_requests_are_not_in_a_backends_queue() -> None:
    async with backend(max_queued=1, script=count_up(10), allowance=1) as one, running_router(one) as router:
        live = []
        for count in (1, 2, 3):
            live.append(asyncio.ensure_future(collect(router.stub.Generate(generate()))))
            await one.until(lambda count=count: one.running == count)  # type: ignore[misc]
            await one.allow(1)
            # Its report says that they all run.
            await room_for(router, 1)
        await one.allow(None)
        await asyncio.gather(*live)


async def test_more_sequences_than_the_tokenizer_decodes_are_shed() -> None:
    async with backend(script=count_up(3), allowance=0) as one, running_router(one, detokenize="tokenizer") as router:
        config = config_pb2.GenerationConfig(num_return_sequences=64, do_sample=True)
        calls = [router.stub.Generate(generate(config=config)) for _ in range(4096 // 64 + 1)]
        answers = [asyncio.ensure_future(collect(call)) for call in calls]
        await one.until(lambda: one.running == len(calls))
        await one.allow(None)
        failed = [error for error in await asyncio.gather(*answers, return_exceptions=True) if error is not None]
        errors = [from_rpc_error(error) for error in failed if isinstance(error, grpc.aio.AioRpcError)]
        assert [(error.code, error.reason) for error in errors] == [
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SEQUENCES")
        ]
        assert (await collect(router.stub.Generate(generate(config=config)))).finished


def narrow_stub(router: Router) -> Any:
    """A client whose connection buffers little, so that not reading is noticed soon."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    return text_pb2_grpc.TextServiceStub(grpc.aio.insecure_channel(router.server.address, options=options))


async def test_reader_that_is_behind_gets_merged_deltas_and_everything() -> None:
    async with backend(script=count_up(3000)) as one, running_router(one) as router:
        call = narrow_stub(router).Generate(generate(output=OUTPUT(return_token_ids=True)))
        # Unread while the backend emits all: deltas that do not fit the connection's window wait merged.
        await one.until(lambda: len(one.submitted) == 1 and one.running == 0)
        answer = await collect(call)
        assert answer.ids() == list(count_up(3000)(None))  # type: ignore[arg-type]


async def test_reader_too_far_behind_is_cut_off_and_its_request_aborted() -> None:
    script = count_up(10**6)
    async with (
        backend(script=script, tokens_per_step=512) as one,
        running_router(one, max_buffered_bytes=4096, max_live_requests=1) as router,
    ):
        call = router.stub.Generate(generate(output=OUTPUT(return_token_ids=True)))
        await one.until(lambda: bool(one.aborted))
        one.script = count_up(4)
        # Its place is free again although it has not read its status yet.
        assert (await collect(router.stub.Generate(generate()))).finished
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).reason == "SLOW_READER"
        assert router.metric("slow_readers_total") == 1


async def test_finished_stream_that_is_not_read_gives_its_place_back() -> None:
    script = count_up(30000)
    async with backend(script=script, tokens_per_step=256) as one:
        settings = {"max_live_requests": 1, "max_waiting_requests": 0, "slow_reader_grace_seconds": 0.2}
        async with running_router(one, **settings) as router:
            call = narrow_stub(router).Generate(generate(output=OUTPUT(return_token_ids=True)))
            await one.until(lambda: len(one.submitted) == 1 and one.running == 0)
            await router.until("num_requests_running", 0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert from_rpc_error(caught.value).reason == "SLOW_READER"


async def test_same_prefix_goes_to_the_same_backend_until_it_is_busy() -> None:
    async with backend() as one, backend() as two, running_router(one, two) as router:
        text = "The same long beginning of a prompt, again and again and again. " * 4
        for index in range(6):
            await collect(router.stub.Generate(generate(f"{text}{index}")))
        assert sorted((len(one.submitted), len(two.submitted))) == [0, 6]
        favourite = one if one.submitted else two
        favourite.extra_load = 50
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(one.submitted) + len(two.submitted) == len(favourite.submitted):
                await collect(router.stub.Generate(generate(f"{text}!")))


async def test_session_stays_with_its_backend() -> None:
    async with backend() as one, backend() as two, running_router(one, two) as router:
        for index in range(6):
            await collect(router.stub.Generate(generate(f"{index} other words", session_id="s")))
        assert sorted((len(one.submitted), len(two.submitted))) == [0, 6]


async def test_reader_that_does_not_even_take_its_status_is_disconnected() -> None:
    async with backend(script=count_up(10**6), tokens_per_step=512) as one:
        settings = {"max_buffered_bytes": 4096, "slow_reader_grace_seconds": 0.05}
        async with running_router(one, **settings) as router:
            call = narrow_stub(router).Generate(generate(output=OUTPUT(return_token_ids=True)))
            await one.until(lambda: bool(one.aborted))
            await router.server.calls.wait_idle()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert from_rpc_error(caught.value).reason == "SLOW_READER"


async def test_tenants_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\nsecond-token\n")
    async with backend() as one, running_router(one, auth_token_file=tokens) as router:
        for token in ("first-token", "first-token", "second-token"):
            await collect(router.stub.Generate(generate(), metadata=(("authorization", f"Bearer {token}"),)))
        salts = [request.cache_salt for request in one.submitted]
        assert salts[0] == salts[1] != salts[2]
        keys = [request.fair_share_key for request in one.submitted]
        assert keys[0] == keys[1] != keys[2]
        # It says nothing about the tenant, and is not what admission and cache know it by.
        assert not set(keys) & set(salts)
        assert all(len(key) == 16 for key in keys)
        code, _ = await failure(router.stub.Generate(generate()))
        assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("mebibytes", "settings", "code"),
    [
        (3, {}, grpc.StatusCode.INVALID_ARGUMENT),
        (5, {}, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (5, {"max_request_bytes": 6 << 20}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["below", "above", "raised"],
)
async def test_clients_messages_have_a_bound_of_their_own(
    mebibytes: int, settings: dict[str, Any], code: grpc.StatusCode
) -> None:
    async with backend() as one, running_router(one, **settings) as router:
        # Texts within the bound are refused by the tokenizer, which takes smaller ones only.
        found, error = await failure(router.stub.Chat(chat("x" * (mebibytes << 20))))
        assert found is code
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert "larger than max" in error.message


def _ten_busy_seconds() -> admin_pb2.Pace:
    return admin_pb2.Pace(
        tokens_per_second=100.0,
        step_seconds=0.001,
        full_step_seconds=0.001,
        least_step_seconds=0.001,
        output_tokens=8.0,
        batch_tokens=512,
        headroom=1.0,
        is_busy=True,
        waiting=[admin_pb2.TenantWaiting(fair_share_key="", tokens=1000.0)],
    )


async def test_what_would_come_too_late_is_refused_before_any_work_with_a_pushback() -> None:
    """Ten seconds of work wait at the only backend: a deadline of five cannot be met, and one of sixty can."""
    async with backend(pace=_ten_busy_seconds()) as one, running_router(one) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(generate(), timeout=5.0))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert error.reason == "OVERLOADED"
        assert error.retry_after_seconds is not None
        assert 5.0 <= error.retry_after_seconds < 6.5
        trailers = dict(caught.value.trailing_metadata() or ())
        assert int(trailers["grpc-retry-pushback-ms"]) == int(error.retry_after_seconds * 1000)
        assert not one.submitted
        await collect(router.stub.Generate(generate(), timeout=60.0))
        await collect(router.stub.Generate(generate()))
        assert len(one.submitted) == 2


async def test_what_became_too_late_while_its_prompt_was_made_does_not_reach_the_backend() -> None:
    async with (
        backend() as one,
        TcpProxy(tokenizer_address()) as proxy,
        running_router(one, tokenizer=proxy.address) as router,
    ):
        proxy.freeze()
        waiting = asyncio.ensure_future(failure(router.stub.Generate(generate(), timeout=9.0)))
        await router.until("num_requests_running", 1)
        one.pace = _ten_busy_seconds()
        async with asyncio.timeout(PATIENCE_SECONDS):
            # Until the router knows.
            while (await failure(router.stub.Generate(generate(), timeout=0.5)))[1].reason != "OVERLOADED":
                pass
        proxy.thaw()
        code, error = await waiting
        assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert not one.submitted


async def test_what_an_engine_refuses_as_too_late_makes_the_router_stricter() -> None:
    """The engine's next figures may be worse than those that it told. A tokenizer's work for such a request is lost."""
    late = ResourceExhausted("too late", reason="OVERLOADED", retry_after_seconds=1.0)
    async with backend(pace=_ten_busy_seconds(), refuse=late) as one, running_router(one) as router:
        seen = -1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(one.submitted) > seen:
                seen = len(one.submitted)
                code, error = await failure(router.stub.Generate(generate(), timeout=12.0))
                assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        # The first ones came there, and the last one did not.
        assert seen
        await failure(router.stub.Generate(generate(), timeout=60.0))
        assert len(one.submitted) == seen + 1


async def test_one_tenants_deadlines_take_nothing_from_those_of_others(tmp_path: Path) -> None:
    """A tenant that asks for what no engine ends in time has the router strict with itself alone."""
    tokens = tmp_path / "tokens"
    tokens.write_text("its\nother\n")
    its, other = ((("authorization", f"Bearer {token}"),) for token in ("its", "other"))
    late = ResourceExhausted("too late", reason="OVERLOADED", retry_after_seconds=1.0)
    # Nine seconds for each request.
    slow = _ten_busy_seconds()
    slow.step_seconds = slow.full_step_seconds = slow.least_step_seconds = 1.0
    del slow.waiting[:]
    async with backend(pace=slow, refuse=late) as one, running_router(one, auth_token_file=tokens) as router:
        seen = -1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(one.submitted) > seen:
                seen = len(one.submitted)
                _, error = await failure(router.stub.Generate(generate(), timeout=12.0, metadata=its))
                assert error.reason == "OVERLOADED"
        assert seen
        one.refuse = None
        await collect(router.stub.Generate(generate(), timeout=12.0, metadata=other))
        assert len(one.submitted) == seen + 1
