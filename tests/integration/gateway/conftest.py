"""One tree for the modules that ask the gateway of a whole tree; their mark `xdist_group` keeps them on one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from factories.servers.served import Served
from penstock.cli.demo import running_stack


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with running_stack() as ready:
        yield Served(ready.addresses["gateway"], ready.addresses["router"])
