"""A process whose weights are overwritten in their file ends loudly; one whose file is replaced goes on."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.models.checkpoints import tiny_checkpoint
from factories.models.packed import packed, use_packing
from factories.servers.generation import PATIENCE_SECONDS, request
from factories.servers.stack import Process, start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.errors import Internal, Unavailable, from_rpc_error
from penstock.generation.weights.files import PACKED_FILE, SINGLE_FILE
from penstock.v1 import generation_pb2_grpc

FLAGS = ("--kv-memory", "8MiB", "--threads", "1", "--weights-check-seconds", "0.01")


def ids(stub: Any) -> list[int]:
    """Of one greedy answer, long enough for several looks at the file."""
    events = stub.Generate(request(config={"max_new_tokens": 100}))
    return [token_id for event in events for token_id in event.delta.token_ids]


def until_refused(stub: Any, call: Any) -> None:
    """A request that ends before the next look at the file is asked for anew."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        list(call)
        call = stub.Generate(request(config={"max_new_tokens": 400}), timeout=PATIENCE_SECONDS)


def assert_ends_when_written(process: Process, folder: Path, name: str, other: Path) -> None:
    """`other`: a file of the same size."""
    process.wait_ready()
    kept = folder / "kept"
    os.link(folder / name, kept)
    with grpc.insecure_channel(process.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        before = ids(stub)
        # Replaced, and then written to under the name that it had: not what the process has mapped.
        shutil.copy(other, folder / "new")
        os.replace(folder / "new", folder / name)
        (folder / name).write_bytes(b"")
        assert ids(stub) == before
        call = stub.Generate(request(config={"max_new_tokens": 400}), timeout=PATIENCE_SECONDS)
        assert next(call).HasField("started")
        with kept.open("r+b") as out:
            out.write(other.read_bytes())
        with pytest.raises(grpc.RpcError) as failure:
            until_refused(stub, call)
        # A request that is asked for anew may find nobody any more.
        assert isinstance(from_rpc_error(failure.value), Internal | Unavailable)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert process.popen.wait(PATIENCE_SECONDS) == 1
    output = process.output()
    assert str(folder / name) in output
    assert "renaming" in output


def test_a_checkpoint(tmp_path: Path) -> None:
    folder, other = (tiny_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    process = start("generation", str(folder), *FLAGS, "--kernels", "torch")
    try:
        assert_ends_when_written(process, folder, SINGLE_FILE, other / SINGLE_FILE)
    finally:
        process.kill()
        process.log.unlink()


def test_a_packed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_packing(monkeypatch)
    models = [tiny_checkpoint(tmp_path / f"model{seed}", seed=seed) for seed in (1, 2)]
    folder, other = (packed(model, tmp_path / f"packed-{model.name}", quantization="int8") for model in models)
    process = start("generation", str(folder), *FLAGS)
    try:
        assert_ends_when_written(process, folder, PACKED_FILE, other / PACKED_FILE)
    finally:
        process.kill()
        process.log.unlink()
