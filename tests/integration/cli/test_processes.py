"""`--processes N`: workers on one port, replaced when they die, drained together, with one metrics endpoint."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.router import Answer, backend, collect, generate, tokenizer_address
from penstock.v1 import common_pb2, config_pb2, text_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

TOKENS = 40
IDS = list(count_up(TOKENS)(None))  # type: ignore[arg-type]
WANT_IDS = config_pb2.OutputConfig(return_token_ids=True)
# Every channel a connection of its own: that is what the kernel spreads.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def service(role: str, *flags: str) -> AsyncIterator[stack.Process]:
    """Two workers of `role`, ready. The backend they wait for may run in this process."""
    process = stack.start(role, "--processes", "2", *flags)
    try:
        # Health answers once one worker does. This line comes when all do, and their metrics are known.
        await until(
            lambda: f"READY {role}" in process.output() or process.popen.poll() is not None, stack.START_TIMEOUT
        )
        assert process.popen.poll() is None, process.output()
        yield process
    finally:
        process.kill()
        process.log.unlink(missing_ok=True)


@asynccontextmanager
async def channels(address: str, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    opened = [grpc.aio.insecure_channel(address, options=OWN_CONNECTION) for _ in range(count)]
    yield opened
    for channel in opened:
        await channel.close()


def workers(process: stack.Process) -> set[int]:
    """Worker processes that live."""
    return {child.pid for child in psutil.Process(process.popen.pid).children() if is_alive(child)}


def is_alive(process: psutil.Process) -> bool:
    """False for one that has ended, collected by its parent or not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        # Between the two looks.
        return False


def connections_of(pid: int, port: int) -> int:
    """Clients of one worker."""
    kept = psutil.Process(pid).net_connections("tcp")
    return sum(1 for one in kept if one.status == "ESTABLISHED" and one.laddr.port == port)


