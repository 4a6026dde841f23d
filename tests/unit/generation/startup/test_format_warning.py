"""A start tells of a number format that would surprise its user, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.startup.format_warning import warn_of_format
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
