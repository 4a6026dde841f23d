"""Bad input gets its status and field at once, and the server is none the worse for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.servers.generation import Client, generation_service, request, text_checkpoint, token_ids
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unimplemented,
    from_rpc_error,
)
from penstock.v1 import admin_pb2, config_pb2, generation_pb2, model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAN = float("nan")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder = text_checkpoint(tmp_path_factory.mktemp("model"))
    async with generation_service(folder, kv_memory="1MiB") as running:
        yield running


async def refused(client: Client, message: generation_pb2.GenerateRequest, kind: type[PenstockError]) -> PenstockError:
    """Return the error of `message`, of which nothing was accepted, and after which the server works as before."""
    outcome = await client.generate(message)
    assert outcome.events == []
    assert type(outcome.error) is kind
    load = await client.load()
    assert (load.running_requests, load.waiting_requests, load.kv_blocks_used) == (0, 0, 0)
    return outcome.error


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        (InvalidArgument, "resumed_token_ids", request(resumed_token_ids=[token_ids(1), token_ids(1)])),
        (InvalidArgument, "constraint", request(constraint=config_pb2.Constraint())),
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
        await channel.unary_unary("/penstock.v1.GenerationAdminService/NoSuchMethod")(b"")
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
