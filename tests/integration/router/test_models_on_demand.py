"""Models on demand: requests load them into slots, the least recently used leaves, and a roll loses no stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.router import Router, collect, generate, running_router, tokenizer_address
from factories.servers.stack import penstock
from penstock.common.errors import Unavailable, from_rpc_error
from penstock.common.idle_only import IDLE_ONLY_KEY
from penstock.router.backends.model_slot import ModelSlot
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc, text_pb2
from penstock_client import AsyncClient, FailedPrecondition, NotFound
from penstock_client import Unavailable as ClientUnavailable

EMPTY, READY = common_pb2.MODEL_STATE_EMPTY, common_pb2.MODEL_STATE_READY
IDLE_ONLY = ((IDLE_ONLY_KEY, "1"),)
SETTINGS: dict[str, Any] = {"kernels": "torch", "kv_memory": "16MiB", "dtype": "float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two models, and one that is none."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        text_checkpoint(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@asynccontextmanager
async def catalogue(
    tmp_path: Path, root: Path, *names: str, slots: int = 1, away: tuple[str, ...] = (), top: str = "", **settings: Any
) -> AsyncIterator[tuple[Router, list[str]]]:
    """A router before empty services, and their addresses. `away`: slots before them."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await start_slot(stack, root) for _ in range(slots)]
        entries = [
            f'[[models]]\nname = "{name}"\ntokenizer = ["{tokenizer_address()}"]\npath = "{name}"\nmemory = "1GiB"\n'
            for name in names
        ]
        path = tmp_path / "models.toml"
        path.write_text("\n".join([f"slots = {[*away, *addresses]}", top, *entries]))
        router = await stack.enter_async_context(
            running_router(models=str(path), backend=(), **{"model_turn_seconds": 0.0, **settings})
        )
        yield router, addresses


async def start_slot(stack: contextlib.AsyncExitStack, root: Path) -> str:
    """Start a service without a model; return its address."""
    service = await stack.enter_async_context(generation_service(None, model_root=str(root), **SETTINGS))
    return service.running.address


async def states(router: Router) -> dict[str, int]:
    answer = await router.stub.ListModels(text_pb2.ListModelsRequest())
    return {model.name: model.state for model in answer.models}


def ask(model: str, **fields: Any) -> text_pb2.GenerateTextRequest:
    request = generate("Hello", model=model, **fields)
    request.config.max_new_tokens = 8
    request.output.return_token_ids = True
    return request


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refused:
        await collect(call)
    return from_rpc_error(refused.value)


