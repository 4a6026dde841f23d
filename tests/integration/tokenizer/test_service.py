"""TokenizerService through a real server, on the demo model's tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.serving.server import RunningServer, serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.decode_stream import DecodeSession
from penstock.tokenizer.tokenizer import TextTokenizer
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc
from prometheus_client import CollectorRegistry

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = pb.Message(role="user", content="Hello")


@dataclass
class Running:
    stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
    server: RunningServer
    app: TokenizerApp
    registry: CollectorRegistry


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Running]:
    """A tokenizer with one template process, for speed, that may be as slow as a busy machine makes it."""
    config = TokenizerConfig(**{"template_processes": 1, "template_timeout_seconds": 60.0, **options})
    registry = CollectorRegistry()
    app = TokenizerApp(config, registry)
    async with serve_in_process(app, config, registry) as server, grpc.aio.insecure_channel(server.address) as channel:
        yield Running(tokenizer_pb2_grpc.TokenizerServiceStub(channel), server, app, registry)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    """A tokenizer as it comes, for tests that leave nothing in it."""
    async with serving() as running:
        yield running


async def error_of(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_every_rpc_answers(running: Running) -> None:
    stub = running.stub
    chat = await stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=[USER]))
    assert chat.text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert chat.template_seconds > 0
    assert chat.tokenize_seconds > 0
    encoded = await stub.Encode(pb.EncodeRequest(texts=[chat.text, "Hello"], return_offsets=True))
    assert encoded.encodings[0].ids == chat.token_ids
    assert encoded.encodings[1].offsets[-1].end == len("Hello")
    decoded = await stub.Decode(pb.DecodeRequest(sequences=[{"ids": chat.token_ids}], skip_special_tokens=False))
    assert decoded.texts == [chat.text]
    about = await stub.GetTokenizer(pb.GetTokenizerRequest(model="penstock-demo"))
    assert about.tokenizer_fingerprint == tokenizer_fingerprint(demo_folder())
    assert about.fingerprint != about.tokenizer_fingerprint
    assert about.eos_token_ids[0] in about.special_token_ids
    assert "im_start" in about.chat_template
    assert not about.HasField("bos_token_id")
    value = running.registry.get_sample_value("penstock_tokenizer_tokens_total", {"operation": "chat"})
    assert value == len(chat.token_ids)


async def test_user_text_stays_text_unless_the_operator_allows_it() -> None:
    request = pb.ApplyChatTemplateRequest(messages=[pb.Message(role="user", content="<|im_end|>")])
    async with serving() as running:
        protected = await running.stub.ApplyChatTemplate(request)
        plain = await running.stub.Encode(pb.EncodeRequest(texts=["<|im_end|>"], parse_special_tokens=False))
        parsed = await running.stub.Encode(pb.EncodeRequest(texts=["<|im_end|>"]))
    async with serving(allow_control_tokens_in_content=True) as running:
        allowed = await running.stub.ApplyChatTemplate(request)
    end = parsed.encodings[0].ids[0]
    assert len(parsed.encodings[0].ids) == 1
    assert end not in plain.encodings[0].ids
    assert protected.text == allowed.text
    assert list(protected.token_ids).count(end) + 1 == list(allowed.token_ids).count(end)


async def test_bad_input_names_its_field() -> None:
    async with serving(max_batch=2, max_text_bytes=200, max_messages=1) as running:
        stub = running.stub
        chat = pb.ApplyChatTemplateRequest
        for request, field in [
            (chat(), "messages"),
            (chat(messages=[pb.Message(content="x")]), "messages[0].role"),
            (chat(messages=[USER], template_name="other"), "template_name"),
            (chat(messages=[USER], chat_template_kwargs={"messages": 1}), "chat_template_kwargs"),
            (
                chat(messages=[USER], add_generation_prompt=True, continue_final_message=True),
                "continue_final_message",
            ),
            (chat(messages=[USER, USER]), "messages"),
            (chat(messages=[pb.Message(role="user", content="x" * 300)]), "messages"),
        ]:
            error = await error_of(stub.ApplyChatTemplate(request))
            assert isinstance(error, InvalidArgument)
            assert error.field == field
        error = await error_of(stub.Encode(pb.EncodeRequest(texts=["a"] * 3)))
        assert error.field == "texts"
        error = await error_of(stub.Encode(pb.EncodeRequest(texts=["a"], truncation_side=9)))  # type: ignore[arg-type]
        assert error.field == "truncation_side"
        error = await error_of(stub.Decode(pb.DecodeRequest(sequences=[{"ids": [1]}, {"ids": [1 << 20]}])))
        assert error.field == "sequences[1].ids"
        assert isinstance(await error_of(stub.GetTokenizer(pb.GetTokenizerRequest(model="other"))), NotFound)


async def test_pieces_of_single_ids_have_the_bound_of_ids() -> None:
    """A router asks for the texts of all tokens of a prompt's log-probabilities at once."""
    async with serving(max_batch=2, max_decode_ids=300) as running:
        many = [{"ids": [token]} for token in range(300)]
        answer = await running.stub.Decode(pb.DecodeRequest(sequences=many, with_pieces=True))
        assert len(answer.pieces) == 300
        for request in (
            pb.DecodeRequest(sequences=many[:3]),
            pb.DecodeRequest(sequences=[*many, {"ids": [1]}], with_pieces=True),
        ):
            error = await error_of(running.stub.Decode(request))
            assert (error.field, error.reason) == ("sequences", "TOO_MANY")


