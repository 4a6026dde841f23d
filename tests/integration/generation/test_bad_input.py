"""Bad input gets its status and field at once, and the server is none the worse for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.generation import Client, generation_service, request, text_checkpoint, token_ids
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unimplemented,
    from_rpc_error,
)
from penstock.v1 import admin_pb2, config_pb2, generation_pb2, model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAN, INF = float("nan"), float("inf")
BAD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("max_length", {"max_new_tokens": None, "max_length": 3}),
    ("max_time", {"max_time": 0}),
    ("max_time", {"max_time": NAN}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": INF}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": NAN}),
    ("min_p", {"min_p": -0.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": -2.5}),
    ("seed", {"seed": 2**63}),
    ("num_return_sequences", {"num_return_sequences": 0, "do_sample": True}),
    ("num_return_sequences", {"num_return_sequences": 2}),
    ("num_return_sequences", {"num_return_sequences": 1000, "do_sample": True}),
    ("logit_bias", {"logit_bias": {4096: 1.0}}),
    ("logit_bias", {"logit_bias": {1: NAN}}),
    ("early_stopping", {"early_stopping": 9}),
    ("length_penalty", {"length_penalty": NAN}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder = text_checkpoint(tmp_path_factory.mktemp("model"))
    async with generation_service(folder, kv_memory="1MiB") as running:
        yield running


async def refused(client: Client, message: generation_pb2.GenerateRequest, kind: type[PenstockError]) -> PenstockError:
    """The error of `message`, of which nothing was accepted, and after which the server works as before."""
    outcome = await client.generate(message)
    assert outcome.events == []
    assert type(outcome.error) is kind
    load = await client.load()
    assert (load.running_requests, load.waiting_requests, load.kv_blocks_used) == (0, 0, 0)
    return outcome.error


@pytest.mark.parametrize(("name", "config"), BAD_CONFIGS, ids=lambda value: str(value)[:40])
async def test_an_impossible_option(client: Client, name: str, config: dict[str, Any]) -> None:
    error = await refused(client, request(config=config), InvalidArgument)
    assert error.field == f"config.{name}"


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        (InvalidArgument, "prompt", request(())),
        (InvalidArgument, "prompt", request((4096,))),
        (InvalidArgument, "prompt", request((2**32 - 1,))),
        (InvalidArgument, "prompt", request([1] * 8192)),
        (InvalidArgument, "eos_token_ids", request(eos_token_ids=[4096])),
        (InvalidArgument, "stop.stop_token_ids", request(stop={"stop_token_ids": [token_ids(4096)]})),
        (InvalidArgument, "stop.stop_token_ids", request(stop={"stop_token_ids": [token_ids()]})),
        (InvalidArgument, "stop.stop_strings", request(stop={"stop_strings": [""]})),
        (InvalidArgument, "stop.stop_strings", request(stop={"stop_strings": ["x" * 1000]})),
        (InvalidArgument, "stop.stop_strings", request(stop={"stop_strings": ["x"] * 100})),
        (InvalidArgument, "output.top_logprobs", request(output={"top_logprobs": 21})),
        (InvalidArgument, "output.prompt_logprobs", request(output={"prompt_logprobs": 21})),
        (InvalidArgument, "output.stream_interval", request(output={"stream_interval": 0})),
        (InvalidArgument, "resumed_token_ids", request(resumed_token_ids=[token_ids(1), token_ids(1)])),
        (InvalidArgument, "seed", request(seed=2**64 - 1)),
        (InvalidArgument, "timeout_seconds", request(timeout_seconds=-1)),
        (InvalidArgument, "request_id", request(request_id="x" * 1000)),
        (InvalidArgument, "constraint", request(constraint=config_pb2.Constraint())),
        (NotFound, "model", request(model="another")),
        (NotFound, "adapter", request(adapter="mine")),
        (FailedPrecondition, "tokenizer_fingerprint", request(tokenizer_fingerprint="0" * 64)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_impossible_request(
    client: Client, kind: type[PenstockError], field: str, message: generation_pb2.GenerateRequest
) -> None:
    error = await refused(client, message, kind)
    assert error.field == field


async def test_a_request_larger_than_the_pool(client: Client) -> None:
    error = await refused(client, request([1] * 6000, config={"max_new_tokens": 2000}), ResourceExhausted)
    assert error.reason == "EXCEEDS_KV_POOL"


async def test_a_request_without_a_length_is_never_too_large_for_the_pool(client: Client) -> None:
    message = request([1] * 100, stop={"ignore_eos": False})
    message.config.ClearField("max_new_tokens")
    call = client.generation.Generate(message)
    first = await call.read()
    assert first.started.warnings
    call.cancel()
    await client.until_idle()


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x08", b"garbage", b"\x1a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message(client: Client, data: bytes) -> None:
    channel: Any = client.channel
    call = channel.unary_stream("/penstock.v1.GenerationService/Generate")(data)
    with pytest.raises(grpc.RpcError) as refusal:
        await call.read()
    assert from_rpc_error(refusal.value).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_garbage_inside_a_session_ends_that_session_only(client: Client) -> None:
    channel: Any = client.channel
    call = channel.stream_stream("/penstock.v1.GenerationService/Session")()
    await call.write(b"\xff" * 40)
    assert await call.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    assert (await client.generate(request())).error is None


async def test_a_method_that_does_not_exist_is_unimplemented(client: Client) -> None:
    channel: Any = client.channel
    with pytest.raises(grpc.RpcError) as refusal:
        await channel.unary_unary("/penstock.v1.GenerationAdminService/LoadAdapter")(b"")
    error = from_rpc_error(refusal.value)
    assert isinstance(error, Unimplemented)
    assert error.reason == "UNIMPLEMENTED"


async def test_the_admin_and_model_services_check_their_fields_too(client: Client) -> None:
    watch = client.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=NAN))
    assert await watch.code() is grpc.StatusCode.INVALID_ARGUMENT
    for call in (
        client.admin.Drain(admin_pb2.DrainRequest(grace_seconds=-1)),
        client.model.GetModelInfo(model_pb2.GetModelInfoRequest(model="another")),
    ):
        assert await call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


async def test_after_all_of_it_the_server_answers_as_before(client: Client) -> None:
    outcome = await client.generate(request())
    assert outcome.error is None
    assert len(outcome.ids()) == 8
    await client.until_idle()
