"""A tiny random model with the demo model's tokenizer, and a Generator of it, for a file's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from factories.engine.local_generators import local_generator
from factories.servers.generation import text_checkpoint
from penstock import Generator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder."""
    return text_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Generator]:
    """Yield the Generator."""
    with local_generator(folder) as made:
        yield made
