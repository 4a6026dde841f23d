"""Makes tests/factories importable as `factories` however pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# The first test that needs the C++ kernels compiles them: a minute, several on a busy machine.
_WITH_COMPILATION_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time for tests of the kernels."""
    for item in items:
        module = getattr(item, "module", None)
        if hasattr(module, "use_native") or hasattr(module, "use_instruction_set"):
            item.add_marker(pytest.mark.timeout(_WITH_COMPILATION_SECONDS))
