"""One real stack (tokenizer, two generation processes, router) for the tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from factories.stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two backends on the embedded model. Tests must leave it as they found it."""
    with Stack(backends=2) as running:
        yield running
