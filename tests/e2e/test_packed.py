"""`penstock pack`, then everything on the folder that it wrote: tokenizer, router and two processes that share it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from factories.models.packed import use_packing
from factories.servers.generation import request
from factories.servers.stack import Process, Stack, start, wait_serving
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock.generation.weights.files import PACKED_FILE
from penstock.v1 import generation_pb2_grpc
from penstock_client import AsyncClient

FLAGS = ("--kv-memory", "16MiB", "--threads", "1")


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def ids(process: Process) -> list[int]:
    """Return the ids of one greedy answer."""
    message = request([5, 6, 7, 8], config={"max_new_tokens": 24})
    with grpc.insecure_channel(process.address) as channel:
        events = generation_pb2_grpc.GenerationServiceStub(channel).Generate(message)  # type: ignore[no-untyped-call]
        return [token_id for event in events for token_id in event.delta.token_ids]


def mapping(process: Process, path: Path) -> dict[str, int]:
    """Figures of smaps for the file in this process, KiB."""
    lines = Path(f"/proc/{process.popen.pid}/smaps").read_text().partition(str(path))[2].splitlines()[1:]
    fields = [line.split() for line in lines[:20]]
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_packed_folder_is_a_model_that_processes_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_packing(monkeypatch)
    folder = tmp_path / "packed"
    done = penstock("pack", str(demo_folder()), str(folder), "--dtype", "bfloat16", "--quantization", "int8")
    assert done.returncode == 0, done.stderr
    assert f"penstock serve {folder}" in done.stdout
    assert penstock("pack", str(folder), "--check").returncode == 0
    refused = penstock("serve", "generation", str(folder), "--port", "0", "--metrics-port", "0", "--dtype", "float32")
    assert refused.returncode == 2
    assert "--dtype float32" in refused.stderr
    direct = start("generation", str(demo_folder()), *FLAGS, "--dtype", "bfloat16", "--quantization", "int8")
    try:
        with Stack(backends=2, model=folder, generation_flags=FLAGS) as stack:
            wait_serving(direct.address, direct)
            expected = ids(direct)
            assert [ids(process) for process in stack.generations] == [expected] * 2
            async with AsyncClient(stack.address) as client:
                assert (await client.generate(user("What is 1 + 1?"), max_new_tokens=8)).text
            for process in stack.generations:
                found = mapping(process, folder / PACKED_FILE)
                assert found["Rss"] * 1024 >= (folder / PACKED_FILE).stat().st_size
                assert (found["Anonymous"], found["Private_Dirty"]) == (0, 0)
    finally:
        direct.kill()
        direct.log.unlink()
