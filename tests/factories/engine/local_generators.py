"""penstock.Generator on tiny random models, with settings that every test of it shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from factories.models.run_kernels import KERNELS
from penstock import Generator
from penstock.common.errors import InvalidArgument
from penstock.compat.mindie import GeneratorTorch

SETTINGS: dict[str, Any] = {
    "kv_memory": "8MiB",
    "threads": 1,
    "tune_seconds": 0.0,
    "dtype": "float32",
    "kernels": KERNELS,
    # A request that a busy machine makes slow must not be refused.
    "constraint_compile_seconds": 60.0,
}


def local_generator(folder: Path, **options: Any) -> Generator:
    """Make a Generator of a folder, in float32, on one thread."""
    torch.set_num_threads(1)
    return Generator(folder, **{**SETTINGS, **options})


def mindie_generator(folder: Path, **options: Any) -> GeneratorTorch:
    """Make a GeneratorTorch of a folder, with the same settings."""
    torch.set_num_threads(1)
    required = {"backend_type": "torch", "world_size": 1, "rank": 0, "npu_device_id": 0, "local_rank": 0}
    return GeneratorTorch({**required, "model_id": str(folder)}, **{**SETTINGS, **options})


def ids_of(generator: Generator, asked: dict[str, Any]) -> Any:
    """Return the ids of each sequence of a request, or a refusal's field and words."""
    options = {name: value for name, value in asked.items() if value is not None and name != "prompt"}
    try:
        answer = generator.generate(asked["prompt"], **options)
    except InvalidArgument as error:
        return error.field, error.message
    return [choice.token_ids for choice in answer.choices]
