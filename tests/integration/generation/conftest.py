"""A tiny random model with the demo model's tokenizer, for the services of these files."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.servers.generation import text_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder, which no test changes."""
    return text_checkpoint(tmp_path_factory.mktemp("model"))
