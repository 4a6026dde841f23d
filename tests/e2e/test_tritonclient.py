"""An unmodified tritonclient against a running stack, by KServe's service on the router's port."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Stack, wait_idle
from penstock.inference import kserve_pb2
from penstock_client import Client

pytestmark = pytest.mark.clients
PROGRAM = Path(__file__).resolve().parents[1] / "clients" / "triton" / "main.py"
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def seen(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of the program, whose environment has tritonclient's own protobuf."""
    folder = tmp_path_factory.mktemp("triton")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "tritonclient[grpc]>=2.40"], check=False, timeout=500
    )
    if installed.returncode:
        pytest.skip("tritonclient cannot be installed; last run recorded in docs/learn/testing.md")
    command = [python, "-I", str(PROGRAM), stack.address, TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_texts_are_those_of_generate(seen: dict[str, Any], stack: Stack) -> None:
    with Client(stack.address) as client:
        expected = client.generate(TEXT, max_new_tokens=24).text
    assert seen["infer"] == seen["async_infer"] == "".join(seen["pieces"]) == expected
    assert len(seen["pieces"]) > 2
    assert seen["id"] == "one"


def test_options_and_outputs_of_vllms_backend_work(seen: dict[str, Any]) -> None:
    assert seen["short"] == ["length", 2]


def test_errors_have_their_status_and_field(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("StatusCode.INVALID_ARGUMENT config.top_p: ")
    assert [error.partition(": ")[0] for error in seen["errors"]] == ["NOT_FOUND"]


def test_a_cancelled_stream_leaves_nothing_behind(seen: dict[str, Any], stack: Stack) -> None:
    for generation in stack.generations:
        wait_idle(generation.address)


def test_server_and_model_describe_themselves(seen: dict[str, Any]) -> None:
    assert (seen["live"], seen["ready"], seen["server"], seen["decoupled"]) == (True, True, "penstock", True)
    assert seen["inputs"][0] == ["text_input", "BYTES", [1]]
    assert [tensor[0] for tensor in seen["config"]] == [tensor[0] for tensor in seen["inputs"]]


def test_fields_have_the_published_numbers(seen: dict[str, Any]) -> None:
    """Each of ours, by tritonclient's own stubs."""
    theirs, compared = seen["numbers"], 0

    def compare(descriptor: Any) -> None:
        nonlocal compared
        for field in descriptor.fields:
            assert theirs[descriptor.full_name][field.name] == field.number, f"{descriptor.full_name}.{field.name}"
            compared += 1
        for nested in descriptor.nested_types:
            compare(nested)

    for descriptor in kserve_pb2.DESCRIPTOR.message_types_by_name.values():
        compare(descriptor)
    assert compared > 80