def samples(process: stack.Process) -> dict[tuple[str, tuple[str, ...]], float]:
    """Read the metrics endpoint: values by name and label values."""
    with urllib.request.urlopen(f"http://{process.metrics_address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


async def until(condition: Any, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 (another process announces nothing)
            await asyncio.sleep(0.05)


async def started(one: EmittingBackend, stubs: list[Any]) -> tuple[list[asyncio.Task[Answer]], list[Answer]]:
    """A stream on each stub, with its first delta there; the rest comes as slowly as the backend steps."""
    answers: list[Answer] = []
    begun = asyncio.Event()

    async def on_delta(answer: Answer) -> None:
        if answer not in answers:
            answers.append(answer)
        if len(answers) == len(stubs):
            begun.set()

    calls = [stub.Generate(generate(output=WANT_IDS)) for stub in stubs]
    tasks = [asyncio.create_task(collect(call, on_delta)) for call in calls]
    await asyncio.wait_for(begun.wait(), 60)
    return tasks, answers


async def test_a_worker_that_is_killed_is_replaced_while_the_others_streams_go_on() -> None:
    async with (
        backend(script=count_up(TOKENS), step_seconds=0.25) as one,
        service("router", "--tokenizer", tokenizer_address(), "--backend", one.address) as router,
    ):
        before = workers(router)
        assert len(before) == 2
        async with channels(router.address, 16) as opened:
            stubs: list[Any] = [text_pb2_grpc.TextServiceStub(channel) for channel in opened]
            tasks, _ = await started(one, stubs)
            spread = {pid: connections_of(pid, router.port) for pid in before}
            victim = min(spread, key=lambda pid: spread[pid])
            assert spread[victim] > 0, "every worker has some of the connections"
            psutil.Process(victim).kill()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [end for end in ended if isinstance(end, BaseException)]
        whole = [end for end in ended if isinstance(end, Answer)]
        assert (len(lost), len(whole)) == (spread[victim], sum(spread.values()) - spread[victim])
        assert all(isinstance(end, grpc.aio.AioRpcError) for end in lost)
        assert all(answer.ids() == IDS for answer in whole)
        await until(lambda: len(workers(router)) == 2 and victim not in workers(router))
        counted = ("penstock_router_requests_total", ("Generate", "OK"))
        # A worker that is too busy to answer is left out of the sums, for once.
        await until(lambda: samples(router).get(counted) == len(whole))
        async with channels(router.address, 8) as opened:
            one.step_seconds = 0.0
            again = [collect(text_pb2_grpc.TextServiceStub(c).Generate(generate(output=WANT_IDS))) for c in opened]
            assert all(answer.ids() == IDS for answer in await asyncio.gather(*again))
        # The new worker takes calls before its parent knows where its metrics are.
        await until(lambda: samples(router).get(counted) == len(whole) + 8)
        assert "ended with exit code 137" in router.output()


async def test_metrics_are_sums_that_outlive_a_worker() -> None:
    async with service("tokenizer") as process:
        request = tokenizer_pb2.EncodeRequest(texts=["Hello"])
        async with channels(process.address, 10) as opened:
            await asyncio.gather(*(tokenizer_pb2_grpc.TokenizerServiceStub(one).Encode(request) for one in opened))
            counted = ("penstock_tokenizer_request_tokens_count", ())
            # A worker that is too busy to answer is left out of the sums, for once.
            await until(lambda: samples(process).get(counted) == 10)
            both = samples(process)
            # One of the two, not their sum.
            assert both[("process_start_time_seconds", ())] < 2e9 * 1.5
            victim = next(iter(workers(process)))
            psutil.Process(victim).kill()
            await until(lambda: victim not in workers(process) and len(workers(process)) == 2)
        await until(lambda: samples(process).get(counted) == 10)


async def test_sigterm_lets_the_streams_of_every_worker_finish() -> None:
    async with (
        backend(script=count_up(TOKENS), step_seconds=0.1) as one,
        service("router", "--tokenizer", tokenizer_address(), "--backend", one.address) as router,
    ):
        async with channels(router.address, 6) as opened:
            stubs: list[Any] = [text_pb2_grpc.TextServiceStub(channel) for channel in opened]
            tasks, _ = await started(one, stubs)
            router.popen.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*tasks)
            assert all(answer.ids() == IDS for answer in answers)
        assert await asyncio.to_thread(router.popen.wait, 130) == 0


@pytest.mark.slow
async def test_sigterm_while_a_worker_is_being_replaced_is_a_clean_end() -> None:
    async with service("tokenizer") as process:
        before = workers(process)
        psutil.Process(min(before)).kill()
        # Just started: it does not handle signals yet.
        await until(lambda: workers(process) - before)
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.popen.wait, 130) == 0


@pytest.mark.slow
async def test_a_free_port_is_shared_by_all_workers() -> None:
    # The later flag counts.
    process = stack.start("tokenizer", "--port", "0", "--metrics-port", "-1", "--processes", "3")
    try:
        await until(
            lambda: "READY tokenizer" in process.output() or process.popen.poll() is not None, stack.START_TIMEOUT
        )
        line = next(line for line in process.output().splitlines() if line.startswith("READY"))
        assert "3 processes" in line
        address = line.split("gRPC ")[1].split(" ")[0]
        sequences = [common_pb2.TokenIds(ids=[300])]
        async with channels(address, 4) as opened:
            for channel in opened:
                stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                assert (await stub.Decode(tokenizer_pb2.DecodeRequest(sequences=sequences))).texts
        assert process.terminate() == 0
    finally:
        process.kill()
        process.log.unlink(missing_ok=True)


@pytest.mark.slow
async def test_a_taken_port_and_a_worker_that_cannot_start_are_named() -> None:
    async with service("tokenizer") as process:
        second = stack.start("tokenizer", "--port", str(process.port), "--processes", "2")
        assert await asyncio.to_thread(second.popen.wait, 120) == 2
        assert "--port" in second.output()
    broken = stack.start("tokenizer", "/nowhere/at/all", "--processes", "2")
    assert await asyncio.to_thread(broken.popen.wait, 120) == 2
    assert "MODEL" in broken.output()


@pytest.mark.parametrize("count", ["0", "many"])
def test_a_wrong_number_of_processes_is_named(count: str) -> None:
    process = stack.start("router", "--processes", count)
    assert process.popen.wait(120) == 2
    assert "--processes" in process.output()
