"""Keys of callers: what a key may do, how much, and what the ledger says of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.key_files import bearer, secret_of, write_keys
from factories.servers.router import (
    PATIENCE_SECONDS,
    Router,
    backend,
    collect,
    generate,
    running_router,
    tokenizer_address,
)
from penstock.common.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    StartupError,
    Unauthenticated,
    from_rpc_error,
)
from penstock.inference import kserve_pb2, kserve_pb2_grpc
from penstock.v1 import config_pb2, text_pb2
from penstock_client import AsyncClient, ClientConfig

OTHER = "other-model"


@asynccontextmanager
async def keyed_router(
    folder: Path, *backends: EmittingBackend, keys: dict[str, dict[str, Any]], **settings: Any
) -> AsyncIterator[Router]:
    """Run a router with a file of keys before one backend, or those given."""
    settings.setdefault("keys_interval_seconds", 0.05)
    async with running_router(
        *backends,
        keys_file=write_keys(folder / "keys.toml", **keys),
        ledger=str(folder / "ledger"),
        **settings,
    ) as router:
        yield router


def asked(tokens: int = 4, **fields: Any) -> text_pb2.GenerateTextRequest:
    return generate(config=config_pb2.GenerationConfig(max_new_tokens=tokens), **fields)


async def refusal(call: Any) -> PenstockError:
    """Return the error that a call ends with."""
    try:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it was answered")


async def answers(router: Router, label: str) -> bool:
    """True when a request with a key is answered; False when the key is refused."""
    try:
        await collect(router.stub.Generate(asked(), metadata=bearer(label)))
    except grpc.RpcError as error:
        if isinstance(from_rpc_error(error), Unauthenticated):
            return False
        raise
    return True


async def until_answers(router: Router, label: str, *, wanted: bool) -> None:
    """Ask again until a key is answered, or refused."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await answers(router, label) is not wanted:
            pass


async def usage_of(router: Router, label: str) -> Any:
    """Return the use of a key today, as an operator sees it."""
    async with AsyncClient(router.server.address, ClientConfig(token=secret_of("boss"))) as client:
        (key,) = [one for one in await client.list_keys() if one.label == label]
        return key.usage[0] if key.usage else None


BOSS: dict[str, Any] = {"scopes": ["admin"]}


async def test_a_key_is_asked_for_and_answered(tmp_path: Path) -> None:
    async with backend() as one, keyed_router(tmp_path, one, keys={"a": {}}) as router:
        assert isinstance(await refusal(router.stub.Generate(asked())), Unauthenticated)
        wrong = (("authorization", "Bearer sk-of-nobody-at-all"),)
        assert isinstance(await refusal(router.stub.Generate(asked(), metadata=wrong)), Unauthenticated)
        answer = await collect(router.stub.Generate(asked(), metadata=bearer("a")))
        assert answer.finished.usage.completion_tokens == 4


async def test_a_scope_that_is_missing_is_named(tmp_path: Path) -> None:
    keys = {"reads": {"scopes": []}, "writes": {"scopes": ["generate"]}, "boss": BOSS}
    async with backend() as one, keyed_router(tmp_path, one, keys=keys) as router:
        error = await refusal(router.stub.Generate(asked(), metadata=bearer("reads")))
        assert isinstance(error, PermissionDenied)
        assert (error.reason, error.metadata) == ("SCOPE_MISSING", {"scope": "generate"})
        embed = text_pb2.EmbedTextRequest(texts=["x"])
        error = await refusal(router.stub.Embed(embed, metadata=bearer("writes")))
        assert (error.reason, error.metadata["scope"]) == ("SCOPE_MISSING", "embed")
        # Any key may list, and convert.
        await router.stub.ListModels(text_pb2.ListModelsRequest(), metadata=bearer("reads"))
        await router.stub.Tokenize(text_pb2.TokenizeRequest(texts=["x"]), metadata=bearer("reads"))
        async with AsyncClient(router.server.address, ClientConfig(token=secret_of("writes"))) as client:
            with pytest.raises(PermissionDenied, match="admin"):
                await client.list_keys()
        async with AsyncClient(router.server.address, ClientConfig(token=secret_of("boss"))) as client:
            assert [key.label for key in await client.list_keys()] == ["reads", "writes", "boss"]


