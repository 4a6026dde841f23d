"""Folders that `penstock pack` writes, made in the test's own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.models.native import cache_home, use_native
from penstock.generation import pack as packing
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.weights.files import PACKED_FILE, parse_header


def use_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Penstock find the tests' kernels, or skip the test."""
    use_native()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home()))


def native_device(compact_weights: str = "auto") -> CPUDevice:
    """Make a device with the kernels."""
    device = CPUDevice()
    device.start(kernels="native", compact_weights=compact_weights)
    return device


def packed(folder: Path, output: Path, **options: Any) -> Path:
    """Pack the model of `folder` into `output` and return it."""
    assert packing.pack(folder, output, **options).path == output / PACKED_FILE
    return output


def load(folder: Path, *, compact_weights: str = "auto", **options: str) -> CausalLM:
    """Load the folder on the kernels."""
    return load_model(folder, device=native_device(compact_weights), **options)  # type: ignore[arg-type]


def read(folder: Path) -> tuple[dict[str, Any], int]:
    """Read the header, and the offset at which the tensors begin."""
    return parse_header((folder / PACKED_FILE).read_bytes())


def rewrite(folder: Path, header: dict[str, Any]) -> None:
    """Write another header of the same length."""
    path = folder / PACKED_FILE
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
