"""`penstock infer --endpoint vllm://`: a router of the command's own before a service that speaks vLLM's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers.generation import generation_service
from factories.servers.stack import free_port
from penstock.cli.infer import engine_router
from penstock.cli.infer.command import run_infer
from penstock.cli.infer.engine_router import EngineRouter
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError
from penstock.generator.generator import Generator
from penstock.router.app import RouterApp

LINES = ["The capital of France is", "Penstock", "One, two, three,"]


def outputs(file: Path) -> list[str]:
    return [one["Output"] for one in json.loads(file.read_text("utf-8"))]


async def test_a_file_is_answered_as_by_the_engine_in_this_process(tmp_path: Path) -> None:
    data, file = tmp_path / "data.txt", tmp_path / "answers.json"
    data.write_text("\n".join(LINES) + "\n")
    asked: dict[str, Any] = {"data_file": str(data), "predictions_file": str(file), "max_new_tokens": "8"}
    async with generation_service(demo_folder(), vllm_engine=True) as service:
        given = {**asked, "endpoint": f"vllm://{service.running.address}", "use_vllm": "true", "do_sample": "false"}
        assert await asyncio.to_thread(run_infer, given) == 0
    with Generator(demo_folder(), kv_memory="8MiB", tune_seconds=0) as generator:
        wanted = [
            generator.generate(line, max_new_tokens=8, do_sample=False, repetition_penalty=1.1).text for line in LINES
        ]
    for line, text, output in zip(LINES, wanted, outputs(file), strict=True):
        assert output in (text, line + text)


def test_an_engine_that_does_not_answer_is_told_by_the_flag() -> None:
    with (
        pytest.raises(StartupError) as caught,
        EngineRouter(None, f"vllm://127.0.0.1:{free_port()}", start_seconds=0.2),
    ):
        pass
    assert caught.value.flag == "--endpoint"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT interrupts this process: a shell's job in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_a_start_that_waits() -> None:
    seconds = 60.0
    with socket.create_server(("127.0.0.1", 0)) as engine:

        def interrupt() -> None:
            engine.accept()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        begin, endpoint = time.monotonic(), f"vllm://127.0.0.1:{engine.getsockname()[1]}"
        with pytest.raises(KeyboardInterrupt), EngineRouter(None, endpoint, start_seconds=seconds):
            pass
    assert time.monotonic() - begin < seconds, "not when the start gives up by itself"


def test_a_wrong_endpoint_is_told_by_the_flag() -> None:
    with pytest.raises(StartupError) as caught, EngineRouter(None, "vllm://nowhere"):
        pass
    assert caught.value.flag == "--endpoint"


def test_whatever_ends_its_thread_in_the_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndOfThread(BaseException):
        pass

    def end(_: str | None) -> Path:
        raise EndOfThread

    monkeypatch.setattr(engine_router, "resolve_model", end)
    with pytest.raises(EndOfThread), EngineRouter(None, f"vllm://127.0.0.1:{free_port()}"):
        pass


async def test_what_stops_it_after_the_start_is_raised_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RouterApp] = []

    class Noted(RouterApp):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(engine_router, "RouterApp", Noted)
    async with generation_service(demo_folder(), vllm_engine=True) as service:
        router = EngineRouter(None, f"vllm://{service.running.address}")

        def use() -> None:
            with router:
                router._loop.call_soon_threadsafe(made[0].failed.set_result, RuntimeError("a task of its own ended"))
                router._thread.join()

        with pytest.raises(RuntimeError, match="a task of its own ended"):
            await asyncio.to_thread(use)
