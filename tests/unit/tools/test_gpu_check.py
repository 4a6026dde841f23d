"""The check of a GPU, as far as a machine without one goes: its measures with a tiny model, and its last word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from factories.models.emulated_cuda import EmulatedCUDA, EmulatedGraphs

from tools import gpu_measure
from tools.gpu_measure import TINY, Bench, config_of, is_wait, rows_of, run, trace

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def device() -> EmulatedCUDA:
    torch.set_num_threads(1)
    device = EmulatedCUDA()
    device.start(num_threads=1)
    return device


@pytest.fixture(scope="module")
def bench(device: EmulatedCUDA) -> Bench:
    return Bench(device, torch.float32, TINY)


def test_the_model_that_is_measured_has_the_shape_of_llama_8b() -> None:
    config = config_of(gpu_measure.FULL)
    assert (config.num_layers, config.hidden_size, config.head_dim, config.vocab_size) == (32, 4096, 128, 128_256)


def test_every_row_is_measured_and_steps_are_replays(bench: Bench) -> None:
    graphs = bench.graphs
    assert isinstance(graphs, EmulatedGraphs)
    before = graphs.num_replayed
    found = list(rows_of(bench, gpu_measure.Limits(1e9, 1e9)))
    assert [row.title for row in found] == ["decode, 1 sequences", "decode, 3 sequences", "prompt of 32 tokens"]
    assert all(row.seconds > 0 and row.share > 0 for row in found)
    assert [row.promised for row in found] == [0.75, 0.0, 0.0]
    assert graphs.num_replayed - before == 2 * (TINY.steps + 2)


def test_bytes_and_operations_are_those_of_the_sizes(bench: Bench) -> None:
    facts = bench.model.config
    head = facts.vocab_size * facts.hidden_size
    assert bench.operations(5, heads=2) == 2 * (5 * (facts.num_parameters - 2 * head) + 2 * head)
    kv_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * 4
    assert bench.kv_bytes(3) == 3 * (TINY.context + TINY.steps / 2) * kv_token
    # All matrices but the table of the embedding, in float32.
    matrices = facts.num_parameters - head - (2 * facts.num_layers + 1) * facts.hidden_size
    assert bench.weight_bytes == 4 * matrices


def test_a_trace_counts_what_waits_and_what_allocates(bench: Bench) -> None:
    assert trace(bench, 2).waits == 0
    calls = ("cudaStreamSynchronize", "cudaMemcpyAsync", "cudaMemcpy", "aten::item")
    assert [name for name in calls if is_wait(name)] == ["cudaStreamSynchronize", "cudaMemcpy"]


@pytest.mark.slow
def test_the_whole_run_says_what_does_not_hold(
    device: EmulatedCUDA, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_measure, "transformers_seconds", lambda *arguments: 1e-9)
    assert not run(device, torch.float32, TINY, ("none", "int8"))
    printed = capsys.readouterr().out
    assert "| int8: decode, 3 sequences |" in printed
    assert "Steady sampled steps: 0.00 waits a step, 0 allocations" in printed
    assert "**below 3.0**" in printed


@pytest.mark.slow
def test_without_a_gpu_it_ends_with_a_clear_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh")],
        env={**os.environ, "GPU_CHECK_OUT": str(tmp_path / "out.md"), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert "There is no GPU here: torch" in found.stdout
    assert "Nothing was checked" in (tmp_path / "out.md").read_text(encoding="utf-8")
