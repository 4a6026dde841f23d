"""Adapters of a generation service, loaded and unloaded by its operators while it serves."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.models.adapters import LAYER_TARGETS, lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import PATIENCE_SECONDS, Client, generation_service, request, token_ids
from penstock.common.errors import PenstockError, StartupError, from_rpc_error
from penstock.generation.adapters.store import AdapterStore
from penstock.generation.config import GenerationServiceConfig
from penstock.v1 import admin_pb2, config_pb2, generation_pb2, model_pb2
from prometheus_client import generate_latest

# Loads and unloads under traffic: a short run, and the long one.
FEW, MANY = 40, 1000
ONE_MIB = 1 << 20


@dataclass
class Adapters:
    """A running service with adapters `one` and `two` below its root, neither of them loaded."""

    client: Client
    root: Path

    async def load(self, name: str, path: str = "", *, replace: bool = False) -> admin_pb2.LoadAdapterResponse:
        asked = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        answer: admin_pb2.LoadAdapterResponse = await self.client.admin.LoadAdapter(asked)
        return answer

    async def unload(self, name: str) -> admin_pb2.UnloadAdapterResponse:
        answer: admin_pb2.UnloadAdapterResponse = await self.client.admin.UnloadAdapter(
            admin_pb2.UnloadAdapterRequest(name=name)
        )
        return answer

    async def listed(self) -> dict[str, admin_pb2.Adapter]:
        answer = await self.client.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        return {adapter.name: adapter for adapter in answer.adapters}

    async def ids(self, adapter: str = "", tokens: int = 8) -> list[int]:
        outcome = await self.client.generate(request(config={"max_new_tokens": tokens}, adapter=adapter))
        assert outcome.error is None, outcome.error
        return outcome.ids()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[Adapters]:
    root = tmp_path / "root"
    for seed, name in enumerate(("one", "two")):
        lora_folder(root / name, model, seed=seed)
    async with generation_service(model, adapter_root=str(root), max_adapters=2) as client:
        yield Adapters(client, root)


async def refusal(call: Awaitable[Any]) -> PenstockError:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def rest(stream: Any) -> list[Any]:
    """Read the events that are left of a stream."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def test_an_adapter_is_loaded_used_listed_and_forgotten(service: Adapters) -> None:
    plain = await service.ids()
    loaded = await service.load("mine", "one")
    assert (loaded.adapter.name, loaded.adapter.path, loaded.adapter.rank) == ("mine", "one", 8)
    assert loaded.seconds > 0
    first = await service.ids("mine")
    assert first != plain
    # Without a path it is the folder of its name.
    assert (await service.load("two")).version == loaded.version + 1
    assert await service.ids("two") not in (first, plain)
    assert await service.ids() == plain
    found = await service.listed()
    assert list(found) == ["mine", "two"]
    assert found["mine"].loaded
    assert list(found["mine"].target_modules) == sorted(LAYER_TARGETS)
    assert found["mine"].bytes > 0
    info = await service.client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert list(info.adapters) == ["mine", "two"]

    assert (await service.unload("mine")).live_requests == 0
    info = await service.client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert list(info.adapters) == ["two"]
    outcome = await service.client.generate(request(adapter="mine"))
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    gone = await refusal(service.unload("mine"))
    assert (gone.reason, gone.field) == ("ADAPTER_NOT_FOUND", "name")


async def test_every_change_is_in_the_load_report(service: Adapters) -> None:
    watch = service.client.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.01))
    assert (await watch.read()).load.adapters_version == 0
    versions = []
    for change in (service.load("one"), service.load("one", replace=True), service.unload("one")):
        version = (await change).version
        versions.append(version)
        # Told without anything else happening.
        async with asyncio.timeout(30):
            while (await watch.read()).load.adapters_version != version:
                pass
    assert versions == [1, 2, 3]
    watch.cancel()


async def test_a_failed_load_changes_nothing_and_says_why(service: Adapters) -> None:
    await service.load("one")
    before = await service.ids("one")
    (service.root / "empty").mkdir()
    (service.root / "broken").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (service.root / "broken" / name).write_bytes(b"{}")
    for asked, reason, field in (
        ({"name": "one"}, "ADAPTER_EXISTS", "name"),
        ({"name": "new", "path": "nowhere"}, "ADAPTER_PATH", "path"),
        ({"name": "new", "path": "empty"}, "ADAPTER_PATH", "path"),
        ({"name": "one", "path": "empty", "replace": True}, "ADAPTER_PATH", "path"),
        ({"name": "one", "path": "broken", "replace": True}, "ADAPTER_UNSUPPORTED", "path"),
        ({"name": "", "path": "two"}, "INVALID_FIELD", "name"),
        ({"name": "a b", "path": "two"}, "INVALID_FIELD", "name"),
        ({"name": "../two", "path": "two"}, "INVALID_FIELD", "name"),
        ({"name": "x" * 1000, "path": "two"}, "INVALID_FIELD", "name"),
    ):
        error = await refusal(service.load(**asked))  # type: ignore[arg-type]
        assert (error.reason, error.field) == (reason, field), asked
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await service.client.load()).adapters_version == 1
    assert list(await service.listed()) == ["one"]
    assert await service.ids("one") == before


