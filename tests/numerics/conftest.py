"""The model of a file's `folder`, on our operators and on transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import reference_model
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    """Return our model in float32."""
    return load_tiny(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    """Return transformers' model."""
    return reference_model(folder)
