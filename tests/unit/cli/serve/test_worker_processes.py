"""`--processes N`: the parent without processes, files or memory to be had."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.cli.flags import as_flags
from penstock.cli.serve import worker_processes
from penstock.cli.serve.reports import Reporter
from penstock.common.config import ServerConfig
from penstock.common.options import BoundOption, Option
from penstock.tokenizer.config import TokenizerConfig


async def test_a_worker_that_cannot_be_started_just_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_processes, "MIN_WAIT_SECONDS", 0.001)
    made = worker_processes.WorkerProcesses("tokenizer", {}, TokenizerConfig(), Reporter(None))
    loop = asyncio.get_running_loop()
    dead, new = (
        SimpleNamespace(name="tokenizer 1", exit_code=137, ended=loop.create_future(), ready=loop.create_future())
        for _ in range(2)
    )
    dead.ended.set_result(-9)
    made._supervisor.children.append(dead)  # type: ignore[arg-type]
    tries, started = 0, asyncio.Event()

    async def start_one(*_: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EAGAIN, "no process left")
        started.set()
        return new

    monkeypatch.setattr(made, "_start_one", start_one)
    keeper = asyncio.create_task(made._keep(0, 1, dead))  # type: ignore[arg-type]
    await started.wait()
    assert not keeper.done()
    keeper.cancel()
    assert capsys.readouterr().err.count("no process left") == 2


async def test_a_signal_ends_a_start_that_waits_for_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, closed = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def never(_: ServerConfig) -> AsyncIterator[None]:
        try:
            opening.set()
            await asyncio.Event().wait()
            yield
        finally:
            closed.set()

    monkeypatch.setattr(worker_processes, "metrics_tokens_of", never)
    made = worker_processes.WorkerProcesses("tokenizer", {}, TokenizerConfig(), Reporter(None))
    running = asyncio.create_task(made.run())
    await opening.wait()
    made._signalled()
    assert await running == 0
    assert closed.is_set()


@pytest.mark.parametrize(("default", "value", "flags"), [(True, True, ["--x"]), (True, False, ["--no-x"])])
def test_a_flag_that_says_the_default_is_passed_on_too(default: bool, value: bool, flags: list[str]) -> None:
    assert as_flags(BoundOption("x", bool, default, Option("", "")), value) == flags
