"""Adapters at the router: requests go where theirs is, move there, and may have it loaded."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.held_backend import IDS, WANT_IDS, held, stop_after
from factories.servers.only_route import only_route
from factories.servers.router import (
    PATIENCE_SECONDS,
    backend,
    chat,
    collect,
    generate,
    running_router,
    tokenizer_address,
    until,
)
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.v1 import admin_pb2, admin_pb2_grpc, text_pb2


async def refusal(call: Any) -> PenstockError:
    """The error that a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


def adapters_of(*backends: EmittingBackend) -> list[list[str]]:
    """Adapters of the requests that each backend got."""
    return [[request.adapter for request in one.submitted] for one in backends]


async def listed(router: Any) -> dict[str, text_pb2.Model]:
    return {one.name: one for one in (await router.stub.ListModels(text_pb2.ListModelsRequest())).models}


async def until_listed(router: Any, name: str, *, is_there: bool) -> None:
    """Ask until a name is listed, or is not any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (name in await listed(router)) is not is_there:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_requests_go_to_the_backend_that_has_their_adapter() -> None:
    async with (
        backend(adapters={"left": "l", "both": "b"}) as one,
        backend(adapters={"right": "r", "both": "b"}) as two,
        running_router(one, two) as router,
    ):
        for _ in range(3):
            for name in ("left", "right"):
                await collect(router.stub.Generate(generate(adapter=name)))
                await collect(router.stub.Chat(chat(adapter=name)))
        assert adapters_of(one, two) == [["left"] * 6, ["right"] * 6]
        for _ in range(8):
            await collect(router.stub.Generate(generate(adapter="both")))
        assert all("both" in names for names in adapters_of(one, two))


async def test_an_adapters_name_may_stand_for_the_model() -> None:
    async with backend() as one, backend(adapters={"right": "r"}) as two, running_router(one, two) as router:
        answer = await collect(router.stub.Generate(generate(model="right")))
        assert answer.started.model == two.model
        assert [(request.model, request.adapter) for request in two.submitted] == [(two.model, "right")]
        await collect(router.stub.Generate(generate(model="right", adapter="right")))
        await collect(router.stub.Generate(generate(model=two.model, adapter="right")))
        assert adapters_of(one, two) == [[], ["right"] * 3]
        wrong = await refusal(router.stub.Generate(generate(model="right", adapter="left")))
        assert (wrong.code, wrong.field) == (grpc.StatusCode.INVALID_ARGUMENT, "adapter")
        models = await listed(router)
        assert (models["right"].parent, models["right"].backends, models[two.model].backends) == (two.model, 1, 2)
        asked = text_pb2.GetModelRequest(name="right")
        assert (await router.stub.GetModel(asked)).model == models["right"]


async def test_an_unknown_adapter_is_not_found_by_its_field() -> None:
    async with backend(adapters={"known": "k"}) as one, running_router(one) as router:
        for request, field in ((generate(adapter="nobody"), "adapter"), (generate(model="nobody"), "model")):
            error = await refusal(router.stub.Generate(request))
            assert (error.code, error.field) == (grpc.StatusCode.NOT_FOUND, field)
        assert not one.submitted


async def test_of_several_models_the_adapter_tells_which() -> None:
    async with (
        backend(model="a", adapters={"mine": "m", "shared": "s"}) as one,
        backend(model="b", adapters={"shared": "s"}) as two,
        running_router(one, two) as router,
    ):
        await collect(router.stub.Generate(generate(adapter="mine")))
        await collect(router.stub.Generate(generate(model="mine")))
        await collect(router.stub.Generate(generate(model="b", adapter="shared")))
        assert adapters_of(one, two) == [["mine", "mine"], ["shared"]]
        for request in (generate(adapter="shared"), generate(model="shared")):
            error = await refusal(router.stub.Generate(request))
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        assert (await refusal(router.stub.Generate(generate(model="b", adapter="mine")))).reason == "ADAPTER_NOT_FOUND"


async def test_adapters_that_come_and_go_are_known_by_the_next_report() -> None:
    async with backend() as one, running_router(one) as router:
        one.set_adapters(late="l")
        await until_listed(router, "late", is_there=True)
        await collect(router.stub.Generate(generate(adapter="late")))
        one.set_adapters()
        await until_listed(router, "late", is_there=False)
        assert (await refusal(router.stub.Generate(generate(adapter="late")))).reason == "ADAPTER_NOT_FOUND"


async def test_a_backend_is_used_once_its_adapters_are_known() -> None:
    one = backend(adapters={"mine": "m"})
    one.may_list.clear()
    async with one:
        starting = running_router(one)
        entered = asyncio.ensure_future(starting.__aenter__())
        await one.until(lambda: one.health_watches > 0)
        assert not entered.done()
        one.may_list.set()
        router = await entered
        try:
            await collect(router.stub.Generate(generate(adapter="mine")))
        finally:
            await starting.__aexit__(None, None, None)


async def test_an_adapter_that_was_unloaded_a_moment_ago_is_found_elsewhere() -> None:
    async with (
        backend(adapters={"mine": "m"}) as one,
        backend(adapters={"mine": "m"}, extra_load=50) as two,
        running_router(one, two, load_interval_seconds=60.0) as router,
    ):
        # No report tells the router, which goes on to believe what it knows.
        one.adapters.clear()
        answer = await collect(router.stub.Generate(generate(adapter="mine")))
        assert answer.finished.attempts == 2
        assert adapters_of(one, two) == [["mine"], ["mine"]]
        await collect(router.stub.Generate(generate(adapter="mine")))
        assert adapters_of(one, two) == [["mine"], ["mine", "mine"]], "it is not believed again"
        two.adapters.clear()
        error = await refusal(router.stub.Generate(generate(adapter="mine")))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")


async def test_an_adapter_that_is_back_is_found_though_no_report_tells_so() -> None:
    async with backend(adapters={"mine": "m"}) as one, running_router(one) as router:
        one.may_list.clear()
        one.adapters.clear()
        assert (await refusal(router.stub.Generate(generate(adapter="mine")))).reason == "ADAPTER_NOT_FOUND"
        # Between two reports it was unloaded and loaded again.
        one.adapters["mine"] = "m"
        one.may_list.set()
        await until_listed(router, "mine", is_there=True)
        await collect(router.stub.Generate(generate(adapter="mine")))


async def test_a_backend_that_does_not_answer_what_it_has_is_believed_to_have_what_it_had() -> None:
    async with (
        backend(adapters={"mine": "m"}) as one,
        running_router(one, connect_timeout_seconds=0.2) as router,
    ):
        one.may_list.clear()
        one.set_adapters(mine="m", other="o")
        asked = one.list_calls
        # The first of them was given up.
        await one.until(lambda: one.list_calls >= asked + 2)
        await collect(router.stub.Generate(generate(adapter="mine")))
        one.may_list.set()
        await until_listed(router, "other", is_there=True)


async def test_a_stream_moves_only_to_a_backend_with_its_adapter() -> None:
    async with (
        held(allowance=5, adapters={"mine": "m"}) as one,
        held(allowance=None) as without,
        held(allowance=None, adapters={"mine": "m"}, extra_load=200) as two,
        running_router(one, without, two) as router,
    ):
        request = generate(adapter="mine", output=WANT_IDS)
        answer = await collect(router.stub.Generate(request), stop_after(5, one.stop))
        assert answer.ids() == IDS
        assert adapters_of(without, two) == [[], ["mine"]]
        assert list(two.submitted[0].resumed_token_ids[0].ids) == IDS[:5]


async def test_a_stream_moves_only_to_the_same_weights_of_its_adapter() -> None:
    async with (
        held(allowance=5, adapters={"mine": "m"}, digests={"mine": "new"}) as one,
        held(allowance=None, adapters={"mine": "m"}, digests={"mine": "old"}, extra_load=100) as old,
        held(allowance=None, adapters={"mine": "m"}, digests={"mine": "new"}, extra_load=200) as two,
        running_router(one, old, two) as router,
    ):
        request = generate(adapter="mine", output=WANT_IDS)
        answer = await collect(router.stub.Generate(request), stop_after(5, one.stop))
        assert answer.ids() == IDS
        assert [one.adapter_digest for one in (*old.submitted, *two.submitted)] == ["new", "new"]
        # For new streams either will do.
        assert (await collect(router.stub.Generate(generate(adapter="mine")))).finished.attempts == 1
        assert [request.adapter_digest for request in old.submitted] == ["new", ""]


async def test_a_lost_stream_whose_adapters_weights_are_nowhere_is_aborted() -> None:
    async with (
        held(allowance=5, adapters={"mine": "m"}, digests={"mine": "new"}) as one,
        held(allowance=None, adapters={"mine": "m"}, digests={"mine": "old"}, extra_load=100) as old,
        running_router(one, old, failover_wait_seconds=0.2) as router,
    ):
        request = generate(adapter="mine", output=WANT_IDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(request), stop_after(5, one.stop))
        assert from_rpc_error(caught.value).code is grpc.StatusCode.ABORTED
        assert {request.adapter_digest for request in old.submitted} == {"new"}


async def test_a_lost_stream_whose_adapter_is_nowhere_is_aborted() -> None:
    async with (
        held(allowance=5, adapters={"mine": "m"}) as one,
        held(allowance=None) as without,
        running_router(one, without, failover_wait_seconds=0.2, return_wait_seconds=0.1) as router,
    ):
        request = generate(adapter="mine", output=WANT_IDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(request), stop_after(5, one.stop))
        assert from_rpc_error(caught.value).code is grpc.StatusCode.ABORTED
        # Nobody unloaded it: it may come back.
        error = await refusal(router.stub.Generate(generate(adapter="mine")))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_BACKEND")
        assert not without.submitted


async def test_a_new_request_waits_for_the_last_backend_with_its_adapter() -> None:
    async with (
        backend(adapters={"mine": "m"}) as one,
        backend() as without,
        running_router(one, without, return_wait_seconds=PATIENCE_SECONDS) as router,
    ):
        await one.stop()
        await router.until("backend_up", 0.0, backend=one.address)
        stream = asyncio.ensure_future(collect(router.stub.Generate(generate(adapter="mine"))))
        assert (await collect(router.stub.Generate(generate()))).finished
        await router.until("num_requests_running", 1)
        await one.start()
        assert (await stream).finished
        assert [request.adapter for request in one.submitted] == ["mine"]


async def test_loading_is_off_unless_it_is_asked_for() -> None:
    async with backend(folders=("mine",)) as one, running_router(one) as router:
        assert (await refusal(router.stub.Generate(generate(adapter="mine")))).reason == "ADAPTER_NOT_FOUND"
        assert not one.adapter_loads


async def test_a_backend_is_asked_to_load_what_nobody_has_once_for_all_who_wait() -> None:
    async with backend(folders=("mine",)) as one, running_router(one, adapter_loading=True) as router:
        await asyncio.gather(*(collect(router.stub.Generate(generate(adapter="mine"))) for _ in range(8)))
        assert [(load.name, load.path) for load in one.adapter_loads] == [("mine", "")]
        assert adapters_of(one) == [["mine"] * 8]
        assert router.metric("adapter_loads_total", outcome="ok") == 1
        error = await refusal(router.stub.Generate(generate(adapter="nobody")))
        assert (error.code, error.reason, error.field) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", "adapter")
        assert router.metric("adapter_loads_total", outcome="failed") == 1


async def test_loads_at_once_have_a_bound() -> None:
    async with (
        backend(folders=("mine", "other")) as one,
        running_router(one, adapter_loading=True, max_adapter_loads=1) as router,
    ):
        one.may_load.clear()
        waiting = [asyncio.ensure_future(collect(router.stub.Generate(generate(adapter="mine")))) for _ in range(3)]
        await one.until(lambda: len(one.adapter_loads) == 1)
        error = await refusal(router.stub.Generate(generate(adapter="other")))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ADAPTER_LOADS_FULL")
        assert error.retry_after_seconds
        one.may_load.set()
        await asyncio.gather(*waiting)
        await collect(router.stub.Generate(generate(adapter="other")))
        assert [load.name for load in one.adapter_loads] == ["mine", "other"]


async def test_loads_that_begin_together_are_spread_over_idle_backends() -> None:
    async with (
        backend(folders=("mine", "other")) as one,
        backend(folders=("mine", "other")) as two,
        running_router(one, two, adapter_loading=True) as router,
    ):
        one.may_load.clear()
        two.may_load.clear()
        waiting = [
            asyncio.ensure_future(collect(router.stub.Generate(generate(adapter=name)))) for name in ("mine", "other")
        ]
        await until(lambda: len(one.adapter_loads) + len(two.adapter_loads) == 2)
        assert sorted(load.name for each in (one, two) for load in each.adapter_loads) == ["mine", "other"]
        one.may_load.set()
        two.may_load.set()
        await asyncio.gather(*waiting)
        assert [len(each.submitted) for each in (one, two)] == [1, 1]


async def test_a_load_that_takes_too_long_is_no_unknown_adapter() -> None:
    """It may be there a moment later, whatever a backend without the folder says."""
    async with (
        backend(folders=("mine",)) as one,
        backend(extra_load=50) as two,
        running_router(one, two, adapter_loading=True, adapter_load_seconds=0.1) as router,
    ):
        one.may_load.clear()
        for request in (generate(adapter="mine"), generate(adapter="mine", session_id="s")):
            error = await refusal(router.stub.Generate(request))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_LOADING")
        late = await refusal(router.stub.Generate(generate(adapter="mine"), timeout=0.05))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        one.may_load.set()
        await collect(router.stub.Generate(generate(adapter="mine")))
        assert adapters_of(one, two) == [["mine"], []]


async def test_an_adapter_that_leaves_while_the_prompt_is_made_is_loaded_again() -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend(adapters={"mine": "mine"}, folders=("mine",)) as one,
        running_router(one, adapter_loading=True, tokenizer=proxy.address) as router,
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        link = only_route(router.server.service).link
        admin: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        score = text_pb2.ScoreTextRequest(adapter="mine", items=[text_pb2.ScoreTextItem(prompt="a", continuation="b")])
        for call in (lambda: collect(router.stub.Generate(generate(adapter="mine"))), lambda: router.stub.Score(score)):
            proxy.freeze()
            waiting = asyncio.ensure_future(call())
            await until(lambda: link._waiting > 0)
            await admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="mine"))
            loads = len(one.adapter_loads)
            proxy.thaw()
            # The scripted backend knows no Score, which is asked of it all the same.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await waiting
            assert len(one.adapter_loads) == loads + 1
        assert adapters_of(one) == [["mine"]]


async def test_a_backend_without_the_folder_is_followed_by_one_with_it() -> None:
    async with (
        backend() as one,
        backend(folders=("mine",), extra_load=50) as two,
        running_router(one, two, adapter_loading=True) as router,
    ):
        await collect(router.stub.Generate(generate(adapter="mine")))
        assert [len(each.adapter_loads) for each in (one, two)] == [1, 1]
        assert adapters_of(one, two) == [[], ["mine"]]


async def test_a_stream_moves_to_a_backend_that_loads_its_adapter_from_the_same_path() -> None:
    async with (
        held(allowance=5, adapters={"mine": "team/v2"}) as one,
        held(allowance=None, folders=("team/v2",)) as two,
        running_router(one, two, adapter_loading=True) as router,
    ):
        request = generate(adapter="mine", output=WANT_IDS)
        answer = await collect(router.stub.Generate(request), stop_after(5, one.stop))
        assert answer.ids() == IDS
        assert [(load.name, load.path) for load in two.adapter_loads] == [("mine", "team/v2")]
        assert adapters_of(two) == [["mine"]]


async def test_calls_of_operators_are_forwarded_and_known_at_once() -> None:
    async with (
        backend(folders=("mine",)) as one,
        backend() as two,
        running_router(one, two, load_interval_seconds=60.0) as router,
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        admin: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        to = (("penstock-backend", one.address),)
        # No report tells of it for a minute.
        answer = await admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="mine"), metadata=to)
        assert answer.version == 1
        await collect(router.stub.Generate(generate(adapter="mine")))
        found = await admin.ListAdapters(admin_pb2.ListAdaptersRequest(), metadata=to)
        assert [adapter.name for adapter in found.adapters] == ["mine"]
        await admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="mine"), metadata=to)
        assert (await refusal(router.stub.Generate(generate(adapter="mine")))).reason == "ADAPTER_NOT_FOUND"
        assert adapters_of(one, two) == [["mine"], []]


async def test_a_prefix_draws_requests_of_its_adapter_only() -> None:
    """Each adapter computes a prefix anew: what one has cached is no reason for another's request to go there."""
    adapters, text = {"a": "a", "b": "b"}, "Penstock " * 200
    # A report may have a request or two that are over. Loads that differ by more decide, and none of them is more than
    # affinity allows: 1.5 times the least, and 4.
    async with (
        backend(adapters=adapters, extra_load=10) as one,
        backend(adapters=adapters, extra_load=20) as two,
        running_router(one, two) as router,
    ):
        await collect(router.stub.Generate(generate(text, adapter="a")))
        assert adapters_of(one, two) == [["a"], []], "the idler one"
        one.extra_load = 28
        while not two.submitted:
            # Too short for a block: it goes to the idlest, which is the other one once this is reported.
            await collect(router.stub.Generate(generate("Hi")))
        for name, owner in (("a", one), ("b", two), ("", two)):
            await collect(router.stub.Generate(generate(text, adapter=name)))
            assert owner.submitted[-1].adapter == name
            assert len(owner.submitted[-1].prompt_token_ids) > 100


async def test_one_without_adapters_is_never_asked_for_a_list() -> None:
    one = backend()
    one.may_list.clear()
    async with one, running_router(one) as router:
        await collect(router.stub.Generate(generate()))
        await until(lambda: len(one.submitted) == 1)


async def test_operators_calls_need_an_operators_token(tmp_path: Path) -> None:
    usual, admins = tmp_path / "usual", tmp_path / "admins"
    usual.write_text("caller\n")
    admins.write_text("operator\n")
    files = {"auth_token_file": str(usual), "admin_token_file": str(admins)}
    async with (
        backend(folders=("mine",)) as one,
        running_router(one, **files) as router,
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        admin: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        for metadata in (None, (("authorization", "Bearer caller"),)):
            for call in (
                admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="mine"), metadata=metadata),
                admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="mine"), metadata=metadata),
                admin.ListAdapters(admin_pb2.ListAdaptersRequest(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not one.adapter_loads
        allowed = (("authorization", "Bearer operator"),)
        await admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="mine"), metadata=allowed)
        # Who may send text may name what is there.
        caller = (("authorization", "Bearer caller"),)
        await collect(router.stub.Generate(generate(adapter="mine"), metadata=caller))
        assert adapters_of(one) == [["mine"]]