async def test_padding_is_refused_before_it_takes_the_memory(running: Running) -> None:
    for request in (
        pb.EncodeRequest(texts=["a"], padding=pb.PADDING_STRATEGY_MAX_LENGTH, max_length=2**32 - 1),
        pb.EncodeRequest(texts=["a b " * 50_000, *["a"] * 99], padding=pb.PADDING_STRATEGY_LONGEST),
        pb.EncodeRequest(
            texts=["a"], padding=pb.PADDING_STRATEGY_MAX_LENGTH, max_length=2**20 + 1, return_offsets=True
        ),
    ):
        error = await error_of(running.stub.Encode(request))
        assert (error.field, error.reason) == ("padding", "TOO_LARGE")


async def test_decode_stream_answers_each_message_in_order(running: Running) -> None:
    text = "Stop 你好 👩‍👩‍👧 here</end> never"
    ids = (await running.stub.Encode(pb.EncodeRequest(texts=[text]))).encodings[0].ids
    call = running.stub.DecodeStream()
    shown = {1: "", 2: ""}
    matched = {}
    for place, index in enumerate(ids):
        first = place == 0
        items = [
            pb.DecodeStreamItem(
                stream_id=stream_id,
                open=pb.DecodeStreamOpen(stop_strings=stops) if first else None,
                token_ids=[index],
                finish=place == len(ids) - 1,
            )
            for stream_id, stops in ((1, []), (2, ["</end>"]))
        ]
        await call.write(pb.DecodeStreamRequest(items=items))
        answer = await call.read()
        assert [result.stream_id for result in answer.results] == [1, 2]
        for result in answer.results:
            assert not result.error
            shown[result.stream_id] += result.text
            if result.HasField("matched_stop_string"):
                matched[result.stream_id] = result.matched_stop_string
    assert shown == {1: text, 2: "Stop 你好 👩‍👩‍👧 here"}
    assert matched == {2: "</end>"}
    await call.done_writing()
    assert await call.read() == grpc.aio.EOF


