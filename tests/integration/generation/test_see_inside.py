"""Looking into a generation service: the admin RPC, the command, the signal, the status line, the trace."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.engine.step_gate import held_after
from factories.servers import stack
from factories.servers.generation import (
    Client,
    generation_service,
    request,
)
from factories.servers.stack import penstock
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.generation.app import GenerationApp
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.dump import request_key
from penstock.generation.engine.status_log import StatusLog
from penstock.generation.rpc.admin import AdminServicer
from penstock.v1 import admin_pb2, generation_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tools._recorded import Trace
from tools.replay import first_difference

# Of the checkpoint's ids, in no length, count or hash of these tests.
CANARY = 3917
# The id as a number of its own: its digits may be in a time.
TOLD = re.compile(rf"(?<![\d.]){CANARY}(?![\d.])")


async def state_of(client: Client, **fields: Any) -> admin_pb2.EngineState:
    answer: admin_pb2.DumpStateResponse = await client.admin.DumpState(admin_pb2.DumpStateRequest(**fields))
    return answer.state


async def test_the_state_by_rpc_and_by_command(folder: Path) -> None:
    async with generation_service(folder, dump_groups=1) as client:
        # The engine is held at its first step until both requests are there, then at its third, and does not answer.
        with held_after(0) as gate:
            idle = await state_of(client)
            assert (len(idle.running), len(idle.waiting), idle.pool.used) == (0, 0, 0)
            assert idle.config["block_size"] == 16
            assert not idle.stack
            calls = [
                client.generation.Generate(
                    request([CANARY] * 40, request_id=f"canary-{number}", config={"max_new_tokens": 500})
                )
                for number in range(2)
            ]
            await client.until(lambda load: load.waiting_requests + load.running_requests == 2)
            gate.allow(2)
            first = await calls[0].read()
            assert first.HasField("started")
            held = await state_of(client, wait_seconds=0.05)
            while held.counters["steps"] < 2 or not held.stack:
                held = await state_of(client, wait_seconds=0.05)
            assert any(frame.endswith(" enter") for frame in held.stack)
            assert (len(held.running), held.more_running) == (1, 1)
            (running,) = held.running
            assert running.request in {request_key(f"canary-{number}") for number in range(2)}
            assert (running.prompt_tokens, running.max_new_tokens) == (40, 500)
            assert running.sequences[0].blocks == 3
            assert held.last_step.groups[0].decode_rows == 1
            assert not TOLD.search(str(held))
            assert "canary" not in str(held)

            address = client.running.address
            code, out, err = await penstock("debug", "state", "--address", address, "--wait-seconds", "0.05")
            assert (code, err) == (0, "")
            for word in ("thread did not answer", "running", "last step", running.request, "max_batch_tokens"):
                assert word in out
            assert "canary" not in out
            code, out, _ = await penstock("debug", "state", "--address", address, "--wait-seconds", "50ms", "--json")
            told = json.loads(out)
            assert (code, told["more_running"], told["counters"]["steps"]) == (0, 1, 2)
            assert told["running"][0]["sequences"][0]["waits_for"] == "step"
            gate.open()
            for call in calls:
                call.cancel()
            await client.until_idle()
            after = await state_of(client)
            assert (len(after.running), after.pool.used, after.pool.references) == (0, 0, 0)


async def test_a_bad_wait_is_refused_and_an_address_without_a_server_is_named(folder: Path) -> None:
    async with generation_service(folder) as client:
        for wait in (-1.0, float("nan"), 1e9):
            with pytest.raises(grpc.RpcError) as caught:
                await state_of(client, wait_seconds=wait)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == "wait_seconds"
    code, _, err = await penstock("debug", "state", "--address", "127.0.0.1:1", "--connect-timeout-seconds", "100ms")
    assert (code, "--address" in err, len(err.splitlines())) == (2, True, 1)
    assert "generation: ready on" in err


@pytest.mark.parametrize(("flags", "seconds"), [((), 70.0), (("--wait-seconds", "20"), 30.0)])
async def test_the_command_does_not_wait_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], seconds: float
) -> None:
    answer, remaining = AdminServicer.DumpState, []

    async def noted(servicer: AdminServicer, asked: admin_pb2.DumpStateRequest, context: Any) -> Any:
        remaining.append(context.time_remaining())
        return await answer(servicer, asked, context)

    monkeypatch.setattr(AdminServicer, "DumpState", noted)
    async with generation_service(folder) as client:
        code, _, err = await penstock("debug", "state", "--address", client.running.address, *flags)
    assert (code, err) == (0, "")
    # gRPC rounds deadlines up.
    assert seconds / 2 < remaining[0] < seconds + 1


class Ticks:
    """Counter of the moments at which a status line may be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._passed = asyncio.Event()
        report = StatusLog._report

        def counted(log: StatusLog, before: Any) -> Any:
            self.count += 1
            self._passed.set()
            return report(log, before)

        monkeypatch.setattr(StatusLog, "_report", counted)

    async def pass_by(self, number: int) -> None:
        """Return once that many more have passed."""
        for _ in range(number):
            self._passed.clear()
            await self._passed.wait()


