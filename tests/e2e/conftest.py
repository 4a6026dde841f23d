"""One real stack (tokenizer, two generation processes, router) for the tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from factories.servers.stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two backends on the embedded model. Tests must leave it as they found it."""
    # float32: no id depends on the other rows of the batch or on the cache, which are a matter of time.
    flags = ("--kv-memory", "64MiB", "--threads", "1", "--dtype", "float32")
    with Stack(backends=2, generation_flags=flags) as running:
        yield running
