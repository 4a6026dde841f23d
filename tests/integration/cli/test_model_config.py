"""`penstock serve generation --model-config FILE`: the dictionary makes the service, and its faults are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers import stack
from penstock.common.checkpoint import demo_folder
from penstock.v1 import model_pb2, model_pb2_grpc

LONG_SECONDS = 300
GOOD: dict[str, Any] = {
    "backend_type": "torch",
    "world_size": "1",
    "rank": 0,
    "npu_device_id": "0",
    "local_rank": 0,
    "model_id": str(demo_folder()),
    "model_name": "from-file",
    "max_position_embeddings": "512",
}


def written(folder: Path, **changed: Any) -> str:
    path = folder / "model_config.json"
    path.write_text(json.dumps({**GOOD, **changed}))
    return str(path)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rank": None}, "model_config['rank'] is missing"),
        ({"world_size": 2, "rank": 1}, "model_config['rank'] must be 0, found 1: rank 0 starts the others"),
        ({"num_threads": "many"}, "model_config['num_threads'] must be a whole number, found 'many'"),
    ],
)
def test_a_wrong_dictionary_is_one_line(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    path = written(tmp_path, **changed)
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "generation", "--model-config", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_SECONDS, check=False)
    assert done.returncode == 2
    assert f"--model-config {path}: {text}" in done.stderr.splitlines()[-1]


def test_the_dictionary_makes_the_service(tmp_path: Path) -> None:
    """Flags go before it."""
    process = stack.start(
        "generation", "--model-config", written(tmp_path), "--max-context", "256", "--kv-memory", "4MiB"
    )
    try:
        stack.wait_serving(process.address, process)
        with grpc.insecure_channel(process.address) as channel:
            info = model_pb2_grpc.ModelServiceStub(channel).GetModelInfo(model_pb2.GetModelInfoRequest())
        assert info.model == "from-file"
        assert info.limits.max_context_tokens == 256
    finally:
        assert process.terminate() == 0, process.output()