async def test_the_status_line_is_about_work_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    with capture_logs() as logs:
        async with generation_service(folder, status_seconds=0.05) as client:
            await ticks.pass_by(3)
            assert not [log for log in logs if log["event"] == "status"]
            await client.generate(request(config={"max_new_tokens": 200}))
            await ticks.pass_by(3)
            lines = [log for log in logs if log["event"] == "status"]
            assert lines
            await ticks.pass_by(3)
            assert len([log for log in logs if log["event"] == "status"]) <= len(lines) + 1
    assert sum(line["steps"] for line in lines) <= 200
    assert any(line["prompt_tokens_per_second"] > 0 for line in lines)
    assert any(line["generated_tokens_per_second"] > 0 for line in lines)
    assert lines[-1]["last_step_ms"] > 0


async def test_no_status_line_when_it_is_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    with capture_logs() as logs:
        async with generation_service(folder, status_seconds=0.0) as client:
            await client.generate(request())
    assert ticks.count == 0
    assert not [log for log in logs if log["event"] == "status"]


async def test_a_signal_while_the_model_loads_ends_nothing(folder: Path) -> None:
    config = GenerationServiceConfig(model=str(folder), kv_memory="8MiB", threads=1, tune_seconds=0.0)
    app = GenerationApp(config, CollectorRegistry())
    with capture_logs() as logs:
        loading = asyncio.create_task(app.start())
        # Its first step takes the signal, before it begins to load.
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        await loading
        await app.close()
    assert [log["event"] for log in logs if "state" in log["event"] or "still" in log["event"]] == [
        "the model is still loading"
    ]


def records(process: stack.Process, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in process.output().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


async def until_logged(process: stack.Process, event: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while not (found := records(process, event)):
            assert process.popen.poll() is None, process.output()
            await asyncio.sleep(0.02)
    return found[0]


async def test_sigusr1_writes_one_record_and_a_trace_of_real_modes_is_replayed(folder: Path, tmp_path: Path) -> None:
    """A process with a small pool: requests of several modes, preempted and with common beginnings."""
    trace = tmp_path / "trace"
    process = stack.start(
        *("generation", str(folder), "--threads", "1", "--kv-memory", "192KiB", "--max-batch-tokens", "64"),
        *("--max-running-sequences", "16", "--log-format", "json", "--trace-steps", str(trace), "--dtype", "float32"),
    )
    try:
        await asyncio.to_thread(process.wait_ready)
        async with grpc.aio.insecure_channel(process.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(request([CANARY] * 9, request_id="canary-id", config={"max_new_tokens": 100}))
            await call.read()
            process.popen.send_signal(signal.SIGUSR1)
            record = await until_logged(process, "engine state")
            call.cancel()
            text = json.dumps(record)
            assert "canary" not in text
            assert not TOLD.search(text)
            assert record["state"]["config"]["max_batch_tokens"] == 64
            assert record["state"]["counters"]["steps"] > 0
            options: list[dict[str, Any]] = [
                {},
                {"num_return_sequences": 3, "do_sample": True},
                {"num_beams": 3},
                {"penalty_alpha": 0.6, "top_k": 3},
                {"guidance_scale": 1.5},
                {"prompt_lookup_num_tokens": 4},
                {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            ]

            async def run(number: int) -> None:
                config = {"max_new_tokens": 40 + number, **options[number % len(options)]}
                async for _ in stub.Generate(request([7] * 20 + [number % 3] * 8, config=config)):
                    pass

            await asyncio.gather(*(run(number) for number in range(21)))
        assert len(records(process, "engine state")) == 1
        assert process.terminate() == 0
    finally:
        process.kill()
        process.log.unlink(missing_ok=True)
    text = trace.read_text()
    assert "canary" not in text
    found = Trace.read(trace)
    assert found.end == "stopped"
    assert sum(len(line["preempted"]) for line in found.steps)
    assert sum(line["prefix_hits"] for line in found.steps)
    assert {row[2] for line in found.steps for row in line["rows"]} == {"p", "d", "v"}
    assert first_difference(found) is None