async def test_nothing_outside_the_root_is_read(service: Adapters, model: Path, tmp_path: Path) -> None:
    outside = lora_folder(tmp_path / "outside", model, seed=7)
    (service.root / "link").symlink_to(outside)
    half = lora_folder(service.root / "half", model, seed=8)
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (service.root / "inside").symlink_to(service.root / "one")
    for path in ("../outside", str(outside), "one/../../outside", "link", "half", "..", "/", "~", "one\0"):
        error = await refusal(service.load("mine", path))
        assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_PATH", "path"), (
            path
        )
        assert error.message == "path: has no adapter_model.safetensors that lies below --adapter-root", path
    # A link to a place below the root, and the root's own spelling, are no escape.
    await service.load("linked", "inside")
    await service.load("absolute", str(service.root / "two"))
    assert (await service.listed())["absolute"].path == "two"


async def test_without_a_root_nothing_is_loaded_at_run_time(model: Path, tmp_path: Path) -> None:
    folder = lora_folder(tmp_path / "given", model)
    async with generation_service(model, lora=(f"given={folder}",)) as client:
        service = Adapters(client, tmp_path)
        error = await refusal(service.load("more", "given"))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_ADAPTER_ROOT")
        assert "--adapter-root" in error.message
        found = await service.listed()
        assert (list(found), found["given"].path) == (["given"], "")
        assert (await client.load()).adapters_version == 1
        assert await service.ids("given") != await service.ids()


def test_a_root_that_is_no_folder_is_said_at_the_start(tmp_path: Path) -> None:
    config = GenerationServiceConfig(adapter_root=str(tmp_path / "nowhere"))
    with pytest.raises(StartupError) as caught:
        config.validate()
    assert caught.value.flag == "--adapter-root"


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_who_has_no_token_changes_nothing(model: Path, tmp_path: Path, transport: str) -> None:
    lora_folder(tmp_path / "one", model)
    (tmp_path / "tokens").write_text("operator\n")
    settings = {"adapter_root": str(tmp_path), "auth_token_file": str(tmp_path / "tokens"), "transport": transport}
    async with generation_service(model, **settings) as client:
        for metadata in (None, (("authorization", "Bearer nobody"),)):
            for method, asked in (
                (client.admin.LoadAdapter, admin_pb2.LoadAdapterRequest(name="one")),
                (client.admin.UnloadAdapter, admin_pb2.UnloadAdapterRequest(name="one")),
                (client.admin.ListAdapters, admin_pb2.ListAdaptersRequest()),
            ):
                assert (await refusal(method(asked, metadata=metadata))).reason == "UNAUTHENTICATED"
        allowed = (("authorization", "Bearer operator"),)
        answer = await client.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="one"), metadata=allowed)
        assert answer.version == 1


async def test_scores_and_embeddings_are_the_adapters_own(service: Adapters) -> None:
    await service.load("one")
    generation = service.client.generation

    def score(adapter: str) -> Any:
        item = generation_pb2.ScoreItem(prompt_token_ids=[5, 6, 7], continuation_token_ids=[8, 9])
        return generation.Score(generation_pb2.ScoreRequest(items=[item], adapter=adapter))

    def embed(adapter: str) -> Any:
        return generation.Embed(generation_pb2.EmbedRequest(inputs=[token_ids(5, 6, 7)], adapter=adapter))

    for call, values in (
        (score, lambda answer: answer.results[0].logprob),
        (embed, lambda answer: list(answer.embeddings[0].values)),
    ):
        plain, adapted, again = values(await call("")), values(await call("one")), values(await call("one"))
        assert adapted == again != plain
        assert values(await call("")) == plain
        error = await refusal(call("nobody"))
        assert (error.code, error.field) == (grpc.StatusCode.NOT_FOUND, "adapter")
    # The score is that of the ids which the adapter generates.
    outcome = await service.client.generate(
        request((5, 6, 7), config={"max_new_tokens": 2}, output={"top_logprobs": 1}, adapter="one")
    )
    item = generation_pb2.ScoreItem(prompt_token_ids=[5, 6, 7], continuation_token_ids=outcome.ids())
    scored = await generation.Score(generation_pb2.ScoreRequest(items=[item], adapter="one"))
    generated = sum(delta.logprobs[0].chosen.logprob for delta in outcome.deltas)
    assert scored.results[0].logprob == pytest.approx(generated, abs=1e-4)


