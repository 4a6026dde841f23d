"""`penstock bench` against a real generation service, and through router and tokenizer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from factories.generation import generation_service, text_checkpoint
from factories.stack import Stack


async def bench(*arguments: str) -> tuple[int | None, dict[str, Any], str]:
    """Exit code, figures and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "bench", "--json", "-", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    return process.returncode, json.loads(stdout or b"{}"), stderr.decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"))


async def test_a_closed_loop_on_a_generation_service(model: Path) -> None:
    flags = ("--direct", "--concurrency", "3", "--requests", "7", "--prompt-tokens", "8-24", "--output-tokens", "5")
    async with generation_service(model) as client:
        code, figures, stderr = await bench("--address", client.running.address, *flags)
        await client.until_idle()
    assert (code, figures["succeeded"], figures["failures"]) == (0, 7, {})
    assert figures["output_tokens"] == 35
    assert figures["milliseconds"]["ttft"]["p50"] > 0
    assert figures["settings"]["prompt_tokens"] == "8-24"
    assert " sent, 0 failed" in stderr


async def test_refusals_are_counted_by_status(model: Path) -> None:
    flags = ("--direct", "--concurrency", "6", "--requests", "12", "--warmup", "0", "--quiet")
    async with generation_service(model, max_queued_requests=1, max_running_sequences=1) as client:
        code, figures, stderr = await bench("--address", client.running.address, *flags)
    assert code == 0
    assert figures["failures"].keys() == {"RESOURCE_EXHAUSTED QUEUE_FULL"}
    assert figures["succeeded"] + figures["failures"]["RESOURCE_EXHAUSTED QUEUE_FULL"] == 12
    assert stderr == ""


async def test_no_success_is_exit_code_1(model: Path) -> None:
    flags = ("--direct", "--requests", "2", "--prompt-tokens", "9000", "--warmup", "0")
    async with generation_service(model) as client:
        code, figures, _ = await bench("--address", client.running.address, *flags)
    assert (code, figures["succeeded"]) == (1, 0)
    assert list(figures["failures"]) == ["INVALID_ARGUMENT PROMPT_TOO_LONG"]


def test_an_open_loop_of_texts_through_the_whole_stack() -> None:
    flags = ("--rate", "20", "--requests", "10", "--text", "--prompt-tokens", "12", "--output-tokens", "4")
    objectives = ("--slo-ttft", "60s", "--slo-tpot", "60s", "--slo-total", "0ms")
    with Stack() as stack:
        code, figures, _ = asyncio.run(bench("--address", stack.address, *flags, *objectives))
    assert (code, figures["succeeded"], figures["output_tokens"]) == (0, 10, 40)
    assert figures["goodput"]["share"] == 0.0
