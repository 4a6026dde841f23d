"""A process without a model: it loads one from bytes or a path, refuses lies, unloads it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.servers import stack
from factories.servers.generation import PATIENCE_SECONDS, Client, generation_service, request, text_checkpoint
from factories.servers.graph_driver import GraphDriver, call_of
from factories.servers.sessions import Session
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.cli.client.models import run_info, run_load, run_unload
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    StartupError,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from penstock.common.progress import StageProgress
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.holder import model_holder
from penstock.v1 import admin_pb2, common_pb2, generation_pb2, graphs_pb2, model_pb2
from penstock_client import AsyncClient, ClientConfig, LoadProgress
from penstock_client import Client as SyncClient
from penstock_client._channel import END, AsyncExchange
from penstock_client._load_model import LoadState, load_requests
from prometheus_client import generate_latest

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# Bytes that do not come are waited for longer than any test waits.
EMPTY: dict[str, Any] = {"kernels": "torch", "receive_idle_seconds": 10 * PATIENCE_SECONDS}
CYCLES, MANY_CYCLES = 8, 160
GROWTH_BYTES = 24 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = text_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    return folder


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uploads")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(folder: Path, uploads: Path) -> AsyncIterator[Client]:
    settings = {**EMPTY, "model_root": str(folder.parent), "model_upload_folder": str(uploads)}
    async with generation_service(None, **settings) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def empty(service: Client) -> AsyncIterator[Client]:
    """The service without a model, before and after."""
    yield service
    if (await info(service)).state == common_pb2.MODEL_STATE_READY:
        await service.model.UnloadModel(model_pb2.UnloadModelRequest(grace_seconds=0))
    assert (await info(service)).state == common_pb2.MODEL_STATE_EMPTY


async def info(client: Client) -> model_pb2.GetModelInfoResponse:
    answer: model_pb2.GetModelInfoResponse = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    return answer


async def load(
    client: Client, requests: Iterator[model_pb2.LoadModelRequest], **call: Any
) -> list[model_pb2.LoadModelResponse]:
    """All answers of a load. Raises its PenstockError."""
    answers: list[Any] = []
    exchange, state = AsyncExchange(client.model.LoadModel, **call), LoadState()

    async def read() -> None:
        answers.append(await exchange.read())
        state.take(answers[-1], END)

    try:
        for message in requests:
            await exchange.send(message)
            state.sent(message)
            while state.waits:
                await read()
        await exchange.end()
        while not state.is_over:
            await read()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    return answers[:-1]


async def unload(client: Client, grace: float | None = None) -> model_pb2.UnloadModelResponse:
    try:
        answer = await client.model.UnloadModel(model_pb2.UnloadModelRequest(grace_seconds=grace))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    gone: model_pb2.UnloadModelResponse = answer
    return gone


def sent(folder: Path, **options: Any) -> Iterator[model_pb2.LoadModelRequest]:
    """The messages of a folder's files."""
    return load_requests(folder, None, "", options)


def files_in(uploads: Path) -> list[str]:
    """Names of all files and folders below."""
    return [path.name for path in uploads.rglob("*")]


