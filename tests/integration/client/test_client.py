"""Python client against a real gRPC server that sends what each test scripts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from factories.wire.conversation import user
from google.protobuf import any_pb2
from google.rpc import status_pb2
from penstock.common.errors import InvalidArgument as ServerInvalidArgument
from penstock.common.errors import trailing_metadata
from penstock.v1 import common_pb2, generation_pb2, text_pb2, text_pb2_grpc
from penstock_client import (
    Aborted,
    AsyncClient,
    Client,
    ClientConfig,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    RetryConfig,
    Unavailable,
)

ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
SLOW = ClientConfig(retry=RetryConfig(initial_backoff=0.1, max_backoff=0.1))
FAST = ClientConfig(retry=RetryConfig(initial_backoff=0.001, max_backoff=0.002))
Script = Callable[[text_pb2.ChatRequest, grpc.ServicerContext, int], Iterator[text_pb2.ChatResponse]]


class Scripted(text_pb2_grpc.TextServiceServicer):
    """Answers every Chat with the script; counts the calls."""

    def __init__(self, script: Script) -> None:
        self.script, self.calls = script, 0

    def Chat(self, request: text_pb2.ChatRequest, context: Any) -> Iterator[text_pb2.ChatResponse]:
        """One scripted stream."""
        self.calls += 1
        yield from self.script(request, context, self.calls)


@contextmanager
def serving(script: Script) -> Iterator[tuple[str, Scripted]]:
    """A server on a free loopback port."""
    servicer = Scripted(script)
    server = grpc.server(ThreadPoolExecutor(4))
    text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(None).wait()


def started() -> text_pb2.ChatResponse:
    """A Started event."""
    return text_pb2.ChatResponse(started=generation_pb2.Started(request_id="r", seed=7, prompt_tokens=3))


def delta(seq: int, text: str, index: int = 0, **fields: Any) -> text_pb2.ChatResponse:
    """A ChatDelta event."""
    return text_pb2.ChatResponse(delta=text_pb2.ChatDelta(seq=seq, index=index, text=text, **fields))


def finished(*reasons: int) -> text_pb2.ChatResponse:
    """A Finished event with one sequence per reason."""
    sequences = [
        common_pb2.SequenceResult(index=i, finish_reason=reason, token_count=2)  # type: ignore[arg-type]
        for i, reason in enumerate(reasons)
    ]
    return text_pb2.ChatResponse(finished=generation_pb2.Finished(sequences=sequences, attempts=1))


EOS = common_pb2.FINISH_REASON_STOP_EOS
LENGTH = common_pb2.FINISH_REASON_LENGTH


def test_deltas_are_folded_into_choices() -> None:
    """Text, reasoning and tool calls of two sequences that arrive mixed."""

    def script(*_: Any) -> Iterator[text_pb2.ChatResponse]:
        yield started()
        yield delta(0, "He", reasoning="hm")
        yield delta(1, "yo", index=1, token_ids=[5])
        yield delta(2, "llo", tool_calls=[text_pb2.ToolCallDelta(index=0, id="c", name="f", arguments='{"a"')])
        yield delta(3, "", tool_calls=[text_pb2.ToolCallDelta(index=0, arguments=": 1}")])
        yield finished(EOS, LENGTH)

    with serving(script) as (address, _), Client(address) as client:
        completion = client.generate(user("Hi"))
    first, second = completion.choices
    assert (first.text, first.reasoning, first.finish_reason) == ("Hello", "hm", "STOP_EOS")
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("f", '{"a": 1}')]
    assert (second.text, second.token_ids, second.finish_reason) == ("yo", [5], "LENGTH")
    assert completion.started.seed == 7


def test_options_reach_their_fields_of_the_request() -> None:
    """One option of each kind: config, stop, output, request; a tool in OpenAI's shape."""
    seen: list[text_pb2.ChatRequest] = []

    def script(request: text_pb2.ChatRequest, *_: Any) -> Iterator[text_pb2.ChatResponse]:
        seen.append(request)
        yield started()
        yield finished(EOS)

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with serving(script) as (address, _), Client(address) as client:
        client.generate(
            [{"role": "user", "content": "Hi"}], tools=[tool], chat_template_kwargs={"enable_thinking": True},
            temperature=0.0, logit_bias={3: -1.5}, stop_strings="end", stop_token_ids=[1, [2, 3]], top_logprobs=0,
            request_id="mine",
        )  # fmt: skip
    [request] = seen
    assert request.config.HasField("temperature")
    assert not request.config.HasField("top_k")
    assert dict(request.config.logit_bias) == {3: -1.5}
    assert list(request.stop.stop_strings) == ["end"]
    assert [list(entry.ids) for entry in request.stop.stop_token_ids] == [[1], [2, 3]]
    assert request.output.HasField("top_logprobs")
    assert (request.request_id, request.tools[0].name) == ("mine", "f")
    assert request.chat_template_kwargs["enable_thinking"] is True


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    """Nothing is dropped silently."""
    with Client("localhost:1") as client, pytest.raises(TypeError, match="num_beeps"):
        client.stream(user("Hi"), num_beeps=3)  # type: ignore[call-arg]


def test_unavailable_before_the_first_event_is_retried() -> None:
    """The third try answers."""

    def script(_: Any, context: grpc.ServicerContext, call: int) -> Iterator[text_pb2.ChatResponse]:
        if call < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        yield started()
        yield delta(0, "ok")
        yield finished(EOS)

    with serving(script) as (address, servicer), Client(address, FAST) as client:
        assert client.generate(user("Hi")).text == "ok"
    assert servicer.calls == 3


