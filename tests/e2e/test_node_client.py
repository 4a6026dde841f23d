"""A client in another language, written from the protos alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Stack
from factories.wire.conversation import user
from google.protobuf import json_format
from penstock.v1 import text_pb2
from penstock_client import Client, GenerationOptions
from penstock_client._options import chat_request

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is Penstock?"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clients/node with its dependencies installed, in a copy of the layout that it expects."""
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed; last run recorded in docs/learn/testing.md")
    root = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", root / "protos")
    folder = root / "clients" / "node"
    shutil.copytree(ROOT / "clients" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=590)
    return folder


def run(folder: Path, *arguments: str, script: str = "chat.mjs") -> subprocess.CompletedProcess[str]:
    """Run the example with node."""
    return subprocess.run(["node", script, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


def test_node_streams_the_same_chat_as_python(example: Path, stack: Stack) -> None:
    """Greedy text, usage and the finish reason agree."""
    done = run(example, "--address", stack.address, "--max-new-tokens", "64", QUESTION)
    assert done.returncode == 0, done.stderr
    with Client(stack.address) as client:
        expected = client.generate(user(QUESTION), max_new_tokens=64)
    assert done.stdout.rstrip("\n") == expected.text.rstrip("\n")
    summary = json.loads(done.stderr)
    assert summary["finish_reason"] == f"FINISH_REASON_{expected.choices[0].finish_reason}"
    assert summary["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert all(name.endswith("_seconds") and not name.startswith("_") for name in summary["timings"])


def test_node_gets_the_status_and_field_of_a_bad_request(example: Path, stack: Stack) -> None:
    """An error is readable in another language's client."""
    done = run(example, "--address", stack.address, "--max-new-tokens", "0", QUESTION)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert "config.max_new_tokens" in done.stderr


def test_node_scores_as_python_does(example: Path, stack: Stack) -> None:
    prompt, continuations = "The capital of France is", [" Rome", " Paris", " bananas"]
    done = run(example, "--address", stack.address, prompt, *continuations, script="score.mjs")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    with Client(stack.address) as client:
        scores = client.score([(prompt, continuation) for continuation in continuations]).scores
    expected = {text: score.logprob for text, score in zip(continuations, scores, strict=True)}
    assert [row["continuation"] for row in rows] == sorted(expected, key=lambda text: -expected[text])
    assert {row["continuation"]: row["logprob"] for row in rows} == pytest.approx(expected, abs=0.05)


def test_node_gets_the_field_of_a_bad_item(example: Path, stack: Stack) -> None:
    done = run(example, "--address", stack.address, "The capital of France is", " Rome", "", script="score.mjs")
    assert done.returncode == 1
    assert "items[1].continuation" in done.stderr


OPTIONS = {
    "early_stopping": "never",
    "num_assistant_tokens_schedule": "heuristic",
    "dola_layers": [1, 2],
    "negative_prompt": "no",
    "bad_words_ids": [[1], [2, 3]],
    "force_words_ids": [[1, 2], [[3], [4, 5]]],
    "forced_eos_token_id": 7,
    "exponential_decay_length_penalty": [5, 1.5],
    "sequence_bias": [[[1, 2], -0.5]],
    "watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"},
    "logits_processor": {"one": {}},
    "stopping_criteria": ["two", "three"],
    "eos_token_id": 5,
    "allowed_token_trie": [[1, 2], [3]],
    "temperature": 0.5,
    "top_k": 0,
    "suppress_tokens": [1],
    "stop_strings": "end",
    "stop_token_ids": [1, [2, 3]],
    "output_scores": True,
    "tensor_steps": [0],
    "json_schema": {"type": "object"},
}


def test_node_makes_the_same_request_of_options_as_python(example: Path) -> None:
    """Both speak Hugging Face's names; every field of the wire has one."""
    made = json_of(example, f"toRequest({json.dumps(OPTIONS)})")
    expected = text_pb2.ChatRequest()
    json_format.ParseDict({**made, "messages": []}, expected)
    request = chat_request([], (), (), None, OPTIONS)
    assert json.loads(made["constraint"]["json_schema"]) == json.loads(request.constraint.json_schema)
    expected.ClearField("constraint")
    request.ClearField("constraint")
    assert expected == request


def test_every_option_of_python_is_one_of_node(example: Path) -> None:
    """A field that is added to the protos must be added to options.mjs."""
    mine = {"config", "model", "adapter", "request_id", "session_id", "priority", "cache_salt", "negative_prompt_ids"}
    # Rows of a model's embeddings: Node has no tensors.
    mine |= {"inputs_embeds", "inputs_embeds_before_ids"}
    names = sorted(set(GenerationOptions.__annotations__) - mine)
    unknown = f"{json.dumps(names)}.filter((name) => {{ try {{ toRequest({{[name]: true}}); return false; }} "
    refused = json_of(example, unknown + "catch (error) { return error.message.startsWith('unknown option'); } })")
    assert refused == []


def json_of(folder: Path, expression: str) -> Any:
    """Evaluate `expression` in node, with options.mjs imported."""
    script = f'import {{ toRequest }} from "./options.mjs"; console.log(JSON.stringify({expression}));'
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)
