"""Weights of a folder as a service's flags ask for them: the model's, the draft model's, and those of a Reload."""

from __future__ import annotations

from pathlib import Path

from penstock.common.progress import CountBytes
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model
from penstock.generation.parallel.processes import Ranks


def read_model(
    config: GenerationServiceConfig, folder: Path, device: Device, count: CountBytes, ranks: Ranks | None = None
) -> LanguageModel:
    """Load them; with `ranks`, rank 0's part. `count` gets the bytes and may raise to give up. Raises StartupError."""
    return load_model(
        folder,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        progress=count,
        map_embeddings=config.map_embeddings,
        route=config.route,
        shard=None if ranks is None else ranks.group.shard,
        sum_parts=None if ranks is None else ranks.group.sum,
    )
