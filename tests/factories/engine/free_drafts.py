"""Drafts wherever they can be made: what verifying costs is measured, so that on a busy machine none may pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from penstock.generation.core.request import Request


@contextmanager
def free_drafts() -> Iterator[None]:
    """Let every request of this process draft as if verifying cost nothing, whatever the engine measures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "draft_costs", property(lambda _: None, lambda _, __: None))
        yield