async def test_a_key_sees_and_uses_only_its_models(tmp_path: Path) -> None:
    keys = {"a": {"models": [OTHER]}, "all": {}}
    async with (
        backend() as one,
        backend(model=OTHER) as two,
        keyed_router(tmp_path, one, two, keys=keys) as router,
    ):
        listed = await router.stub.ListModels(text_pb2.ListModelsRequest(), metadata=bearer("a"))
        assert [model.name for model in listed.models] == [OTHER]
        error = await refusal(router.stub.Generate(asked(model="penstock-demo"), metadata=bearer("a")))
        assert isinstance(error, PermissionDenied)
        assert (error.reason, error.field) == ("MODEL_NOT_ALLOWED", "model")
        error = await refusal(
            router.stub.Tokenize(text_pb2.TokenizeRequest(texts=["x"], model="penstock-demo"), metadata=bearer("a"))
        )
        assert error.reason == "MODEL_NOT_ALLOWED"
        error = await refusal(router.stub.Generate(asked(model="no-such"), metadata=bearer("a")))
        assert isinstance(error, NotFound)
        assert "penstock-demo" not in error.message, "it must not learn what there is"
        await collect(router.stub.Generate(asked(model=OTHER), metadata=bearer("a")))
        await collect(router.stub.Generate(asked(model="penstock-demo"), metadata=bearer("all")))


async def test_an_alias_is_allowed_where_all_its_models_are(tmp_path: Path) -> None:
    keys = {"one": {"models": ["one"]}, "both": {"models": ["one", "two"]}}
    async with backend(model="one") as one, backend(model="two") as two:
        path = tmp_path / "models.toml"
        path.write_text(
            "\n".join(
                f'[[models]]\nname = "{name}"\ntokenizer = ["{tokenizer_address()}"]\nbackends = ["{each.address}"]\n'
                'aliases = ["either"]'
                for name, each in (("one", one), ("two", two))
            )
        )
        async with keyed_router(tmp_path, keys=keys, models=str(path), backend=()) as router:
            for each in (one, two):
                await router.until("backend_up", 1.0, backend=each.address)
            # Whichever of them it is the turn of.
            for _ in range(2):
                error = await refusal(router.stub.Generate(asked(model="either"), metadata=bearer("one")))
                assert error.reason == "MODEL_NOT_ALLOWED"
                await collect(router.stub.Generate(asked(model="either"), metadata=bearer("both")))
            await collect(router.stub.Generate(asked(model="one"), metadata=bearer("one")))


async def test_requests_a_minute_are_refused_with_the_quota_and_a_time(tmp_path: Path) -> None:
    keys = {"a": {"requests_per_minute": 2}, "b": {}}
    async with backend() as one, keyed_router(tmp_path, one, keys=keys) as router:
        for _ in range(2):
            await collect(router.stub.Generate(asked(), metadata=bearer("a")))
        error = await refusal(router.stub.Generate(asked(), metadata=bearer("a")))
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXCEEDED", "requests_per_minute")
        assert error.retry_after_seconds is not None
        assert 0 < error.retry_after_seconds <= 30
        await collect(router.stub.Generate(asked(), metadata=bearer("b")))
        assert router.metric("key_refusals_total", key="a", quota="requests_per_minute") == 1
        assert router.metric("key_requests_total", key="a", status="OK") == 2


async def test_concurrent_requests_are_bounded(tmp_path: Path) -> None:
    async with (
        backend(allowance=0) as one,
        keyed_router(tmp_path, one, keys={"a": {"concurrent_requests": 1}}) as router,
    ):
        first = asyncio.ensure_future(collect(router.stub.Generate(asked(), metadata=bearer("a"))))
        await one.until(lambda: one.running == 1)
        error = await refusal(router.stub.Generate(asked(), metadata=bearer("a")))
        assert error.metadata["quota"] == "concurrent_requests"
        await one.allow(None)
        await first
        await collect(router.stub.Generate(asked(), metadata=bearer("a")))
        assert router.metric("key_requests_live", key="a") == 0


