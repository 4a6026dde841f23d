"""`penstock bench` against a real generation service, and through router and tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.stack import Stack, penstock


async def bench(*arguments: str) -> tuple[int | None, dict[str, Any], str]:
    """Exit code, figures and standard error."""
    code, stdout, stderr = await penstock("bench", "--json", "-", *arguments)
    return code, json.loads(stdout or "{}"), stderr


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
    assert figures["failure_messages"]["INVALID_ARGUMENT PROMPT_TOO_LONG"].startswith("prompt: ")


async def test_why_requests_failed_is_reported_in_words_of_the_command(model: Path) -> None:
    flags = ("--direct", "--requests", "1", "--warmup", "0")
    async with generation_service(model) as client:
        address = ("--address", client.running.address, *flags)
        _, late, _ = await bench(*address, "--timeout", "1ms")
        _, unknown, _ = await bench(*address, "--model", "nobody")
        await client.until_idle()
    assert late["failure_messages"] == {"DEADLINE_EXCEEDED": "took longer than --timeout 0.001s"}
    assert "--model nobody" in unknown["failure_messages"]["NOT_FOUND MODEL_NOT_FOUND"]


async def test_a_generation_service_is_no_router(model: Path) -> None:
    async with generation_service(model) as client:
        code, _, stderr = await bench("--address", client.running.address)
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "is a generation service: add --direct" in stderr


def test_an_open_loop_of_texts_through_the_whole_stack() -> None:
    flags = ("--rate", "20", "--requests", "10", "--text", "--prompt-tokens", "12", "--output-tokens", "4")
    objectives = ("--slo-ttft", "60s", "--slo-tpot", "60s", "--slo-total", "0ms")
    with Stack() as stack:
        code, figures, _ = asyncio.run(bench("--address", stack.address, *flags, *objectives))
        confused = asyncio.run(bench("--address", stack.address, "--direct"))
        unknown = asyncio.run(bench("--address", stack.address, "--model", "nobody"))
    assert (code, figures["succeeded"], figures["output_tokens"]) == (0, 10, 40)
    assert figures["goodput"]["share"] == 0.0
    assert confused[0] == 2
    assert "is a router: leave --direct out" in confused[2]
    assert unknown[0] == 1
    assert "--model nobody" in unknown[2]


@pytest.mark.slow
def test_a_sweep_of_rates_over_a_dataset(tmp_path: Path) -> None:
    records = [{"prompt": "once upon a time"}, {"messages": [{"role": "user", "content": "hello"}], "output_tokens": 3}]
    dataset, plot = tmp_path / "prompts.json", tmp_path / "curves.svg"
    dataset.write_text(json.dumps(records))
    flags = ("--rates", "40,20", "--requests", "8", "--warmup", "2", "--output-tokens", "5", "--plot", str(plot))
    with Stack() as stack:
        sweep = ("--address", stack.address, *flags, "--dataset", str(dataset))
        code, figures, stderr = asyncio.run(bench(*sweep, "--slo-ttft", "60s"))
        missed = asyncio.run(bench(*sweep, "--slo-ttft", "0ms", "--quiet"))
    assert code == 0, stderr
    assert (code, figures["requests"], figures["succeeded"], figures["greatest_rate_served"]) == (0, 16, 16, 40)
    assert [(run["rate"], run["succeeded"], run["goodput"]["share"]) for run in figures["runs"]] == [
        (40, 8, 1.0),
        (20, 8, 1.0),
    ]
    # Every prompt as often as the other, and each has its own length.
    assert {run["output_tokens"] for run in figures["runs"]} == {4 * 5 + 4 * 3}
    assert all(run["prompt_tokens_per_second"] > 0 for run in figures["runs"])
    assert "penstock: 40 requests/s: " in stderr
    assert plot.read_text().startswith("<?xml")
    assert (missed[0], missed[1]["greatest_rate_served"]) == (0, None)


def test_a_sweep_is_a_table(model: Path) -> None:
    async def table() -> str:
        async with generation_service(model) as client:
            flags = ("--direct", "--rates", "30", "--requests", "3", "--prompt-tokens", "4", "--output-tokens", "3")
            _, stdout, _ = await penstock("bench", "--address", client.running.address, *flags, COLUMNS="160")
            return stdout

    found = asyncio.run(table())
    assert "100.0%" in found
    assert "greatest rate with 0.99 served" in found
    assert "30 requests/s" in found
