"""A launcher starts a process for each rank, by torchrun's variables: rank 0 serves, the others join it.

Ranks that torchrun itself starts are new programs, others are forked as services are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from factories.models.checkpoints import tiny_checkpoint
from factories.servers import stack
from penstock.v1 import config_pb2, generation_pb2, generation_pb2_grpc

FLAGS = ("--tensor-parallel", "2", "--no-load-tokenizer", "--threads", "2", "--dtype", "float32", "--kernels", "torch")
PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen2", "qwen2"))


@pytest.fixture(scope="module")
def wanted(model: str) -> Iterator[tuple[int, ...]]:
    """Ids of the group that rank 0 starts itself."""
    process = stack.start("generation", model, *FLAGS)
    try:
        stack.wait_serving(process.address, process)
        yield ids_of(process.address)
    finally:
        process.terminate()


def ids_of(address: str) -> tuple[int, ...]:
    asked = generation_pb2.GenerateRequest(
        prompt_token_ids=[5, 6, 7, 8],
        config=config_pb2.GenerationConfig(max_new_tokens=12),
        stop=config_pb2.StopConfig(ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        events = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked)
        return tuple(token for event in events if event.HasField("delta") for token in event.delta.token_ids)


class Launched:
    """Ranks as a launcher starts them, without one: their variables are those of torchrun."""

    def __init__(self, model: str) -> None:
        self.variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stack.free_port())}
        self.ranks = [self.start(model, rank) for rank in range(2)]

    def start(self, model: str, rank: int) -> stack.Process:
        own = {**self.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return stack.start("generation", model, *FLAGS, environment=own)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.popen.kill()
            rank.popen.wait()


def test_ranks_of_a_launcher_answer_as_those_that_rank_0_starts(model: str, wanted: tuple[int, ...]) -> None:
    with Launched(model) as launched:
        first, second = launched.ranks
        stack.wait_serving(first.address, first)
        assert ids_of(first.address) == wanted
        # A launcher tells all of its processes to stop: the other ranks wait for rank 0.
        second.popen.send_signal(signal.SIGTERM)
        assert ids_of(first.address) == wanted
        first.popen.send_signal(signal.SIGTERM)
        # Nobody was killed: that would be a failure to the launcher.
        assert [rank.popen.wait(PATIENCE) for rank in launched.ranks] == [0, 0]


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_dies_ends_the_group(model: str, lost: int) -> None:
    with Launched(model) as launched:
        first = launched.ranks[0]
        stack.wait_serving(first.address, first)
        launched.ranks[lost].popen.kill()
        status = launched.ranks[1 - lost].popen.wait(PATIENCE)
        # Rank 0 fails. Another rank has done all that was asked of it; the launcher sees the loss of rank 0 itself.
        assert status == (1 if lost else 0)
        if lost:
            assert "rank 1 of 2 has ended" in first.output()


def test_torchrun_starts_the_ranks(model: str, wanted: tuple[int, ...]) -> None:
    port = stack.free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(stack.free_port()), "-m", "penstock.cli.main", "serve", "generation", model]
    command += ["--port", str(port), "--metrics-port", "-1", *FLAGS]
    with tempfile.NamedTemporaryFile("wb") as log, ExitStack() as undo:
        popen = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **stack._FIXED}, start_new_session=True
        )
        undo.callback(popen.wait)
        undo.callback(lambda: os.killpg(popen.pid, signal.SIGKILL) if popen.poll() is None else None)
        process = stack.Process("generation", popen, port, port, Path(log.name))
        stack.wait_serving(process.address, process)
        assert ids_of(process.address) == wanted
        popen.send_signal(signal.SIGTERM)
        popen.wait(PATIENCE)
        # Not by force: both ended when they were asked to.
        assert not re.search("SIGKILL|Unable to shutdown", process.output())


def test_a_process_that_cannot_be_a_rank_names_the_variable(model: str) -> None:
    own = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    process = stack.start("generation", model, *FLAGS, environment=own)
    assert process.popen.wait(PATIENCE) != 0
    assert "LOCAL_RANK is 0, and RANK 1" in process.output()


PROGRAM = """
import os, sys
from penstock.compat.mindie import GeneratorTorch

rank = int(os.environ["RANK"])
settings = {"model_id": sys.argv[1], "backend_type": "torch", "world_size": 2, "rank": rank, "local_rank": 0,
            "npu_device_id": 0, "load_tokenizer": False}
generator = GeneratorTorch(settings, threads=2, dtype="float32", kernels="torch", kv_memory="8MiB")
assert rank == generator.rank == 0
print(*generator.generate([5, 6, 7, 8], max_new_tokens=12, ignore_eos=True).token_ids)
generator.close()
"""


def test_a_program_with_a_generator_is_started_once_a_rank(model: str, wanted: tuple[int, ...]) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stack.free_port())}
    command = [sys.executable, "-c", PROGRAM, model]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=PATIENCE)[0].split() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0, 0]
    assert said == [[str(token).encode() for token in wanted], []]


MEETING = """
import json, os, sys
from penstock.generation.parallel.launch import Place
from penstock.generation.parallel.meeting import Meeting, meet_rank_0

place = Place.of(os.environ, 2)
if place.rank == 0:
    _, other = Meeting(place).take(1, {"attempt": place.attempt})
    assert other.recv_bytes() == b"met"
else:
    rank_0, _ = meet_rank_0(place)
    print("met in attempt", json.loads(rank_0.recv_bytes())["attempt"], flush=True)
    rank_0.send_bytes(b"met")
# The first attempt fails.
sys.exit(0 if place.attempt else 1)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_anew_find_each_other(tmp_path: Path) -> None:
    """Its store has what the first attempt told."""
    program = tmp_path / "program.py"
    program.write_text(MEETING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(stack.free_port()), str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ})
    assert ended.returncode == 0, ended.stderr
    assert re.findall("met in attempt [0-9]", ended.stdout) == ["met in attempt 0", "met in attempt 1"]
