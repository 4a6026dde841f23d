"""A start tells of a number format that would surprise its user, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.models.checkpoints import tiny_checkpoint
from factories.models.quantised import CASES, quantised_pair
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.startup.format_warning import warn_of_format, warn_of_whole_weights
from structlog.testing import capture_logs


@pytest.mark.parametrize(("quantization", "told"), [("none", []), ("int8", []), ("int4", ["int4"])])
def test_int4_at_load_is_told(tmp_path: Path, quantization: str, told: list[str]) -> None:
    device = CPUDevice()
    device.start(num_threads=1)
    model = load_model(tiny_checkpoint(tmp_path), dtype="bfloat16", quantization=quantization, device=device)
    with capture_logs() as logs:
        warn_of_format(quantization, model)
    assert [line["format"] for line in logs] == told
    assert all(line["log_level"] == "warning" and "--quantization int8" in line["advice"] for line in logs)


@pytest.mark.parametrize(
    ("case", "quantization", "told"),
    [
        ("w8a8", "auto", ["int8"]),
        ("bitsandbytes-int8", "int8", ["int8"]),
        ("w8a8", "none", []),
        ("gptq", "auto", []),
        # Its numbers are no bytes: they are made so here, of turned blocks.
        ("nf4", "int8", []),
    ],
)
def test_a_byte_a_row_of_a_checkpoint_is_told(tmp_path: Path, case: str, quantization: str, told: list[str]) -> None:
    """Its weights are kept, and what it costs are the inputs, which no checkpoint has."""
    folder = quantised_pair(tmp_path, *CASES[case][0], layers=1).folder
    device = CPUDevice()
    device.start(num_threads=1)
    model = load_model(folder, dtype="bfloat16", quantization=quantization, device=device)
    with capture_logs() as logs:
        warn_of_format(quantization, model)
    assert [line["format"] for line in logs] == told
    assert all(line["log_level"] == "warning" and "--quantization none" in line["advice"] for line in logs)


@pytest.mark.parametrize(
    ("dtype", "quantization", "is_packed", "told"),
    [
        ("bfloat16", "none", False, []),
        ("bfloat16", "none", True, ["is read as it is"]),
        ("bfloat16", "int8", False, ["weights in bfloat16"]),
        ("float32", "none", False, ["weights in bfloat16"]),
    ],
)
def test_weights_that_cannot_be_compact_are_told(
    tmp_path: Path, dtype: str, quantization: str, is_packed: bool, told: list[str]
) -> None:
    device = CPUDevice()
    device.start(num_threads=1)
    model = load_model(tiny_checkpoint(tmp_path), dtype=dtype, quantization=quantization, device=device)
    with capture_logs() as logs:
        warn_of_whole_weights(model, is_packed=is_packed)
    assert [cause for line in logs for cause in told if cause in line["cause"]] == told
    assert len(logs) == len(told)
