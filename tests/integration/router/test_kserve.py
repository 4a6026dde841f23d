"""KServe's GRPCInferenceService through a real router, a real tokenizer and scripted backends."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.router import Router, backend, running_router, until
from google.rpc import error_details_pb2, status_pb2
from penstock.common.errors import from_rpc_error
from penstock.inference import kserve_pb2, kserve_pb2_grpc

IDS = count_up(8)(None)  # type: ignore[arg-type]


@asynccontextmanager
async def kserve(*backends: EmittingBackend, **settings: Any) -> AsyncIterator[tuple[Any, Router]]:
    """A stub of a router before these backends."""
    async with (
        running_router(*backends, **settings) as router,
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield stub, router


def infer(text: str = "Hello", *, id: str = "", model: str = "", **parameters: Any) -> kserve_pb2.ModelInferRequest:
    """A request whose tensors are not raw."""
    request = kserve_pb2.ModelInferRequest(model_name=model, id=id)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def add_input(request: kserve_pb2.ModelInferRequest, name: str, value: bool | str) -> None:
    if isinstance(value, bool):
        request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(value)
    else:
        request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value.encode())


def texts(response: kserve_pb2.ModelInferResponse) -> list[str]:
    assert response.outputs[0].name == "text_output"
    return [text.decode() for text in response.outputs[0].contents.bytes_contents]


def field_of(error: grpc.aio.AioRpcError) -> str:
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status_pb2.Status.FromString(details).details)  # type: ignore[arg-type]
    return bad.field_violations[0].field


async def test_infer_answers_with_the_text_that_generate_streams() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        response = await stub.ModelInfer(infer(id="seven"))
        assert texts(response) == [await router.decode(IDS)]
        assert (response.id, response.model_version) == ("seven", "1")
        assert response.parameters["triton_final_response"].bool_param
        assert list(one.submitted[0].prompt_token_ids) == await router.encode("Hello")


async def test_raw_contents_come_back_raw() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        request = infer()
        request.inputs[0].ClearField("contents")
        request.raw_input_contents.append(struct.pack("<I", 5) + b"Hello")
        response = await stub.ModelInfer(request)
        expected = (await router.decode(IDS)).encode()
        assert list(response.raw_output_contents) == [struct.pack("<I", len(expected)) + expected]
        assert not response.outputs[0].HasField("contents")


async def test_options_come_as_parameters_and_as_sampling_parameters() -> None:
    async with backend() as one, kserve(one) as (stub, _):
        request = infer(max_tokens=5, temperature=0.5, do_sample=True, top_k="7", stop='["a", "b"]', ignore_eos=True)
        add_input(request, "sampling_parameters", json.dumps({"top_p": 0.25, "seed": "11", "logit_bias": {"3": 1.5}}))
        await stub.ModelInfer(request)
        sent = one.submitted[0]
        assert (sent.config.max_new_tokens, sent.config.temperature, sent.config.top_k) == (5, 0.5, 7)
        assert (sent.config.top_p, sent.seed, dict(sent.config.logit_bias)) == (0.25, 11, {3: 1.5})
        assert list(sent.stop.stop_strings) == ["a", "b"]
        assert sent.stop.ignore_eos


async def test_outputs_that_are_asked_for() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        request = infer()
        add_input(request, "return_finish_reason", True)
        request.outputs.add(name="text_output")
        request.outputs.add(name="num_output_tokens")
        request.outputs.add(name="num_input_tokens")
        outputs = {output.name: output for output in (await stub.ModelInfer(request)).outputs}
        assert outputs.keys() == {"text_output", "finish_reason", "num_output_tokens", "num_input_tokens"}
        assert list(outputs["finish_reason"].contents.bytes_contents) == [b"stop_eos"]
        assert list(outputs["num_output_tokens"].contents.uint_contents) == [len(IDS)]
        assert list(outputs["num_input_tokens"].contents.uint_contents) == [len(await router.encode("Hello"))]


async def test_the_prompt_comes_back_where_it_is_not_excluded() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        request = infer()
        add_input(request, "exclude_input_in_output", False)
        (text,) = texts(await stub.ModelInfer(request))
        assert text == "Hello" + await router.decode(IDS)


async def test_a_stream_has_pieces_and_a_last_response() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        call = stub.ModelStreamInfer(iter([infer(id="a", stream=True)]))
        responses = [message.infer_response async for message in call]
        assert "".join(texts(response)[0] for response in responses) == await router.decode(IDS)
        assert len(responses) > 2
        assert [response.parameters["triton_final_response"].bool_param for response in responses] == [
            *[False] * (len(responses) - 1),
            True,
        ]
        assert {response.id for response in responses} == {"a"}


async def test_a_stream_answers_whole_where_no_pieces_are_asked_for() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        (message,) = [message async for message in stub.ModelStreamInfer(iter([infer()]))]
        assert texts(message.infer_response) == [await router.decode(IDS)]


async def test_a_failed_request_of_a_stream_leaves_the_others_alone() -> None:
    async with backend() as one, kserve(one) as (stub, router):
        requests = [infer(id="unknown", model="nothing"), infer(id="good")]
        answers: dict[str, Any] = {}
        async for message in stub.ModelStreamInfer(iter(requests)):
            answers[message.infer_response.id] = message
        assert answers["unknown"].error_message.startswith("NOT_FOUND: model_name: ")
        assert texts(answers["good"].infer_response) == [await router.decode(IDS)]


async def test_the_first_error_is_the_status_where_the_client_wants_it() -> None:
    async with backend() as one, kserve(one) as (stub, _):
        call = stub.ModelStreamInfer(iter([infer(model="nothing")]), metadata=(("triton_grpc_error", "true"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert field_of(caught.value) == "model_name"


async def test_a_cancelled_call_ends_its_request() -> None:
    async with backend(script=count_up(100), allowance=3) as one, kserve(one) as (stub, router):
        call = stub.ModelStreamInfer(iter([infer(stream=True)]))
        await call.read()
        call.cancel()
        await until(lambda: len(one.aborted) == 1)
        await router.until("num_requests_running", 0)


def wrong(**changes: Any) -> kserve_pb2.ModelInferRequest:
    """A good request whose text_input has other fields."""
    request = infer()
    for name, value in changes.items():
        if name == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], name, value)
    return request


def with_input(name: str, value: bool | str) -> kserve_pb2.ModelInferRequest:
    request = infer()
    add_input(request, name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (kserve_pb2.ModelInferRequest(), "inputs"),
        (wrong(name="text"), "inputs[0].name"),
        (wrong(datatype="FP32"), "inputs.text_input.datatype"),
        (wrong(shape=[2]), "inputs.text_input.shape"),
        (with_input("sampling_parameters", "[]"), "inputs.sampling_parameters"),
        (with_input("sampling_parameters", '{"nothing": 1}'), "sampling_parameters.nothing"),
        (with_input("text_input", "twice"), "inputs.text_input"),
        (infer(nothing="x"), "parameters.nothing"),
        (infer(temperature="warm"), "parameters.temperature"),
        (infer(max_tokens=1, max_new_tokens=2), "parameters.max_tokens"),
        (infer(regex="a", grammar="b"), "parameters"),
        (infer(stream=True), "parameters.stream"),
        (infer(stream="yes"), "parameters.stream"),
        (infer(echo=True), "parameters.echo"),
        (infer(num_return_sequences=100_000), "config.num_return_sequences"),
        (infer(""), "inputs.text_input"),
    ],
)
async def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    request_: kserve_pb2.ModelInferRequest, field: str
) -> None:
    async with backend() as one, kserve(one) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request_)
        assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelConfig"])
async def test_unknown_models_and_versions_are_not_found(method: str) -> None:
    async with backend() as one, kserve(one) as (stub, _):
        ask = getattr(kserve_pb2, f"{method}Request")
        for request, field in ((ask(name="nothing"), "name"), (ask(version="2"), "version")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, method)(request)
            assert (caught.value.code(), field_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, field)


async def test_server_and_model_describe_themselves() -> None:
    async with backend() as one, kserve(one) as (stub, _):
        assert (await stub.ServerLive(kserve_pb2.ServerLiveRequest())).live
        assert (await stub.ServerReady(kserve_pb2.ServerReadyRequest())).ready
        assert (await stub.ModelReady(kserve_pb2.ModelReadyRequest())).ready
        assert (await stub.ServerMetadata(kserve_pb2.ServerMetadataRequest())).name == "penstock"
        metadata = await stub.ModelMetadata(kserve_pb2.ModelMetadataRequest())
        config = (await stub.ModelConfig(kserve_pb2.ModelConfigRequest())).config
        assert [tensor.name for tensor in metadata.inputs] == [tensor.name for tensor in config.input]
        assert [tensor.name for tensor in metadata.outputs] == [tensor.name for tensor in config.output]
        assert (metadata.inputs[0].name, metadata.outputs[0].name) == ("text_input", "text_output")
        assert config.model_transaction_policy.decoupled


async def test_calls_need_the_token_that_other_calls_need(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    async with backend() as one, kserve(one, auth_token_file=str(tokens)) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(infer())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert texts(await stub.ModelInfer(infer(), metadata=(("authorization", "Bearer secret"),)))


async def test_bytes_of_a_stream_that_are_no_request_are_refused() -> None:
    async with (
        backend() as one,
        kserve(one) as (_, router),
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # A string of one byte that is no UTF-8, as the model's name.
            _ = [answer async for answer in stream(iter([b"\x0a\x01\xff"]))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_of_a_stream_beyond_its_bound_wait_for_those_before_them() -> None:
    async with backend() as one, kserve(one, kserve_stream_requests=1) as (stub, _):
        requests = [infer(id=str(number), stream=True) for number in range(3)]
        ids = [message.infer_response.id async for message in stub.ModelStreamInfer(iter(requests))]
        assert ids == sorted(ids)
        assert set(ids) == {"0", "1", "2"}


async def test_each_request_of_a_stream_has_a_request_id_of_its_own() -> None:
    async with backend() as one, kserve(one) as (stub, _):
        call = stub.ModelStreamInfer(iter([infer(), infer()]), metadata=(("x-request-id", "mine"),))
        _ = [message async for message in call]
        ids = {request.request_id.partition(".")[0] for request in one.submitted}
        assert "mine" in ids
        assert len(ids) == 2


async def test_a_stream_that_nobody_reads_is_hung_up_and_its_requests_aborted() -> None:
    async with backend(script=count_up(10**6), tokens_per_step=512) as one:
        settings = {"max_buffered_bytes": 4096, "slow_reader_grace_seconds": 0.05}
        # A connection that buffers little, so that not reading is noticed soon.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with (
            running_router(one, **settings) as router,
            grpc.aio.insecure_channel(router.server.address, options=options) as channel,
        ):
            stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer()
            await call.write(infer(id="a", stream=True))
            await call.write(infer(id="b", stream=True))
            # The client goes on sending: it is the whole call that ends.
            await until(lambda: len(one.aborted) == 2)
            await router.server.calls.wait_idle()
            if router.server.config.transport == "grpc":
                # grpc.aio queues the status behind the message that is not read, and this client does not come to it.
                call.cancel()
                return
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in _unread(call)]
            assert from_rpc_error(caught.value).reason == "SLOW_READER"


async def _unread(call: Any) -> AsyncIterator[kserve_pb2.ModelStreamInferResponse]:
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield message