async def test_a_reload_under_traffic_leaves_running_requests_their_weights(service: Adapters) -> None:
    """New requests take the new weights from the answer on; the old ones end with the old, on the same blocks."""
    tokens = 64
    await service.load("mine", "one")
    old = await service.ids("mine", tokens)
    await service.load("other", "two")
    new = await service.ids("other", tokens)
    await service.unload("other")
    assert old != new

    long = request(config={"max_new_tokens": tokens}, adapter="mine")
    with held_after(0) as gate:
        running = [service.client.generation.Generate(long) for _ in range(4)]
        await service.client.until(lambda load: load.waiting_requests + load.running_requests == 4)
        gate.allow(4)
        begun = [[await stream.read() for _ in range(3)] for stream in running]
        # They are amid their answers.
        await service.load("mine", "two", replace=True)
        after = [asyncio.ensure_future(service.ids("mine", tokens)) for _ in range(4)]
        await service.client.until(lambda load: load.waiting_requests + load.running_requests == 8)
    for stream, events in zip(running, begun, strict=True):
        events += await rest(stream)
        assert [token for event in events for token in event.delta.token_ids] == old
        assert events[-1].HasField("finished")
    assert await asyncio.gather(*after) == [new] * 4


async def test_an_unload_under_traffic_ends_nothing(service: Adapters) -> None:
    await service.load("mine", "one")
    alone = await service.ids("mine", 64)
    with held_after(4):
        stream = service.client.generation.Generate(request(config={"max_new_tokens": 64}, adapter="mine"))
        events = [await stream.read() for _ in range(3)]
        assert (await service.listed())["mine"].live_requests == 1
        assert (await service.unload("mine")).live_requests == 1
    events += await rest(stream)
    assert [token for event in events for token in event.delta.token_ids] == alone
    await service.client.until_idle()


async def test_one_that_left_for_others_comes_back_by_itself(service: Adapters, model: Path) -> None:
    """Two may be in memory; the third name pushes an idle one out, and a request brings it back."""
    lora_folder(service.root / "three", model, seed=3)
    wanted = {}
    for name in ("one", "two", "three"):
        await service.load(name)
        wanted[name] = await service.ids(name)
    found = await service.listed()
    assert [found[name].loaded for name in ("one", "two", "three")] == [False, True, True]
    for name, ids in wanted.items():
        assert await service.ids(name) == ids
    assert (await service.client.load()).adapters_version == 3, "the names are the same: routers need not ask again"