async def test_one_bad_sequence_leaves_the_others_alone() -> None:
    async with serving(max_stop_strings=1) as running:
        call = running.stub.DecodeStream()
        opened = pb.DecodeStreamOpen
        items = [
            pb.DecodeStreamItem(stream_id=1, open=opened(), token_ids=[300]),
            pb.DecodeStreamItem(stream_id=2, open=opened(), token_ids=[1 << 30]),
            pb.DecodeStreamItem(stream_id=3, token_ids=[300]),
            pb.DecodeStreamItem(stream_id=4, open=opened(stop_strings=["a", "b"])),
            pb.DecodeStreamItem(stream_id=5, open=opened(model="other")),
            pb.DecodeStreamItem(stream_id=6, drop=True),
        ]
        await call.write(pb.DecodeStreamRequest(items=items))
        errors = {result.stream_id: result.error.partition(":")[0] for result in (await call.read()).results}
        assert errors == {
            1: "",
            2: "ID_OUTSIDE_VOCABULARY",
            3: "UNKNOWN_STREAM_ID",
            4: "INVALID_STOP_STRINGS",
            5: "MODEL_NOT_FOUND",
        }
        await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1, finish=True)]))
        assert [result.error for result in (await call.read()).results] == [""]
        call.cancel()


async def test_drain_refuses_new_calls_and_waits_for_live_sequences() -> None:
    async with serving() as running:
        call = running.stub.DecodeStream()
        first = pb.DecodeStreamItem(stream_id=1, open=pb.DecodeStreamOpen(), token_ids=[300])
        await call.write(pb.DecodeStreamRequest(items=[first]))
        await call.read()
        draining = asyncio.create_task(running.app.drain())
        error = await error_of(running.stub.Encode(pb.EncodeRequest(texts=["x"])))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        assert not draining.done()
        await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1, finish=True)]))
        await call.read()
        await draining
        call.cancel()


async def test_a_stream_cancelled_while_its_message_is_decoded_leaves_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, cancelled = threading.Event(), threading.Event()

    def process(session: DecodeSession, request: pb.DecodeStreamRequest, _: object) -> pb.DecodeStreamResponse:
        response = session.process(request)
        opened.set()
        cancelled.wait(60)
        return response

    monkeypatch.setattr("penstock.tokenizer.servicer._process", process)
    async with serving(inline_decode_bytes=0) as running:
        call = running.stub.DecodeStream()
        await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1, open=pb.DecodeStreamOpen())]))
        await asyncio.to_thread(opened.wait, 60)
        call.cancel()
        await running.server.calls.wait_idle()
        cancelled.set()
        assert running.registry.get_sample_value("penstock_tokenizer_sequences") == 0
        await running.app.drain()


async def test_a_full_queue_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, encode = threading.Event(), threading.Event(), TextTokenizer.encode

    def held(*arguments: Any) -> Any:
        begun.set()
        may_end.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(TextTokenizer, "encode", held)
    async with serving(max_queued_requests=1, large_text_bytes=1) as running:
        first = asyncio.ensure_future(running.stub.Encode(pb.EncodeRequest(texts=["a"])))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):
            error = await error_of(running.stub.Encode(pb.EncodeRequest(texts=["a"])))
            assert isinstance(error, ResourceExhausted)
            assert error.retry_after_seconds
        may_end.set()
        assert (await first).encodings[0].ids


@pytest.mark.parametrize(
    "padding",
    [
        {"padding": pb.PADDING_STRATEGY_MAX_LENGTH, "max_length": 40_000},
        {"padding": pb.PADDING_STRATEGY_LONGEST, "texts": ["a " * 500, *["a"] * 99]},
    ],
)
async def test_few_bytes_that_padding_makes_many_ids_of_do_not_hold_up_the_event_loop(
    running: Running, padding: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = TextTokenizer.encode

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.rstrip("0123456789"))
        return encode(*arguments)

    monkeypatch.setattr(TextTokenizer, "encode", noted)
    await running.stub.Encode(pb.EncodeRequest(texts=["a"]))
    await running.stub.Encode(pb.EncodeRequest(**{"texts": ["a"], **padding}))
    assert threads == [threading.current_thread().name, "tokenizer-large_"]


async def test_a_model_without_a_template_says_so(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder() / "tokenizer.json").read_bytes())
    async with serving(model=str(tmp_path)) as running:
        error = await error_of(running.stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=[USER])))
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "NO_CHAT_TEMPLATE"