async def health(client: Client, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
    return status


async def ids_of(client: Client) -> list[int]:
    outcome = await client.generate(request())
    assert outcome.error is None
    return outcome.ids()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(folder: Path) -> list[int]:
    """Ids of a process that was started with the folder."""
    async with generation_service(folder, kernels="torch") as client:
        return await ids_of(client)


async def test_a_process_without_a_model_says_so(empty: Client) -> None:
    assert await health(empty, "") == NOT_SERVING
    assert await health(empty, "penstock.v1.GenerationService") == NOT_SERVING
    assert await health(empty, "penstock.v1.ModelService") == SERVING
    assert await health(empty, "penstock.v1.GenerationAdminService") == SERVING
    facts = await info(empty)
    assert (facts.model, facts.state, facts.can_load) == ("", common_pb2.MODEL_STATE_EMPTY, True)
    assert (await empty.load()).state == common_pb2.MODEL_STATE_EMPTY
    refused = (await empty.generate(request())).error
    assert isinstance(refused, Unavailable)
    assert refused.reason == "NO_MODEL"
    assert "LoadModel" in refused.message
    for call in (
        empty.generation.Score(generation_pb2.ScoreRequest()),
        empty.generation.Embed(generation_pb2.EmbedRequest()),
        empty.admin.WarmUp(admin_pb2.WarmUpRequest()),
        empty.model.UnloadModel(model_pb2.UnloadModelRequest()),
        empty.model.Sample(graphs_pb2.SampleRequest()),
    ):
        with pytest.raises(grpc.RpcError) as unavailable:
            await call
        assert from_rpc_error(unavailable.value).reason == "NO_MODEL"


async def test_bytes_give_the_ids_of_the_folder(
    empty: Client, folder: Path, uploads: Path, expected: list[int]
) -> None:
    before = (await info(empty)).load_number
    answers = await load(empty, sent(folder))
    stages = [answer.progress.stage for answer in answers[:-1]]
    assert list(dict.fromkeys(stages)) == ["receive", "load_weights", "tune", "warm_up"]
    assert answers[-1].info == await info(empty)
    facts = answers[-1].info
    assert (facts.model, facts.state) == ("tiny", common_pb2.MODEL_STATE_READY)
    assert (facts.load_number, facts.load_stage) == (before + 1, "")
    assert await health(empty, "") == SERVING
    assert await ids_of(empty) == expected
    kept = files_in(uploads)
    assert "tokenizer.json" in kept
    assert not [name for name in kept if name.endswith(".safetensors")]
    metrics = generate_latest(empty.running.registry).decode()
    assert 'penstock_request_success_total{finished_reason="length",model_name="tiny"} 1.0' in metrics
    assert "penstock_model_loaded 1.0" in metrics
    gone = await unload(empty)
    assert gone.model == "tiny"
    assert gone.resident_bytes_before > 0
    assert not files_in(uploads)
    assert await health(empty, "") == NOT_SERVING
    metrics = generate_latest(empty.running.registry).decode()
    assert "penstock_model_loaded 0.0" in metrics
    assert 'model_name="tiny"' not in metrics


async def test_a_path_gives_the_ids_of_the_folder(empty: Client, expected: list[int]) -> None:
    answers = await load(empty, load_requests(None, "tiny", "named", {"max_context": 64}))
    assert (answers[-1].info.model, answers[-1].info.limits.max_context_tokens) == ("named", 64)
    assert await ids_of(empty) == expected
    assert (await empty.generate(request(model="tiny"))).error is not None


async def test_clients_and_commands_load_and_unload(
    empty: Client, folder: Path, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    address = empty.running.address
    seen: list[LoadProgress] = []
    async with AsyncClient(address) as client:
        assert (await client.load_model(folder, on_progress=seen.append)).model == "tiny"
        assert {"receive", "load_weights"} <= {progress.stage for progress in seen}
        assert (await client.model_info()).model == "tiny"
        assert (await client.unload_model(grace=0)).name == "tiny"
        with pytest.raises(InvalidArgument):
            await client.load_model(path="nowhere")

    def blocking() -> None:
        with SyncClient(address) as client:
            assert client.load_model(path="tiny", name="sync").model == "sync"
            assert client.unload_model().name == "sync"
        run_load(str(folder), {"address": address, "name": "cli", "block_size": "8", "prefix_cache": False})
        run_info({"address": address})

    await asyncio.to_thread(blocking)
    assert (await info(empty)).kv.block_size == 8
    assert await ids_of(empty) == expected
    await asyncio.to_thread(run_unload, {"address": address})
    shown = capsys.readouterr().out
    assert "loaded cli (Qwen2ForCausalLM)" in shown
    assert "ready, load" in shown
    assert "unloaded cli: the process had" in shown
    for given in ((None, {}), (str(folder), {"path": "a"}), (str(folder / "no"), {})):
        with pytest.raises(StartupError):
            await asyncio.to_thread(run_load, given[0], {"address": address, **given[1]})


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], None], body: int = 0) -> Path:
    """Copy a model with another header of its weights; `body` bytes are added to, or cut from, the data."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    rest = data[8 + size :]
    rest = rest + bytes(body) if body >= 0 else rest[:body]
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return target


def configured(source: Path, target: Path, **fields: Any) -> Path:
    """Copy a model with another config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def _other_shape(header: dict[str, Any]) -> None:
    rows, columns = header[EMBED]["shape"]
    header[EMBED]["shape"] = [rows // 2, columns * 2]


def _other_dtype(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "I32"


def _half_dtype(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "F16"


def _renamed(header: dict[str, Any]) -> None:
    header["model.backdoor.weight"] = header.pop(NORM)


def _beyond_the_end(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"][1] += 10**12


def _overlapping(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def _negative(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [-1]


def _same(_: dict[str, Any]) -> None:
    pass


LIES: dict[str, Callable[[Path, Path], Path]] = {
    "shape": lambda source, target: rewritten(source, target, _other_shape),
    "dtype": lambda source, target: rewritten(source, target, _other_dtype),
    "half": lambda source, target: rewritten(source, target, _half_dtype),
    "name": lambda source, target: rewritten(source, target, _renamed),
    "beyond": lambda source, target: rewritten(source, target, _beyond_the_end),
    "overlap": lambda source, target: rewritten(source, target, _overlapping),
    "negative": lambda source, target: rewritten(source, target, _negative),
    "short": lambda source, target: rewritten(source, target, _same, body=-100),
    "long": lambda source, target: rewritten(source, target, _same, body=100),
    "layers": lambda source, target: configured(source, target, num_hidden_layers=10**9),
    "more layers": lambda source, target: configured(source, target, num_hidden_layers=9),
    "positions": lambda source, target: configured(source, target, max_position_embeddings=10**12),
    "vocabulary": lambda source, target: configured(source, target, vocab_size=10**6),
    "hidden": lambda source, target: configured(source, target, hidden_size=96),
    "family": lambda source, target: configured(source, target, model_type="other"),
    "code": lambda source, target: configured(source, target, model_type="x", auto_map={"AutoModel": "m.M"}),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("source", ["bytes", "path"])
async def test_a_lying_checkpoint_is_refused_and_the_process_lives(
    empty: Client, folder: Path, uploads: Path, tmp_path: Path, lie: str, source: str
) -> None:
    name = f"lie-{lie.replace(' ', '-')}"
    lying = LIES[lie](folder, tmp_path / name)
    if source == "path":
        lying = lying.rename(folder.parent / name)
    messages = sent(lying) if source == "bytes" else load_requests(None, name, "", None)
    try:
        with pytest.raises(InvalidArgument) as refused:
            await load(empty, messages)
    finally:
        if source == "path":
            shutil.rmtree(lying)
    assert refused.value.reason == "MODEL_REFUSED"
    assert refused.value.field == ("start.upload.files" if source == "bytes" else "start.path")
    for private in (str(uploads), str(folder.parent), "penstock-model-"):
        assert private not in refused.value.message
    assert (await info(empty)).state == common_pb2.MODEL_STATE_EMPTY
    assert not files_in(uploads)


async def test_after_all_lies_a_good_one_is_loaded(empty: Client, folder: Path, expected: list[int]) -> None:
    await load(empty, sent(folder))
    assert await ids_of(empty) == expected


def cut(messages: Iterator[model_pb2.LoadModelRequest], count: int) -> Iterator[model_pb2.LoadModelRequest]:
    """The first messages of a load."""
    for _ in range(count):
        yield next(messages)


async def test_a_truncated_one_is_refused(empty: Client, folder: Path, uploads: Path) -> None:
    for count in (1, 2, 3):
        with pytest.raises(InvalidArgument, match="cut short") as refused:
            await load(empty, cut(sent(folder), count))
        assert refused.value.reason == "MODEL_REFUSED"
    assert not files_in(uploads)
    assert (await info(empty)).state == common_pb2.MODEL_STATE_EMPTY


async def test_an_oversized_one_is_refused_at_its_first_message(empty: Client, folder: Path) -> None:
    start = next(sent(folder))
    start.start.upload.files[-1].size_bytes = 1 << 50
    with pytest.raises(ResourceExhausted) as refused:
        await load(empty, iter((start,)))
    assert refused.value.reason == "MODEL_TOO_LARGE"
    with pytest.raises(InvalidArgument):
        await load(empty, iter(()))
    # Config and sizes that memory could not hold are refused before the weights come, whatever the cap.
    async with generation_service(None, **EMPTY, max_model_bytes=1 << 50) as other:
        files = start.start.upload.files
        files[-1].size_bytes = 1 << 34
        monkey = [start, *cut(sent(folder), 2)][:1]
        config = folder / "config.json"
        monkey.append(
            model_pb2.LoadModelRequest(chunk=model_pb2.ModelFileChunk(name="config.json", data=config.read_bytes()))
        )
        with pytest.raises(PenstockError) as early:
            await load(other, iter(monkey))
        # On a machine with more than 16 GiB free the stream's end is what is wrong.
        assert early.value.reason in ("MODEL_TOO_LARGE", "MODEL_REFUSED")


async def test_more_bytes_than_announced_are_refused(empty: Client, folder: Path) -> None:
    def more() -> Iterator[model_pb2.LoadModelRequest]:
        messages = sent(folder)
        yield next(messages)
        first = next(messages)
        first.chunk.data += b" "
        yield first

    with pytest.raises(InvalidArgument) as refused:
        await load(empty, more())
    assert refused.value.field == "chunk.data"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "int3"}, "start.options.dtype"),
        ({"quantization": "int3"}, "start.options.quantization"),
        ({"kv_memory": "much"}, "start.options.kv_memory"),
        ({"kv_cache_dtype": "int3"}, "start.options.kv_cache_dtype"),
        ({"max_context": 10**6}, "start.options.max_context"),
        ({"max_batch_tokens": 1}, "start.options.max_batch_tokens"),
    ],
)
async def test_an_option_that_cannot_be_honoured_is_named(empty: Client, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await load(empty, load_requests(None, "tiny", "", options))
    assert refused.value.field == field


async def test_a_kv_pool_that_cannot_fit_is_refused_before_the_weights_are_read(empty: Client) -> None:
    seen = [answer.progress.stage async for answer in _until_error(empty, {"kv_memory": "900TiB"})]
    assert "load_weights" not in seen


async def _until_error(client: Client, options: dict[str, Any]) -> AsyncIterator[model_pb2.LoadModelResponse]:
    try:
        async for answer in client.model.LoadModel(load_requests(None, "tiny", "", options)):
            yield answer
    except grpc.RpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, ResourceExhausted)
        assert (refused.reason, refused.field) == ("MODEL_TOO_LARGE", "start.options.kv_memory")
        assert "--kv-memory" in refused.message
    else:
        raise AssertionError("it was loaded")


@contextlib.contextmanager
def held_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold loads before they begin: (reached, let go)."""
    reached, go_on, real = threading.Event(), threading.Event(), model_holder.load

    def held(config: Any, name: str, show: Callable[[StageProgress], None], *more: Any) -> Any:
        reached.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return real(config, name, show, *more)

    with monkeypatch.context() as patch:
        patch.setattr(model_holder, "load", held)
        try:
            yield reached, go_on
        finally:
            go_on.set()


async def test_one_load_at_a_time(empty: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_load(monkeypatch) as (reached, go_on):
        first = asyncio.create_task(load(empty, sent(folder)))
        assert await asyncio.to_thread(reached.wait, PATIENCE_SECONDS)
        assert (await info(empty)).state == common_pb2.MODEL_STATE_LOADING
        refused = (await empty.generate(request())).error
        assert refused is not None
        assert refused.reason == "STARTING"
        for second in (lambda: load(empty, sent(folder)), lambda: unload(empty)):
            with pytest.raises(FailedPrecondition) as busy:
                await second()
            assert busy.value.reason == "LOAD_IN_PROGRESS"
        go_on.set()
        await first
    with pytest.raises(FailedPrecondition) as loaded:
        await load(empty, sent(folder))
    assert loaded.value.reason == "MODEL_LOADED"


async def until_empty(client: Client) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await info(client)).state != common_pb2.MODEL_STATE_EMPTY:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("when", ["receive", "load"])
async def test_a_caller_that_leaves_cancels_the_load(
    empty: Client, folder: Path, uploads: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = (await info(empty)).load_number
    with held_load(monkeypatch) as (reached, go_on):
        if when == "load":
            call = empty.model.LoadModel(sent(folder))
            assert await asyncio.to_thread(reached.wait, PATIENCE_SECONDS)
        else:
            call = empty.model.LoadModel()
            for message in cut(sent(folder), 2):
                await call.write(message)
            assert (await call.read()).progress.stage == "receive"
            assert files_in(uploads)
        call.cancel()
        go_on.set()
        await until_empty(empty)
    assert (await info(empty)).load_number == before
    assert not files_in(uploads)


async def test_a_caller_may_leave_at_the_moment_its_bytes_arrive(empty: Client, folder: Path, uploads: Path) -> None:
    """As tests/unit/generation/rpc/test_model_calls.py has it, by real calls."""
    for _ in range(8):
        call = empty.model.LoadModel()
        start, chunk = cut(sent(folder), 2)
        await call.write(start)
        assert (await call.read()).progress.stage == "receive"
        await call.write(chunk)
        call.cancel()
        await until_empty(empty)
    assert not files_in(uploads)


async def test_bytes_that_do_not_come_are_waited_for_only_so_long(folder: Path) -> None:
    async with generation_service(None, **{**EMPTY, "receive_idle_seconds": 0.1}) as client:
        call = client.model.LoadModel()
        await call.write(next(sent(folder)))
        assert (await call.read()).progress.total_bytes > 0
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()
        assert "--receive-idle-seconds" in from_rpc_error(refused.value).message
        await until_empty(client)


async def test_a_load_that_breaks_leaves_the_process_as_it_was(
    empty: Client, folder: Path, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret of the machine")

    with monkeypatch.context() as patch:
        patch.setattr(model_holder, "load", broken)
        with pytest.raises(PenstockError) as failed:
            await load(empty, sent(folder))
    assert failed.value.reason == "LOAD_FAILED"
    assert "secret" not in failed.value.message
    await load(empty, sent(folder))
    assert await ids_of(empty) == expected


async def test_unloading_waits_for_requests_or_refuses(empty: Client, folder: Path) -> None:
    await load(empty, sent(folder))
    with held_after(1):
        live = asyncio.create_task(empty.generate(request(config={"max_new_tokens": 40})))
        await empty.until(lambda load: load.running_requests == 1)
        with pytest.raises(FailedPrecondition) as busy:
            await unload(empty)
        assert busy.value.reason == "BUSY"
        ending = asyncio.create_task(unload(empty, PATIENCE_SECONDS))
        await empty.until(lambda load: load.draining)
        with pytest.raises(grpc.RpcError):
            await empty.admin.Resume(admin_pb2.ResumeRequest())
    assert (await live).finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (await ending).model == "tiny"
    await load(empty, sent(folder))
    with held_after(1):
        live = asyncio.create_task(empty.generate(request(config={"max_new_tokens": 4000})))
        await empty.until(lambda load: load.running_requests == 1)
        ending = asyncio.create_task(unload(empty, 0.0))
        # Without grace a watch may end before it has told of the draining.
        while (await info(empty)).state == common_pb2.MODEL_STATE_READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await live).finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
    await ending


async def test_streams_that_wait_do_not_keep_the_model(empty: Client, folder: Path) -> None:
    """A session, a watch with a long interval and a Forward stream are open when it is unloaded."""
    await load(empty, sent(folder))
    app: Any = empty.running.service
    core = app._holder.running.core
    kept = [weakref.ref(one) for one in (core.loaded.weights.model, core.loaded.pools.kv, core.loop, core.hub)]
    del core
    session = Session(empty)
    await session.submit(request(request_id="over"))
    while "finished" not in session.kinds("over"):
        await session.next()
    watch = empty.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=3600.0))
    await watch.read()
    forward = empty.model.Forward()
    await forward.write(graphs_pb2.ForwardRequest())
    await unload(empty)
    assert [one() for one in kept] == [None] * len(kept)
    assert await session.call.code() is grpc.StatusCode.OK
    assert await watch.code() is grpc.StatusCode.OK
    forward.cancel()


async def test_a_stream_of_graphs_ends_with_its_model(empty: Client, folder: Path) -> None:
    await load(empty, sent(folder))
    async with GraphDriver(empty.model, 2) as old:
        ids = {0: np.array([[5, 6, 7]], "<i4")}
        before = await old.run("embedding", ids)
        await unload(empty)
        await load(empty, sent(folder))
        error = await old.refused(call_of("embedding", ids))
        assert (type(error), error.reason) == (Unavailable, "NO_MODEL")
    async with GraphDriver(empty.model, 2) as new:
        assert np.array_equal(await new.run("embedding", ids), before)


@pytest.mark.slow
async def test_many_loads_leave_no_thread_descriptor_or_engine(empty: Client, folder: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def engines() -> list[object]:
        return [one for one in gc.get_objects() if type(one).__name__ in ("LoadedModel", "EngineLoop", "KVCachePool")]

    # Of other tests of this worker, which hold theirs in circles.
    others = engines()
    before: tuple[int, int] | None = None
    for cycle in range(CYCLES):
        await load(empty, sent(folder) if cycle % 2 else load_requests(None, "tiny", "", None))
        await ids_of(empty)
        await unload(empty)
        if cycle == 1:
            before = held()
    assert before is not None
    threads, descriptors = held()
    # The pool of threads for short work has a few at most.
    assert threads <= before[0] + 4
    # Connections of gRPC come and go. A load that leaves one has left as many as there were cycles.
    assert descriptors <= before[1] + 4
    assert not [one for one in engines() if not any(one is other for other in others)]


def residents_of_loads(process: stack.Process) -> list[int]:
    """Load and unload over and over; the process's bytes after each."""
    with grpc.insecure_channel(process.address) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
    residents: list[int] = []
    with SyncClient(process.address) as client:
        for _ in range(MANY_CYCLES):
            client.load_model(path="tiny")
            residents.append(client.unload_model(grace=0).resident_bytes_after)
    return residents


@pytest.mark.slow
async def test_many_loads_take_no_memory(folder: Path) -> None:
    """In a process of its own: the heap of a worker that ran other tests goes up and down by itself."""
    flags = ("--empty", "--model-root", str(folder.parent), "--kernels", "torch", "--kv-memory", "8MiB")
    process = stack.start("generation", *flags)
    try:
        residents = await asyncio.to_thread(residents_of_loads, process)
    finally:
        process.kill()
    # Heaps of threads grow in steps to what a load takes at most; a model that stays would take more in each cycle.
    quarter = MANY_CYCLES // 4
    assert min(residents[-quarter:]) < max(residents[quarter : 2 * quarter]) + GROWTH_BYTES


async def test_a_process_that_was_started_with_a_model_can_be_given_another(
    folder: Path, tmp_path: Path, expected: list[int]
) -> None:
    other = text_checkpoint(tmp_path / "other", seed=7)
    async with generation_service(other, kernels="torch") as client:
        assert await ids_of(client) != expected
        assert (await unload(client)).model == "other"
        await load(client, sent(folder))
        assert await ids_of(client) == expected


async def test_where_the_model_is_not_open_nobody_loads(folder: Path) -> None:
    async with generation_service(folder, kernels="torch", model_access="off") as client:
        assert not (await info(client)).can_load
        for call in (lambda: load(client, sent(folder)), lambda: unload(client)):
            with pytest.raises(FailedPrecondition) as refused:
                await call()
            assert refused.value.reason == "MODEL_ACCESS_OFF"
        assert (await client.generate(request())).error is None


async def test_a_path_needs_a_root(folder: Path) -> None:
    async with generation_service(None, **EMPTY) as client:
        with pytest.raises(FailedPrecondition) as refused:
            await load(client, load_requests(None, str(folder), "", None))
        assert refused.value.reason == "MODEL_ROOT_OFF"


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_loading_has_tokens_of_its_own(transport: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("for-text\n")
    (tmp_path / "model").write_text("for-the-model\n")
    tokens = {"auth_token_file": str(tmp_path / "text"), "model_access_token_file": str(tmp_path / "model")}
    async with generation_service(None, transport=transport, **EMPTY, **tokens) as client:
        text, model = ((("authorization", f"Bearer {one}"),) for one in ("for-text", "for-the-model"))

        def by_text() -> None:
            with SyncClient(client.running.address, ClientConfig(token="for-text")) as blocking:
                blocking.load_model(folder)

        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(by_text)
        for source in ({"folder": folder}, {"path": "tiny"}) * 5:
            async with AsyncClient(client.running.address, ClientConfig(token="for-text")) as waiting:
                with pytest.raises(Unauthenticated):
                    await waiting.load_model(**source)
        await load(client, sent(folder), metadata=model)
        with pytest.raises(grpc.RpcError) as refused:
            await client.model.UnloadModel(model_pb2.UnloadModelRequest(), metadata=text)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"empty": True, "model": "somewhere"}, "--empty"),
        ({"empty": True, "model_access": "off"}, "--model-access"),
        ({"empty": True, "host": "0.0.0.0", "insecure_bind": True}, "--model-access"),
        ({"model_access": "all", "host": "0.0.0.0", "insecure_bind": True}, "--model-access-token-file"),
    ],
)
async def test_flags_that_contradict_each_other_are_named(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(StartupError) as refused:
        GenerationServiceConfig(**settings).validate()
    assert refused.value.flag == flag