async def test_a_request_loads_its_model_and_the_least_recently_used_leaves(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", "second") as (router, _):
        assert await states(router) == {"first": EMPTY, "second": EMPTY}
        answers = await asyncio.gather(*(collect(router.stub.Generate(ask("first"))) for _ in range(4)))
        assert {answer.started.model for answer in answers} == {"first"}
        assert router.metric("model_loads_total", model="first", outcome="ok") == 1
        assert await states(router) == {"first": READY, "second": EMPTY}
        other = await collect(router.stub.Generate(ask("second")))
        assert other.started.model == "second"
        assert await states(router) == {"first": EMPTY, "second": READY}
        assert router.metric("model_unloads_total", model="first", cause="room") == 1
        assert router.metric("model_loaded", model="first") == 0
        # Both are asked at once: they take turns, and answer as before.
        again = await asyncio.gather(*(collect(router.stub.Generate(ask(name))) for name in ("first", "second") * 3))
        assert {tuple(one.ids()) for one in again if one.started.model == "first"} == {tuple(answers[0].ids())}
        # Tokenize needs no model.
        await router.stub.Tokenize(text_pb2.TokenizeRequest(model="first", texts=["x"]))


async def test_waiting_for_a_load_is_bounded_and_keeps_deadlines(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", max_model_waiting=1) as (router, _):
        late, refused, patient = await asyncio.gather(
            refusal(router.stub.Generate(ask("first"), timeout=0.01)),
            *(refusal(router.stub.Generate(ask("first"), timeout=0.02)) for _ in range(1)),
            asyncio.sleep(0),
        )
        assert {late.code, refused.code} <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert patient is None
        assert (await collect(router.stub.Generate(ask("first")))).finished


async def test_an_idle_model_is_unloaded(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", model_idle_seconds=0.2) as (router, _):
        await collect(router.stub.Generate(ask("first")))
        await router.until("model_unloads_total", 1, model="first", cause="idle")
        assert await states(router) == {"first": EMPTY}
        assert (await collect(router.stub.Generate(ask("first")))).finished


async def test_a_request_of_idle_capacity_displaces_no_model_that_others_used_lately(
    tmp_path: Path, root: Path
) -> None:
    async with catalogue(tmp_path, root, "first", "second", model_turn_seconds=3600.0) as (router, _):
        await collect(router.stub.Generate(ask("first")))
        error = await refusal(router.stub.Generate(ask("second"), metadata=IDLE_ONLY))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MODEL_SLOTS_FULL")
        assert await states(router) == {"first": READY, "second": EMPTY}
        assert (await collect(router.stub.Generate(ask("first"), metadata=IDLE_ONLY))).finished


async def test_a_model_that_idle_capacity_alone_uses_has_no_turn_before_another(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", "second", model_turn_seconds=3600.0) as (router, _):
        is_over = False

        async def use_idle_capacity() -> None:
            while not is_over:
                with contextlib.suppress(grpc.RpcError):
                    await collect(router.stub.Generate(ask("first"), metadata=IDLE_ONLY))

        lines = [asyncio.ensure_future(use_idle_capacity()) for _ in range(3)]
        await router.until("model_loaded", 1, model="first")
        assert (await collect(router.stub.Generate(ask("second")))).finished
        is_over = True
        await asyncio.gather(*lines)


async def test_a_slot_that_does_not_answer_is_passed_over(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", "second", away=("127.0.0.1:1",)) as (router, _):
        assert (await collect(router.stub.Generate(ask("first")))).finished
        # The only one that answers is taken from the other model.
        assert (await collect(router.stub.Generate(ask("second")))).finished


async def test_a_model_leaves_a_slot_that_is_gone_for_good(tmp_path: Path, root: Path) -> None:
    async with (
        contextlib.AsyncExitStack() as first_slot,
        catalogue(tmp_path, root, "first", slots=1, away=(await start_slot(first_slot, root),)) as (router, (_,)),
    ):
        await collect(router.stub.Generate(ask("first")))
        await first_slot.aclose()
        await router.until("model_loaded", 0, model="first")
        assert (await collect(router.stub.Generate(ask("first")))).finished


async def test_memory_bounds_the_models_more_than_slots_do(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", "second", slots=2, top='memory = "1GiB"') as (router, _):
        await collect(router.stub.Generate(ask("first")))
        await collect(router.stub.Generate(ask("second")))
        assert await states(router) == {"first": EMPTY, "second": READY}


async def test_a_model_that_cannot_be_loaded_is_refused_and_frees_its_slot(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "broken", "first") as (router, _):
        error = await refusal(router.stub.Generate(ask("broken")))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert str(root) not in error.message
        assert (await collect(router.stub.Generate(ask("first")))).finished


async def test_another_router_takes_over_what_is_loaded(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first") as (router, _):
        await collect(router.stub.Generate(ask("first")))
        async with running_router(models=str(tmp_path / "models.toml"), backend=()) as second:
            assert (await collect(second.stub.Generate(ask("first")))).finished
            assert second.metric("model_loads_total", model="first", outcome="ok") == 0


async def test_a_roll_of_a_model_on_demand_loads_it_elsewhere_before_the_old_one_goes(
    tmp_path: Path, root: Path
) -> None:
    async with (
        catalogue(tmp_path, root, "first", slots=2) as (router, slots),
        AsyncClient(router.server.address) as client,
    ):
        before = await collect(router.stub.Generate(ask("first")))
        steps = await client.roll_model("first")
        assert [(step.backend, step.step) for step in steps] == [
            (slots[1], router_pb2.ROLL_STEP_LOADING),
            (slots[1], router_pb2.ROLL_STEP_READY),
            (slots[0], router_pb2.ROLL_STEP_UNLOADED),
        ]
        after = await collect(router.stub.Generate(ask("first")))
        assert after.ids() == before.ids()
        assert router.metric("model_unloads_total", model="first", cause="roll") == 1


async def test_a_roll_that_cannot_unload_frees_the_old_slot_nevertheless(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        catalogue(tmp_path, root, "first", slots=2, model_load_seconds=10.0) as (router, _),
        AsyncClient(router.server.address) as client,
    ):
        await collect(router.stub.Generate(ask("first")))
        unload = ModelSlot.unload

        async def fail(slot: ModelSlot, grace_seconds: float) -> None:
            monkeypatch.setattr(ModelSlot, "unload", unload)
            raise Unavailable("lost", reason="BACKEND_LOST")

        monkeypatch.setattr(ModelSlot, "unload", fail)
        with pytest.raises(ClientUnavailable):
            await client.roll_model("first")
        steps = await client.roll_model("first")
        assert steps[-1].step == router_pb2.ROLL_STEP_UNLOADED


async def test_a_roll_without_a_second_place_is_refused(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first") as (router, _), AsyncClient(router.server.address) as client:
        with pytest.raises(FailedPrecondition) as refused:
            await client.roll_model("first")
        assert refused.value.reason == "ONE_BACKEND"
        with pytest.raises(NotFound, match="there is: first"):
            await client.roll_model("third")


async def test_a_roll_reloads_each_backend_while_the_others_serve(root: Path) -> None:
    async with (
        generation_service(root / "first", **SETTINGS) as one,
        generation_service(root / "first", **SETTINGS) as two,
        running_router(backend=(one.running.address, two.running.address)) as router,
        AsyncClient(router.server.address) as client,
    ):
        is_over = False

        async def ask_all_the_time() -> int:
            count = 0
            while not is_over:
                await collect(router.stub.Generate(ask("")))
                count += 1
            return count

        load = asyncio.ensure_future(ask_all_the_time())
        steps = await client.roll_model()
        is_over = True
        assert await load > 0
        assert [step.step for step in steps] == [router_pb2.ROLL_STEP_LOADING, router_pb2.ROLL_STEP_READY] * 2
        assert {step.backend for step in steps} == {one.running.address, two.running.address}
        code, told, _ = await penstock("admin", "roll", "--address", router.server.address)
        assert (code, told.splitlines()[-1], told.count(": ready")) == (0, "rolled", 2)


async def test_reload_models_reads_the_file_now(tmp_path: Path, root: Path) -> None:
    async with catalogue(tmp_path, root, "first", models_interval_seconds=600.0) as (router, _):
        path = tmp_path / "models.toml"
        async with grpc.aio.insecure_channel(router.server.address) as channel:
            admin: Any = router_pb2_grpc.RouterAdminServiceStub(channel)
            assert await admin.ReloadModels(router_pb2.ReloadModelsRequest()) == router_pb2.ReloadModelsResponse()
            path.write_text(path.read_text() + 'aliases = ["a"]\n')
            code, told, _ = await penstock("admin", "reload-models", "--address", router.server.address)
            assert (code, told.strip()) == (0, "first: changed")
            assert "a" in await states(router)
            path.write_text("models = 3")
            with pytest.raises(grpc.RpcError) as refused:
                await admin.ReloadModels(router_pb2.ReloadModelsRequest())
            error = from_rpc_error(refused.value)
            assert (error.reason, "models: must be a list" in error.message) == ("MODELS_FILE", True)
