"""`penstock infer --endpoint http://...`: a batch of a gateway's, which goes on when the command is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router
from penstock.cli.infer.command import run_infer
from penstock.cli.infer.line_batch import SOME_FAILED
from penstock.common.errors import StartupError

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.xdist_group("gateway")


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[EmittingBackend, Gateway]]:
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, job_poll_seconds=0.05, **settings) as gateway,
    ):
        yield one, gateway


def flags(folder: Path, gateway: Gateway, lines: list[str]) -> dict[str, Any]:
    """Write the file of prompts, and return the command's flags."""
    (folder / "prompts.txt").write_text("\n".join(lines))
    return {
        "endpoint": gateway.url.removesuffix("/v1"),
        "data_file": str(folder / "prompts.txt"),
        "predictions_file": str(folder / "out" / "predictions.json"),
        "max_new_tokens": "4",
        "do_sample": "false",
    }


def predictions(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out" / "predictions.json").read_text())
    return found


def num_batches(gateway: Gateway) -> int:
    """Return the number of batches of callers without a token."""
    with urllib.request.urlopen(f"{gateway.url}/batches") as answer:
        return len(json.load(answer)["data"])


@pytest.mark.parametrize("template", [False, True])
async def test_every_line_of_a_file_has_its_answer(tmp_path: Path, template: bool) -> None:
    async with scripted() as (one, gateway):
        lines = ["one", "two", "two", "three"]
        asked = flags(tmp_path, gateway, lines) | ({"with_prompt": "true"} if template else {})
        assert await asyncio.to_thread(run_infer, asked) == 0
        found = predictions(tmp_path)
        assert [entry["Input"] for entry in found] == lines
        assert all(entry["Output"] and "Error" not in entry for entry in found)
        # Equal lines are asked once.
        assert len(one.submitted) == 3
        assert sorted(os.listdir(tmp_path / "out")) == ["generation_config.json", "predictions.json"]


async def test_a_killed_command_finds_its_batch_again(tmp_path: Path) -> None:
    async with scripted(job_requests=2) as (one, gateway):
        await one.allow(6)
        asked = flags(tmp_path, gateway, ["one", "two", "three", "four"])
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if name != "do_sample"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.cli.main", "infer", *arguments, "--no-do-sample"
        )
        await one.until(lambda: one.allowance == 0)
        note = tmp_path / "out" / "predictions.json.batch"
        async with asyncio.timeout(60):
            while not note.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await one.allow(None)
        assert await asyncio.to_thread(run_infer, asked) == 0
        assert [entry["Input"] for entry in predictions(tmp_path)] == ["one", "two", "three", "four"]
        assert await asyncio.to_thread(num_batches, gateway) == 1
        assert not note.exists()


async def test_a_line_that_is_refused_has_its_error(tmp_path: Path) -> None:
    async with scripted(max_body_bytes=2048, max_bodies_bytes=4096) as (_, gateway):
        with pytest.raises(StartupError, match="the line has more than 2048 bytes"):
            await asyncio.to_thread(run_infer, flags(tmp_path, gateway, ["short", "x" * 3000]))
    async with (
        backend(max_context=24) as one,
        running_router(one) as router,
        running_gateway(router.server.address, job_poll_seconds=0.05) as gateway,
    ):
        asked = flags(tmp_path, gateway, ["short", "long " * 40]) | {"resume": "false"}
        assert await asyncio.to_thread(run_infer, asked) == SOME_FAILED
        first, second = predictions(tmp_path)
        assert first["Output"]
        assert "Error" in second


async def test_a_conversation_needs_a_router_and_a_wrong_address_is_told(tmp_path: Path) -> None:
    def refused(flag: str, **asked: str) -> str:
        with pytest.raises(StartupError) as caught:
            run_infer({"predictions_file": str(tmp_path / "p.json"), **asked})
        assert caught.value.flag == flag
        return str(caught.value)

    assert "needs a router" in refused("--endpoint", endpoint="http://127.0.0.1:1", interactive="true")
    assert "does not answer" in refused("--endpoint", endpoint="http://127.0.0.1:1")
    assert "expected http://" in refused("--endpoint", endpoint="http://127.0.0.1:1/other")
    token = tmp_path / "token"
    token.write_text("t")
    assert "https" in refused("--token-file", endpoint="http://192.0.2.1:1", token_file=str(token))