def test_retries_end_at_max_attempts() -> None:
    """And the last error is what the caller sees."""

    def script(_: Any, context: grpc.ServicerContext, call: int) -> Iterator[text_pb2.ChatResponse]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        yield started()

    with serving(script) as (address, servicer), Client(address, FAST) as client, pytest.raises(Unavailable):
        client.generate(user("Hi"))
    assert servicer.calls == 3


def test_a_stream_lost_after_a_delta_is_aborted_with_last_seq_and_not_retried() -> None:
    """Tokens are never sent twice."""

    def script(_: Any, context: grpc.ServicerContext, call: int) -> Iterator[text_pb2.ChatResponse]:
        yield started()
        yield delta(0, "a")
        yield delta(1, "b")
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with serving(script) as (address, servicer), Client(address, FAST) as client, pytest.raises(Aborted) as caught:
        client.generate(user("Hi"))
    assert caught.value.metadata["last_seq"] == "1"
    assert servicer.calls == 1


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([started(), delta(0, "a")], "TRUNCATED_STREAM"),
        ([started(), delta(0, "a"), delta(2, "b"), finished(EOS)], "PROTOCOL"),
        ([started(), finished(EOS), delta(0, "a")], "PROTOCOL"),
    ],
)
async def test_a_stream_that_breaks_the_protocol_is_refused(events: list[Any], reason: str) -> None:
    """OK without Finished, a gap in seq, something after Finished: by both clients."""
    with serving(lambda *_: iter(events)) as (address, _):
        with Client(address) as client, pytest.raises(Internal) as caught:
            client.generate(user("Hi"))
        assert caught.value.reason == reason
        async with AsyncClient(address) as async_client:
            with pytest.raises(Internal) as caught:
                await async_client.generate(user("Hi"))
        assert caught.value.reason == reason


async def test_details_of_an_error_arrive_typed() -> None:
    """Field, reason and message of an INVALID_ARGUMENT, in both clients."""

    def script(_: Any, context: Any, call: int) -> Iterator[text_pb2.ChatResponse]:
        error = ServerInvalidArgument("config.top_p", "must be in [0, 1]")
        context.set_trailing_metadata(trailing_metadata(error))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        yield started()

    def check(error: PenstockError) -> None:
        assert (error.field, error.reason) == ("config.top_p", "INVALID_FIELD")
        assert "[0, 1]" in error.message

    with serving(script) as (address, _):
        with Client(address) as client, pytest.raises(InvalidArgument) as caught:
            client.generate(user("Hi"), top_p=2.0)
        check(caught.value)
        async with AsyncClient(address) as async_client:
            with pytest.raises(InvalidArgument) as caught:
                await async_client.generate(user("Hi"), top_p=2.0)
        check(caught.value)


def test_a_timeout_is_the_deadline_of_the_call() -> None:
    """The server sees what is left, the caller gets DeadlineExceeded."""
    left: list[float] = []

    def script(_: Any, context: Any, call: int) -> Iterator[text_pb2.ChatResponse]:
        over = threading.Event()
        context.add_callback(over.set)
        left.append(context.time_remaining())
        yield started()
        over.wait()

    with serving(script) as (address, _), Client(address) as client, pytest.raises(DeadlineExceeded):
        client.generate(user("Hi"), timeout=1.0)
    # Not exactly: it travels rounded up, and a busy machine may call the script too late or not at all.
    assert all(seconds < 30 for seconds in left)


def test_a_token_never_travels_in_the_clear_to_another_machine() -> None:
    """Refused before anything is sent."""
    with pytest.raises(ValueError, match="tls"):
        Client("penstock.example:50050", ClientConfig(token="secret"))


@pytest.mark.parametrize("retry_after", [None, 3600.0])
def test_retries_keep_to_the_deadline(retry_after: float | None) -> None:
    left: list[float] = []

    def script(_: Any, context: Any, __: int) -> Iterator[text_pb2.ChatResponse]:
        error = Unavailable("not yet", reason="NO_BACKEND", retry_after_seconds=retry_after)
        context.set_trailing_metadata(trailing_metadata(error))
        context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        yield started()

    # An hour's pushback must not be waited for: pytest's own timeout would show it.
    refused = pytest.raises((Unavailable, DeadlineExceeded))
    with serving(script) as (address, _), Client(address, SLOW) as client, refused:
        chat = client._stub.Chat

        # The timeout that the client asked for: the server's own clock starts with its thread.
        def asked(request: Any, timeout: float, **options: Any) -> Any:
            left.append(timeout)
            return chat(request, timeout=timeout, **options)

        client._stub.Chat = asked
        client.generate(user("hello"), timeout=60.0)
    assert all(later < earlier for earlier, later in itertools.pairwise([60.0, *left]))
    assert len(left) == (3 if retry_after is None else 1)


@pytest.mark.parametrize(
    "details",
    [b"\xff\xff", status_pb2.Status(code=13, details=[any_pb2.Any(type_url=ERROR_INFO, value=b"\xff")])],
)
def test_details_that_cannot_be_read_leave_the_status(details: bytes | status_pb2.Status) -> None:
    value = details if isinstance(details, bytes) else details.SerializeToString()

    def script(_: Any, context: Any, __: int) -> Iterator[text_pb2.ChatResponse]:
        context.set_trailing_metadata((("grpc-status-details-bin", value),))
        context.abort(grpc.StatusCode.INTERNAL, "broken")
        yield started()

    with serving(script) as (address, _), Client(address, FAST) as client, pytest.raises(Internal, match="broken"):
        client.generate(user("hello"))
