"""The scripts of examples/ run as they stand, and examples/README.md lists them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories.models.adapters import lora_folder
from factories.servers.generation import text_checkpoint

EXAMPLES = Path(__file__).parents[3] / "examples"
# Script -> arguments, and what its output must have.
RUNS: dict[str, tuple[list[str], str]] = {
    "offline_batch.py": (
        ["penstock-demo", "30"],
        r"^failed: 1 of 30 prompts failed: prompts\[15\]: prompt.*\nanswered 29 of 30 prompts, \d+ tokens\nthe first: ",
    ),
    "streaming.py": ([], r"(?s)Penstock .*\nSTOP_EOS, .* prompt tokens, .*total .*\nleft early\n"),
    "beams.py": ([], r"(?s)^(\s*-?\d+\.\d{3} '.*'\n){3}the same by GenerationConfig: True\n"),
    "json_output.py": ([], r"(?s)GPU\? \{'answer': (True|False), 'confidence': '(low|high)'\}\n.*France\? \{"),
    "grpo.py": (
        ["penstock-demo", "3"],
        r"^update 1: reward 0\.\d+, engine and trainer differ by \d\.\de-0[5-9]\n(update .*\n){2}$",
    ),
    "scoring.py": ([], r"(?s)\(greedy\)\n.*best: Paris\n.* / A cat is asleep"),
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread, and no measurement at the start: the machine may have other tests to run.
    environment = {**os.environ, "PENSTOCK_THREADS": "1", "PENSTOCK_TUNE_SECONDS": "0"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=590, check=False, env=environment)


def test_every_script_is_listed_and_run() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    # The one of a driver needs a service: tests/integration/client/test_engine_llm.py.
    assert scripts == listed == {*RUNS, "adapters.py", "engine_llm.py"}


@pytest.mark.thinned(5)
# grpo.py trains: test_write_weights.py writes weights in every run.
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=[pytest.mark.slow] if one == "grpo.py" else []) for one in RUNS]
)
def test_a_script_runs(script: str) -> None:
    arguments, output = RUNS[script]
    from penstock.common.checkpoint import demo_folder

    given = [str(demo_folder()) if one == "penstock-demo" else one for one in arguments]
    done = run(script, *given)
    assert done.returncode == 0, done.stderr
    assert re.search(output, done.stdout), done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_script_of_adapters_runs_and_tells_what_is_no_adapter(tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path / "model")
    done = run("adapters.py", str(folder), str(lora_folder(tmp_path / "lora", folder)))
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"without: (.*)\nwith:    (.*)\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] != found[2]
    done = run("adapters.py", str(folder), str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert done.stdout == "the adapter is not loaded: path: has no adapter_model.safetensors\n"