async def test_a_reload_waits_for_a_score_whose_adapter_is_being_read(
    service: Adapters, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora_folder(service.root / "three", model, seed=3)
    for name in ("one", "two", "three"):
        await service.load(name)
    may_read, bring = threading.Event(), AdapterStore.bring

    def held(store: AdapterStore, name: str) -> Any:
        assert may_read.wait(PATIENCE_SECONDS)
        return bring(store, name)

    monkeypatch.setattr(AdapterStore, "bring", held)
    items = [generation_pb2.ScoreItem(prompt_token_ids=[5], continuation_token_ids=[6, 7])]
    client = service.client
    score = asyncio.ensure_future(client.generation.Score(generation_pb2.ScoreRequest(items=items, adapter="one")))
    await client.until(lambda load: load.waiting_requests == 1)
    reload = asyncio.ensure_future(client.admin.Reload(admin_pb2.ReloadRequest()))
    await client.until(lambda load: load.draining)
    may_read.set()
    assert (await refusal(score)).reason == "DRAINING"
    assert (await reload).aborted_requests == 0
    answer = await client.generation.Score(generation_pb2.ScoreRequest(items=items, adapter="one"))
    assert len(answer.results) == 1


async def test_an_adapter_is_in_use_while_its_request_is_prepared(
    service: Adapters, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be in memory beside the bound, if others could take its place meanwhile."""
    lora_folder(service.root / "three", model, seed=3)
    for name in ("one", "two"):
        await service.load(name)
    core = service.client.running.service._lifecycle.core  # type: ignore[attr-defined]
    compiling, may_compile, compile = asyncio.Event(), asyncio.Event(), core.compiler.compile

    async def held(constraint: Any) -> Any:
        compiling.set()
        await may_compile.wait()
        return await compile(constraint)

    monkeypatch.setattr(core.compiler, "compile", held)
    asked = request(adapter="one", constraint=config_pb2.Constraint(regex="[a-z]+"))
    prepared = asyncio.ensure_future(service.client.generate(asked))
    await compiling.wait()
    await service.load("three")
    await service.ids("two")
    found = await service.listed()
    assert [found[name].loaded for name in ("one", "two", "three")] == [True, True, False]
    assert found["one"].live_requests == 1
    may_compile.set()
    await prepared
    assert (await service.listed())["one"].live_requests == 0


async def test_a_resumed_request_goes_on_with_the_same_weights_only(service: Adapters) -> None:
    for name, path in (("first", "one"), ("again", "one"), ("other", "two")):
        await service.load(name, path)
    digests = {}
    for name in ("first", "again", "other"):
        outcome = await service.client.generate(request(adapter=name))
        digests[name] = outcome.started.adapter_digest
    assert digests["first"] == digests["again"] != digests["other"]
    assert len(digests["first"]) == 64
    assert (await service.client.generate(request())).started.adapter_digest == ""
    for name in ("first", "again", "other"):
        outcome = await service.client.generate(request(adapter=name, adapter_digest=digests["first"]))
        if name == "other":
            assert outcome.error is not None
            assert (outcome.error.reason, outcome.error.field) == ("ADAPTER_DIFFERS", "adapter_digest")
        else:
            assert outcome.error is None
    # Its files are others when it is read again.
    await service.load("first", "two", replace=True)
    outcome = await service.client.generate(request(adapter="first", adapter_digest=digests["first"]))
    assert outcome.error is not None
    assert outcome.error.reason == "ADAPTER_DIFFERS"


async def test_a_load_whose_caller_left_is_whole_and_counted(
    service: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = threading.Event(), AdapterStore.load

    def held(store: AdapterStore, *arguments: Any, **more: Any) -> Any:
        assert go_on.wait(PATIENCE_SECONDS)
        return real(store, *arguments, **more)

    monkeypatch.setattr(AdapterStore, "load", held)
    call = service.client.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="one"), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    go_on.set()
    load = await service.client.until(lambda load: load.adapters_version == 1)
    assert load.adapters_version == len(await service.listed())
    assert await service.ids("one") != await service.ids()


def resident_bytes() -> int:
    """Memory of this process, in which service and client are."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def churn(service: Adapters, rounds: int) -> tuple[int, int]:
    """Load, reload and unload under traffic; return requests that ended well and the growth of memory after a third."""
    wanted = {"": await service.ids()}
    for name in ("one", "two"):
        await service.load("steady", name, replace=True)
        wanted[name] = await service.ids("steady")
    stop, ended = asyncio.Event(), 0
    generator = random.Random(0)

    async def traffic() -> None:
        nonlocal ended
        while not stop.is_set():
            name = generator.choice(["steady", ""])
            ids = await service.ids(name)
            # Reloads give it either weights; never a mixture, and never the base model's.
            assert ids == wanted[""] if not name else ids in (wanted["one"], wanted["two"])
            ended += 1

    tasks = [asyncio.ensure_future(traffic()) for _ in range(4)]
    base = 0
    try:
        for number in range(rounds):
            if number == rounds // 3:
                base = resident_bytes()
            await service.load(f"guest-{number}", generator.choice(["one", "two"]))
            await service.load("steady", generator.choice(["one", "two"]), replace=True)
            await service.unload(f"guest-{number}")
            for task in tasks:
                assert not task.done(), task.exception()
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    assert list(await service.listed()) == ["steady"]
    await service.client.until_idle()
    return ended, resident_bytes() - base


async def check_churn(model: Path, root: Path, rounds: int) -> None:
    for seed, name in enumerate(("one", "two")):
        lora_folder(root / name, model, seed=seed, rank=16)
    # Requests may hold earlier readings of the name that is reloaded.
    async with generation_service(model, adapter_root=str(root), max_adapters=16) as client:
        ended, growth = await churn(Adapters(client, root), rounds)
        assert ended > rounds // 4
        print(f"{rounds} rounds: {ended} requests, {growth / ONE_MIB:.1f} MiB more")
        assert growth < 16 * ONE_MIB, f"{growth / ONE_MIB:.1f} MiB more"


@pytest.mark.slow
async def test_loads_and_unloads_under_traffic_fail_nothing(model: Path, tmp_path: Path) -> None:
    await check_churn(model, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_thousand_loads_and_unloads_under_traffic_fail_nothing(model: Path, tmp_path: Path) -> None:
    await check_churn(model, tmp_path, MANY)


async def test_adapters_are_in_the_metrics_while_they_are_known(service: Adapters) -> None:
    def shown() -> str:
        return generate_latest(service.client.running.registry).decode()

    await service.load("one")
    await refusal(service.load("more", "nowhere"))
    text = shown()
    assert 'adapter="one"' in text
    for line in ("penstock_adapters_known{", "penstock_adapters_loaded{", "penstock_adapter_loads_total{"):
        (found,) = (one for one in text.splitlines() if one.startswith(line))
        assert found.endswith(" 1.0")
    assert 'reason="ADAPTER_PATH"' in text
    await service.unload("one")
    assert 'adapter="one"' not in shown()