async def test_tokens_a_minute_count_what_was_used(tmp_path: Path) -> None:
    async with (
        backend(script=count_up(3)) as one,
        keyed_router(tmp_path, one, keys={"a": {"tokens_per_minute": 50}}) as router,
    ):
        # Each may use 40 tokens and uses few of them: the rest is given back.
        for _ in range(3):
            await collect(router.stub.Generate(asked(40), metadata=bearer("a")))
        error = await refusal(router.stub.Generate(asked(400), metadata=bearer("a")))
        assert error.metadata["quota"] == "tokens_per_minute"
        assert error.retry_after_seconds is None, "no wait helps a request that is larger than the quota"


async def test_no_day_is_over_its_quota_however_many_ask_at_once(tmp_path: Path) -> None:
    keys = {"a": {"tokens_per_day": 200}, "boss": BOSS}
    async with backend(script=count_up(64)) as one, keyed_router(tmp_path, one, keys=keys) as router:
        calls = [collect(router.stub.Generate(asked(20), metadata=bearer("a"))) for _ in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [one for one in results if not isinstance(one, BaseException)]
        refused = [from_rpc_error(one) for one in results if isinstance(one, grpc.RpcError)]
        assert {error.metadata["quota"] for error in refused} == {"tokens_per_day"}
        used = sum(one.finished.usage.prompt_tokens + one.finished.usage.completion_tokens for one in answers)
        assert 0 < used <= 200
        usage = await usage_of(router, "a")
        assert usage.prompt_tokens + usage.completion_tokens == used
        assert (usage.answers, usage.reserved_tokens, usage.lost_answers) == (len(answers), 0, 0)


async def test_a_cancelled_answer_counts_what_was_generated(tmp_path: Path) -> None:
    keys = {"a": {"tokens_per_day": 1000}, "boss": BOSS}
    async with backend(script=count_up(64), allowance=5) as one, keyed_router(tmp_path, one, keys=keys) as router:
        with_ids = config_pb2.OutputConfig(return_token_ids=True)
        call = router.stub.Generate(asked(64, output=with_ids), metadata=bearer("a"))
        tokens = 0
        async for response in call:
            # Deltas that come together are one.
            tokens += len(response.delta.token_ids)
            if tokens == 5:
                break
        call.cancel()
        await router.until("key_requests_total", 1, key="a", status="CANCELLED")
        usage = await usage_of(router, "a")
        while usage.reserved_tokens:
            usage = await usage_of(router, "a")
        assert usage.completion_tokens == 5
        assert usage.prompt_tokens > 0


async def test_a_request_that_no_backend_began_costs_nothing(tmp_path: Path) -> None:
    keys = {"a": {"tokens_per_day": 1000}, "boss": BOSS}
    refused = InvalidArgument("config.top_p", "no")
    async with backend(refuse=refused) as one, keyed_router(tmp_path, one, keys=keys) as router:
        assert isinstance(await refusal(router.stub.Generate(asked(), metadata=bearer("a"))), InvalidArgument)
        usage = await usage_of(router, "a")
        while usage.reserved_tokens:
            usage = await usage_of(router, "a")
        assert (usage.answers, usage.prompt_tokens, usage.completion_tokens) == (0, 0, 0)


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    async with backend() as one, keyed_router(tmp_path, one, keys={"a": {}}) as router:
        write_keys(path, b={})

        await until_answers(router, "b", wanted=True)
        assert not await answers(router, "a")
        write_keys(path, a={"revoked": True}, b={"expires": "2001-01-01"})
        await until_answers(router, "b", wanted=False)
        assert (await refusal(router.stub.Generate(asked(), metadata=bearer("a")))).reason == "KEY_REVOKED"
        assert (await refusal(router.stub.Generate(asked(), metadata=bearer("b")))).reason == "KEY_EXPIRED"


async def test_sighup_has_the_file_read_at_once(tmp_path: Path) -> None:
    async with (
        backend() as one,
        keyed_router(tmp_path, one, keys={"a": {}}, keys_interval_seconds=3600.0) as router,
    ):
        write_keys(tmp_path / "keys.toml", b={})
        # Else the signal would end this process.
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGHUP)
        await until_answers(router, "b", wanted=True)
        assert not await answers(router, "a")


