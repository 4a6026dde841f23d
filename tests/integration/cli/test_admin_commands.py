"""`penstock admin` and the other commands of operators, directly and through a router with tokens of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from factories.engine.step_gate import held_after
from factories.servers.generation import generation_service, request, text_checkpoint
from factories.servers.router import collect, generate, running_router
from penstock.cli.adapters import run_list
from penstock.cli.admin_commands import run_drain, run_pause, run_reload, run_resume
from penstock.cli.client.models import run_info
from penstock.common.errors import StartupError, Unauthenticated, Unavailable
from penstock.v1 import common_pb2
from penstock_client import AsyncClient


async def test_a_service_is_drained_resumed_and_reloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with generation_service(text_checkpoint(tmp_path / "m")) as service:
        flags: dict[str, Any] = {"address": service.running.address}
        with held_after(2):
            live = asyncio.ensure_future(service.generate(request(config={"max_new_tokens": 64})))
            await service.until(lambda load: load.running_requests > 0)
            draining = asyncio.to_thread(run_drain, {**flags, "grace_seconds": "0"})
            drained = asyncio.ensure_future(draining)
            await service.until(lambda load: load.draining)
        await drained
        assert (await live).finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
        assert isinstance((await service.generate(request())).error, Unavailable)
        await asyncio.to_thread(run_resume, flags)
        assert (await service.generate(request())).error is None
        await asyncio.to_thread(run_pause, {**flags, "max_seconds": "60"})
        assert isinstance((await service.generate(request())).error, Unavailable)
        await asyncio.to_thread(run_resume, flags)
        await asyncio.to_thread(run_reload, flags)
        assert (await service.generate(request())).error is None
        out = capsys.readouterr().out
        for words in (
            "drained: it takes no requests until",
            "resumed: it takes requests",
            " of weights in ",
            "paused for at most 60 s",
        ):
            assert words in out

        async with AsyncClient(service.running.address) as client:
            assert await client.drain(grace=0.0) == 0
            assert (await service.load()).draining
            await client.resume()
            assert not (await service.load()).draining
            assert (await client.pause(max_seconds=60.0)).max_seconds == 60.0
            assert (await service.load()).HasField("paused_seconds")
            await client.resume()
            assert not (await service.load()).draining
            assert (await client.reload()).weights_bytes > 0
        with pytest.raises(StartupError, match="is not a router") as refused:
            await asyncio.to_thread(run_resume, {**flags, "backend": service.running.address})
        assert refused.value.flag == "--backend"


async def test_commands_of_operators_take_their_token_at_a_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router with a token for text knows it for nothing else, and needs no call with it to be found to be one."""
    for name in ("text", "operator"):
        (tmp_path / name).write_text(f"for-{name}\n")
    tokens = {"auth_token_file": str(tmp_path / "text"), "admin_token_file": str(tmp_path / "operator")}
    async with generation_service(text_checkpoint(tmp_path / "m")) as service:
        address = service.running.address
        async with running_router(backend=(address,), **tokens) as router:
            flags = {"address": router.server.address, "token_file": str(tmp_path / "operator")}
            for named in ({}, {"backend": address}):
                await asyncio.to_thread(run_drain, {**flags, **named})
                await router.until("backend_up", 0.0, backend=address)
                await asyncio.to_thread(run_resume, {**flags, **named})
                await router.until("backend_up", 1.0, backend=address)
                await asyncio.to_thread(run_list, {**flags, **named})
                await asyncio.to_thread(run_info, {**flags, **named})
            assert "no adapters\nm (Qwen2ForCausalLM)" in capsys.readouterr().out
            for command in (run_drain, run_list, run_info):
                with pytest.raises(StartupError, match="--backend: no backend has this address") as unknown:
                    await asyncio.to_thread(command, {**flags, "backend": "nobody"})
                assert unknown.value.flag == "--backend"
                with pytest.raises(Unauthenticated):
                    await asyncio.to_thread(command, {**flags, "token_file": str(tmp_path / "text")})
            text = (("authorization", "Bearer for-text"),)
            assert (await collect(router.stub.Generate(generate(), metadata=text))).finished
