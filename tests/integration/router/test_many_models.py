"""Several models behind one router: a tokenizer each, aliases, shares of versions, a file that changes."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from factories.models.tokenizer_folders import byte_fallback_tokenizer, write_folder
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.gateway import running_gateway
from factories.servers.router import Router, backend, chat, collect, generate, running_router, tokenizer_address, until
from penstock.common.errors import from_rpc_error
from penstock.inference import kserve_pb2, kserve_pb2_grpc
from penstock.v1 import common_pb2, text_pb2, tokenizer_pb2, tokenizer_pb2_grpc


@functools.cache
def _other_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    return str(write_folder(folder, byte_fallback_tokenizer(), {"eos_token": "</s>"}))


@pytest.fixture(scope="module")
def other() -> Iterator[tuple[str, str]]:
    """Address and fingerprint of a second tokenizer."""
    process = stack.start("tokenizer", _other_folder())
    try:
        stack.wait_serving(process.address, process)
        with grpc.insecure_channel(process.address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            info = stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
        yield process.address, str(info.tokenizer_fingerprint)
    finally:
        process.kill()


def entry(name: str, *backends: EmittingBackend, tokenizer: str = "", **more: Any) -> str:
    """A table of the file."""
    lines = [f'name = "{name}"', f'tokenizer = ["{tokenizer or tokenizer_address()}"]']
    lines.append(f"backends = {[one.address for one in backends]}")
    return "\n".join(["[[models]]", *lines, *(f"{key} = {value!r}" for key, value in more.items()), ""])


def write(path: Path, text: str) -> None:
    path.write_text(text)


@asynccontextmanager
async def served(path: Path, text: str, *backends: EmittingBackend, **settings: Any) -> AsyncIterator[Router]:
    """A router before the backends of a file."""
    write(path, text)
    settings = {"models_interval_seconds": 0.05, **settings}
    async with running_router(models=str(path), backend=(), **settings) as router:
        for one in backends:
            await router.until("backend_up", 1.0, backend=one.address)
        yield router


async def names(router: Router) -> dict[str, text_pb2.Model]:
    answer = await router.stub.ListModels(text_pb2.ListModelsRequest())
    return {model.name: model for model in answer.models}


async def until_listed(router: Router, is_it: Callable[[dict[str, text_pb2.Model]], bool]) -> dict[str, text_pb2.Model]:
    """Wait until the list is so, and return it."""
    async with asyncio.timeout(60):
        while not is_it(listed := await names(router)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return listed


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refused:
        await collect(call)
    return from_rpc_error(refused.value)


async def test_each_request_goes_to_its_model_and_its_tokenizer(tmp_path: Path, other: tuple[str, str]) -> None:
    address, fingerprint = other
    async with (
        backend(model="demo") as demo,
        EmittingBackend(model="bytes", fingerprint=fingerprint, script=count_up(4, first=70), vocab_size=0) as small,
    ):
        text = entry("demo", demo) + entry("bytes", small, tokenizer=address, aliases=["tiny"])
        async with served(tmp_path / "models.toml", text, demo, small) as router:
            first = await collect(router.stub.Generate(generate("hello", model="demo")))
            second = await collect(router.stub.Generate(generate("hello", model="bytes")))
            assert (first.started.model, second.started.model) == ("demo", "bytes")
            # Each tokenizer has ids of its own for the same text, and a text of its own for the ids.
            assert list(demo.submitted[0].prompt_token_ids) != list(small.submitted[0].prompt_token_ids)
            assert first.text() != second.text()
            await collect(router.stub.Generate(generate("hello", model="tiny")))
            assert small.submitted[1].model == "bytes"
            tokens = await router.stub.Tokenize(text_pb2.TokenizeRequest(model="tiny", texts=["hello"]))
            assert list(tokens.sequences[0].ids) == list(small.submitted[0].prompt_token_ids)

            listed = await names(router)
            assert set(listed) == {"demo", "bytes", "tiny"}
            assert listed["bytes"].tokenizer_fingerprint == fingerprint != listed["demo"].tokenizer_fingerprint
            assert [share.model for share in listed["tiny"].shares] == ["bytes"]
            for labels, value in (({"model": "demo", "status": "OK"}, 1), ({"model": "bytes", "status": "OK"}, 2)):
                assert router.metric("model_requests_total", **labels) == value
            assert router.metric("model_generation_tokens_total", model="bytes") == 8
            assert router.metric("model_time_to_first_token_seconds_count", model="bytes") == 2
            assert router.metric("model_requests_live", model="bytes") == 0
            # Three answers of four tokens; some come together.
            assert 0 < router.metric("inter_token_latency_seconds_count") <= 9


async def test_an_unknown_name_is_told_the_names_and_no_name_the_default(tmp_path: Path) -> None:
    async with backend(model="a") as a, backend(model="b", adapters={"style": "style"}) as b:
        text = entry("a", a) + entry("b", b, aliases=["big"])
        async with served(tmp_path / "models.toml", text, a, b) as router:
            unknown = await refusal(router.stub.Generate(generate(model="c")))
            assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
            assert "there are: a, b, big, style" in unknown.message
            assert router.metric("model_requests_total", model="other", status="NOT_FOUND") == 1
            none = await refusal(router.stub.Chat(chat()))
            assert none.field == "model"
            # An adapter tells its model, in either field.
            for fields in ({"model": "style"}, {"adapter": "style"}):
                await collect(router.stub.Generate(generate(**fields)))
            assert [(one.model, one.adapter) for one in b.submitted] == [("b", "style")] * 2
            async with grpc.aio.insecure_channel(router.server.address) as channel:
                kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
                ready = await kserve.ModelReady(kserve_pb2.ModelReadyRequest(name="big"))
                assert ready.ready
                with pytest.raises(grpc.RpcError) as refused:
                    await kserve.ModelReady(kserve_pb2.ModelReadyRequest(name="c"))
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        async with served(tmp_path / "models.toml", 'default = "big"\n' + text, a, b) as router:
            assert (await collect(router.stub.Generate(generate()))).started.model == "b"


async def test_versions_of_one_name_share_its_requests_by_weight(tmp_path: Path) -> None:
    async with backend(model="v1") as v1, backend(model="v2") as v2:
        text = entry("v1", v1, aliases=["chat"], weight=3) + entry("v2", v2, aliases=["chat"], weight=1)
        async with served(tmp_path / "models.toml", text, v1, v2) as router:
            answers = [await collect(router.stub.Generate(generate(model="chat"))) for _ in range(40)]
            assert Counter(answer.started.model for answer in answers) == {"v1": 30, "v2": 10}
            shares = (await names(router))["chat"].shares
            assert [(share.model, share.weight) for share in shares] == [("v1", 3.0), ("v2", 1.0)]
            # A conversation stays with one version.
            for session in "abcdefgh":
                of_session = [
                    await collect(router.stub.Generate(generate(model="chat", session_id=session))) for _ in range(4)
                ]
                assert len({answer.started.model for answer in of_session}) == 1
            # One that cannot answer gets nothing.
            await v1.stop()
            await router.until("backend_up", 0.0, backend=v1.address)
            answers = [await collect(router.stub.Generate(generate(model="chat"))) for _ in range(4)]
            assert {answer.started.model for answer in answers} == {"v2"}


async def test_a_changed_file_starts_what_is_new_and_lets_streams_end(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    async with (
        backend(model="a", allowance=3) as old,
        backend(model="a") as new,
        backend(model="b") as gone,
        served(path, entry("a", old) + entry("b", gone), old, gone) as router,
    ):
        stream = asyncio.ensure_future(collect(router.stub.Generate(generate(model="a"))))
        await old.until(lambda: old.running == 1)
        gone.allowance = 0
        leaving = asyncio.ensure_future(collect(router.stub.Generate(generate(model="b"))))
        await gone.until(lambda: gone.running == 1)
        path.write_text(entry("a", new) + entry("c", new).replace(new.address, "127.0.0.1:1"))
        await until(lambda: router.metric("backend_up", backend=new.address) == 1)
        listed = await until_listed(router, lambda there: "b" not in there)
        assert listed["c"].state == common_pb2.MODEL_STATE_UNAVAILABLE
        assert (await refusal(router.stub.Generate(generate(model="b")))).reason == "MODEL_NOT_FOUND"
        await new.until(lambda: bool(new.sessions))
        assert (await collect(router.stub.Generate(generate(model="a")))).started.model == "a"
        assert len(new.submitted) == 1
        # Streams that had begun end where they are, with nothing lost.
        await old.allow(None)
        await gone.allow(None)
        whole = (await stream).text()
        assert whole == (await leaving).text() == (await collect(router.stub.Generate(generate(model="a")))).text()
        assert old.aborted == gone.aborted == []
        # The one that left is let go of.
        await old.until(lambda: not old.sessions)


async def test_one_model_that_cannot_be_served_does_not_keep_the_others(tmp_path: Path) -> None:
    async with (
        backend(model="a") as a,
        backend(model="lost", fingerprint="of another") as lost,
        served(tmp_path / "models.toml", entry("a", a) + entry("lost", lost), a) as router,
    ):
        assert (await collect(router.stub.Generate(generate(model="a")))).finished
        error = await refusal(router.stub.Generate(generate(model="lost")))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")


async def test_over_http_the_list_has_states_and_shares_and_no_model_means_the_default(tmp_path: Path) -> None:
    async with backend(model="v1") as one, backend(model="v2") as two:
        file = 'default = "v2"\n' + entry("v1", one, aliases=["c"], weight=3) + entry("v2", two, aliases=["c"])
        async with (
            served(tmp_path / "models.toml", file, one, two) as router,
            running_gateway(router.server.address) as gateway,
            openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as client,
        ):
            listed = {model.id: model.model_dump() async for model in client.models.list()}
            assert [listed[name]["state"] for name in ("v1", "v2", "c")] == ["ready"] * 3
            assert listed["c"]["shares"] == [{"model": "v1", "weight": 3.0}, {"model": "v2", "weight": 1.0}]
            assert "shares" not in listed["v1"]
            found = await router.stub.GetModel(text_pb2.GetModelRequest())
            assert found.model.name == "v2"