async def test_keys_hold_for_kserve_too(tmp_path: Path) -> None:
    keys: dict[str, dict[str, Any]] = {"embeds": {"scopes": ["embed"]}, "other": {"models": [OTHER]}}
    async with (
        backend() as one,
        keyed_router(tmp_path, one, keys=keys) as router,
        grpc.aio.insecure_channel(router.server.address) as channel,
    ):
        kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        asking = kserve_pb2.ModelInferRequest(model_name="penstock-demo")
        assert (await refusal(kserve.ModelInfer(asking, metadata=bearer("embeds")))).reason == "SCOPE_MISSING"
        facts = kserve_pb2.ModelMetadataRequest(name="penstock-demo")
        await kserve.ModelMetadata(facts, metadata=bearer("embeds"))
        assert (await refusal(kserve.ModelMetadata(facts, metadata=bearer("other")))).reason == "MODEL_NOT_ALLOWED"


async def test_a_revoked_key_is_refused_at_every_router_and_after_a_restart(tmp_path: Path) -> None:
    keys: dict[str, dict[str, Any]] = {"a": {}, "boss": BOSS}
    async with backend() as one:
        async with (
            keyed_router(tmp_path, one, keys=keys) as router,
            keyed_router(tmp_path, one, keys=keys, ledger_lease_seconds=0.3) as beside,
        ):
            await collect(beside.stub.Generate(asked(), metadata=bearer("a")))
            async with AsyncClient(router.server.address, ClientConfig(token=secret_of("boss"))) as client:
                with pytest.raises(NotFound, match="label"):
                    await client.revoke_key("nobody")
                await client.revoke_key("a")
                assert {key.label: key.revoked for key in await client.list_keys()} == {"a": True, "boss": False}
            assert (await refusal(router.stub.Generate(asked(), metadata=bearer("a")))).reason == "KEY_REVOKED"

            await until_answers(beside, "a", wanted=False)
        async with keyed_router(tmp_path, one, keys=keys) as router:
            assert (await refusal(router.stub.Generate(asked(), metadata=bearer("a")))).reason == "KEY_REVOKED"


async def test_tokens_of_the_other_file_have_no_bounds(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("an old token\n")
    old = (("authorization", "Bearer an old token"),)
    keys = {"a": {"requests_per_minute": 1}}
    async with backend() as one, keyed_router(tmp_path, one, keys=keys, auth_token_file=str(tokens)) as router:
        for _ in range(3):
            await collect(router.stub.Generate(asked(), metadata=old))
        await collect(router.stub.Generate(asked(), metadata=bearer("a")))
        assert (await refusal(router.stub.Generate(asked(), metadata=bearer("a")))).reason == "QUOTA_EXCEEDED"


async def test_keys_of_one_tenant_share_prefixes_and_others_do_not(tmp_path: Path) -> None:
    keys = {"a": {"tenant": "t"}, "b": {"tenant": "t"}, "c": {}}
    async with backend() as one, keyed_router(tmp_path, one, keys=keys) as router:
        for label in keys:
            await collect(router.stub.Generate(asked(), metadata=bearer(label)))
        salts = [request.cache_salt for request in one.submitted]
        assert salts[0] == salts[1] != salts[2]


async def test_a_wrong_file_or_ledger_ends_the_start(tmp_path: Path) -> None:
    async with backend() as one:
        (tmp_path / "keys.toml").write_text("[[keys]]\nlabel = 'a'\nsecret = 'short'\n")
        with pytest.raises(StartupError, match="secret: must be 16 to 512"):
            async with running_router(one, keys_file=str(tmp_path / "keys.toml")):
                pass
        (tmp_path / "ledger").write_text("not a folder")
        with pytest.raises(StartupError, match="--ledger"):
            async with keyed_router(tmp_path, one, keys={"a": {}}):
                pass


async def test_operators_see_no_secret(tmp_path: Path) -> None:
    keys: dict[str, dict[str, Any]] = {"a": {"tokens_per_day": 5}, "boss": BOSS}
    async with backend() as one, keyed_router(tmp_path, one, keys=keys) as router:
        async with AsyncClient(router.server.address, ClientConfig(token=secret_of("boss"))) as client:
            shown = str(await client.list_keys())
        assert "tokens_per_day: 5" in shown
        assert secret_of("a") not in shown
